"""Triton kernels of Kimi Delta Attention (arXiv 2510.26692) over packed rows, as the delta rule's.

With the parts of a chunk (`chunks.ChunkParts`), M its similar keys and P its scores:

    r = β (v − read·S)    u = (I + β M)⁻¹ r    o = asked·S + P u    S' = diag(kept)·S + writtenᵀ u

- `inverse_kernel`, a program for each chunk and head: (I + β M)⁻¹.
- `state_kernel`, a program for each *document* that crosses a chunk's end, head and part of its columns: u of its
  chunks, and the state at the beginning of each. `state_gradient_kernel` runs the same chunks backward.
- `output_kernel`, a program for each chunk, head and part of its columns, and `gradient_kernel`, one for each chunk and
  head: all that needs no order.

Layout: T is a multiple of the chunk; asked, read, written [B, N, T, H]; scores, similar and inverses [B, N, T, C]; beta
[B, N, T] and kept [B, N, chunks, H], float32; values, out and updates, which are u, [B, T, N, V]; gradients as these;
states and dstates [B, N, chunks, H, V], for chunks that begin, or end, within a document.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from jaxglue.ops.delta_rule.kernels import crossing_bounds, part_of_columns, unit_inverse


@dataclass(frozen=True, kw_only=True)
class KDAKernelSpec:
    """Constants of a kernel: sizes of a call, and a program's part of them."""

    T: int
    N: int
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
    def chunks(self) -> int:
        """Return the chunks of a row."""
        return self.T // self.chunk


@triton.jit
def _tile(rows, columns, WIDTH: tl.constexpr):
    """Return the places of some columns of rows of WIDTH values."""
    return rows[:, None] * WIDTH + columns[None, :]


@triton.jit
def inverse_kernel(similar, beta, inverses, spec: tl.constexpr):
    """Compute (I + β M)⁻¹ of one chunk of a head; grid (N, chunks, B)."""
    C: tl.constexpr = spec.chunk
    n, chunk, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    order = tl.arange(0, C)
    tokens = (row * spec.N + n) * spec.T + chunk * C + order
    squares = _tile(tokens, order, C)
    A = tl.load(similar + squares).to(tl.float32) * tl.load(beta + tokens)[:, None]
    tl.store(inverses + squares, unit_inverse(A, spec).to(inverses.dtype.element_ty))


@triton.jit
def state_kernel(read, written, values, beta, inverses, kept, starts, ends, updates, states, spec: tl.constexpr):
    """Compute u of chunks, and their states, along the document that crosses a chunk's end, if it began there.

    A chunk's u is written along the document that crosses its beginning; where none does, by the chunk's own program.
    Grid (N · V / columns, chunks, B).
    """
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    row, n, column = part_of_columns(spec)
    chunk = tl.program_id(1)
    before, behind = crossing_bounds(starts, row, chunk, spec)
    owned = before == chunk * C
    begins = (behind >= chunk * C) & (behind < (chunk + 1) * C)
    if owned | begins:
        last = chunk
        if begins:
            last = (tl.load(ends + row * T + (chunk + 1) * C) - 1) // C
        order, keys, own = tl.arange(0, C), tl.arange(0, spec.H), column + tl.arange(0, spec.columns)
        head = row * spec.N + n
        values += row * T * spec.N * spec.V + n * spec.V
        updates += row * T * spec.N * spec.V + n * spec.V
        dtype = values.dtype.element_ty
        state = tl.full((spec.H, spec.columns), 0.0, tl.float32)
        for index in tl.range(chunk, last + 1, num_stages=spec.stages):
            tokens = index * C + order
            of_head, of_values = head * T + tokens, _tile(tokens, own, spec.N * spec.V)
            key = tl.load(read + _tile(of_head, keys, spec.H))
            writing = tl.load(written + _tile(of_head, keys, spec.H))
            value, step = tl.load(values + of_values), tl.load(beta + of_head)
            inverse = tl.load(inverses + _tile(of_head, order, C))
            carried = tl.load(kept + (head * spec.chunks + index) * spec.H + keys)
            seen = tl.dot(key, state.to(dtype), input_precision=spec.precision)
            wanted = step[:, None] * (value.to(tl.float32) - seen)
            update = tl.dot(inverse, wanted.to(dtype), input_precision=spec.precision).to(dtype)
            tl.store(updates + of_values, update, mask=(order >= 0)[:, None] & (owned | (index > chunk)))
            state = tl.dot(tl.trans(writing), update, carried[:, None] * state, input_precision=spec.precision)
            pointers = states + (head * spec.chunks + index + 1) * spec.H * spec.V + _tile(keys, own, spec.V)
            tl.store(pointers, state.to(states.dtype.element_ty), mask=(keys >= 0)[:, None] & (index < last))


