"""Triton kernels over many tensors in one launch; a table assigns each program a tile of a tensor.

A row of `tiles` [n, 4] int32 is (tensor, tile in it, values in the tensor, whether its weights decay).
"""

import triton
import triton.language as tl


@triton.jit
def _select(pointers, which, dtype: tl.constexpr):
    """Return the pointer of this number among the launch's arguments."""
    address = pointers[0].to(tl.int64)
    for i in tl.static_range(1, len(pointers)):
        address = tl.where(which == i, pointers[i].to(tl.int64), address)
    return tl.multiple_of(address, 16).to(tl.pointer_type(dtype))


@triton.jit
def square_norm_kernel(tiles, gradients, out, TILE: tl.constexpr):
    """Store Σ g² of each tile in out [n]; grid (n)."""
    row = tiles + 4 * tl.program_id(0)
    index = tl.load(row + 1) * TILE + tl.arange(0, TILE)
    gradient = _select(gradients, tl.load(row), tl.float32) + index
    value = tl.load(gradient, mask=index < tl.load(row + 2), other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(value * value, 0))


@triton.jit
def _step(
    parameter, mu, nu, gradient, scalars, decays,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Return (parameter, mu, nu) after a step, as `AdamW.update` does; scalars [4] is `StepScalars`."""
    gradient *= tl.load(scalars)
    mu = BETA1 * mu + (1 - BETA1) * gradient
    nu = BETA2 * nu + (1 - BETA2) * gradient * gradient
    step = mu / tl.load(scalars + 2) / (tl.sqrt(nu / tl.load(scalars + 3)) + EPSILON)
    step += DECAY * decays.to(tl.float32) * parameter
    return parameter - tl.load(scalars + 1) * step, mu, nu


@triton.jit
def adam_kernel(
    tiles, scalars, gradients, parameters, mus, nus,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr, DECAY: tl.constexpr,
    MU: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update a tile's parameters and moments in place; grid (n)."""
    row = tiles + 4 * tl.program_id(0)
    which = tl.load(row)
    index = tl.load(row + 1) * TILE + tl.arange(0, TILE)
    inside = index < tl.load(row + 2)
    gradient = tl.load(_select(gradients, which, tl.float32) + index, mask=inside, other=0.0)
    parameter_at = _select(parameters, which, tl.float32) + index
    mu_at, nu_at = _select(mus, which, MU) + index, _select(nus, which, tl.float32) + index
    parameter, mu, nu = _step(
        tl.load(parameter_at, mask=inside, other=0.0),
        tl.load(mu_at, mask=inside, other=0.0).to(tl.float32),
        tl.load(nu_at, mask=inside, other=0.0),
        gradient, scalars, tl.load(row + 3), BETA1, BETA2, EPSILON, DECAY,
    )  # fmt: skip
    tl.store(parameter_at, parameter, mask=inside)
    tl.store(mu_at, mu.to(MU), mask=inside)
    tl.store(nu_at, nu, mask=inside)


@triton.jit
def _nearest(values, midpoints):
    """Count the midpoints, of 255 ascending ones, below each value, by bisection."""
    index = tl.full(values.shape, 0, tl.int32)
    for bit in tl.static_range(8):
        further = index + (128 >> bit)
        index = tl.where(values > tl.load(midpoints + further - 1), further, index)
    return index


@triton.jit
def _store_blocks(values, codes_at, absmax_at, inside, midpoints):
    """Store rows of values as 8-bit codes and each row's largest magnitude."""
    absmax = tl.max(tl.where(inside, tl.abs(values), 0.0), 1)
    scaled = values * (1.0 / tl.where(absmax > 0, absmax, 1.0))[:, None]
    tl.store(codes_at, _nearest(scaled, midpoints).to(tl.uint8), mask=inside)
    tl.store(absmax_at, absmax, mask=tl.max(inside.to(tl.int32), 1) > 0)


@triton.jit
def adam_8bit_kernel(
    tiles, scalars, tables, gradients, parameters, mus, mu_absmax, nus, nu_absmax,
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
    mu_at, mu_absmax_at = _select(mus, which, tl.uint8) + index, _select(mu_absmax, which, tl.float32) + block
    nu_at = _select(nus, which, tl.uint8) + index
    nu_absmax_at = _select(nu_absmax, which, tl.float32) + block
    mu = tl.load(tables + tl.load(mu_at, mask=inside, other=0).to(tl.int32))
    nu = tl.load(tables + 512 + tl.load(nu_at, mask=inside, other=0).to(tl.int32))
    parameter, mu, nu = _step(
        tl.load(parameter_at, mask=inside, other=0.0),
        mu * tl.load(mu_absmax_at, mask=filled, other=0.0)[:, None],
        nu * tl.load(nu_absmax_at, mask=filled, other=0.0)[:, None],
        gradient, scalars, tl.load(row + 3), BETA1, BETA2, EPSILON, DECAY,
    )  # fmt: skip
    tl.store(parameter_at, parameter, mask=inside)
    _store_blocks(mu, mu_at, mu_absmax_at, inside, tables + 256)
    _store_blocks(nu, nu_at, nu_absmax_at, inside, tables + 768)
