"""Choice of tokens in plain JAX: in three passes over the logits, and a draw that reads one block more.

Weights are probabilities relative to the largest, formed where they are read: a vocabulary's would be large.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 1024
"""Tokens whose weights are summed before the draw chooses among them."""
_GROUP = 128
"""Tokens of which the likeliest is found first, where a few are wanted of all."""
_DIGIT = 3
"""Bits of a threshold that a pass over the vocabulary decides: more passes read, larger ones compare, longer."""


class Truncation(NamedTuple):
    """Thresholds below which unlikely tokens of B rows are left out, in this order; None for unused ones.

    Equally likely ones are all in or all out.
    """

    top_k: Int[Array, " B"] | None = None
    """Most likely tokens that are kept; 0 for all."""
    top_p: Float[Array, " B"] | None = None
    """Probability that the fewest most likely tokens which are kept reach, of those that are left."""
    min_p: Float[Array, " B"] | None = None
    """Probability of tokens that are kept, relative to the most likely one's, at least."""


class Choice(NamedTuple):
    """Tokens of B rows of logits."""

    tokens: Int[Array, " B"]
    log_probs: Float[Array, " B"]
    """Their log-probabilities at the temperature, among all tokens; 0 counts as 1."""
    model_log_probs: Float[Array, " B"]
    """At temperature 1."""
    normalizers: Float[Array, " B"]
    """Logarithms of the sums of all logits' exponentials; NaN where one is NaN or infinite."""


def choose(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"] | None,
    uniform: Float[Array, " B"] | None,
    truncation: Truncation | None = None,
) -> Choice:
    """Do as `jaxglue.ops.sampling.choose_tokens`."""
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    highest = at(logits, tokens)
    normalizers = normalizer(logits, highest)
    if temperature is None or uniform is None:
        return Choice(tokens, highest - normalizers, highest - normalizers, normalizers)
    divisor = divisors(temperature)
    weights = Weights(logits, highest, divisor)
    total = weights.sums.sum(-1)
    candidates: Weights | Kept = weights
    if truncation is not None:
        candidates = Kept(weights.all, _threshold(weights.all, total, truncation))
    tokens = jnp.where(temperature > 0, _draw(candidates, uniform), tokens)
    chosen = at(logits, tokens)
    log_probs = (chosen - highest) / divisor - jnp.log(total)
    return Choice(tokens, log_probs, chosen - normalizers, normalizers)


