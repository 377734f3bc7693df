"""Triton kernels that choose tokens: one reads the logits once, another what it found of them.

In exponents, logits are relative to their block's largest, so no pass has to find the row's first. Weights are
probabilities relative to the row's largest, at the temperature. Where tokens are left out, a third kernel reads those
blocks of the logits again that may hold a kept one.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
ABOVE_ONE = tl.constexpr(0x3F800001)
"""Bits of the least float above 1, the largest weight; bits of positive floats are in their order."""
SLACK = tl.constexpr(1e-5)
"""Share of a sum by which its parts, added in another order, may be less."""


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
    V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Compute of each block of BLOCK logits [B, V] the largest, and sums of exponentials relative to it.

    All are [B, BLOCKS], the second sums of the logits divided by the temperature; grid (B, BLOCKS / COUNT).
    """
    row, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + row * V + at, mask=at < V, other=-float("inf"))
    highest = tl.max(values, 1)
    # A block of minus infinities alone has weights of 0, not of NaN.
    below = values - tl.where(highest == -float("inf"), 0.0, highest)[:, None]
    to, mask = row * BLOCKS + blocks, blocks < BLOCKS
    tl.store(largest + to, highest, mask=mask)
    tl.store(sums + to, tl.sum(_exp(below), 1), mask=mask)
    if temperatures is not None:
        tl.store(sums_at_temperature + to, tl.sum(_exp(below / _divisor(temperatures, row)), 1), mask=mask)


