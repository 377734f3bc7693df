"""Triton kernels around the delta rule, which read and write every value once: convolution with silu, and gated norm.

Layout: x, y and their gradients [B, T, C], taps [C, W] with a token's own last; heads and gates [M, V].
"""

import triton
import triton.language as tl

from jaxglue.ops.norm_rope.kernels import normed, rms_scale


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _tap(taps, channels, back: tl.constexpr, W: tl.constexpr):
    """Load the weight of the token so many before, for each channel."""
    return tl.load(taps + channels * W + (W - 1 - back)).to(tl.float32)[None, :]


@triton.jit
def _sums(x, taps, tokens, start, channels, C: tl.constexpr, W: tl.constexpr):
    """Return a tile's sums over the last W tokens of each token's document; 0 where `start` is past the token."""
    total = tl.full((tokens.shape[0], channels.shape[0]), 0.0, tl.float32)
    for back in tl.static_range(W):
        inside = tokens - back >= start
        values = tl.load(x + (tokens - back)[:, None] * C + channels[None, :], mask=inside[:, None], other=0.0)
        total += values.to(tl.float32) * _tap(taps, channels, back, W)
    return total


@triton.jit
def convolution_kernel(
    x, taps, starts, y,
    T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Convolve one tile of tokens and channels within each document; grid (C / BLOCK_C, tiles of T, B)."""
    row = tl.program_id(2).to(tl.int64) * T
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.load(starts + row + tokens, mask=tokens < T, other=T + BLOCK_T)
    total = _sums(x + row * C, taps, tokens, start, channels, C, W)
    place = y + row * C + tokens[:, None] * C + channels[None, :]
    tl.store(place, _silu(total).to(y.dtype.element_ty), mask=(tokens < T)[:, None])


@triton.jit
def convolution_gradient_kernel(
    x, taps, starts, dy, dx,
    T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dx; grid (C / BLOCK_C, tiles of T, B).

    A tile's last W − 1 tokens belong to the next tile: their gradients are computed for the tokens that they read.
    """
    row = tl.program_id(2).to(tl.int64) * T
    order = tl.arange(0, BLOCK_T)
    tokens = tl.program_id(1) * (BLOCK_T - W + 1) + order
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.load(starts + row + tokens, mask=tokens < T, other=T + BLOCK_T)
    total = _sums(x + row * C, taps, tokens, start, channels, C, W)
    places = tokens[:, None] * C + channels[None, :]
    gate = 1.0 / (1.0 + tl.exp(-total))
    given = tl.load(dy + row * C + places, mask=(tokens < T)[:, None], other=0.0).to(tl.float32)
    dtotal = given * gate * (1.0 + total * (1.0 - gate))
    gradient = tl.where((start <= tokens)[:, None], dtotal, 0.0) * _tap(taps, channels, 0, W)
    for ahead in tl.static_range(1, W):
        later = tl.minimum(order + ahead, BLOCK_T - 1)
        reads = tl.load(starts + row + tokens + ahead, mask=tokens + ahead < T, other=T + BLOCK_T) <= tokens
        shifted = tl.gather(dtotal, tl.broadcast_to(later[:, None], (BLOCK_T, BLOCK_C)), 0)
        gradient += tl.where(reads[:, None], shifted, 0.0) * _tap(taps, channels, ahead, W)
    mine = (order < BLOCK_T - W + 1) & (tokens < T)
    tl.store(dx + row * C + places, gradient.to(dx.dtype.element_ty), mask=mine[:, None])


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
    values, gates, given = _load(x, places, mask), _load(gate, places, mask), _load(dout, places, mask)
    scale = rms_scale(tl.sum(values * values, 1), V, EPS)[:, None]
    weights = _load(weight, columns, inside)[None, :]
    opened = 1.0 / (1.0 + tl.exp(-gates))
    slope = opened * (1.0 + gates * (1.0 - opened))
    tl.store(dgate + places, (given * normed(values, scale, weights, dtype) * slope).to(dtype), mask=mask)
    dnormed = given * gates * opened * weights
    along = tl.sum(dnormed * values, 1)[:, None] * scale * scale / V
    tl.store(dx + places, ((dnormed - values * along) * scale).to(dtype), mask=mask)
