"""K-quants: the super-blocks of 256 values in which llama.cpp stores matrices, quantized by weighted least squares.

A super-block holds sub-blocks with a scale each (and, in q4_k and q5_k, a minimum), which are integers of six or eight
bits times one float16 of the super-block. Scales are found by a search: each candidate rounds the values, and the
least-squares scale and minimum of these integers compete by their weighted error, as in the published algorithm.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

KQuant = Literal["q4_k", "q5_k", "q6_k"]
SUPER_BLOCK = 256
"""Values of a super-block; rows must be a multiple of it."""
BLOCK_BYTES: dict[KQuant, int] = {"q4_k": 144, "q5_k": 176, "q6_k": 210}
"""Bytes of a super-block."""
TOP_LEVELS: dict[KQuant, int] = {"q4_k": 15, "q5_k": 31, "q6_k": 63}
"""Highest level, from 0."""
_SCALE_LEVELS = 63
_TINY = 1e-15
"""Magnitude below which a block counts as zero."""


class _Search(NamedTuple):
    """Candidates of the inverse scale: (levels + first + i · step) / range for i = 0 … attempts − 1."""

    first: float
    step: float
    attempts: int


_PLAIN = {"q4_k": _Search(-1.0, 0.1, 21), "q5_k": _Search(-0.5, 0.1, 16)}
_WEIGHTED = _Search(-0.9, 0.05, 37)


class Grid(NamedTuple):
    """Levels of super-blocks: a value is scale · level − minimum, with both integers times one of the super-block."""

    scale: Float[Array, " S"]
    """Float16."""
    scale_levels: Int[Array, "S B"]
    minimum: Float[Array, " S"] | None = None
    """Float16; None in q6_k, whose levels are around zero."""
    minimum_levels: Int[Array, "S B"] | None = None

    @property
    def steps(self) -> Float[Array, "S B"]:
        """Return the distance of each sub-block's levels, float32."""
        return self.scale.astype(jnp.float32)[:, None] * self.scale_levels

    @property
    def lows(self) -> Float[Array, "S B"]:
        """Return what is taken from each sub-block's levels, float32; 0 in q6_k."""
        if self.minimum is None or self.minimum_levels is None:
            return jnp.zeros(self.scale_levels.shape)
        return self.minimum.astype(jnp.float32)[:, None] * self.minimum_levels


@partial(jax.jit, static_argnames="kind")
def quantize_super_blocks(
    blocks: Float[Array, "S 256"], kind: KQuant, importance: Float[Array, "S 256"] | None = None
) -> UInt8[Array, "S bytes"]:
    """Quantize super-blocks, whatever rows they are of.

    Args:
        blocks: 256 values each, of one row.
        kind: the format.
        importance: mean square of each value's input, to weigh errors; by default large values weigh more.
    """
    grid = fit_grid(blocks, kind, importance)
    return pack_levels(grid, nearest_levels(grid, blocks, kind), kind)


@partial(jax.jit, static_argnames="kind")
def fit_grid(blocks: Float[Array, "S 256"], kind: KQuant, importance: Float[Array, "S 256"] | None = None) -> Grid:
    """Return the grid of least weighted error; arguments as of `quantize_super_blocks`."""
    x = blocks.astype(jnp.float32)
    importance = None if importance is None else importance.astype(jnp.float32)
    return _fit_q6(x, importance) if kind == "q6_k" else _fit_with_minimum(x, kind, importance)


def nearest_levels(grid: Grid, blocks: Float[Array, "S 256"], kind: KQuant) -> UInt8[Array, "S 256"]:
    """Return the level nearest to each value, from 0."""
    steps, first = grid.steps[..., None], 32 if kind == "q6_k" else 0
    values = blocks.astype(jnp.float32).reshape(*grid.scale_levels.shape, -1) + grid.lows[..., None]
    levels = jnp.clip(jnp.round(values / jnp.where(steps != 0, steps, 1)), -first, TOP_LEVELS[kind] - first) + first
    return jnp.where(steps != 0, levels, first).astype(jnp.uint8).reshape(blocks.shape)


