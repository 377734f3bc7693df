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
def adam_kernel(
    tiles, hyper, gradients, parameters, means, squares,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr, DECAY: tl.constexpr,
    MEAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile's parameters and moments in place, as `AdamW.update` does; hyper [4] is `Hyper`; grid (n)."""
    row = tiles + 4 * tl.program_id(0)
    which = tl.load(row)
    index = tl.load(row + 1) * TILE + tl.arange(0, TILE)
    inside = index < tl.load(row + 2)
    gradient = tl.load(_select(gradients, which, tl.float32) + index, mask=inside, other=0.0) * tl.load(hyper)
    mean_at, square_at = _select(means, which, MEAN) + index, _select(squares, which, tl.float32) + index
    mean = BETA1 * tl.load(mean_at, mask=inside, other=0.0).to(tl.float32) + (1 - BETA1) * gradient
    square = BETA2 * tl.load(square_at, mask=inside, other=0.0) + (1 - BETA2) * gradient * gradient
    parameter_at = _select(parameters, which, tl.float32) + index
    parameter = tl.load(parameter_at, mask=inside, other=0.0)
    step = mean / tl.load(hyper + 2) / (tl.sqrt(square / tl.load(hyper + 3)) + EPSILON)
    step += DECAY * tl.load(row + 3).to(tl.float32) * parameter
    tl.store(parameter_at, parameter - tl.load(hyper + 1) * step, mask=inside)
    tl.store(mean_at, mean.to(MEAN), mask=inside)
    tl.store(square_at, square, mask=inside)
