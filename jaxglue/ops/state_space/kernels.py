"""Triton kernels of Mamba-2's recurrence over packed rows; the equations are those of `chunks.py`.

A chunk is C consecutive tokens of a row, wherever documents begin. It is the gated delta rule without its delta term
(`ops/delta_rule/kernels.py`): nothing has to be solved, what a token writes is known at once, and all heads of a group
have one matrix of scores, cᵢ·bⱼ, which a program computes once.

- `decay_kernel`, a program for each chunk and block of heads: logarithms of decays from a chunk's or document's
  beginning, whichever is later, so that no bit of them depends on another document.
- `state_kernel`, a program for each *document* that crosses a chunk's end, head and part of its columns: the state at
  the beginning of each chunk. Documents run in parallel, and a program at whose chunk none begins returns at once.
  `state_gradient_kernel` runs the same chunks backward.
- `output_kernel`, `input_gradient_kernel` and `group_gradient_kernel`, a program for each chunk and some heads of a
  group: all that needs no order. Gradients to x and those to B and C are apart, since together they take more registers
  than a thread has.
- `decay_gradient_kernel`: gradients to a token's own logarithm, from those to the sums.

Layout: xbc and its gradient [B, T, W], W = N·P + 2·G·S, x, B and C side by side; step, g and their gradients
[B, T, N]; factors and their gradients [B, N, 2, T] float32; out and dout [B, T, N, P]; states and dstates
[B, N, chunks, S, P], for chunks that begin, or end, within a document; sums [parts, B, T, 2·G·S] float32. Offsets of
rows and chunks are 64-bit, offsets within a chunk 32-bit.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from jaxglue.ops.delta_rule.kernels import load_factor, load_tokens, store_tokens

# Rows of `factors`: step sizes, and logarithms of decays from the beginning of the chunk or document.
STEP, TOTAL = tl.constexpr(0), tl.constexpr(1)
FACTORS = tl.constexpr(2)


@dataclass(frozen=True, kw_only=True)
class StateSpaceSpec:
    """Constants of a kernel: sizes of a call, and a program's part of them."""

    T: int
    G: int
    R: int
    """Heads of a group."""
    S: int
    P: int
    precision: str
    """Precision of matmuls of float32 values."""
    chunk: int = 64
    columns: int = 0
    """Columns of a state at a time."""
    heads: int = 0
    """Heads that a program computes."""
    stages: int = 1
    """Chunks or heads under way in a loop."""

    @property
    def N(self) -> int:  # noqa: N802
        """Return the heads."""
        return self.G * self.R

    @property
    def values(self) -> int:
        """Return the width of x, and of the outputs."""
        return self.G * self.R * self.P

    @property
    def width(self) -> int:
        """Return the values of a token in xbc."""
        return self.values + 2 * self.G * self.S

    @property
    def chunks(self) -> int:
        """Return the chunks of a row."""
        return -(-self.T // self.chunk)


@triton.jit
def _seen(start, order, T: tl.constexpr):
    """Return [C, C], whether a token (rows) sees another (columns): not after it, and of its document."""
    return (order[:, None] >= order[None, :]) & (start[:, None] == start[None, :]) & (start < T)[:, None]


@triton.jit
def decay_kernel(step, g, starts, factors, spec: tl.constexpr):
    """Compute the factors of a chunk, for some heads; grid (N / heads, chunks, B)."""
    T: tl.constexpr = spec.T
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    order, members = tl.arange(0, spec.chunk), tl.program_id(0) * spec.heads + tl.arange(0, spec.heads)
    tokens = chunk * spec.chunk + order
    start = tl.load(starts + row * T + tokens, mask=tokens < T, other=T)
    places, exists = (row * T + tokens)[:, None] * spec.N + members[None, :], (tokens < T)[:, None]
    exists = exists & (members < spec.N)[None, :]
    logs = tl.load(g + places, mask=exists, other=0.0)
    # A matmul in float32: terms of other documents are zeros, which change no bit of a sum.
    totals = tl.dot(_seen(start, order, T).to(tl.float32), logs, input_precision="ieee")
    steps = tl.where((start < T)[:, None], tl.load(step + places, mask=exists, other=0.0), 0.0)
    at = factors + (row * spec.N + members)[None, :] * FACTORS * T + tokens[:, None]
    tl.store(at + STEP * T, steps, mask=exists)
    tl.store(at + TOTAL * T, totals, mask=exists)


@triton.jit
def decay_gradient_kernel(dfactors, starts, dstep, dg, spec: tl.constexpr):
    """Compute the gradients to step sizes and logarithms of a chunk, for some heads; grid (N / heads, chunks, B).

    A logarithm is in the sums of all tokens of its document from its own on; a document's first token decays nothing.
    """
    T: tl.constexpr = spec.T
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    order, members = tl.arange(0, spec.chunk), tl.program_id(0) * spec.heads + tl.arange(0, spec.heads)
    tokens = chunk * spec.chunk + order
    start = tl.load(starts + row * T + tokens, mask=tokens < T, other=T)
    exists = (tokens < T)[:, None] & (members < spec.N)[None, :]
    at = dfactors + (row * spec.N + members)[None, :] * FACTORS * T + tokens[:, None]
    dtotals = tl.load(at + TOTAL * T, mask=exists, other=0.0)
    later = tl.trans(_seen(start, order, T).to(tl.float32))
    dlogs = tl.dot(later, dtotals, input_precision="ieee")
    places = (row * T + tokens)[:, None] * spec.N + members[None, :]
    tl.store(dg + places, tl.where((start < tokens)[:, None], dlogs, 0.0), mask=exists)
    tl.store(dstep + places, tl.load(at + STEP * T, mask=exists, other=0.0), mask=exists)


@triton.jit
def _bounds(starts, row, chunk, spec: tl.constexpr):
    """Return (first token of the document that crosses the chunk's beginning, of the one that crosses its end).

    Where none does, the chunk's first token, and the next chunk's.
    """
    first, after = chunk * spec.chunk, (chunk + 1) * spec.chunk
    before = tl.load(starts + row * spec.T + first)
    behind = tl.load(starts + row * spec.T + after, mask=after < spec.T, other=after)
    return tl.minimum(before, first), tl.minimum(behind, after)


@triton.jit
def _part(spec: tl.constexpr):
    """Return (row, head, first of its columns) of a program; grid (N · P / columns, chunks, B)."""
    PARTS: tl.constexpr = spec.P // spec.columns
    return tl.program_id(2).to(tl.int64), tl.program_id(0) // PARTS, (tl.program_id(0) % PARTS) * spec.columns


@triton.jit
def _state_places(n, row, index, keys, columns, spec: tl.constexpr):
    return ((row * spec.N + n) * spec.chunks + index) * spec.S * spec.P + keys[:, None] * spec.P + columns[None, :]


@triton.jit
def _state(states, exists, n, row, index, keys, columns, spec: tl.constexpr):
    """Load some columns of a chunk's state; zeros, without reading, where none was written."""
    places = _state_places(n, row, index, keys, columns, spec)
    return tl.load(states + places, mask=exists & (places >= 0), other=0.0)


@triton.jit
def state_kernel(xbc, starts, ends, factors, states, spec: tl.constexpr):
    """Compute the states of chunks along the document that crosses a chunk's end, if it began there.

    Grid (N · P / columns, chunks, B).
    """
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    row, n, column = _part(spec)
    chunk = tl.program_id(1)
    _, begin = _bounds(starts, row, chunk, spec)
    if (begin >= chunk * C) & (begin < (chunk + 1) * C):
        last = (tl.load(ends + row * T + (chunk + 1) * C) - 1) // C
        order, keys, columns = tl.arange(0, C), tl.arange(0, spec.S), column + tl.arange(0, spec.columns)
        xbc += row * T * spec.width
        factors += (row * spec.N + n) * FACTORS * T
        state = tl.full((spec.S, spec.columns), 0.0, tl.float32)
        for index in tl.range(chunk, last, num_stages=spec.stages):
            tokens = index * C + order
            b = load_tokens(xbc, tokens, spec.values + (n // spec.R) * spec.S + keys, spec.width, T)
            x = load_tokens(xbc, tokens, n * spec.P + columns, spec.width, T)
            step, total = load_factor(factors, STEP, tokens, T), load_factor(factors, TOTAL, tokens, T)
            at_end = tl.load(factors + TOTAL * T + index * C + C - 1)
            # Tokens before the document's first are another's.
            write = tl.exp(tl.where(tokens >= begin, at_end - total, float("-inf"))) * step
            written = (write[:, None] * x.to(tl.float32)).to(x.dtype)
            state = tl.dot(tl.trans(b), written, tl.exp(at_end) * state, input_precision=spec.precision)
            places = states + _state_places(n, row, index + 1, keys, columns, spec)
            tl.store(places, state.to(states.dtype.element_ty))


@triton.jit
def state_gradient_kernel(xbc, starts, ends, factors, dout, dstates, spec: tl.constexpr):
    """Compute gradients to the states behind chunks, back along the document that ends in a chunk and began before.

    Grid (N · P / columns, chunks, B).
    """
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    row, n, column = _part(spec)
    chunk = spec.chunks - 1 - tl.program_id(1)
    begin, _ = _bounds(starts, row, chunk, spec)
    if begin < chunk * C:
        end = tl.load(ends + row * T + chunk * C)
        if end <= (chunk + 1) * C:
            first = begin // C
            order, keys, columns = tl.arange(0, C), tl.arange(0, spec.S), column + tl.arange(0, spec.columns)
            xbc += row * T * spec.width
            factors += (row * spec.N + n) * FACTORS * T
            dout += row * T * spec.values
            dstate = tl.full((spec.S, spec.columns), 0.0, tl.float32)
            for back in tl.range(0, chunk - first, num_stages=spec.stages):
                index = chunk - back
                tokens = index * C + order
                c = load_tokens(xbc, tokens, spec.values + (spec.G + n // spec.R) * spec.S + keys, spec.width, T)
                douts = load_tokens(dout, tokens, n * spec.P + columns, spec.values, T)
                total = load_factor(factors, TOTAL, tokens, T)
                at_end = tl.load(factors + TOTAL * T + index * C + C - 1, mask=index * C + C <= T, other=0.0)
                # Tokens behind the document's last are another's.
                read = tl.exp(tl.where(tokens < end, total, float("-inf")))
                answered = (read[:, None] * douts.to(tl.float32)).to(douts.dtype)
                dstate = tl.dot(tl.trans(c), answered, tl.exp(at_end) * dstate, input_precision=spec.precision)
                places = dstates + _state_places(n, row, index - 1, keys, columns, spec)
                tl.store(places, dstate.to(dstates.dtype.element_ty))


@triton.jit
def _group_rows(xbc, tokens, group, keys, spec: tl.constexpr):
    """Load B and C of a group."""
    b = load_tokens(xbc, tokens, spec.values + group * spec.S + keys, spec.width, spec.T)
    return b, load_tokens(xbc, tokens, spec.values + (spec.G + group) * spec.S + keys, spec.width, spec.T)


@triton.jit
def output_kernel(xbc, starts, factors, states, skip, out, spec: tl.constexpr):
    """Compute one chunk's outputs of some heads of a group; grid (N / heads, chunks, B)."""
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * spec.heads
    order, keys = tl.arange(0, C), tl.arange(0, spec.S)
    tokens = chunk * C + order
    xbc += row * T * spec.width
    out += row * T * spec.values
    b, c = _group_rows(xbc, tokens, first // spec.R, keys, spec)
    scores = tl.dot(c, tl.trans(b), input_precision=spec.precision)
    start = tl.load(starts + row * T + tokens, mask=tokens < T, other=T)
    real, crosses = start < T, start < chunk * C
    seen = _seen(start, order, T)
    before, _ = _bounds(starts, row, chunk, spec)
    for member in tl.range(0, spec.heads, num_stages=spec.stages):
        n = first + member
        of_head = factors + (row * spec.N + n) * FACTORS * T
        step, total = load_factor(of_head, STEP, tokens, T), load_factor(of_head, TOTAL, tokens, T)
        passed = tl.where(real, tl.load(skip + n).to(tl.float32), 0.0)
        decays = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
        weights = (scores * decays * step[None, :]).to(c.dtype)
        read = tl.where(crosses, tl.exp(total), 0.0)
        for column in range(0, spec.P, spec.columns):
            columns = column + tl.arange(0, spec.columns)
            x = load_tokens(xbc, tokens, n * spec.P + columns, spec.width, T)
            state = _state(states, before < chunk * C, n, row, chunk, keys, columns, spec).to(c.dtype)
            result = read[:, None] * tl.dot(c, state, input_precision=spec.precision)
            result = tl.dot(weights, x, result, input_precision=spec.precision)
            result += passed[:, None] * x.to(tl.float32)
            store_tokens(out, result, tokens, n * spec.P + columns, spec.values, T)


@triton.jit
def _weighted(xbc, dout, tokens, n, seen, total, spec: tl.constexpr):
    """Return (decays [C, C] from token to token, these times doutᵢ·xⱼ)."""
    products = tl.full((spec.chunk, spec.chunk), 0.0, tl.float32)
    for column in range(0, spec.P, spec.columns):
        columns = n * spec.P + column + tl.arange(0, spec.columns)
        x = load_tokens(xbc, tokens, columns, spec.width, spec.T)
        douts = load_tokens(dout, tokens, columns, spec.values, spec.T)
        products = tl.dot(douts, tl.trans(x), products, input_precision=spec.precision)
    decays = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
    return decays, products * decays


@triton.jit
def input_gradient_kernel(
    xbc, starts, factors, states, dstates, skip, dout, dxbc, dfactors, spec: tl.constexpr
):  # fmt: skip
    """Compute one chunk's gradients to x and factors, for some heads of a group; grid (N / heads, chunks, B)."""
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * spec.heads
    order, keys = tl.arange(0, C), tl.arange(0, spec.S)
    tokens = chunk * C + order
    inside, after = tokens < T, (chunk + 1) * C
    xbc += row * T * spec.width
    dxbc += row * T * spec.width
    dout += row * T * spec.values
    b, c = _group_rows(xbc, tokens, first // spec.R, keys, spec)
    dtype = b.dtype
    scores = tl.dot(c, tl.trans(b), input_precision=spec.precision)
    start = tl.load(starts + row * T + tokens, mask=inside, other=T)
    real, crosses = start < T, start < chunk * C
    seen = _seen(start, order, T)
    before, behind = _bounds(starts, row, chunk, spec)
    written_on = (behind < after) & (start == behind)  # tokens of the document that crosses the chunk's end
    for member in tl.range(0, spec.heads, num_stages=spec.stages):
        n = first + member
        of_head = factors + (row * spec.N + n) * FACTORS * T
        step, total = load_factor(of_head, STEP, tokens, T), load_factor(of_head, TOTAL, tokens, T)
        at_end = tl.load(of_head + TOTAL * T + after - 1, mask=after <= T, other=0.0)
        passed = tl.where(real, tl.load(skip + n).to(tl.float32), 0.0)
        decays, weighted = _weighted(xbc, dout, tokens, n, seen, total, spec)
        weighted *= scores
        dstep = tl.sum(weighted, 0)
        dtotal = tl.sum(weighted * step[None, :], 1)
        weights = (scores * decays).to(dtype)
        write = tl.exp(tl.where(written_on, at_end - total, float("-inf")))
        read = tl.where(crosses, tl.exp(total), 0.0)
        to_end, recalled, kept = tl.full((C,), 0.0, tl.float32), tl.full((C,), 0.0, tl.float32), 0.0
        for column in range(0, spec.P, spec.columns):
            columns = column + tl.arange(0, spec.columns)
            douts = load_tokens(dout, tokens, n * spec.P + columns, spec.values, T)
            dstate = _state(dstates, behind < after, n, row, chunk, keys, columns, spec).to(dtype)
            state = _state(states, before < chunk * C, n, row, chunk, keys, columns, spec).to(dtype)
            kept += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0)
            answers = tl.dot(c, state, input_precision=spec.precision)
            recalled += tl.sum(douts.to(tl.float32) * answers, 1)
            through = write[:, None] * tl.dot(b, dstate, input_precision=spec.precision)
            x32 = load_tokens(xbc, tokens, n * spec.P + columns, spec.width, T).to(tl.float32)
            to_end += tl.sum(x32 * through, 1)
            dx = tl.dot(tl.trans(weights), douts, through, input_precision=spec.precision)
            dx = step[:, None] * dx + passed[:, None] * douts.to(tl.float32)
            store_tokens(dxbc, dx, tokens, n * spec.P + columns, spec.width, T)
        # What reads grows with a total, what writes shrinks; the decay to the chunk's end is in all that is behind it.
        dstep += to_end
        kept *= tl.where(behind < chunk * C, tl.exp(at_end), 0.0)
        dtotal += read * recalled - step * dstep
        dtotal += tl.where(order == C - 1, kept + tl.sum(step * to_end, 0), 0.0)
        at = dfactors + (row * spec.N + n) * FACTORS * T + tokens
        tl.store(at + STEP * T, tl.where(real, dstep, 0.0), mask=inside)
        tl.store(at + TOTAL * T, tl.where(real, dtotal, 0.0), mask=inside)


@triton.jit
def group_gradient_kernel(xbc, starts, factors, states, dstates, dout, sums, spec: tl.constexpr):
    """Compute one chunk's gradients to B and C, summed over some heads of a group; grid (N / heads, chunks, B).

    The products of outputs' gradients and values are summed over the heads before they meet B or C.
    """
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * spec.heads
    group = first // spec.R
    order, keys = tl.arange(0, C), tl.arange(0, spec.S)
    tokens = chunk * C + order
    after = (chunk + 1) * C
    xbc += row * T * spec.width
    dout += row * T * spec.values
    dtype = xbc.dtype.element_ty
    start = tl.load(starts + row * T + tokens, mask=tokens < T, other=T)
    seen, crosses = _seen(start, order, T), start < chunk * C
    before, behind = _bounds(starts, row, chunk, spec)
    written_on = (behind < after) & (start == behind)
    dscores = tl.full((C, C), 0.0, tl.float32)
    db, dc = tl.full((C, spec.S), 0.0, tl.float32), tl.full((C, spec.S), 0.0, tl.float32)
    for member in tl.range(0, spec.heads, num_stages=spec.stages):
        n = first + member
        of_head = factors + (row * spec.N + n) * FACTORS * T
        step, total = load_factor(of_head, STEP, tokens, T), load_factor(of_head, TOTAL, tokens, T)
        at_end = tl.load(of_head + TOTAL * T + after - 1, mask=after <= T, other=0.0)
        _, weighted = _weighted(xbc, dout, tokens, n, seen, total, spec)
        dscores += weighted * step[None, :]
        write = step * tl.exp(tl.where(written_on, at_end - total, float("-inf")))
        read = tl.where(crosses, tl.exp(total), 0.0)
        for column in range(0, spec.P, spec.columns):
            columns = column + tl.arange(0, spec.columns)
            x = load_tokens(xbc, tokens, n * spec.P + columns, spec.width, T)
            dstate = _state(dstates, behind < after, n, row, chunk, keys, columns, spec).to(dtype)
            written = (write[:, None] * x.to(tl.float32)).to(dtype)
            db = tl.dot(written, tl.trans(dstate), db, input_precision=spec.precision)
            douts = load_tokens(dout, tokens, n * spec.P + columns, spec.values, T)
            state = _state(states, before < chunk * C, n, row, chunk, keys, columns, spec).to(dtype)
            answered = (read[:, None] * douts.to(tl.float32)).to(dtype)
            dc = tl.dot(answered, tl.trans(state), dc, input_precision=spec.precision)
    b, c = _group_rows(xbc, tokens, group, keys, spec)
    dscores = dscores.to(dtype)
    db = tl.dot(tl.trans(dscores), c, db, input_precision=spec.precision)
    dc = tl.dot(dscores, b, dc, input_precision=spec.precision)
    part = (first % spec.R) // spec.heads
    sums += (part * tl.num_programs(2) + row) * T * 2 * spec.G * spec.S
    store_tokens(sums, db, tokens, group * spec.S + keys, 2 * spec.G * spec.S, T)
    store_tokens(sums, dc, tokens, (spec.G + group) * spec.S + keys, 2 * spec.G * spec.S, T)