def pack_levels(grid: Grid, levels: UInt8[Array, "S 256"], kind: KQuant) -> UInt8[Array, "S bytes"]:
    """Return super-blocks of these levels as llama.cpp lays them out."""
    if kind == "q6_k":
        return _pack_q6(grid, levels)
    assert grid.minimum is not None and grid.minimum_levels is not None
    head = [_bytes(grid.scale), _bytes(grid.minimum), _pack_six_bits(grid.scale_levels, grid.minimum_levels)]
    pairs = levels.reshape(-1, 4, 2, 32)
    low = ((pairs[:, :, 0] & 0xF) | ((pairs[:, :, 1] & 0xF) << 4)).reshape(-1, 128)
    if kind == "q4_k":
        return jnp.concatenate([*head, low], axis=1)
    shifts = jnp.arange(8, dtype=jnp.uint8)[:, None]
    high = ((levels.reshape(-1, 8, 32) >> 4) << shifts).sum(axis=1, dtype=jnp.uint8)
    return jnp.concatenate([*head, high, low], axis=1)


def _fit_with_minimum(x: Float[Array, "S 256"], kind: KQuant, importance: Float[Array, "S 256"] | None) -> Grid:
    """Fit super-blocks of eight sub-blocks: value = scale · level − minimum."""
    levels, blocks = TOP_LEVELS[kind], x.reshape(-1, 8, 32)
    if importance is None:
        weights = jnp.sqrt(jnp.mean(blocks**2, axis=-1, keepdims=True)) + jnp.abs(blocks)
        scales, minima = _fit_scales(blocks, weights, levels, _PLAIN[kind])
        scale, scale_levels = _round_scales(scales)
        minimum, minimum_levels = _round_scales(minima)
    else:
        mean = 2 * jnp.mean(x**2, axis=-1)[:, None, None]
        weights = importance.reshape(blocks.shape) * jnp.sqrt(mean + blocks**2)
        scales, minima = _fit_scales(blocks, weights, levels, _WEIGHTED)
        total = weights.sum(axis=-1)
        scale, scale_levels = _fit_scale_of_scales(scales, total)
        minimum, minimum_levels = _fit_scale_of_scales(minima, total)
    return Grid(scale.astype(jnp.float16), scale_levels, minimum.astype(jnp.float16), minimum_levels)


def _fit_scales(
    x: Float[Array, "S B 32"], weights: Float[Array, "S B 32"], levels: int, search: _Search
) -> tuple[Float[Array, "S B"], Float[Array, "S B"]]:
    """Return scales and negated minima of least weighted square error."""
    low, high = jnp.minimum(x.min(axis=-1), 0), x.max(axis=-1)
    span = jnp.where(high > low, high - low, 1)
    sum_w, sum_x, sum_xx = weights.sum(-1), (weights * x).sum(-1), (weights * x**2).sum(-1)

    def sums(inverse, minimum):
        q = jnp.clip(jnp.round(inverse[..., None] * (x - minimum[..., None])), 0, levels)
        weighted = weights * q
        return weighted.sum(-1), (weighted * q).sum(-1), (weighted * x).sum(-1)

    def error(scale, minimum, sum_q, sum_qq, sum_qx):
        # Expanded, so that one pass over the values gives both fit and error.
        square = scale**2 * sum_qq + minimum**2 * sum_w + sum_xx
        return square + 2 * (scale * minimum * sum_q - scale * sum_qx - minimum * sum_x)

    def attempt(index, best):
        _, minimum, least = best
        # From the best minimum so far, as in the published algorithm.
        inverse = (levels + search.first + search.step * index) / jnp.where(high > minimum, high - minimum, 1)
        sum_q, sum_qq, sum_qx = sums(inverse, minimum)
        determinant = sum_w * sum_qq - sum_q**2
        divisor = jnp.where(determinant > 0, determinant, 1)
        new_scale = (sum_w * sum_qx - sum_x * sum_q) / divisor
        new_minimum = (sum_qq * sum_x - sum_q * sum_qx) / divisor
        above = new_minimum > 0
        new_scale = jnp.where(above, sum_qx / jnp.where(sum_qq > 0, sum_qq, 1), new_scale)
        new_minimum = jnp.where(above, 0, new_minimum)
        new_error = error(new_scale, new_minimum, sum_q, sum_qq, sum_qx)
        better = (determinant > 0) & (new_error < least)
        return tuple(
            jnp.where(better, new, old) for new, old in zip((new_scale, new_minimum, new_error), best, strict=True)
        )

    first = span / levels
    best = (first, low, error(first, low, *sums(1 / first, low)))
    scale, minimum, _ = jax.lax.fori_loop(0, search.attempts, attempt, best)
    return jnp.where(high > low, scale, 0), -minimum


