"""Triton kernels of the gated convolution, which read and write every value once.

Layout: values z and their gradients [B, T, 3·C], a token's `before`, `gate` and x side by side; y and its gradient
[B, T, C]; taps [C, W] with a token's own last; bias [C] or None. Products and sums are rounded as the reference's.
"""

# Tuples grow in loops, which Triton unrolls, and it knows their sums alone.
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005

import triton
import triton.language as tl


@triton.jit
def _load(row, channels, inside):
    """Load some channels of a token in float32; zeros for a token that is not inside the row."""
    return tl.load(row + channels, mask=(channels >= 0) & inside, other=0.0).to(tl.float32)


@triton.jit
def _product(z, token, channels, T: tl.constexpr, C: tl.constexpr):
    """Return before · x of a token, rounded; zeros outside the row."""
    row, inside = z + token * (3 * C), (token >= 0) & (token < T)
    product = _load(row, channels, inside) * _load(row + 2 * C, channels, inside)
    return product.to(z.dtype.element_ty).to(tl.float32)


@triton.jit
def _begin(starts, token, T: tl.constexpr):
    """Return the first token of a token's document; T for padding, 2T past the row: no token sees them."""
    return tl.load(starts + token, mask=token < T, other=2 * T)


@triton.jit
def _taps(taps, channels, W: tl.constexpr):
    """Return each channel's weights, that of a token itself first."""
    weights = ()
    for back in tl.static_range(W):
        weights = weights + (tl.load(taps + channels * W + (W - 1 - back)).to(tl.float32),)
    return weights


@triton.jit
def _before(z, first, channels, T: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Return the products of the W - 1 tokens before the first, the nearest first."""
    earlier = ()
    for back in tl.static_range(1, W):
        earlier = earlier + (_product(z, first - back, channels, T, C),)
    return earlier


@triton.jit
def _sum(products, weights, start, token, bias, dtype: tl.constexpr, W: tl.constexpr):
    """Return the rounded sum of a token's product and those before it, of its document, the token's own first."""
    total = bias
    for back in tl.static_range(W):
        total += tl.where(start + back <= token, products[back] * weights[back], 0.0)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _bias(bias, channels):
    """Return each channel's bias; zeros without one."""
    values = channels * 0.0
    if bias is not None:
        values = tl.load(bias + channels).to(tl.float32)
    return values


@triton.jit
def convolution_kernel(
    z, taps, bias, starts, y,
    T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Convolve some tokens of some channels within each document; grid (C / BLOCK_C, tiles of T, B).

    Threads hold channels and go from token to token, so that every row is loaded once, and no value moves.
    """
    row, first = tl.program_id(2).to(tl.int64) * T, tl.program_id(1) * BLOCK_T
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    z, y, starts = z + row * (3 * C), y + row * C, starts + row
    dtype = y.dtype.element_ty
    weights, own_bias = _taps(taps, channels, W), _bias(bias, channels)
    earlier = _before(z, first, channels, T, C, W)
    for step in tl.static_range(BLOCK_T):
        token = first + step
        products = (_product(z, token, channels, T, C),) + earlier
        total = _sum(products, weights, _begin(starts, token, T), token, own_bias, dtype, W)
        gate = _load(z + token * (3 * C) + C, channels, token < T)
        tl.store(y + token * C + channels, (gate * total).to(dtype), mask=(channels >= 0) & (token < T))
        earlier = products[: W - 1]


@triton.jit
def convolution_gradient_kernel(
    z, taps, bias, starts, dy, dz,
    T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute dz of some tokens and channels; grid (C / BLOCK_C, tiles of T, B).

    A token's gate gets its gradient from the sum, computed again; its product from the gradients to its own sum and to
    those of the next W - 1 tokens, some of which the next program owns.
    """
    row, first = tl.program_id(2).to(tl.int64) * T, tl.program_id(1) * BLOCK_T
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    z, dz, dy, starts = z + row * (3 * C), dz + row * (3 * C), dy + row * C, starts + row
    dtype = dz.dtype.element_ty
    weights, own_bias = _taps(taps, channels, W), _bias(bias, channels)
    earlier = _before(z, first, channels, T, C, W)
    slopes, begins = (), ()  # gradients to sums, and first tokens of documents, of this token and of those before it
    for step in tl.static_range(BLOCK_T + W - 1):
        token = first + step
        begin, given = _begin(starts, token, T), _load(dy + token * C, channels, token < T)
        gate = _load(z + token * (3 * C) + C, channels, token < T)
        slopes, begins = ((given * gate).to(dtype).to(tl.float32),) + slopes, (begin,) + begins
        if step < BLOCK_T:
            products = (_product(z, token, channels, T, C),) + earlier
            total = _sum(products, weights, begin, token, own_bias, dtype, W)
            place = dz + token * (3 * C) + C + channels
            tl.store(place, (given * total).to(dtype), mask=(channels >= 0) & (token < T))
            earlier = products[: W - 1]
        if step >= W - 1:
            own = token - (W - 1)
            gradient = channels * 0.0
            for ahead in tl.static_range(W):
                seen = begins[W - 1 - ahead] <= own
                gradient += tl.where(seen, slopes[W - 1 - ahead] * weights[ahead], 0.0)
            gradient = gradient.to(dtype).to(tl.float32)
            owned, mask = z + own * (3 * C), (channels >= 0) & (own < T)
            before, x = _load(owned, channels, own < T), _load(owned + 2 * C, channels, own < T)
            tl.store(dz + own * (3 * C) + channels, (gradient * x).to(dtype), mask=mask)
            tl.store(dz + own * (3 * C) + 2 * C + channels, (gradient * before).to(dtype), mask=mask)
            slopes, begins = slopes[: W - 1], begins[: W - 1]
