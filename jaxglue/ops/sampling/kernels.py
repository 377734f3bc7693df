"""Triton kernels that choose tokens: one reads the logits once, another what it found of them.

In exponents, logits are relative to their block's largest, so no pass has to find the row's first.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def _divisor(temperatures, row):
    """Return what divides a row's logits: its temperature, or 1 where that is 0."""
    temperature = tl.load(temperatures + row)
    return tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def sums_kernel(
    logits, temperatures, largest, sums, sums_at_temperature,
    V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute of each block of BLOCK logits [B, V] the largest, and sums of exponentials relative to it.

    All are [B, BLOCKS], the second sums of the logits divided by the temperature; grid (B, BLOCKS).
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, to = block * BLOCK + tl.arange(0, BLOCK), row * BLOCKS + block
    values = tl.load(logits + row * V + at, mask=at < V, other=-float("inf"))
    highest = tl.max(values, 0)
    # A block of minus infinities alone has weights of 0, not of NaN.
    below = values - tl.where(highest == -float("inf"), 0.0, highest)
    tl.store(largest + to, highest)
    tl.store(sums + to, tl.sum(_exp(below), 0))
    if temperatures is not None:
        tl.store(sums_at_temperature + to, tl.sum(_exp(below / _divisor(temperatures, row)), 0))


@triton.jit
def _first(fits, at, last: tl.constexpr):
    """Return the first index that fits; the last one if none does, as with NaN."""
    return tl.min(tl.where(fits, at, last), 0)


@triton.jit
def _first_above(weights, target, at, last: tl.constexpr):
    """Return the first index whose cumulated weight is above the target, and what is left of the target there.

    The weight there is above 0, whatever the rounding of the sums: if none fits, it is the largest.
    """
    until = tl.cumsum(weights, 0)
    fits = (until > target) & (weights > 0)
    largest = _first(weights == tl.max(weights, 0), at, last)
    index = tl.where(tl.max(fits.to(tl.int32), 0) > 0, _first(fits, at, last), largest)
    return index, target - tl.sum(tl.where(at == index, until - weights, 0.0), 0)


@triton.jit
def choose_kernel(
    logits, largest, sums, sums_at_temperature, temperatures, uniform,
    tokens, model_log_probs, normalizers, log_probs,
    V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Choose a row's token from what `sums_kernel` found; grid (B).

    It is the most likely one at temperature 0 or without temperatures, and otherwise the one at which the cumulated
    weights exceed their sum times `uniform` [B].
    """
    row = tl.program_id(0).to(tl.int64)
    at, lanes = tl.arange(0, LANES), tl.arange(0, BLOCK)
    maxima = tl.load(largest + row * BLOCKS + at, mask=at < BLOCKS, other=-float("inf"))
    highest = tl.max(maxima, 0)
    below = maxima - highest
    total = tl.sum(tl.load(sums + row * BLOCKS + at, mask=at < BLOCKS, other=0.0) * _exp(below), 0)
    normalizer = highest + tl.log(total)
    block = _first(maxima == highest, at, BLOCKS - 1)
    if temperatures is not None:
        divisor, draws = _divisor(temperatures, row), tl.load(temperatures + row) > 0
        weights = tl.load(sums_at_temperature + row * BLOCKS + at, mask=at < BLOCKS, other=0.0) * _exp(below / divisor)
        total = tl.sum(weights, 0)
        drawn, left = _first_above(weights, tl.load(uniform + row) * total, at, BLOCKS - 1)
        block = tl.where(draws, drawn, block)
    columns = block * BLOCK + lanes
    values = tl.load(logits + row * V + columns, mask=columns < V, other=-float("inf"))
    token = _first(values == highest, lanes, BLOCK - 1)
    if temperatures is not None:
        weights = _exp((values - highest) / divisor)
        token = tl.where(draws, _first_above(weights, left, lanes, BLOCK - 1)[0], token)
    value = tl.sum(tl.where(lanes == token, values, 0.0), 0)
    tl.store(tokens + row, tl.minimum(block * BLOCK + token, V - 1))
    tl.store(model_log_probs + row, value - normalizer)
    tl.store(normalizers + row, normalizer)
    if temperatures is not None:
        tl.store(log_probs + row, (value - highest) / divisor - tl.log(total))