def _round_scales(values: Float[Array, "S B"]) -> tuple[Float[Array, " S"], Int[Array, "S B"]]:
    """Return the scale of the sub-blocks' values and their integers, the largest value at the highest level."""
    largest = jnp.maximum(values.max(axis=-1), 0)
    inverse = jnp.where(largest > 0, _SCALE_LEVELS / jnp.where(largest > 0, largest, 1), 0)
    rounded = jnp.clip(jnp.round(inverse[:, None] * values), 0, _SCALE_LEVELS)
    return largest / _SCALE_LEVELS, rounded.astype(jnp.int32)


def _fit_scale_of_scales(
    values: Float[Array, "S B"], weights: Float[Array, "S B"]
) -> tuple[Float[Array, " S"], Int[Array, "S B"]]:
    """Return the scale of the sub-blocks' values and their integers of least weighted error, by coordinate descent."""
    values = jnp.maximum(values, 0)
    largest = values.max(axis=-1, keepdims=True)
    divisor = jnp.where(largest > _TINY, largest, 1)

    def rounded(inverse):
        return jnp.clip(jnp.round(inverse * values), 0, _SCALE_LEVELS)

    best, least = _SCALE_LEVELS / divisor, jnp.full(largest.shape, jnp.inf)
    for offset in (0, -4, -3, -2, -1, 1, 2, 3, 4):
        inverse = (_SCALE_LEVELS + 0.1 * offset) / divisor
        errors = (weights * (values - rounded(inverse) / inverse) ** 2).sum(axis=-1, keepdims=True)
        best, least = jnp.where(errors < least, inverse, best), jnp.minimum(errors, least)
    q = rounded(best)
    sum_qx, sum_qq = (weights * values * q).sum(axis=-1), (weights * q * q).sum(axis=-1)

    def improve(index, state):
        q, sum_qx, sum_qq = state
        column = index % values.shape[1]
        take = partial(jax.lax.dynamic_index_in_dim, index=column, axis=1, keepdims=False)
        w, value, old = take(weights), take(values), take(q)
        rest_qx, rest_qq = sum_qx - w * value * old, sum_qq - w * old * old
        possible = (rest_qx > 0) & (rest_qq > 0)
        new = jnp.minimum(jnp.round(value * rest_qq / jnp.where(possible, rest_qx, 1)), _SCALE_LEVELS)
        new_qx, new_qq = rest_qx + w * value * new, rest_qq + w * new * new
        better = possible & (new != old) & (new_qx**2 * sum_qq > sum_qx**2 * new_qq)
        q = jax.lax.dynamic_update_index_in_dim(q, jnp.where(better, new, old), column, axis=1)
        return q, jnp.where(better, new_qx, sum_qx), jnp.where(better, new_qq, sum_qq)

    q, sum_qx, sum_qq = jax.lax.fori_loop(0, 5 * values.shape[1], improve, (q, sum_qx, sum_qq))
    return jnp.where(sum_qq > 0, sum_qx / jnp.where(sum_qq > 0, sum_qq, 1), 0), q.astype(jnp.int32)