@triton.jit
def _state(states, exists, head, index, keys, own, spec: tl.constexpr):
    """Load some columns of a chunk's state; zeros, without reading, where none was written."""
    places = _tile(keys, own, spec.V)
    pointers = states + (head * spec.chunks + index) * spec.H * spec.V + places
    return tl.load(pointers, mask=exists & (places >= 0), other=0.0)


@triton.jit
def output_kernel(asked, scores, updates, states, starts, out, spec: tl.constexpr):
    """Compute one chunk's outputs; grid (N · V / columns, chunks, B)."""
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    row, n, column = part_of_columns(spec)
    chunk, head = tl.program_id(1), row * spec.N + n
    order, keys, own = tl.arange(0, C), tl.arange(0, spec.H), column + tl.arange(0, spec.columns)
    tokens = chunk * C + order
    of_values = row * T * spec.N * spec.V + n * spec.V + _tile(tokens, own, spec.N * spec.V)
    before, _ = crossing_bounds(starts, row, chunk, spec)
    query = tl.load(asked + _tile(head * T + tokens, keys, spec.H))
    state = _state(states, before < chunk * C, head, chunk, keys, own, spec).to(query.dtype)
    P, update = tl.load(scores + _tile(head * T + tokens, order, C)), tl.load(updates + of_values)
    total = tl.dot(query, state, input_precision=spec.precision)
    total = tl.dot(P, update, total, input_precision=spec.precision)
    tl.store(out + of_values, total.to(out.dtype.element_ty))


@triton.jit
def state_gradient_kernel(
    asked, read, written, scores, inverses, beta, kept, starts, ends, dout, dvalues, dstates, spec: tl.constexpr
):  # fmt: skip
    """Compute gradients to values, and to the states behind chunks, back along the document that ends in a chunk.

    A chunk's are written along the document that crosses its end; where none does, by the chunk's own program. Grid
    (N · V / columns, chunks, B).
    """
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
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
        order, keys, own = tl.arange(0, C), tl.arange(0, spec.H), column + tl.arange(0, spec.columns)
        head = row * spec.N + n
        dout += row * T * spec.N * spec.V + n * spec.V
        dvalues += row * T * spec.N * spec.V + n * spec.V
        dtype = asked.dtype.element_ty
        dstate = tl.full((spec.H, spec.columns), 0.0, tl.float32)
        for back in tl.range(0, chunk - first + 1, num_stages=spec.stages):
            index = chunk - back
            tokens = index * C + order
            of_head, of_values = head * T + tokens, _tile(tokens, own, spec.N * spec.V)
            writing = tl.load(written + _tile(of_head, keys, spec.H))
            douts, step = tl.load(dout + of_values), tl.load(beta + of_head)
            inverse = tl.load(inverses + _tile(of_head, order, C))
            P = tl.load(scores + _tile(of_head, order, C))
            query, key = (tl.load(asked + _tile(of_head, keys, spec.H)), tl.load(read + _tile(of_head, keys, spec.H)))
            carried = tl.load(kept + (head * spec.chunks + index) * spec.H + keys)
            dupdate = tl.dot(writing, dstate.to(dtype), input_precision=spec.precision)
            dupdate = tl.dot(tl.trans(P), douts, dupdate, input_precision=spec.precision)
            dvalue = tl.dot(tl.trans(inverse), dupdate.to(dtype), input_precision=spec.precision)
            dvalue = (step[:, None] * dvalue).to(dtype)
            tl.store(dvalues + of_values, dvalue, mask=(order >= 0)[:, None] & (owned | (back > 0)))
            dstate = tl.dot(tl.trans(query), douts, carried[:, None] * dstate, input_precision=spec.precision)
            dstate -= tl.dot(tl.trans(key), dvalue, input_precision=spec.precision)
            pointers = dstates + (head * spec.chunks + index - 1) * spec.H * spec.V + _tile(keys, own, spec.V)
            tl.store(pointers, dstate.to(dtype), mask=(keys >= 0)[:, None] & (index > first))