@triton.jit
def _floor(tops, masses, wanted, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bits of a weight that the threshold is not below, from blocks' largest weights and sums alone."""
    low, total = tl.program_id(0) * 0, tl.sum(masses, 0)
    high = low + ABOVE_ONE
    for _ in range(30):
        middle = (low + high) // 2
        value = middle.to(tl.float32, bitcast=True)
        if COUNTS:  # the largest weights of so many blocks are as many tokens
            enough = tl.sum((tops >= value).to(tl.float32), 0) >= wanted
        else:  # of a block, at most all is below the value, or as many tokens as there are
            below = tl.where(tops >= value, tl.minimum(masses, BLOCK * value), masses)
            enough = total * (1.0 - SLACK) - tl.sum(below, 0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def _list_blocks(tops, value, lanes, found):
    """Write the numbers of the blocks with weights from the value on to `found`; return how many there are."""
    wanted = tops >= value
    tl.debug_barrier()  # earlier numbers are read until here
    tl.store(found + tl.cumsum(wanted.to(tl.int32), 0) - 1, lanes, mask=wanted)
    tl.debug_barrier()
    return tl.sum(wanted.to(tl.int32), 0)


@triton.jit
def _weights_of(
    logits, found, first, count, highest, divisor, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    """Return (listed blocks from the first on, their weights [COUNT, BLOCK]); 0 for those that there are not."""
    listed = first + tl.arange(0, COUNT)
    blocks = tl.load(found + listed, mask=listed < count, other=0)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + at, mask=(at < V) & (listed < count)[:, None], other=-float("inf"))
    return blocks, _exp((values - highest) / divisor)


@triton.jit
def _threshold(
    logits, tops, masses, lanes, found, wanted, highest, divisor,
    COUNTS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Return the largest threshold from which on tokens, or their weights, sum to what is wanted.

    Each turn compares with VALUES - 1 thresholds between the least and the largest possible one, and reads only blocks
    with weights from the least on.
    """
    low = _floor(tops, masses, wanted, COUNTS, BLOCK)
    high = low * 0 + ABOVE_ONE
    places = tl.arange(0, VALUES)
    while high - low > 1:
        step = (high - low + VALUES - 1) // VALUES
        values = (low + places * step).to(tl.float32, bitcast=True)
        count = _list_blocks(tops, low.to(tl.float32, bitcast=True), lanes, found)
        sums = tl.full((VALUES,), 0.0, tl.float32)
        for first in range(0, count, COUNT):
            _, weights = _weights_of(logits, found, first, count, highest, divisor, V, BLOCK, COUNT)
            weights = tl.reshape(weights, [COUNT * BLOCK])
            measured = tl.where(weights > 0, 1.0, 0.0) if COUNTS else weights
            sums += tl.sum(tl.where(weights[:, None] >= values[None, :], measured[:, None], 0.0), 0)
        # The least possible one is known to be low enough.
        passed = tl.sum(((sums >= wanted) & (places > 0)).to(tl.int32), 0)
        low, high = low + passed * step, tl.minimum(high, low + (passed + 1) * step)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def keep_kernel(
    logits, largest, sums_at_temperature, temperatures, top_k, top_p, min_p, kept, thresholds, found,
    V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, COUNT: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Compute each row's threshold of weights, and sums kept [B, BLOCKS] of the weights from it on in each block.

    Top-k, top-p and min-p that are None leave nothing out; found [B, LANES] is scratch. Grid (B).
    """
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    logits, found, inside = logits + row * V, found + row * LANES, lanes < BLOCKS
    own = tl.load(largest + row * BLOCKS + lanes, mask=inside, other=-float("inf"))
    highest, divisor = tl.max(own, 0), _divisor(temperatures, row)
    tops = _exp((own - highest) / divisor)
    masses = tl.load(sums_at_temperature + row * BLOCKS + lanes, mask=inside, other=0.0) * tops
    tl.store(kept + row * BLOCKS + lanes, tl.full((LANES,), 0.0, tl.float32), mask=inside)
    threshold = divisor * 0.0
    if min_p is not None:
        threshold = tl.load(min_p + row)
    if tl.load(temperatures + row) > 0:
        if top_k is not None:
            wanted = tl.load(top_k + row)
            if (wanted > 0) & (wanted < V):
                least = _threshold(
                    logits, tops, masses, lanes, found, wanted.to(tl.float32), highest, divisor,
                    True, V, BLOCK, COUNT, VALUES,
                )  # fmt: skip
                threshold = tl.maximum(threshold, least)
        if top_p is not None:
            share = tl.load(top_p + row)
            if share < 1:
                total = tl.sum(masses, 0)
                if top_k is not None:
                    count, total = _list_blocks(tops, threshold, lanes, found), total * 0.0
                    for first in range(0, count, COUNT):
                        _, weights = _weights_of(logits, found, first, count, highest, divisor, V, BLOCK, COUNT)
                        total += tl.sum(tl.sum(tl.where(weights >= threshold, weights, 0.0), 1), 0)
                least = _threshold(
                    logits, tops, masses, lanes, found, share * total, highest, divisor,
                    False, V, BLOCK, COUNT, VALUES,
                )  # fmt: skip
                threshold = tl.maximum(threshold, least)
        count = _list_blocks(tops, threshold, lanes, found)
        for first in range(0, count, COUNT):
            blocks, weights = _weights_of(logits, found, first, count, highest, divisor, V, BLOCK, COUNT)
            listed = first + tl.arange(0, COUNT) < count
            tl.store(kept + row * BLOCKS + blocks, tl.sum(tl.where(weights >= threshold, weights, 0.0), 1), mask=listed)
    tl.store(thresholds + row, threshold)


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
    logits, largest, sums, sums_at_temperature, kept, thresholds, temperatures, uniform,
    tokens, model_log_probs, normalizers, log_probs,
    V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Choose a row's token from what `sums_kernel` found, and `keep_kernel` if there are thresholds; grid (B).

    It is the most likely one at temperature 0 or without temperatures, and otherwise the one at which the cumulated
    weights exceed their sum times `uniform` [B].
    """
    row = tl.program_id(0).to(tl.int64)
    at, lanes = tl.arange(0, LANES), tl.arange(0, BLOCK)
    own = tl.load(largest + row * BLOCKS + at, mask=at < BLOCKS, other=-float("inf"))
    highest = tl.max(own, 0)
    below = own - highest
    total = tl.sum(tl.load(sums + row * BLOCKS + at, mask=at < BLOCKS, other=0.0) * _exp(below), 0)
    normalizer = highest + tl.log(total)
    block = _first(own == highest, at, BLOCKS - 1)
    if temperatures is not None:
        divisor, draws = _divisor(temperatures, row), tl.load(temperatures + row) > 0
        weights = tl.load(sums_at_temperature + row * BLOCKS + at, mask=at < BLOCKS, other=0.0) * _exp(below / divisor)
        total = tl.sum(weights, 0)
        if thresholds is not None:
            weights = tl.load(kept + row * BLOCKS + at, mask=at < BLOCKS, other=0.0)
        drawn, left = _first_above(weights, tl.load(uniform + row) * tl.sum(weights, 0), at, BLOCKS - 1)
        block = tl.where(draws, drawn, block)
    columns = block * BLOCK + lanes
    values = tl.load(logits + row * V + columns, mask=columns < V, other=-float("inf"))
    token = _first(values == highest, lanes, BLOCK - 1)
    if temperatures is not None:
        weights = _exp((values - highest) / divisor)
        if thresholds is not None:
            weights = tl.where(weights >= tl.load(thresholds + row), weights, 0.0)
        token = tl.where(draws, _first_above(weights, left, lanes, BLOCK - 1)[0], token)
    value = tl.sum(tl.where(lanes == token, values, 0.0), 0)
    tl.store(tokens + row, tl.minimum(block * BLOCK + token, V - 1))
    tl.store(model_log_probs + row, value - normalizer)
    tl.store(normalizers + row, normalizer)
    if temperatures is not None:
        tl.store(log_probs + row, (value - highest) / divisor - tl.log(total))
