"""Triton kernels over tokens that read and write every value once."""

import triton
import triton.language as tl

from jaxglue.ops.quant.fp8_kernels import clip_e4m3, e4m3_scale


@triton.jit
def _load(x, columns, mask):
    return tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rms_scale(squares, D: tl.constexpr, EPS: tl.constexpr):
    """Return the factor of a norm of D values from the sum of their squares."""
    return 1.0 / tl.sqrt(squares / D + EPS)


@triton.jit
def normed(x, scale, weight, dtype: tl.constexpr):
    """Return x · scale · weight, rounded where the reference rounds."""
    return ((x * scale).to(dtype).to(tl.float32) * weight.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def norm_kernel(x, weight, out, D: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """Norm one row to out [M, D], rounded to its dtype before and after the weight; grid (M)."""
    start, columns = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BLOCK)
    mask = columns < D
    dtype = out.dtype.element_ty
    row = _load(x + start, columns, mask)
    scale = rms_scale(tl.sum(row * row, 0), D, EPS)
    tl.store(out + start + columns, normed(row, scale, _load(weight, columns, mask), dtype).to(dtype), mask=mask)


@triton.jit
def fp8_norm_kernel(x, weight, values, scales, inverse_rms, D: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize the norm of one row to e4m3 values [M, D] times its own of scales [M]; grid (M)."""
    start, columns = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BLOCK)
    mask = columns < D
    row = _load(x + start, columns, mask)
    inverse = rms_scale(tl.sum(row * row, 0), D, EPS)
    row = normed(row, inverse, _load(weight, columns, mask), x.dtype.element_ty)
    scale = e4m3_scale(tl.max(tl.abs(row), 0))
    row = clip_e4m3(row / scale)
    tl.store(values + start + columns, row.to(values.dtype.element_ty), mask=mask)
    tl.store(scales + tl.program_id(0), scale)
    tl.store(inverse_rms + tl.program_id(0), inverse)


@triton.jit
def norm_gradient_kernel(x, weight, dresidual, dout, dx, D: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the norm's gradient to the residual stream's in one row of dx [M, D]; grid (M)."""
    start, columns = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BLOCK)
    mask = columns < D
    row, grad = _load(x + start, columns, mask), _load(dout + start, columns, mask) * _load(weight, columns, mask)
    scale = rms_scale(tl.sum(row * row, 0), D, EPS)
    along = tl.sum(grad * row, 0) * scale * scale / D
    total = _load(dresidual + start, columns, mask) + (grad - row * along) * scale
    tl.store(dx + start + columns, total.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(
    x, weight, cos, sin, out,
    N: tl.constexpr, H: tl.constexpr, EPS: tl.constexpr, HAS_NORM: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Norm and rotate all N heads of one token."""
    HALF: tl.constexpr = H // 2
    dtype = out.dtype.element_ty
    columns = tl.arange(0, BLOCK_H)
    inside = columns < HALF
    c, s = _load(cos, columns, inside)[None, :], _load(sin, columns, inside)[None, :]
    if INVERSE:
        s = -s
    if HAS_NORM:
        left_weight = _load(weight, columns, inside)[None, :]
        right_weight = _load(weight + HALF, columns, inside)[None, :]
    for start in tl.static_range(0, N, BLOCK_N):
        heads = start + tl.arange(0, BLOCK_N)
        at, mask = heads[:, None] * H + columns[None, :], (heads < N)[:, None] & inside[None, :]
        left, right = _load(x, at, mask), _load(x + HALF, at, mask)
        if HAS_NORM:
            scale = rms_scale(tl.sum(left * left + right * right, 1), H, EPS)[:, None]
            left = normed(left, scale, left_weight, dtype)
            right = normed(right, scale, right_weight, dtype)
        tl.store(out + at, (left * c - right * s).to(dtype), mask=mask)
        tl.store(out + HALF + at, (right * c + left * s).to(dtype), mask=mask)


@triton.jit
def rotate_kernel(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, EPS: tl.constexpr,
    HAS_NORM: tl.constexpr, INVERSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one token of q [M, N·H] and k [M, K·H]; grid (M)."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin = cos + token * (H // 2), sin + token * (H // 2)
    q, q_out, k, k_out = q + token * N * H, q_out + token * N * H, k + token * K * H, k_out + token * K * H
    _rotate(q, q_weight, cos, sin, q_out, N, H, EPS, HAS_NORM, INVERSE, BLOCK_N, BLOCK_H)
    _rotate(k, k_weight, cos, sin, k_out, K, H, EPS, HAS_NORM, INVERSE, BLOCK_K, BLOCK_H)


@triton.jit
def head_norm_gradient(left, right, dleft, dright, H: tl.constexpr, EPS: tl.constexpr):
    """Return the gradients to the halves of heads, from those to their norm before its weight."""
    scale = rms_scale(tl.sum(left * left + right * right, 1), H, EPS)[:, None]
    along = tl.sum(dleft * left + dright * right, 1)[:, None] * scale * scale / H
    return (dleft - left * along) * scale, (dright - right * along) * scale


@triton.jit
def _rotate_gradient(
    x, weight, cos, sin, dout, dx,
    N: tl.constexpr, H: tl.constexpr, EPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Take the gradient of all N heads of one token back through rotation and norm."""
    HALF: tl.constexpr = H // 2
    dtype = dx.dtype.element_ty
    columns = tl.arange(0, BLOCK_H)
    inside = columns < HALF
    c, s = _load(cos, columns, inside)[None, :], _load(sin, columns, inside)[None, :]
    left_weight = _load(weight, columns, inside)[None, :]
    right_weight = _load(weight + HALF, columns, inside)[None, :]
    for start in tl.static_range(0, N, BLOCK_N):
        heads = start + tl.arange(0, BLOCK_N)
        at, mask = heads[:, None] * H + columns[None, :], (heads < N)[:, None] & inside[None, :]
        left, right = _load(x, at, mask), _load(x + HALF, at, mask)
        dleft, dright = _load(dout, at, mask), _load(dout + HALF, at, mask)
        dleft, dright = (dleft * c + dright * s) * left_weight, (dright * c - dleft * s) * right_weight
        dleft, dright = head_norm_gradient(left, right, dleft, dright, H, EPS)
        tl.store(dx + at, dleft.to(dtype), mask=mask)
        tl.store(dx + HALF + at, dright.to(dtype), mask=mask)


@triton.jit
def rotate_gradient_kernel(
    q, k, q_weight, k_weight, cos, sin, dq_out, dk_out, dq, dk,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, EPS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute one token of dq [M, N·H] and dk [M, K·H] of normed and rotated heads; grid (M)."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin = cos + token * (H // 2), sin + token * (H // 2)
    q, dq_out, dq = q + token * N * H, dq_out + token * N * H, dq + token * N * H
    k, dk_out, dk = k + token * K * H, dk_out + token * K * H, dk + token * K * H
    _rotate_gradient(q, q_weight, cos, sin, dq_out, dq, N, H, EPS, BLOCK_N, BLOCK_H)
    _rotate_gradient(k, k_weight, cos, sin, dk_out, dk, K, H, EPS, BLOCK_K, BLOCK_H)


@triton.jit
def split_rotate_kernel(
    z, q_weight, k_weight, cos, sin, q_out, k_out,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, EPS: tl.constexpr, HAS_NORM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Do as `rotate_kernel` for one token of z [M, WIDTH], which begins with q and k side by side; grid (M)."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin, z = cos + token * (H // 2), sin + token * (H // 2), z + token * WIDTH
    q_out, k_out = q_out + token * N * H, k_out + token * K * H
    _rotate(z, q_weight, cos, sin, q_out, N, H, EPS, HAS_NORM, False, BLOCK_N, BLOCK_H)
    _rotate(z + N * H, k_weight, cos, sin, k_out, K, H, EPS, HAS_NORM, False, BLOCK_K, BLOCK_H)


@triton.jit
def split_rotate_gradient_kernel(
    z, q_weight, k_weight, cos, sin, dq_out, dk_out, dz,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, EPS: tl.constexpr, HAS_NORM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Write one token of q's and k's gradients to dz [M, WIDTH], from those of rotated heads; grid (M)."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin, z, dz = cos + token * (H // 2), sin + token * (H // 2), z + token * WIDTH, dz + token * WIDTH
    dq_out, dk_out = dq_out + token * N * H, dk_out + token * K * H
    if HAS_NORM:
        _rotate_gradient(z, q_weight, cos, sin, dq_out, dz, N, H, EPS, BLOCK_N, BLOCK_H)
        _rotate_gradient(z + N * H, k_weight, cos, sin, dk_out, dz + N * H, K, H, EPS, BLOCK_K, BLOCK_H)
    else:
        _rotate(dq_out, q_weight, cos, sin, dz, N, H, EPS, False, True, BLOCK_N, BLOCK_H)
        _rotate(dk_out, k_weight, cos, sin, dz + N * H, K, H, EPS, False, True, BLOCK_K, BLOCK_H)