@triton.jit
def gradient_kernel(
    beta, updates, states, dstates, dout, dvalues, starts,
    dasked, dread, dwritten, dkept, dscores, dsimilar, dbeta, spec: tl.constexpr,
):  # fmt: skip
    """Compute the gradients to one chunk's parts and β, for one head; grid (N, chunks, B)."""
    T: tl.constexpr = spec.T
    C: tl.constexpr = spec.chunk
    n, chunk, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    order, keys, head = tl.arange(0, C), tl.arange(0, spec.H), row * spec.N + n
    tokens = chunk * C + order
    before, behind = crossing_bounds(starts, row, chunk, spec)
    asks, reads = tl.full((C, spec.H), 0.0, tl.float32), tl.full((C, spec.H), 0.0, tl.float32)
    writes, keeps = tl.full((C, spec.H), 0.0, tl.float32), tl.full((spec.H,), 0.0, tl.float32)
    dP, dM = tl.full((C, C), 0.0, tl.float32), tl.full((C, C), 0.0, tl.float32)
    dstep = tl.full((C,), 0.0, tl.float32)
    for column in range(0, spec.V, spec.columns):
        own = column + tl.arange(0, spec.columns)
        of_values = row * T * spec.N * spec.V + n * spec.V + _tile(tokens, own, spec.N * spec.V)
        update, douts = tl.load(updates + of_values), tl.load(dout + of_values)
        dvalue = tl.load(dvalues + of_values)
        dstate = _state(dstates, behind < (chunk + 1) * C, head, chunk, keys, own, spec)
        state = _state(states, before < chunk * C, head, chunk, keys, own, spec).to(dstate.dtype)
        writes = tl.dot(update, tl.trans(dstate), writes, input_precision=spec.precision)
        asks = tl.dot(douts, tl.trans(state), asks, input_precision=spec.precision)
        reads -= tl.dot(dvalue, tl.trans(state), input_precision=spec.precision)
        dP = tl.dot(douts, tl.trans(update), dP, input_precision=spec.precision)
        dM -= tl.dot(dvalue, tl.trans(update), input_precision=spec.precision)
        dstep += tl.sum(dvalue.to(tl.float32) * update.to(tl.float32), 1)
        keeps += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    of_head = head * T + tokens
    places, squares = _tile(of_head, keys, spec.H), _tile(of_head, order, C)
    tl.store(dasked + places, asks.to(dasked.dtype.element_ty))
    tl.store(dread + places, reads.to(dread.dtype.element_ty))
    tl.store(dwritten + places, writes.to(dwritten.dtype.element_ty))
    tl.store(dkept + (head * spec.chunks + chunk) * spec.H + keys, keeps)
    tl.store(dscores + squares, dP.to(dscores.dtype.element_ty))
    tl.store(dsimilar + squares, dM.to(dsimilar.dtype.element_ty))
    step = tl.load(beta + of_head)
    tl.store(dbeta + of_head, tl.where(step > 0, dstep / tl.where(step > 0, step * step, 1.0), 0.0))
