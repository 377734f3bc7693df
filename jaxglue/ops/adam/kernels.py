"""Triton kernels that go through many tensors in one launch; a table says which part of which tensor a program takes.

A row of `tiles` [n, 4] int32 is (tensor, tile in it, values in the tensor, whether its weights decay).
"""

import triton
import triton.language as tl


@triton.jit
def _select(pointers, which, dtype: tl.constexpr):
    """The pointer of this number: addresses are arguments of the launch, which have no order of their own."""
    address = pointers[0].to(tl.int64)
    for i in tl.static_range(1, len(pointers)):
        address = tl.where(which == i, pointers[i].to(tl.int64), address)
    return tl.multiple_of(address, 16).to(tl.pointer_type(dtype))


@triton.jit
def square_norm_kernel(tiles, gradients, out, TILE: tl.constexpr):
    """Σ g² of a tile to its place of out [n]; grid (n)."""
    row = tiles + 4 * tl.program_id(0)
    index = tl.load(row + 1) * TILE + tl.arange(0, TILE)
    gradient = _select(gradients, tl.load(row), tl.float32) + index
    value = tl.load(gradient, mask=index < tl.load(row + 2), other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(value * value, 0))


@triton.jit
def _step(
    parameter, mean, square, gradient, hyper, decays,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """(parameter, mean, square) after a step, as `AdamW.update` computes it; hyper [4] is `Hyper`."""
    gradient *= tl.load(hyper)
    mean = BETA1 * mean + (1 - BETA1) * gradient
    square = BETA2 * square + (1 - BETA2) * gradient * gradient
    step = mean / tl.load(hyper + 2) / (tl.sqrt(square / tl.load(hyper + 3)) + EPSILON)
    step += DECAY * decays.to(tl.float32) * parameter
    return parameter - tl.load(hyper + 1) * step, mean, square


@triton.jit
def adam_kernel(
    tiles, hyper, gradients, parameters, means, squares,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr, DECAY: tl.constexpr,
    MEAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile's parameters and moments in place; grid (n)."""
    row = tiles + 4 * tl.program_id(0)
    which = tl.load(row)
    index = tl.load(row + 1) * TILE + tl.arange(0, TILE)
    inside = index < tl.load(row + 2)
    gradient = tl.load(_select(gradients, which, tl.float32) + index, mask=inside, other=0.0)
    parameter_at = _select(parameters, which, tl.float32) + index
    mean_at, square_at = _select(means, which, MEAN) + index, _select(squares, which, tl.float32) + index
    parameter, mean, square = _step(
        tl.load(parameter_at, mask=inside, other=0.0),
        tl.load(mean_at, mask=inside, other=0.0).to(tl.float32),
        tl.load(square_at, mask=inside, other=0.0),
        gradient, hyper, tl.load(row + 3), BETA1, BETA2, EPSILON, DECAY,
    )  # fmt: skip
    tl.store(parameter_at, parameter, mask=inside)
    tl.store(mean_at, mean.to(MEAN), mask=inside)
    tl.store(square_at, square, mask=inside)


@triton.jit
def _nearest(values, midpoints):
    """How many of 255 ascending midpoints are below each value, by bisection."""
    found = tl.full(values.shape, 0, tl.int32)
    for bit in tl.static_range(8):
        further = found + (128 >> bit)
        found = tl.where(values > tl.load(midpoints + further - 1), further, found)
    return found


@triton.jit
def _store_blocks(values, codes_at, absmax_at, inside, midpoints):
    """Rows of values as 8-bit codes and each row's largest magnitude."""
    absmax = tl.max(tl.where(inside, tl.abs(values), 0.0), 1)
    scaled = values * (1.0 / tl.where(absmax > 0, absmax, 1.0))[:, None]
    tl.store(codes_at, _nearest(scaled, midpoints).to(tl.uint8), mask=inside)
    tl.store(absmax_at, absmax, mask=tl.max(inside.to(tl.int32), 1) > 0)


@triton.jit
def adam_8bit_kernel(
    tiles, hyper, tables, gradients, parameters, means, mean_absmax, squares, square_absmax,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr, DECAY: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`adam_kernel` for moments in blocks of 8 bits; tables [4, 256]: values, midpoints, signed, not; grid (n)."""
    row = tiles + 4 * tl.program_id(0)
    which = tl.load(row)
    block = tl.load(row + 1) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    index = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    size = tl.load(row + 2)
    inside, filled = index < size, block * BLOCK < size
    gradient = tl.load(_select(gradients, which, tl.float32) + index, mask=inside, other=0.0)
    parameter_at = _select(parameters, which, tl.float32) + index
    mean_at, mean_absmax_at = _select(means, which, tl.uint8) + index, _select(mean_absmax, which, tl.float32) + block
    square_at = _select(squares, which, tl.uint8) + index
    square_absmax_at = _select(square_absmax, which, tl.float32) + block
    mean = tl.load(tables + tl.load(mean_at, mask=inside, other=0).to(tl.int32))
    square = tl.load(tables + 512 + tl.load(square_at, mask=inside, other=0).to(tl.int32))
    parameter, mean, square = _step(
        tl.load(parameter_at, mask=inside, other=0.0),
        mean * tl.load(mean_absmax_at, mask=filled, other=0.0)[:, None],
        square * tl.load(square_absmax_at, mask=filled, other=0.0)[:, None],
        gradient, hyper, tl.load(row + 3), BETA1, BETA2, EPSILON, DECAY,
    )  # fmt: skip
    tl.store(parameter_at, parameter, mask=inside)
    _store_blocks(mean, mean_at, mean_absmax_at, inside, tables + 256)
    _store_blocks(square, square_at, square_absmax_at, inside, tables + 768)
