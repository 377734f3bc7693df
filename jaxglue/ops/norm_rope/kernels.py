"""Triton kernels over tokens that read and write every value once."""

from dataclasses import dataclass

import triton
import triton.language as tl

from jaxglue.ops.quant.fp8_kernels import clip_e4m3, e4m3_scale


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """Constants of heads: sizes, the dimensions that turn, and the norms before that."""

    H: int
    block: int
    """Pairs of dimensions in a tile: H / 2, or the next power of two."""
    turning: int
    """Dimensions that turn, the first of a head."""
    eps: float | None = None
    """Added to a mean square by the norms; None where there are none."""
    offset: float = 0.0
    """Added to the norms' weights."""
    rounds_first: bool = True
    """See `NormStyle`."""


@triton.jit
def _load(x, columns, mask):
    return tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rms_scale(squares, D: tl.constexpr, EPS: tl.constexpr):
    """Return the factor of a norm of D values from the sum of their squares."""
    return 1.0 / tl.sqrt(squares / D + EPS)


@triton.jit
def normed(x, scale, weight, dtype: tl.constexpr, OFFSET: tl.constexpr = 0.0, ROUNDS_FIRST: tl.constexpr = True):
    """Return x · scale · (OFFSET + weight), rounded where the reference rounds."""
    if ROUNDS_FIRST and OFFSET == 0.0:
        return ((x * scale).to(dtype).to(tl.float32) * weight.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    value = x * scale
    if ROUNDS_FIRST:
        value = value.to(dtype).to(tl.float32)
    return (value * (OFFSET + weight)).to(dtype).to(tl.float32)


@triton.jit
def norm_kernel(
    x, weight, stream, out, D: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):  # fmt: skip
    """Norm one row to out [M, D], rounded to its dtype, and add it to that of a stream, if there is one; grid (M)."""
    start, columns = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BLOCK)
    mask = columns < D
    dtype = out.dtype.element_ty
    row = _load(x + start, columns, mask)
    scale = rms_scale(tl.sum(row * row, 0), D, EPS)
    row = normed(row, scale, _load(weight, columns, mask), dtype, OFFSET, ROUNDS_FIRST)
    if stream is not None:
        row += _load(stream + start, columns, mask)
    tl.store(out + start + columns, row.to(dtype), mask=mask)


@triton.jit
def fp8_norm_kernel(
    x, weight, values, scales, inverse_rms, D: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
    OFFSET: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
):  # fmt: skip
    """Quantize the norm of one row to e4m3 values [M, D] times its own of scales [M]; grid (M)."""
    start, columns = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BLOCK)
    mask = columns < D
    row = _load(x + start, columns, mask)
    inverse = rms_scale(tl.sum(row * row, 0), D, EPS)
    row = normed(row, inverse, _load(weight, columns, mask), x.dtype.element_ty, OFFSET, ROUNDS_FIRST)
    scale = e4m3_scale(tl.max(tl.abs(row), 0))
    row = clip_e4m3(row / scale)
    tl.store(values + start + columns, row.to(values.dtype.element_ty), mask=mask)
    tl.store(scales + tl.program_id(0), scale)
    tl.store(inverse_rms + tl.program_id(0), inverse)


