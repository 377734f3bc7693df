"""Triton kernels that form the adapters' products of queries and keys where heads are normed and rotated.

z [M, WIDTH] has the projections to N heads of queries and K of keys, [N + K, H], then the adapters' ranks. A program
covers heads of queries, of keys or of values only. Partial sums are added up afterwards: the result is deterministic.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(x, rows, columns, mask, WIDTH: tl.constexpr):
    """Load [rows, columns] of x [M, WIDTH] in float32."""
    return tl.load(x + rows[:, None].to(tl.int64) * WIDTH + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _halves(
    z, own, matrix, rows, columns, lanes, mask,
    H: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return both halves of a head with its adapter's product, in float32."""
    HALF: tl.constexpr = H // 2
    left, right = _tile(z, rows, columns, mask, WIDTH), _tile(z + HALF, rows, columns, mask, WIDTH)
    at, inside = columns[:, None] * R + lanes[None, :], (columns < HALF)[:, None] & (lanes < R)[None, :]
    left_b = tl.load(matrix + at, mask=inside, other=0.0).to(own.dtype)
    right_b = tl.load(matrix + HALF * R + at, mask=inside, other=0.0).to(own.dtype)
    left = tl.dot(own, tl.trans(left_b), left, input_precision=PRECISION)
    return left, tl.dot(own, tl.trans(right_b), right, input_precision=PRECISION)


@triton.jit
def _inverse_rms(left, right, H: tl.constexpr, EPS: tl.constexpr):
    return (1.0 / tl.sqrt(tl.sum(left * left + right * right, 1) / H + EPS))[:, None]