def _fit_q6(x: Float[Array, "S 256"], importance: Float[Array, "S 256"] | None) -> Grid:
    """Fit super-blocks of sixteen sub-blocks, whose values are scale · level for levels −32 … 31."""
    blocks = x.reshape(-1, 16, 16)
    weights = blocks**2 if importance is None else importance.reshape(blocks.shape)
    scales = _fit_symmetric_scales(blocks, weights, 32)
    at = jnp.argmax(jnp.abs(scales), axis=-1, keepdims=True)
    largest = jnp.take_along_axis(scales, at, axis=-1)
    present = jnp.abs(largest) >= _TINY
    inverse = jnp.where(present, -128 / jnp.where(present, largest, 1), 0)
    scale = jnp.where(present, largest / -128, 0).astype(jnp.float16)
    return Grid(scale[:, 0], jnp.clip(jnp.round(inverse * scales), -128, 127).astype(jnp.int8))


def _pack_q6(grid: Grid, levels: UInt8[Array, "S 256"]) -> UInt8[Array, "S 210"]:
    q = levels.reshape(-1, 2, 4, 32)
    low = jnp.concatenate([(q[:, :, 0] & 0xF) | (q[:, :, 2] << 4), (q[:, :, 1] & 0xF) | (q[:, :, 3] << 4)], axis=-1)
    shifts = jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None]
    high = ((q >> 4) << shifts).sum(axis=2, dtype=jnp.uint8)
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), _bytes(grid.scale_levels.astype(jnp.int8)), _bytes(grid.scale)]
    return jnp.concatenate(parts, axis=1)


def _fit_symmetric_scales(x: Float[Array, "S B n"], weights: Float[Array, "S B n"], levels: int) -> Float[Array, "S B"]:
    """Return scales of least weighted square error for levels −levels … levels − 1."""
    at = jnp.argmax(jnp.abs(x), axis=-1, keepdims=True)
    extreme = jnp.take_along_axis(x, at, axis=-1)
    present = jnp.abs(extreme) >= _TINY
    extreme = jnp.where(present, extreme, 1)

    def attempt(index, best):
        scale, most = best
        # The first candidate is the middle one, then those below and above it in order.
        offset = jnp.where(index == 0, 0, jnp.where(index <= 9, index - 10, index - 9))
        q = jnp.clip(jnp.round(-(levels + 0.1 * offset) / extreme * x), -levels, levels - 1)
        sum_qx, sum_qq = (weights * q * x).sum(-1), (weights * q * q).sum(-1)
        gained = sum_qx**2 / jnp.where(sum_qq > 0, sum_qq, 1)
        better = (sum_qq > 0) & (gained > most)
        return (
            jnp.where(better, sum_qx / jnp.where(sum_qq > 0, sum_qq, 1), scale),
            jnp.where(better, gained, most),
        )

    zero = jnp.zeros(x.shape[:-1], jnp.float32)
    scale, _ = jax.lax.fori_loop(0, 19, attempt, (zero, zero))
    return jnp.where(present[..., 0], scale, 0)


def _pack_six_bits(scales: Int[Array, "S 8"], minima: Int[Array, "S 8"]) -> UInt8[Array, "S 12"]:
    """Pack six bits of eight scales and eight minima: the first four whole, the others' high bits above these."""
    scales, minima = scales.astype(jnp.uint8), minima.astype(jnp.uint8)
    high = [values[:, :4] | ((values[:, 4:] >> 4) << 6) for values in (scales, minima)]
    return jnp.concatenate([*high, (scales[:, 4:] & 0xF) | ((minima[:, 4:] & 0xF) << 4)], axis=1)


def _bytes(values: Array) -> UInt8[Array, "S n"]:
    """Return the bytes of each row of values, little-endian."""
    return jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(values.shape[0], -1)
