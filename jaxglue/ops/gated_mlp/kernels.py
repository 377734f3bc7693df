"""Triton kernels of SwiGLU or GeGLU between adapters: the wide arrays are read and written once each way.

gate, up [M, F] are the projections without their adapters, whose products are formed here: low_rank [M, 2R] has gate's
ranks, then up's; gate_b, up_b [F, R] and down_a [R, F] are float32. A program covers COLUMNS of its rows forward and
ROWS of its columns backward; its partial sums are added up afterwards, so the result is deterministic.

Rows of wide arrays are WIDTH, of low_rank RANKS, and of the output OUT values apart, for they may be parts of longer
rows. An argument that a call has no use for is None, and its part of the kernel is not compiled.

Loops name their number of stages: otherwise Triton loads only matmul operands ahead, not addends.
"""

import triton
import triton.language as tl

from jaxglue.ops.quant.fp8_kernels import clip_e4m3, e4m3_scale

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def activate(g, ACTIVATION: tl.constexpr):
    """Return the activation of g, and its derivative there; both are g · sigmoid(polynomial)."""
    if ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2z), of z = sqrt(2 / pi) · (g + 0.044715 · g³)
        square = g * g
        sigmoid = _sigmoid(g * (1.5957691216057308 + 0.07135481627260024 * square))
        value = g * sigmoid
        slope = 1.5957691216057308 + 0.21406444881780073 * square
        return value, sigmoid + value * (1.0 - sigmoid) * slope
    else:
        sigmoid = _sigmoid(g)
        value = g * sigmoid
        return value, sigmoid + value * (1.0 - sigmoid)


@triton.jit
def _ranks(low_rank, rows, lanes, M: tl.constexpr, R: tl.constexpr, STRIDE: tl.constexpr, FIRST: tl.constexpr):
    """Load [rows, lanes] of low_rank [M, STRIDE] from column FIRST on."""
    mask = (rows < M)[:, None] & (lanes < R)[None, :]
    return tl.load(low_rank + rows[:, None].to(tl.int64) * STRIDE + FIRST + lanes[None, :], mask=mask, other=0.0)