@triton.jit
def _normed(x, scale, weight, dtype: tl.constexpr):
    """Return x · scale · weight, rounded where the reference rounds."""
    return ((x * scale).to(dtype).to(tl.float32) * weight.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _rotate(
    z, hidden, matrix, weight, cos, sin, out,
    M: tl.constexpr, H: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, EPS: tl.constexpr,
    HAS_NORM: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads, from the first of z, matrix and out [M, OUT] on."""
    HALF: tl.constexpr = H // 2
    dtype = out.dtype.element_ty
    rows, columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)
    lanes, mask = tl.arange(0, BLOCK_R), (rows < M)[:, None] & (columns < HALF)[None, :]
    inside = (rows < M)[:, None] & (lanes < R)[None, :]
    own = tl.load(hidden + rows[:, None].to(tl.int64) * WIDTH + lanes[None, :], mask=inside, other=0.0)
    c, s = _tile(cos, rows, columns, mask, HALF), _tile(sin, rows, columns, mask, HALF)
    if HAS_NORM:
        left_weight = tl.load(weight + columns, mask=columns < HALF, other=0.0)[None, :]
        right_weight = tl.load(weight + HALF + columns, mask=columns < HALF, other=0.0)[None, :]
    for head in tl.range(0, HEADS, num_stages=STAGES):
        heads, matrices = z + head * H, matrix + head * H * R
        left, right = _halves(heads, own, matrices, rows, columns, lanes, mask, H, R, WIDTH, PRECISION)
        if HAS_NORM:
            scale = _inverse_rms(left, right, H, EPS)
            left, right = _normed(left, scale, left_weight, dtype), _normed(right, scale, right_weight, dtype)
        to = out + head * H + rows[:, None].to(tl.int64) * OUT + columns[None, :]
        tl.store(to, (left * c - right * s).to(dtype), mask=mask)
        tl.store(to + HALF, (right * c + left * s).to(dtype), mask=mask)


@triton.jit
def rotate_kernel(
    z, q_b, k_b, q_weight, k_weight, cos, sin, q_out, k_out,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
    EPS: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of q_b [N·H, R] and k_b [K·H, R], norm and rotate to q_out [M, N·H] and k_out [M, K·H].

    A program covers HEADS heads of BLOCK_M tokens; grid (M / BLOCK_M, (N + K) / HEADS).
    """
    head, ranks = tl.program_id(1) * HEADS, z + (N + K) * H
    if head < N:
        _rotate(
            z + head * H, ranks, q_b + head * H * R, q_weight, cos, sin, q_out + head * H,
            M, H, R, WIDTH, N * H, EPS, HAS_NORM, HEADS, STAGES, BLOCK_R, BLOCK_M, BLOCK_H, PRECISION,
        )  # fmt: skip
    else:
        own = head - N
        _rotate(
            z + head * H, ranks + R, k_b + own * H * R, k_weight, cos, sin, k_out + own * H,
            M, H, R, WIDTH, K * H, EPS, HAS_NORM, HEADS, STAGES, BLOCK_R, BLOCK_M, BLOCK_H, PRECISION,
        )  # fmt: skip


@triton.jit
def _rotate_gradient(
    z, hidden, matrix, weight, cos, sin, dout, dz, dhidden, dmatrix,
    M: tl.constexpr, H: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, DZ_WIDTH: tl.constexpr,
    EPS: tl.constexpr, ROTATES: tl.constexpr, HAS_NORM: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the gradient of the first head of z, matrix, dout [M, OUT], dz, dhidden [M, R] and dmatrix [H, R] back.

    Without ROTATES only through the adapter.
    """
    HALF: tl.constexpr = H // 2
    dtype = dz.dtype.element_ty
    columns, lanes = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_R)
    at, inside = columns[:, None] * R + lanes[None, :], (columns < HALF)[:, None] & (lanes < R)[None, :]
    left_b = tl.load(matrix + at, mask=inside, other=0.0).to(dtype)
    right_b = tl.load(matrix + HALF * R + at, mask=inside, other=0.0).to(dtype)
    left_total = tl.full((BLOCK_H, BLOCK_R), 0.0, tl.float32)
    right_total = left_total
    if HAS_NORM:
        left_weight = tl.load(weight + columns, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
        right_weight = tl.load(weight + HALF + columns, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    first = tl.program_id(0) * ROWS
    for start in tl.range(first, min(first + ROWS, M), BLOCK_M, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        mask, low = (rows < M)[:, None] & (columns < HALF)[None, :], (rows < M)[:, None] & (lanes < R)[None, :]
        own = tl.load(hidden + rows[:, None].to(tl.int64) * WIDTH + lanes[None, :], mask=low, other=0.0)
        dleft, dright = _tile(dout, rows, columns, mask, OUT), _tile(dout + HALF, rows, columns, mask, OUT)
        if ROTATES:
            c, s = _tile(cos, rows, columns, mask, HALF), _tile(sin, rows, columns, mask, HALF)
            dleft, dright = dleft * c + dright * s, dright * c - dleft * s
        if HAS_NORM:
            left, right = _tile(z, rows, columns, mask, WIDTH), _tile(z + HALF, rows, columns, mask, WIDTH)
            left = tl.dot(own, tl.trans(left_b), left, input_precision=PRECISION)
            right = tl.dot(own, tl.trans(right_b), right, input_precision=PRECISION)
            scale = _inverse_rms(left, right, H, EPS)
            dleft, dright = dleft * left_weight, dright * right_weight
            along = tl.sum(dleft * left + dright * right, 1)[:, None] * scale * scale / H
            dleft, dright = (dleft - left * along) * scale, (dright - right * along) * scale
        dleft, dright = dleft.to(dtype), dright.to(dtype)
        to = dz + rows[:, None].to(tl.int64) * DZ_WIDTH + columns[None, :]
        tl.store(to, dleft, mask=mask)
        tl.store(to + HALF, dright, mask=mask)
        product = tl.dot(dright, right_b, input_precision=PRECISION)
        product = tl.dot(dleft, left_b, product, input_precision=PRECISION)
        tl.store(dhidden + rows[:, None].to(tl.int64) * R + lanes[None, :], product, mask=low)
        left_total = tl.dot(tl.trans(dleft), own, left_total, input_precision=PRECISION)
        right_total = tl.dot(tl.trans(dright), own, right_total, input_precision=PRECISION)
    tl.store(dmatrix + at, left_total, mask=inside)
    tl.store(dmatrix + HALF * R + at, right_total, mask=inside)


@triton.jit
def rotate_gradient_kernel(
    z, q_b, k_b, v_b, q_weight, k_weight, cos, sin, dq_out, dk_out, dv, dz, dhidden, dmatrix,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
    EPS: tl.constexpr, HAS_NORM: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one head and ROWS tokens of dz [M, WIDTH + K·H]: as z without the ranks' columns, then values.

    Also compute partial sums of the gradients to the ranks, dhidden [N + 2K, M, R], and to q_b, k_b and v_b, dmatrix
    [M / ROWS, (N + 2K)·H, R]. Grid (M / ROWS, N + 2K).
    """
    DZ_WIDTH: tl.constexpr = WIDTH + K * H
    head, ranks = tl.program_id(1), z + (N + K) * H
    dhidden += head.to(tl.int64) * M * R
    dmatrix += (tl.program_id(0).to(tl.int64) * (N + 2 * K) + head) * H * R
    if head < N:
        _rotate_gradient(
            z + head * H, ranks, q_b + head * H * R, q_weight, cos, sin, dq_out + head * H, dz + head * H, dhidden,
            dmatrix, M, H, R, WIDTH, N * H, DZ_WIDTH, EPS, True, HAS_NORM, ROWS, STAGES,
            BLOCK_R, BLOCK_M, BLOCK_H, PRECISION,
        )  # fmt: skip
    elif head < N + K:
        own = head - N
        _rotate_gradient(
            z + head * H, ranks + R, k_b + own * H * R, k_weight, cos, sin, dk_out + own * H, dz + head * H, dhidden,
            dmatrix, M, H, R, WIDTH, K * H, DZ_WIDTH, EPS, True, HAS_NORM, ROWS, STAGES,
            BLOCK_R, BLOCK_M, BLOCK_H, PRECISION,
        )  # fmt: skip
    else:
        own = head - N - K
        _rotate_gradient(
            z, ranks + 2 * R, v_b + own * H * R, k_weight, cos, sin, dv + own * H, dz + WIDTH + own * H, dhidden,
            dmatrix, M, H, R, WIDTH, K * H, DZ_WIDTH, EPS, False, False, ROWS, STAGES,
            BLOCK_R, BLOCK_M, BLOCK_H, PRECISION,
        )  # fmt: skip