def likeliest(logits: Float[Array, "B V"], count: int) -> tuple[Float[Array, "B count"], Int[Array, "B count"]]:
    """Return the largest logits and their tokens as `jax.lax.top_k`, which sorts few of them instead of all.

    They are in as many groups of tokens: those with the largest ones, the first ones where these are equal.
    """
    B, V = logits.shape
    if not 0 < 4 * count * _GROUP < V:
        return jax.lax.top_k(logits, count)
    groups = jnp.pad(logits, ((0, 0), (0, -V % _GROUP)), constant_values=-jnp.inf).reshape(B, -1, _GROUP)
    chosen = jnp.sort(jax.lax.top_k(groups.max(-1), count)[1], axis=-1)  # in the order of tokens, for equal ones
    values, places = jax.lax.top_k(jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(B, -1), count)
    return values, jnp.take_along_axis(chosen, places // _GROUP, axis=-1) * _GROUP + places % _GROUP


def divisors(temperature: Float[Array, " B"]) -> Float[Array, " B"]:
    """Return the divisors of logits."""
    return jnp.where(temperature > 0, temperature, 1.0)


class Weights:
    """Tokens' weights, formed where they are read."""

    def __init__(self, logits: Float[Array, "B V"], highest: Float[Array, " B"], divisor: Float[Array, " B"]):
        self._blocks = _blocks(logits, -jnp.inf)
        self._logits, self._highest, self._divisor = logits, highest[:, None], divisor[:, None]
        self.sums = _block_sums(jnp.exp((self._blocks - highest[:, None, None]) / divisor[:, None, None]))
        """Sums of the weights in each block."""

    @property
    def all(self) -> Float[Array, "B V"]:
        """Return the weights."""
        return self._of(self._logits)

    def block(self, index: Int[Array, " B"]) -> Float[Array, "B n"]:
        """Return the weights of one block of each row."""
        return self._of(_block(self._blocks, index))

    def _of(self, logits: Float[Array, "B n"]) -> Float[Array, "B n"]:
        return jnp.exp((logits - self._highest) / self._divisor)


class Kept:
    """Weights in memory, those below the least that is kept taken as 0: formed again, equal ones might differ."""

    def __init__(self, weights: Float[Array, "B V"], least: Float[Array, " B"]):
        self._blocks, self._least = _blocks(weights, 0.0), least[:, None]
        self.sums = _block_sums(jnp.where(self._blocks >= least[:, None, None], self._blocks, 0.0))

    def block(self, index: Int[Array, " B"]) -> Float[Array, "B n"]:
        """Return the weights of one block of each row."""
        weights = _block(self._blocks, index)
        return jnp.where(weights >= self._least, weights, 0.0)


def _draw(weights: Weights | Kept, uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """Draw a token from each row, in proportion to the weights."""
    block, left = _first_above(weights.sums, uniform * weights.sums.sum(-1))
    return (block * BLOCK + _first_above(weights.block(block), left)[0]).astype(jnp.int32)


def _threshold(weights: Float[Array, "B V"], total: Float[Array, " B"], truncation: Truncation) -> Float[Array, " B"]:
    """Return the least weight that top-k, top-p and min-p keep; `total` is that of all weights.

    A row's is the same whatever other rows use: a part that it does not use changes neither threshold nor total.
    """
    top_k, top_p, min_p = truncation
    threshold = jnp.zeros_like(total)
    if top_k is not None:
        likeliest = _search(weights, jnp.ones_like, top_k.astype(jnp.float32))
        threshold = jnp.where(top_k > 0, likeliest, threshold)
        left = jnp.where(weights >= threshold[:, None], weights, 0.0).sum(-1)
        total = jnp.where(top_k > 0, left, total)
    if top_p is not None:  # of what top-k left: min-p does not change the nucleus
        nucleus = _search(weights, lambda values: values, top_p * total)
        threshold = jnp.where(top_p < 1, jnp.maximum(threshold, nucleus), threshold)
    return threshold if min_p is None else jnp.maximum(threshold, min_p)


def _search(weights: Float[Array, "B V"], measure: Any, wanted: Float[Array, " B"]) -> Float[Array, " B"]:
    """Return the largest threshold at which the measure of the weights at or above it sums to `wanted`; else 0.

    Bits of positive floats are in their order. Each pass decides a digit of them from the sums at all its values.
    """

    def sums(thresholds: list[Array]) -> tuple[Array, ...]:
        parts = [jnp.where(weights >= value[:, None], measure(weights), 0.0) for value in thresholds]
        zeros = (jnp.float32(0),) * len(parts)
        return jax.lax.reduce(tuple(parts), zeros, lambda a, b: tuple(map(jnp.add, a, b)), (1,))

    bits = jnp.zeros(len(weights), jnp.int32)
    for shift in range(30 - _DIGIT, -1, -_DIGIT):  # no weight is above 1, whose bits are below 2³⁰
        digits = range(1, 1 << _DIGIT)
        values = [jax.lax.bitcast_convert_type(bits + (digit << shift), jnp.float32) for digit in digits]
        enough = [(total >= wanted).astype(jnp.int32) for total in sums(values)]
        bits += sum(enough) << shift
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def normalizer(logits: Float[Array, "B V"], highest: Float[Array, " B"]) -> Float[Array, " B"]:
    """Return the logarithm of the sum of exponentials; NaN if a logit is infinite or NaN."""
    return highest + jnp.log(_block_sums(jnp.exp(_blocks(logits, -jnp.inf) - highest[:, None, None])).sum(-1))


def at(values: Float[Array, "B V"], tokens: Int[Array, " B"]) -> Float[Array, " B"]:
    """Return the value at each row's token."""
    return jnp.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]


def _blocks(values: Float[Array, "B V"], padding: float) -> Float[Array, "B blocks n"]:
    B, V = values.shape
    return jnp.pad(values, ((0, 0), (0, -V % BLOCK)), constant_values=padding).reshape(B, -1, BLOCK)


def _block(blocks: Float[Array, "B blocks n"], index: Int[Array, " B"]) -> Float[Array, "B n"]:
    return jnp.take_along_axis(blocks, index[:, None, None], axis=1)[:, 0]


def _block_sums(blocks: Float[Array, "B blocks n"]) -> Float[Array, "B blocks"]:
    """Return the sums of blocks, which XLA would otherwise form once more, in another pass, for the sum of all."""
    return jax.lax.optimization_barrier(blocks.sum(-1))


def _first_above(weights: Float[Array, "B n"], target: Float[Array, " B"]) -> tuple[Int[Array, " B"], Array]:
    """Return the first index whose cumulated weight exceeds the target, and the target less the weights before it.

    The weight there is above 0, whatever the rounding of the sums.
    """
    until = jnp.cumsum(weights, axis=-1)
    fits = (until > target[:, None]) & (weights > 0)
    index = jnp.where(fits.any(-1), jnp.argmax(fits, axis=-1), jnp.argmax(weights, axis=-1))
    before = at(until, index) - at(weights, index)
    return index, target - before