@triton.jit
def _outer(matrix, columns, lanes, F: tl.constexpr, R: tl.constexpr, dtype: tl.constexpr):
    """Load [columns, lanes] of matrix [F, R]."""
    mask = (columns < F)[:, None] & (lanes < R)[None, :]
    return tl.load(matrix + columns[:, None] * R + lanes[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def _inner(matrix, columns, lanes, F: tl.constexpr, R: tl.constexpr, dtype: tl.constexpr):
    """Load [lanes, columns] of matrix [R, F]."""
    mask = (lanes < R)[:, None] & (columns < F)[None, :]
    return tl.load(matrix + lanes[:, None] * F + columns[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def _vector(x, at, length: tl.constexpr):
    return tl.load(x + at, mask=at < length, other=0.0)


@triton.jit
def swiglu_kernel(
    gate, up, low_rank, gate_b, up_b, down_a, row_scales, gate_scales, up_scales, out, down_ranks, absmax,
    M: tl.constexpr, F: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, OUT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute out [M, F] and partial sums down_ranks [F / COLUMNS, M, R] of out·down_aᵀ; grid (rows, columns).

    With scales, of rows [M] and of gate's and up's columns [F], gate and up are without them; then also compute partial
    maxima absmax [F / COLUMNS, M] of |out| in each row.
    """
    SCALED: tl.constexpr = row_scales is not None
    rows, lanes = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    dtype = out.dtype.element_ty
    # The ranks of these rows stay in registers, and so does the sum of their products with down_a.
    gate_ranks = _ranks(low_rank, rows, lanes, M, R, RANKS, 0)
    up_ranks = _ranks(low_rank, rows, lanes, M, R, RANKS, R)
    product = tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
    largest = tl.full((BLOCK_M,), 0.0, tl.float32)
    if SCALED:
        row_scale = _vector(row_scales, rows, M)[:, None]
    # A base in 64 bits, and 32-bit offsets that are the same in every turn of the loop.
    origin, out = tl.program_id(0).to(tl.int64) * BLOCK_M * WIDTH, out + tl.program_id(0).to(tl.int64) * BLOCK_M * OUT
    offsets = tl.arange(0, BLOCK_M)[:, None] * WIDTH + tl.arange(0, BLOCK_N)[None, :]
    to = tl.arange(0, BLOCK_M)[:, None] * OUT + tl.arange(0, BLOCK_N)[None, :]
    first = tl.program_id(1) * COLUMNS
    for start in tl.range(first, min(first + COLUMNS, F), BLOCK_N, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_N)
        at, mask = origin + start, (rows < M)[:, None] & (columns < F)[None, :]
        g = tl.load(gate + at + offsets, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up + at + offsets, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            g = g * row_scale * _vector(gate_scales, columns, F)[None, :]
            u = u * row_scale * _vector(up_scales, columns, F)[None, :]
        # Products of adapters accumulate onto the projections in float32, which are never rounded in between.
        g = tl.dot(gate_ranks, tl.trans(_outer(gate_b, columns, lanes, F, R, dtype)), g, input_precision=PRECISION)
        u = tl.dot(up_ranks, tl.trans(_outer(up_b, columns, lanes, F, R, dtype)), u, input_precision=PRECISION)
        y = (activate(g, ACTIVATION)[0] * u).to(dtype)
        tl.store(out + start + to, y, mask=mask)
        if SCALED:
            largest = tl.maximum(largest, tl.max(tl.abs(y.to(tl.float32)), 1))
        a = _inner(down_a, columns, lanes, F, R, dtype)
        product = tl.dot(y, tl.trans(a), product, input_precision=PRECISION)
    to = down_ranks + (tl.program_id(1).to(tl.int64) * M + rows[:, None]) * R + lanes[None, :]
    tl.store(to, product, mask=(rows < M)[:, None] & (lanes < R)[None, :])
    if SCALED:
        tl.store(absmax + tl.program_id(1).to(tl.int64) * M + rows, largest, mask=rows < M)


@triton.jit
def joined_swiglu_kernel(
    z, gate_b, up_b, down_a, out, down_ranks,
    M: tl.constexpr, F: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do as `swiglu_kernel` for z [M, WIDTH] with gate, up and low_rank side by side; out is [M, OUT]."""
    swiglu_kernel(
        gate=z, up=z + F, low_rank=z + 2 * F, gate_b=gate_b, up_b=up_b, down_a=down_a,
        row_scales=None, gate_scales=None, up_scales=None, out=out, down_ranks=down_ranks, absmax=None,
        M=M, F=F, R=R, WIDTH=WIDTH, RANKS=WIDTH, OUT=OUT,
        BLOCK_R=BLOCK_R, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, COLUMNS=COLUMNS, STAGES=STAGES, PRECISION=PRECISION,
        ACTIVATION="silu",
    )  # fmt: skip


@triton.jit
def swiglu_gradient_kernel(
    gate, up, low_rank, gate_b, up_b, down_a, dout, ddown_ranks, row_scales, gate_scales, up_scales, dout_scales,
    dgate, dup, ddown_a, absmax, dlow_rank, dgate_b, dup_b,
    M: tl.constexpr, F: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, OUT: tl.constexpr,
    OUT_RANKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute dgate, dup [M, F] from dout [M, F] and ddown_ranks [M, R], and partial sums of ddown_aᵀ.

    Sum ddown_a [M / ROWS, F, R] over rows afterwards. Rows of ddown_ranks are OUT_RANKS values apart. Grid (columns,
    rows).

    With scales gate, up and dout are without them: dout has one for each row. Then also compute partial maxima absmax
    [F / BLOCK_N, M] of |dgate·gate_scales| and |dup·up_scales| in each row.

    With dlow_rank, also compute partial sums of the gradients to low_rank there, [F / BLOCK_N, M, 2R], and to gate_b
    and up_b, [M / ROWS, F, R].
    """
    SCALED: tl.constexpr = row_scales is not None
    lanes, left = tl.arange(0, BLOCK_R), tl.program_id(0) * BLOCK_N
    columns = left + tl.arange(0, BLOCK_N)
    dtype = dgate.dtype.element_ty
    # The matrices of these columns stay in registers for all rows of the program, and so do the sums of gradients to
    # them; a program that passed over columns would write a partial sum for every tile.
    b_gate, b_up = _outer(gate_b, columns, lanes, F, R, dtype), _outer(up_b, columns, lanes, F, R, dtype)
    a = _inner(down_a, columns, lanes, F, R, dtype)
    total = tl.full((BLOCK_N, BLOCK_R), 0.0, tl.float32)
    gate_total, up_total = total, total
    if SCALED:
        gate_scale, up_scale = _vector(gate_scales, columns, F)[None, :], _vector(up_scales, columns, F)[None, :]
    offsets = tl.arange(0, BLOCK_M)[:, None] * WIDTH + tl.arange(0, BLOCK_N)[None, :]
    out_offsets = tl.arange(0, BLOCK_M)[:, None] * OUT + tl.arange(0, BLOCK_N)[None, :]
    first = tl.program_id(1) * ROWS
    origin, out_origin = first.to(tl.int64) * WIDTH + left, first.to(tl.int64) * OUT + left
    for start in tl.range(first, min(first + ROWS, M), BLOCK_M, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        at, mask = origin + (start - first) * WIDTH, (rows < M)[:, None] & (columns < F)[None, :]
        g = tl.load(gate + at + offsets, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up + at + offsets, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dout + out_origin + (start - first) * OUT + out_offsets, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            row_scale = _vector(row_scales, rows, M)[:, None]
            g, u = g * row_scale * gate_scale, u * row_scale * up_scale
            d = d * _vector(dout_scales, rows, M)[:, None]
        down_row_ranks = _ranks(ddown_ranks, rows, lanes, M, R, OUT_RANKS, 0)
        gate_ranks = _ranks(low_rank, rows, lanes, M, R, RANKS, 0)
        up_ranks = _ranks(low_rank, rows, lanes, M, R, RANKS, R)
        # The activation's inputs are formed again, at less than the cost of reading them.
        g = tl.dot(gate_ranks, tl.trans(b_gate), g, input_precision=PRECISION)
        u = tl.dot(up_ranks, tl.trans(b_up), u, input_precision=PRECISION)
        d = tl.dot(down_row_ranks, a, d, input_precision=PRECISION)
        activated, slope = activate(g, ACTIVATION)
        du, dg = (d * activated).to(dtype), (d * u * slope).to(dtype)
        tl.store(dup + at + offsets, du, mask=mask)
        tl.store(dgate + at + offsets, dg, mask=mask)
        if SCALED:
            # Of the rounded gradients, which are quantized next: a larger one would overflow e4m3.
            folded = tl.maximum(tl.abs(dg.to(tl.float32) * gate_scale), tl.abs(du.to(tl.float32) * up_scale))
            tl.store(absmax + tl.program_id(0).to(tl.int64) * M + rows, tl.max(folded, 1), mask=rows < M)
        if dlow_rank is not None:
            to = dlow_rank + (tl.program_id(0).to(tl.int64) * M + rows[:, None]) * (2 * R) + lanes[None, :]
            inside = (rows < M)[:, None] & (lanes < R)[None, :]
            tl.store(to, tl.dot(dg, b_gate, input_precision=PRECISION), mask=inside)
            tl.store(to + R, tl.dot(du, b_up, input_precision=PRECISION), mask=inside)
            gate_total = tl.dot(tl.trans(dg), gate_ranks, gate_total, input_precision=PRECISION)
            up_total = tl.dot(tl.trans(du), up_ranks, up_total, input_precision=PRECISION)
        total = tl.dot(tl.trans((activated * u).to(dtype)), down_row_ranks, total, input_precision=PRECISION)
    to = tl.program_id(1).to(tl.int64) * F * R + columns[:, None] * R + lanes[None, :]
    inside = (columns < F)[:, None] & (lanes < R)[None, :]
    tl.store(ddown_a + to, total, mask=inside)
    if dlow_rank is not None:
        tl.store(dgate_b + to, gate_total, mask=inside)
        tl.store(dup_b + to, up_total, mask=inside)


@triton.jit
def joined_swiglu_gradient_kernel(
    z, gate_b, up_b, down_a, dout, dz, dlow_rank, dgate_b, dup_b, ddown_a,
    M: tl.constexpr, F: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do as `swiglu_gradient_kernel` for z [M, WIDTH] with gate, up and low_rank side by side.

    dout is [M, OUT], with the gradient to the ranks from column F on. All partial sums are computed; dz's last columns
    are left as they are.
    """
    swiglu_gradient_kernel(
        gate=z, up=z + F, low_rank=z + 2 * F, gate_b=gate_b, up_b=up_b, down_a=down_a, dout=dout, ddown_ranks=dout + F,
        row_scales=None, gate_scales=None, up_scales=None, dout_scales=None, dgate=dz, dup=dz + F, ddown_a=ddown_a,
        absmax=None, dlow_rank=dlow_rank, dgate_b=dgate_b, dup_b=dup_b,
        M=M, F=F, R=R, WIDTH=WIDTH, RANKS=WIDTH, OUT=OUT, OUT_RANKS=OUT,
        BLOCK_R=BLOCK_R, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, ROWS=ROWS, STAGES=STAGES, PRECISION=PRECISION,
        ACTIVATION="silu",
    )  # fmt: skip


@triton.jit
def gate_fp8_kernel(
    gate, up, row_scales, gate_scales, up_scales, fp8_values, scales,
    F: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute a row of activation(gate)·up, rounded to gate's dtype, as e4m3 values and a scale; grid (M).

    gate and up [M, F] are without their scales, of rows [M] and of columns [F].
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row_scale = tl.load(row_scales + row)
    g = _vector(gate + row * F, at, F).to(tl.float32) * row_scale * _vector(gate_scales, at, F)
    u = _vector(up + row * F, at, F).to(tl.float32) * row_scale * _vector(up_scales, at, F)
    y = (activate(g, ACTIVATION)[0] * u).to(gate.dtype.element_ty).to(tl.float32)
    scale = e4m3_scale(tl.max(tl.abs(y), 0))
    values = clip_e4m3(y / scale)
    tl.store(fp8_values + row * F + at, values.to(fp8_values.dtype.element_ty), mask=at < F)
    tl.store(scales + row, scale)
