"""Triton kernels that form the adapters' products of queries and keys where heads are normed and rotated.

z [M, WIDTH] has the projections to N heads of queries and K of keys, [N + K, H], then the adapters' ranks. A program
covers HEADS heads, all of queries or all of keys, of BLOCK_M tokens; grid (M / BLOCK_M, (N + K) / HEADS).
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
    HAS_NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr,
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
    for head in range(HEADS):
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
    EPS: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of q_b [N·H, R] and k_b [K·H, R], norm and rotate to q_out [M, N·H] and k_out [M, K·H]."""
    head, ranks = tl.program_id(1) * HEADS, z + (N + K) * H
    if head < N:
        _rotate(
            z + head * H, ranks, q_b + head * H * R, q_weight, cos, sin, q_out + head * H,
            M, H, R, WIDTH, N * H, EPS, HAS_NORM, HEADS, BLOCK_R, BLOCK_M, BLOCK_H, PRECISION,
        )  # fmt: skip
    else:
        own = head - N
        _rotate(
            z + head * H, ranks + R, k_b + own * H * R, k_weight, cos, sin, k_out + own * H,
            M, H, R, WIDTH, K * H, EPS, HAS_NORM, HEADS, BLOCK_R, BLOCK_M, BLOCK_H, PRECISION,
        )  # fmt: skip


@triton.jit
def _rotate_gradient(
    z, hidden, matrix, weight, cos, sin, dout, dz,
    M: tl.constexpr, H: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, EPS: tl.constexpr,
    HAS_NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the gradient of HEADS heads back, from the first of z, matrix, dout [M, OUT] and dz on."""
    HALF: tl.constexpr = H // 2
    dtype = dz.dtype.element_ty
    rows, columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)
    lanes, mask = tl.arange(0, BLOCK_R), (rows < M)[:, None] & (columns < HALF)[None, :]
    inside = (rows < M)[:, None] & (lanes < R)[None, :]
    own = tl.load(hidden + rows[:, None].to(tl.int64) * WIDTH + lanes[None, :], mask=inside, other=0.0)
    c, s = _tile(cos, rows, columns, mask, HALF), _tile(sin, rows, columns, mask, HALF)
    if HAS_NORM:
        left_weight = tl.load(weight + columns, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
        right_weight = tl.load(weight + HALF + columns, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    for head in range(HEADS):
        from_left = _tile(dout + head * H, rows, columns, mask, OUT)
        from_right = _tile(dout + head * H + HALF, rows, columns, mask, OUT)
        dleft, dright = from_left * c + from_right * s, from_right * c - from_left * s
        if HAS_NORM:
            heads, matrices = z + head * H, matrix + head * H * R
            left, right = _halves(heads, own, matrices, rows, columns, lanes, mask, H, R, WIDTH, PRECISION)
            scale = _inverse_rms(left, right, H, EPS)
            dleft, dright = dleft * left_weight, dright * right_weight
            along = tl.sum(dleft * left + dright * right, 1)[:, None] * scale * scale / H
            dleft, dright = (dleft - left * along) * scale, (dright - right * along) * scale
        to = dz + head * H + rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
        tl.store(to, dleft.to(dtype), mask=mask)
        tl.store(to + HALF, dright.to(dtype), mask=mask)


@triton.jit
def rotate_gradient_kernel(
    z, q_b, k_b, q_weight, k_weight, cos, sin, dq_out, dk_out, dz,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
    EPS: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dz [M, WIDTH] of queries and keys, without the ranks' columns."""
    head, ranks = tl.program_id(1) * HEADS, z + (N + K) * H
    if head < N:
        _rotate_gradient(
            z + head * H, ranks, q_b + head * H * R, q_weight, cos, sin, dq_out + head * H, dz + head * H,
            M, H, R, WIDTH, N * H, EPS, HAS_NORM, HEADS, BLOCK_R, BLOCK_M, BLOCK_H, PRECISION,
        )  # fmt: skip
    else:
        own = head - N
        _rotate_gradient(
            z + head * H, ranks + R, k_b + own * H * R, k_weight, cos, sin, dk_out + own * H, dz + head * H,
            M, H, R, WIDTH, K * H, EPS, HAS_NORM, HEADS, BLOCK_R, BLOCK_M, BLOCK_H, PRECISION,
        )  # fmt: skip
