"""Triton kernels of the gated delta rule (arXiv 2412.06464) over packed rows.

The equations are those of `chunks.py`. A chunk is C consecutive tokens of a row, wherever documents begin:

    r = β (v − Γ k̂ S)    u = (I + A)⁻¹ r    o = Γ q̂ S + P u    S' = λ S + (Λ k̂)ᵀ u

with A[i, j] = βᵢ γᵢⱼ k̂ᵢ·k̂ⱼ below the diagonal and P[i, j] = γᵢⱼ q̂ᵢ·k̂ⱼ on and below it. Decays, 0 where another
document lies between: γ from token to token, Γ from the chunk's beginning, Λ to its end, and λ the last token's Γ.

- `prepare_kernel`, a program for each chunk and value head: (I + A)⁻¹, P and the factors of each token.
- `state_kernel`, a program for each *document* that crosses a chunk's end, value head and part of its columns: u of its
  chunks, and the state at the beginning of each. Documents run in parallel, since none reads another's state, and a
  program at whose chunk none begins returns at once. `state_gradient_kernel` runs the same chunks backward.
- `output_kernel`, a program for each chunk, value head and part of its columns, and `gradient_kernel`, one for each
  chunk and key head: all that needs no order.

Queries and keys enter matmuls as they are: their lengths are factors of rows and columns, and q̂, k̂ never rounded.

Layout: qkv and its gradient [B, T, W], W = 2·K·H + K·G·V, queries, keys and values side by side; g, beta, dg, dbeta
[B, T, N]; out, dout and updates, which are u, [B, T, N, V]; factors [B, N, 8, T] float32; inverses and scores
[B, N, T, C]; states and dstates [B, N, chunks, H, V], for chunks that begin, or end, within a document. Offsets
of rows and chunks are 64-bit, offsets within a chunk 32-bit.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)
# β of real tokens at least: its gradient is that of u over it. No output changes by it.
LEAST_STEP = tl.constexpr(1e-12)
# Rows of `factors`: β; Γ over |k|, Λ over |k| and Γ over |q|; logarithms of decays from the chunk's beginning; Γ;
# 1 / |k| and 1 / |q|.
STEP, READ_KEY, WRITE_KEY, READ_QUERY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
DECAY, KEPT, KEY_SCALE, QUERY_SCALE = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
FACTORS = tl.constexpr(8)


@dataclass(frozen=True, kw_only=True)
class DeltaKernelSpec:
    """Constants of a kernel: sizes of a call, and a program's part of them."""

    T: int
    K: int
    G: int
    """Value heads of a key head."""
    H: int
    V: int
    precision: str
    """Precision of matmuls of float32 values."""
    chunk: int = 64
    columns: int = 0
    """Columns of values that a program, or its turn, computes."""
    stages: int = 1
    """Chunks under way in a loop."""

    @property
    def width(self) -> int:
        """Return the values of a token in qkv."""
        return self.K * (2 * self.H + self.G * self.V)

    @property
    def chunks(self) -> int:
        """Return the chunks of a row."""
        return -(-self.T // self.chunk)


@triton.jit
def load_tokens(array, tokens, columns, WIDTH: tl.constexpr, T: tl.constexpr):
    """Load some columns of tokens of a row's array [T, WIDTH]; zeros past the row."""
    return tl.load(array + tokens[:, None] * WIDTH + columns[None, :], mask=(tokens < T)[:, None], other=0.0)


@triton.jit
def store_tokens(array, values, tokens, columns, WIDTH: tl.constexpr, T: tl.constexpr):
    """Write some columns of tokens of a row's array [T, WIDTH]; nothing past the row."""
    at = array + tokens[:, None] * WIDTH + columns[None, :]
    tl.store(at, values.to(array.dtype.element_ty), mask=(tokens < T)[:, None])


@triton.jit
def load_factor(factors, row: tl.constexpr, tokens, T: tl.constexpr):
    """Load one factor of each token of a head; 0 past the row."""
    return tl.load(factors + row * T + tokens, mask=tokens < T, other=0.0)


@triton.jit
def _square(array, tokens, order, spec: tl.constexpr):
    """Load a chunk's matrix [C, C] of an array [T, C]."""
    return tl.load(array + tokens[:, None] * spec.chunk + order[None, :], mask=(tokens < spec.T)[:, None], other=0.0)


@triton.jit
def unit_inverse(A, spec: tl.constexpr):
    """Return (I + A)⁻¹ of A [C, C], strictly lower triangular.

    Blocks of 16 on the diagonal by substitution, all at once; with their inverses D and L the rest of A, N = D·L is
    nilpotent by blocks, N⁴ = 0, so (I + A)⁻¹ = (I − N)(I + N²) D. Powers of A would overflow where keys are alike.
    """
    C: tl.constexpr = spec.chunk
    BLOCKS: tl.constexpr = C // 16
    tl.static_assert(BLOCKS <= 4)
    on_diagonal = (tl.arange(0, C) // 16)[:, None, None] == tl.arange(0, BLOCKS)[None, :, None]
    blocks = tl.reshape(A, (C, BLOCKS, 16))
    diagonal = tl.reshape(tl.sum(tl.where(on_diagonal, blocks, 0.0), 1), (BLOCKS, 16, 16))
    # Transposed, a row's coefficients lie along the axis over which they are summed, and stay in their threads.
    diagonal = tl.permute(diagonal, (0, 2, 1))
    order = tl.arange(0, 16)
    rows, columns = order[None, :, None], order[None, None, :]
    solved = tl.where(rows == columns, 1.0, 0.0) + tl.full((BLOCKS, 16, 16), 0.0, tl.float32)
    for turn in range(1, 16):
        coefficients = tl.sum(tl.where(columns == turn, diagonal, 0.0), 2)
        change = tl.sum(coefficients[:, :, None] * solved, 1)
        solved = tl.where(rows == turn, solved - change[:, None, :], solved)
    spread = tl.reshape(solved, (C, 16))[:, None, :] + tl.full((C, BLOCKS, 16), 0.0, tl.float32)
    D = tl.reshape(tl.where(on_diagonal, spread, 0.0), (C, C))
    L = tl.reshape(tl.where(on_diagonal, 0.0, blocks), (C, C))
    N = tl.dot(D, L, input_precision=spec.precision)
    N2 = tl.dot(N, N, input_precision=spec.precision)
    X = D + tl.dot(N2, D, input_precision=spec.precision)
    return X - tl.dot(N, X, input_precision=spec.precision)


@triton.jit
def _decays(totals, start, real, order):
    """Return γ [C, C] on and below the diagonal, from the logarithms of decays from the chunk's beginning."""
    seen = (order[:, None] >= order[None, :]) & (start[:, None] == start[None, :]) & real[:, None]
    return tl.exp(tl.where(seen, totals[:, None] - totals[None, :], float("-inf")))


@triton.jit
def prepare_kernel(qkv, g, beta, starts, factors, inverses, scores, spec: tl.constexpr):
    """Compute factors, (I + A)⁻¹ and P of one chunk, for one value head; grid (N, chunks, B)."""
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    N: tl.constexpr = spec.K * spec.G
    n, chunk, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    order, columns = tl.arange(0, C), tl.arange(0, spec.H)
    tokens = chunk * C + order
    inside = tokens < T
    at = (row * N + n) * T
    squares = (at + tokens)[:, None] * C + order[None, :]
    start = tl.load(starts + row * T + tokens, mask=inside, other=T)
    real = start < T
    decay = tl.load(g + (row * T + tokens) * N + n, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(beta + (row * T + tokens) * N + n, mask=inside, other=0.0).to(tl.float32)
    rows = qkv + row * T * spec.width + (n // spec.G) * spec.H
    k = load_tokens(rows + spec.K * spec.H, tokens, columns, spec.width, T)
    q = load_tokens(rows, tokens, columns, spec.width, T)
    step = tl.where(real, tl.maximum(step, LEAST_STEP), 0.0)
    totals = tl.cumsum(decay, 0)
    between = _decays(totals, start, real, order)
    q32, k32 = q.to(tl.float32), k.to(tl.float32)
    query_scale = tl.rsqrt(tl.sum(q32 * q32, 1) + EPS) * (spec.H**-0.5)
    key_scale = tl.rsqrt(tl.sum(k32 * k32, 1) + EPS)
    between *= key_scale[None, :]
    seen = between * tl.dot(q, tl.trans(k), input_precision=spec.precision) * query_scale[:, None]
    tl.store(scores + squares, seen.to(scores.dtype.element_ty), mask=inside[:, None])
    last = tl.sum(tl.where(order == C - 1, start, 0), 0)  # the document of the chunk's last token
    carried = tl.where(start < chunk * C, tl.exp(totals), 0.0)
    to_end = tl.where((start == last) & real, tl.exp(tl.sum(decay, 0) - totals), 0.0)
    pointers = factors + at * FACTORS + tokens
    tl.store(pointers + STEP * T, step, mask=inside)
    tl.store(pointers + READ_KEY * T, carried * key_scale, mask=inside)
    tl.store(pointers + WRITE_KEY * T, to_end * key_scale, mask=inside)
    tl.store(pointers + READ_QUERY * T, carried * query_scale, mask=inside)
    tl.store(pointers + DECAY * T, totals, mask=inside)
    tl.store(pointers + KEPT * T, carried, mask=inside)
    tl.store(pointers + KEY_SCALE * T, key_scale, mask=inside)
    tl.store(pointers + QUERY_SCALE * T, query_scale, mask=inside)
    A = between * tl.dot(k, tl.trans(k), input_precision=spec.precision) * (step * key_scale)[:, None]
    inverse = unit_inverse(tl.where(order[:, None] > order[None, :], A, 0.0), spec)
    tl.store(inverses + squares, inverse.to(inverses.dtype.element_ty), mask=inside[:, None])


@triton.jit
def part_of_columns(spec: tl.constexpr):
    """Return (row, head of values, first of its columns) of a program; grid (N · V / columns, chunks, B)."""
    PARTS: tl.constexpr = spec.V // spec.columns
    return tl.program_id(2).to(tl.int64), tl.program_id(0) // PARTS, (tl.program_id(0) % PARTS) * spec.columns


@triton.jit
def crossing_bounds(starts, row, chunk, spec: tl.constexpr):
    """Return (first token of the document that crosses the chunk's beginning, of the one that crosses its end).

    Where none does, the chunk's first token, and the next chunk's.
    """
    first, after = chunk * spec.chunk, (chunk + 1) * spec.chunk
    before = tl.load(starts + row * spec.T + first)
    behind = tl.load(starts + row * spec.T + after, mask=after < spec.T, other=after)
    return tl.minimum(before, first), tl.minimum(behind, after)


@triton.jit
def state_kernel(qkv, starts, ends, factors, inverses, updates, states, spec: tl.constexpr):
    """Compute u of chunks, and their states, along the document that crosses a chunk's end, if it began there.

    A chunk's u is written along the document that crosses its beginning; where none does, by the chunk's own program.
    Grid (N · V / columns, chunks, B).
    """
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    N: tl.constexpr = spec.K * spec.G
    row, n, column = part_of_columns(spec)
    chunk = tl.program_id(1)
    before, behind = crossing_bounds(starts, row, chunk, spec)
    owned = before == chunk * C
    begins = (behind >= chunk * C) & (behind < (chunk + 1) * C)
    if owned | begins:
        last = chunk
        if begins:
            last = (tl.load(ends + row * T + (chunk + 1) * C) - 1) // C
        order, keys, values = tl.arange(0, C), tl.arange(0, spec.H), column + tl.arange(0, spec.columns)
        qkv += row * T * spec.width
        k_rows = qkv + (spec.K + n // spec.G) * spec.H
        v_rows = qkv + 2 * spec.K * spec.H + n * spec.V
        at = row * N + n
        factors += at * FACTORS * T
        inverses += at * T * C
        updates += row * T * N * spec.V + n * spec.V
        dtype = qkv.dtype.element_ty
        state = tl.full((spec.H, spec.columns), 0.0, tl.float32)
        for index in tl.range(chunk, last + 1, num_stages=spec.stages):
            tokens = index * C + order
            k = load_tokens(k_rows, tokens, keys, spec.width, T)
            v = load_tokens(v_rows, tokens, values, spec.width, T)
            inverse = _square(inverses, tokens, order, spec)
            read, step = load_factor(factors, READ_KEY, tokens, T), load_factor(factors, STEP, tokens, T)
            write, end = load_factor(factors, WRITE_KEY, tokens, T), index * C + C - 1
            carried = tl.load(factors + KEPT * T + end, mask=end < T, other=0.0)
            seen = tl.dot(k, state.to(dtype), input_precision=spec.precision)
            wanted = step[:, None] * (v.to(tl.float32) - read[:, None] * seen)
            update = tl.dot(inverse, wanted.to(dtype), input_precision=spec.precision)
            pointers = updates + tokens[:, None] * (N * spec.V) + values[None, :]
            written = (tokens < T) & (owned | (index > chunk))
            tl.store(pointers, update.to(dtype), mask=written[:, None])
            update *= write[:, None]
            state = tl.dot(tl.trans(k), update.to(dtype), carried * state, input_precision=spec.precision)
            pointers = states + (at * spec.chunks + index + 1) * spec.H * spec.V
            pointers += keys[:, None] * spec.V + values[None, :]
            tl.store(pointers, state.to(states.dtype.element_ty), mask=(keys >= 0)[:, None] & (index < last))


@triton.jit
def _state(states, exists, n, row, index, keys, values, spec: tl.constexpr):
    """Load some columns of a chunk's state; zeros, without reading, where none was written."""
    at = ((row * spec.K * spec.G + n) * spec.chunks + index) * spec.H * spec.V
    places = keys[:, None] * spec.V + values[None, :]
    return tl.load(states + at + places, mask=exists & (places >= 0), other=0.0)


@triton.jit
def output_kernel(qkv, starts, factors, scores, updates, states, out, spec: tl.constexpr):
    """Compute one chunk's outputs; grid (N · V / columns, chunks, B)."""
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    N: tl.constexpr = spec.K * spec.G
    row, n, column = part_of_columns(spec)
    chunk = tl.program_id(1)
    order, keys, values = tl.arange(0, C), tl.arange(0, spec.H), column + tl.arange(0, spec.columns)
    tokens = chunk * C + order
    at = row * N + n
    before, _ = crossing_bounds(starts, row, chunk, spec)
    state = _state(states, before < chunk * C, n, row, chunk, keys, values, spec).to(qkv.dtype.element_ty)
    q = load_tokens(qkv + row * T * spec.width + (n // spec.G) * spec.H, tokens, keys, spec.width, T)
    P = _square(scores + at * T * C, tokens, order, spec)
    update = load_tokens(updates + row * T * N * spec.V + n * spec.V, tokens, values, N * spec.V, T)
    read = load_factor(factors + at * FACTORS * T, READ_QUERY, tokens, T)
    total = read[:, None] * tl.dot(q, state, input_precision=spec.precision)
    total = tl.dot(P, update, total, input_precision=spec.precision)
    store_tokens(out + row * T * N * spec.V + n * spec.V, total, tokens, values, N * spec.V, T)


@triton.jit
def state_gradient_kernel(qkv, starts, ends, factors, inverses, scores, dout, dqkv, dstates, spec: tl.constexpr):
    """Compute gradients to values, and to the states behind chunks, back along the document that ends in a chunk.

    A chunk's are written along the document that crosses its end; where none does, by the chunk's own program. Grid
    (N · V / columns, chunks, B).
    """
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    N: tl.constexpr = spec.K * spec.G
    row, n, column = part_of_columns(spec)
    chunk = spec.chunks - 1 - tl.program_id(1)
    before, behind = crossing_bounds(starts, row, chunk, spec)
    owned = behind == (chunk + 1) * C
    finishes = before < chunk * C
    if finishes:
        finishes = tl.load(ends + row * T + chunk * C) <= (chunk + 1) * C
    if owned | finishes:
        first = chunk
        if finishes:
            first = before // C
        order, keys, values = tl.arange(0, C), tl.arange(0, spec.H), column + tl.arange(0, spec.columns)
        q_rows = qkv + row * T * spec.width + (n // spec.G) * spec.H
        k_rows = q_rows + spec.K * spec.H
        at = row * N + n
        factors += at * FACTORS * T
        inverses += at * T * C
        scores += at * T * C
        dout += row * T * N * spec.V + n * spec.V
        dqkv += row * T * spec.width + 2 * spec.K * spec.H + n * spec.V
        dtype = qkv.dtype.element_ty
        dstate = tl.full((spec.H, spec.columns), 0.0, tl.float32)
        for back in tl.range(0, chunk - first + 1, num_stages=spec.stages):
            index = chunk - back
            tokens = index * C + order
            k = load_tokens(k_rows, tokens, keys, spec.width, T)
            douts = load_tokens(dout, tokens, values, N * spec.V, T)
            inverse = _square(inverses, tokens, order, spec)
            P = _square(scores, tokens, order, spec)
            q = load_tokens(q_rows, tokens, keys, spec.width, T)
            # All that a turn loads is under way before it waits for the first matmul.
            write, step = load_factor(factors, WRITE_KEY, tokens, T), load_factor(factors, STEP, tokens, T)
            read_query, read_key = (
                load_factor(factors, READ_QUERY, tokens, T),
                load_factor(factors, READ_KEY, tokens, T),
            )
            end = index * C + C - 1
            carried = tl.load(factors + KEPT * T + end, mask=end < T, other=0.0)
            dupdate = write[:, None] * tl.dot(k, dstate.to(dtype), input_precision=spec.precision)
            dupdate = tl.dot(tl.trans(P), douts, dupdate, input_precision=spec.precision)
            dvalues = tl.dot(tl.trans(inverse), dupdate.to(dtype), input_precision=spec.precision)
            dvalues *= step[:, None]
            pointers = dqkv + tokens[:, None] * spec.width + values[None, :]
            written = (tokens < T) & (owned | (back > 0))
            tl.store(pointers, dvalues.to(dtype), mask=written[:, None])
            answered = read_query[:, None] * douts.to(tl.float32)
            dstate = tl.dot(tl.trans(q), answered.to(dtype), carried * dstate, input_precision=spec.precision)
            dvalues = (-read_key[:, None] * dvalues).to(dtype)
            dstate = tl.dot(tl.trans(k), dvalues, dstate, input_precision=spec.precision)
            pointers = dstates + (at * spec.chunks + index - 1) * spec.H * spec.V
            pointers += keys[:, None] * spec.V + values[None, :]
            tl.store(pointers, dstate.to(dtype), mask=(keys >= 0)[:, None] & (index > first))


@triton.jit
def _sum_so_far(dqkv, tokens, columns, added, spec: tl.constexpr):
    places = dqkv + tokens[:, None] * spec.width + columns[None, :]
    return tl.load(places, mask=added[:, None], other=0.0).to(tl.float32)


@triton.jit
def gradient_kernel(
    qkv, starts, factors, updates, states, dstates, dout, dqkv, dg, dbeta, spec: tl.constexpr
):  # fmt: skip
    """Compute the gradients to queries, keys and gates of one chunk, for one key head; grid (K, chunks, B).

    dqkv has the gradients to values already.
    """
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    N: tl.constexpr = spec.K * spec.G
    head, chunk, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    order, keys = tl.arange(0, C), tl.arange(0, spec.H)
    tokens = chunk * C + order
    inside = tokens < T
    before, behind = crossing_bounds(starts, row, chunk, spec)
    after = (chunk + 1) * C
    qkv += row * T * spec.width
    dqkv += row * T * spec.width
    updates += row * T * N * spec.V
    dout += row * T * N * spec.V
    q_columns, k_columns = head * spec.H + keys, (spec.K + head) * spec.H + keys
    q, k = load_tokens(qkv, tokens, q_columns, spec.width, T), load_tokens(qkv, tokens, k_columns, spec.width, T)
    start = tl.load(starts + row * T + tokens, mask=inside, other=T)
    real = start < T
    dtype = k.dtype
    for member in range(spec.G):
        n = head * spec.G + member
        of_head = factors + (row * N + n) * FACTORS * T
        # A load that waits behind a barrier takes as long as several matmuls: factors are loaded at once.
        step, totals = load_factor(of_head, STEP, tokens, T), load_factor(of_head, DECAY, tokens, T)
        read_key, write_key = load_factor(of_head, READ_KEY, tokens, T), load_factor(of_head, WRITE_KEY, tokens, T)
        read_query = load_factor(of_head, READ_QUERY, tokens, T)
        key_scale, query_scale = (
            load_factor(of_head, KEY_SCALE, tokens, T),
            load_factor(of_head, QUERY_SCALE, tokens, T),
        )
        carried = tl.load(of_head + KEPT * T + after - 1, mask=after <= T, other=0.0)
        # Gradients to queries and keys before the part along them is taken away.
        dq, dk = tl.full((C, spec.H), 0.0, tl.float32), tl.full((C, spec.H), 0.0, tl.float32)
        dP, dA = tl.full((C, C), 0.0, tl.float32), tl.full((C, C), 0.0, tl.float32)
        dstep, at_end = tl.full((C,), 0.0, tl.float32), 0.0
        for column in range(0, spec.V, spec.columns):
            values = column + tl.arange(0, spec.columns)
            dstate = _state(dstates, behind < after, n, row, chunk, keys, values, spec)
            state = _state(states, before < chunk * C, n, row, chunk, keys, values, spec)
            update = load_tokens(updates, tokens, n * spec.V + values, N * spec.V, T)
            douts = load_tokens(dout, tokens, n * spec.V + values, N * spec.V, T)
            dvalue = load_tokens(dqkv, tokens, 2 * spec.K * spec.H + n * spec.V + values, spec.width, T)
            written = (write_key[:, None] * update.to(tl.float32)).to(dtype)
            dk = tl.dot(written, tl.trans(dstate), dk, input_precision=spec.precision)
            dstep += tl.sum(dvalue.to(tl.float32) * update.to(tl.float32), 1)
            dP = tl.dot(douts, tl.trans(update), dP, input_precision=spec.precision)
            dA = tl.dot(dvalue, tl.trans(update), dA, input_precision=spec.precision)
            answered = (read_query[:, None] * douts.to(tl.float32)).to(dtype)
            dq = tl.dot(answered, tl.trans(state), dq, input_precision=spec.precision)
            at_end += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0)
        # The decay to the chunk's end is in all that the chunk writes, and in what it keeps.
        k32 = load_tokens(qkv, tokens, k_columns, spec.width, T).to(tl.float32)
        at_end = carried * at_end + tl.sum(tl.sum(k32 * dk, 1), 0)
        between = _decays(totals, start, real, order) * key_scale[None, :]
        below = order[:, None] > order[None, :]
        dA = tl.where(below, -dA * between * key_scale[:, None], 0.0).to(dtype)
        dP = (dP * between * query_scale[:, None]).to(dtype)
        dk = tl.dot(tl.trans(dA), k, dk, input_precision=spec.precision)
        dk = tl.dot(tl.trans(dP), q, dk, input_precision=spec.precision)
        along_write = tl.sum(k32 * dk, 1)
        for column in range(0, spec.V, spec.columns):
            values = column + tl.arange(0, spec.columns)
            state = _state(states, before < chunk * C, n, row, chunk, keys, values, spec)
            dvalue = load_tokens(dqkv, tokens, 2 * spec.K * spec.H + n * spec.V + values, spec.width, T)
            dvalue = (-read_key[:, None] * dvalue.to(tl.float32)).to(dtype)
            dk = tl.dot(dvalue, tl.trans(state), dk, input_precision=spec.precision)
        dk = tl.dot(dA, k, dk, input_precision=spec.precision)
        dq = tl.dot(dP, k, dq, input_precision=spec.precision)
        # The sums over the value heads are this program's own, kept in memory to spare registers. What is along a query
        # or key is taken away, as their norms do.
        added = inside & (member > 0)
        q32 = load_tokens(qkv, tokens, q_columns, spec.width, T).to(tl.float32)
        along_query = tl.sum(q32 * dq, 1)
        dq -= q32 * (query_scale * query_scale * spec.H * along_query)[:, None]
        dq += _sum_so_far(dqkv, tokens, q_columns, added, spec)
        along_key = tl.sum(k32 * dk, 1)
        dk -= k32 * (key_scale * key_scale * along_key)[:, None]
        dk += _sum_so_far(dqkv, tokens, k_columns, added, spec)
        tl.debug_barrier()  # other threads have read the sums that these overwrite
        store_tokens(dqkv, dq, tokens, q_columns, spec.width, T)
        store_tokens(dqkv, dk, tokens, k_columns, spec.width, T)
        # A decay's logarithm is in the sums of all tokens from it on: these scale what they read, and divide what they
        # write. A document's first token decays nothing.
        dtotals = along_query + (along_key - along_write) - along_write
        dtotals = tl.cumsum(dtotals, 0, reverse=True) + at_end
        dtotals = tl.where(start < tokens, dtotals, 0.0)
        dstep = tl.where(real, dstep / tl.where(real, step * step, 1.0), 0.0)
        tl.store(dg + (row * T + tokens) * N + n, dtotals, mask=inside)
        tl.store(dbeta + (row * T + tokens) * N + n, dstep, mask=inside)
        tl.debug_barrier()  # the next value head reads sums that other threads wrote
