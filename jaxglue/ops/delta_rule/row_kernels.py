"""Triton kernels around the delta rule, which read and write every value once: convolution with silu, and gated norm.

Layout: x, y and their gradients [B, T, C], taps [C, 4] with a token's own last, bias [C] or None; heads
and gates [M, V].
"""

import triton
import triton.language as tl

from jaxglue.ops.norm_rope.kernels import normed, rms_scale


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _row(x, token, least, channels, C: tl.constexpr, T: tl.constexpr):
    """Load a token's channels in float32; zeros for tokens before `least` or past the row."""
    return tl.load(x + token * C + channels, mask=(channels >= 0) & (token >= least) & (token < T), other=0.0).to(
        tl.float32
    )


@triton.jit
def _begin(starts, token, T: tl.constexpr):
    """Return the first token of a token's document; T for padding, 2T past the row: no token sees them."""
    return tl.load(starts + token, mask=token < T, other=2 * T)


@triton.jit
def _taps(taps, channels):
    """Return the weights of a token and of the three before it, for each channel."""
    last, first = tl.load(taps + channels * 4 + 3).to(tl.float32), tl.load(taps + channels * 4 + 2).to(tl.float32)
    return last, first, tl.load(taps + channels * 4 + 1).to(tl.float32), tl.load(taps + channels * 4).to(tl.float32)


@triton.jit
def _sum(start, token, taps, bias, x0, x1, x2, x3):
    """Return the sum of a token and the three before it, those of its document, and the bias, if any; 0 for padding."""
    total = tl.where(start <= token, x0 * taps[0], 0.0) + tl.where(start < token, x1 * taps[1], 0.0)
    total += tl.where(start + 1 < token, x2 * taps[2], 0.0) + tl.where(start + 2 < token, x3 * taps[3], 0.0)
    if bias is not None:
        total += tl.where(start <= token, bias, 0.0)  # none in padding
    return total


@triton.jit
def convolution_kernel(
    x, taps, bias, starts, y, T: tl.constexpr, C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Convolve some tokens of some channels within each document; grid (C / BLOCK_C, tiles of T, B).

    Threads hold channels and go from token to token, so that every row is loaded once, and no value moves.
    """
    row, first = tl.program_id(2).to(tl.int64) * T, tl.program_id(1) * BLOCK_T
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    weights, added = _taps(taps, channels), None
    if bias is not None:
        added = tl.load(bias + channels).to(tl.float32)
    x, y, starts = x + row * C, y + row * C, starts + row
    x1, x2 = _row(x, first - 1, 0, channels, C, T), _row(x, first - 2, 0, channels, C, T)
    x3 = _row(x, first - 3, 0, channels, C, T)
    for step in tl.static_range(BLOCK_T):
        token = first + step
        x0 = _row(x, token, 0, channels, C, T)
        total = _sum(_begin(starts, token, T), token, weights, added, x0, x1, x2, x3)
        tl.store(y + token * C + channels, _silu(total).to(y.dtype.element_ty), mask=(channels >= 0) & (token < T))
        x1, x2, x3 = x0, x1, x2


@triton.jit
def convolution_gradient_kernel(
    x, taps, bias, starts, dy, dx, T: tl.constexpr, C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Compute dx of some tokens and channels, from the gradients to their sums and the next three tokens'.

    Grid (C / BLOCK_C, tiles of T, B).
    """
    row, first = tl.program_id(2).to(tl.int64) * T, tl.program_id(1) * BLOCK_T
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    weights, added = _taps(taps, channels), None
    if bias is not None:
        added = tl.load(bias + channels).to(tl.float32)
    x, dy, dx, starts = x + row * C, dy + row * C, dx + row * C, starts + row
    x1, x2 = _row(x, first - 1, 0, channels, C, T), _row(x, first - 2, 0, channels, C, T)
    x3 = _row(x, first - 3, 0, channels, C, T)
    d1, d2, d3 = x1 * 0.0, x1 * 0.0, x1 * 0.0
    s1, s2, s3 = 2 * T, 2 * T, 2 * T
    for step in tl.static_range(BLOCK_T + 3):
        token = first + step
        s0, x0 = _begin(starts, token, T), _row(x, token, 0, channels, C, T)
        total = _sum(s0, token, weights, added, x0, x1, x2, x3)
        gate = 1.0 / (1.0 + tl.exp(-total))
        d0 = _row(dy, token, 0, channels, C, T) * gate * (1.0 + total * (1.0 - gate))
        if step >= 3:
            target = token - 3
            gradient = tl.where(s3 <= target, d3 * weights[0], 0.0) + tl.where(s2 <= target, d2 * weights[1], 0.0)
            gradient += tl.where(s1 <= target, d1 * weights[2], 0.0) + tl.where(s0 <= target, d0 * weights[3], 0.0)
            pointers = dx + target * C + channels
            tl.store(pointers, gradient.to(dx.dtype.element_ty), mask=(channels >= 0) & (target < T))
        x1, x2, x3 = x0, x1, x2
        d1, d2, d3 = d0, d1, d2
        s1, s2, s3 = s0, s1, s2


@triton.jit
def _rows(M, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return (places, mask) of a program's rows, and its columns and theirs."""
    rows, columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_V)
    places = rows.to(tl.int64)[:, None] * V + columns[None, :]
    return places, (rows < M)[:, None] & (columns < V)[None, :], columns, columns < V


@triton.jit
def _load(x, places, mask):
    return tl.load(x + places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def gated_norm_kernel(
    x, gate, weight, out,
    M: tl.constexpr, V: tl.constexpr, EPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Norm some heads, rounded as the reference's, and multiply them by their gates' silu; grid (tiles of M)."""
    places, mask, columns, inside = _rows(M, V, BLOCK_M, BLOCK_V)
    values = _load(x, places, mask)
    scale = rms_scale(tl.sum(values * values, 1), V, EPS)[:, None]
    values = normed(values, scale, _load(weight, columns, inside)[None, :], out.dtype.element_ty)
    tl.store(out + places, (values * _silu(_load(gate, places, mask))).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gated_norm_gradient_kernel(
    x, gate, weight, dout, dx, dgate,
    M: tl.constexpr, V: tl.constexpr, EPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the gradients to some heads and their gates; grid (tiles of M)."""
    places, mask, columns, inside = _rows(M, V, BLOCK_M, BLOCK_V)
    dtype = dx.dtype.element_ty
    values, gates, douts = _load(x, places, mask), _load(gate, places, mask), _load(dout, places, mask)
    scale = rms_scale(tl.sum(values * values, 1), V, EPS)[:, None]
    weights = _load(weight, columns, inside)[None, :]
    opened = 1.0 / (1.0 + tl.exp(-gates))
    slope = opened * (1.0 + gates * (1.0 - opened))
    tl.store(dgate + places, (douts * normed(values, scale, weights, dtype) * slope).to(dtype), mask=mask)
    dnormed = douts * gates * opened * weights
    along = tl.sum(dnormed * values, 1)[:, None] * scale * scale / V
    tl.store(dx + places, ((dnormed - values * along) * scale).to(dtype), mask=mask)