@triton.jit
def norm_gradient_kernel(
    x, weight, dstream, dout, dx, D: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr
):
    """Compute the norm's gradient in one row of dx [M, D], plus that of a stream, if there is one; grid (M)."""
    start, columns = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BLOCK)
    mask = columns < D
    row, grad = _load(x + start, columns, mask), _load(dout + start, columns, mask)
    grad *= OFFSET + _load(weight, columns, mask)
    scale = rms_scale(tl.sum(row * row, 0), D, EPS)
    # Along x itself the norm is constant: that part of the gradient is taken out.
    along = tl.sum(grad * row, 0) * scale * scale / D
    total = (grad - row * along) * scale
    if dstream is not None:
        total = _load(dstream + start, columns, mask) + total
    tl.store(dx + start + columns, total.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _pairs(spec: tl.constexpr):
    """Return (dimensions that turn together, left and right, which are in a head, numbers of their angles).

    Dimensions that do not turn are pairs, too, past the angles.
    """
    HALF: tl.constexpr = spec.turning // 2
    pair = tl.arange(0, spec.block)
    if spec.turning == spec.H:
        left, right = pair, pair + HALF
    else:
        left, right = tl.where(pair < HALF, pair, pair + HALF), pair + tl.where(pair < HALF, HALF, spec.H // 2)
    return left, right, pair < spec.H // 2, pair


@triton.jit
def _angles(cos, sin, pair, spec: tl.constexpr):
    """Return the cosines and sines of a token's pairs."""
    turns = pair < spec.turning // 2
    c, s = tl.load(cos + pair, mask=turns, other=1.0), tl.load(sin + pair, mask=turns, other=0.0)
    return c.to(tl.float32)[None, :], s.to(tl.float32)[None, :]


@triton.jit
def rotate(
    x, weight, cos, sin, out, N: tl.constexpr, INVERSE: tl.constexpr, BLOCK_N: tl.constexpr, STRIDE: tl.constexpr,
    spec: tl.constexpr,
):  # fmt: skip
    """Norm and rotate all N heads of one token, or rotate them back; those of `out` are STRIDE values apart."""
    dtype = out.dtype.element_ty
    left_at, right_at, inside, pair = _pairs(spec)
    c, s = _angles(cos, sin, pair, spec)
    if INVERSE:
        s = -s
    HAS_NORM: tl.constexpr = spec.eps is not None and not INVERSE
    if HAS_NORM:
        left_weight = _load(weight, left_at, inside)[None, :]
        right_weight = _load(weight, right_at, inside)[None, :]
    for start in tl.static_range(0, N, BLOCK_N):
        heads = start + tl.arange(0, BLOCK_N)
        mask = (heads < N)[:, None] & inside[None, :]
        at_left, at_right = heads[:, None] * spec.H + left_at[None, :], heads[:, None] * spec.H + right_at[None, :]
        left, right = _load(x, at_left, mask), _load(x, at_right, mask)
        if HAS_NORM:
            scale = rms_scale(tl.sum(left * left + right * right, 1), spec.H, spec.eps)[:, None]
            left = normed(left, scale, left_weight, dtype, spec.offset, spec.rounds_first)
            right = normed(right, scale, right_weight, dtype, spec.offset, spec.rounds_first)
        to_left, to_right = heads[:, None] * STRIDE + left_at[None, :], heads[:, None] * STRIDE + right_at[None, :]
        tl.store(out + to_left, (left * c - right * s).to(dtype), mask=mask)
        tl.store(out + to_right, (right * c + left * s).to(dtype), mask=mask)


@triton.jit
def rotate_kernel(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out,
    N: tl.constexpr, K: tl.constexpr, INVERSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    spec: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one token of q [M, N·H] and k [M, K·H], or rotate it back; grid (M)."""
    H: tl.constexpr = spec.H
    token = tl.program_id(0).to(tl.int64)
    cos, sin = cos + token * (spec.turning // 2), sin + token * (spec.turning // 2)
    q, q_out, k, k_out = q + token * N * H, q_out + token * N * H, k + token * K * H, k_out + token * K * H
    rotate(q, q_weight, cos, sin, q_out, N, INVERSE, BLOCK_N, spec.H, spec)
    rotate(k, k_weight, cos, sin, k_out, K, INVERSE, BLOCK_K, spec.H, spec)


@triton.jit
def head_norm_gradient(left, right, dleft, dright, H: tl.constexpr, EPS: tl.constexpr):
    """Return the gradients to the halves of heads, from those to their norm before its weight."""
    scale = rms_scale(tl.sum(left * left + right * right, 1), H, EPS)[:, None]
    along = tl.sum(dleft * left + dright * right, 1)[:, None] * scale * scale / H
    return (dleft - left * along) * scale, (dright - right * along) * scale


@triton.jit
def _rotate_gradient(x, weight, cos, sin, dout, dx, N: tl.constexpr, BLOCK_N: tl.constexpr, spec: tl.constexpr):
    """Take the gradient of all N heads of one token back through rotation and norm."""
    dtype = dx.dtype.element_ty
    left_at, right_at, inside, pair = _pairs(spec)
    c, s = _angles(cos, sin, pair, spec)
    left_weight = spec.offset + _load(weight, left_at, inside)[None, :]
    right_weight = spec.offset + _load(weight, right_at, inside)[None, :]
    for start in tl.static_range(0, N, BLOCK_N):
        heads = start + tl.arange(0, BLOCK_N)
        mask = (heads < N)[:, None] & inside[None, :]
        at_left, at_right = heads[:, None] * spec.H + left_at[None, :], heads[:, None] * spec.H + right_at[None, :]
        left, right = _load(x, at_left, mask), _load(x, at_right, mask)
        dleft, dright = _load(dout, at_left, mask), _load(dout, at_right, mask)
        dleft, dright = (dleft * c + dright * s) * left_weight, (dright * c - dleft * s) * right_weight
        dleft, dright = head_norm_gradient(left, right, dleft, dright, spec.H, spec.eps)
        tl.store(dx + at_left, dleft.to(dtype), mask=mask)
        tl.store(dx + at_right, dright.to(dtype), mask=mask)


@triton.jit
def rotate_gradient_kernel(
    q, k, q_weight, k_weight, cos, sin, dq_out, dk_out, dq, dk,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Compute one token of dq [M, N·H] and dk [M, K·H] of normed and rotated heads; grid (M)."""
    H: tl.constexpr = spec.H
    token = tl.program_id(0).to(tl.int64)
    cos, sin = cos + token * (spec.turning // 2), sin + token * (spec.turning // 2)
    q, dq_out, dq = q + token * N * H, dq_out + token * N * H, dq + token * N * H
    k, dk_out, dk = k + token * K * H, dk_out + token * K * H, dk + token * K * H
    _rotate_gradient(q, q_weight, cos, sin, dq_out, dq, N, BLOCK_N, spec)
    _rotate_gradient(k, k_weight, cos, sin, dk_out, dk, K, BLOCK_K, spec)


@triton.jit
def split_rotate_kernel(
    z, q_weight, k_weight, cos, sin, q_out, k_out,
    N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    spec: tl.constexpr,
):  # fmt: skip
    """Do as `rotate_kernel` for one token of z [M, WIDTH], which begins with q and k side by side; grid (M)."""
    H: tl.constexpr = spec.H
    token = tl.program_id(0).to(tl.int64)
    cos, sin = cos + token * (spec.turning // 2), sin + token * (spec.turning // 2)
    z, q_out, k_out = z + token * WIDTH, q_out + token * N * H, k_out + token * K * H
    rotate(z, q_weight, cos, sin, q_out, N, False, BLOCK_N, spec.H, spec)
    rotate(z + N * H, k_weight, cos, sin, k_out, K, False, BLOCK_K, spec.H, spec)


@triton.jit
def split_rotate_gradient_kernel(
    z, q_weight, k_weight, cos, sin, dq_out, dk_out, dz,
    N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    spec: tl.constexpr,
):  # fmt: skip
    """Write one token of q's and k's gradients to dz [M, WIDTH], from those of rotated heads; grid (M)."""
    H: tl.constexpr = spec.H
    token = tl.program_id(0).to(tl.int64)
    cos, sin = cos + token * (spec.turning // 2), sin + token * (spec.turning // 2)
    z, dz = z + token * WIDTH, dz + token * WIDTH
    dq_out, dk_out = dq_out + token * N * H, dk_out + token * K * H
    if spec.eps is not None:
        _rotate_gradient(z, q_weight, cos, sin, dq_out, dz, N, BLOCK_N, spec)
        _rotate_gradient(z + N * H, k_weight, cos, sin, dk_out, dz + N * H, K, BLOCK_K, spec)
    else:
        rotate(dq_out, q_weight, cos, sin, dz, N, True, BLOCK_N, spec.H, spec)
        rotate(dk_out, k_weight, cos, sin, dz + N * H, K, True, BLOCK_K, spec.H, spec)
