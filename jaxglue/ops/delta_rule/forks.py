"""Forked segments for operations that follow one continuation: rows in which each has a copy of its beginning.

A beginning is computed again for each continuation, in these operations alone; the gradients of its copies add up, in
the same order in every run.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxglue.ops.segments import ForkCopies, PackedSegments


def with_copies(
    function: Callable[..., Float[Array, "B C *O"]], segments: PackedSegments, *values: Float[Array, "B T *V"]
) -> Float[Array, "B T *O"]:
    """Return function(documents, *values) of the values of copies, for each token at its own place.

    Args:
        function: of packed segments without forks and values of their tokens.
        segments: with copies.
        values: of the tokens.
    """
    copies = segments.copies
    assert copies is not None
    return _collect(function(documents(copies), *(_spread(x, copies) for x in values)), copies)


def documents(copies: ForkCopies) -> PackedSegments:
    """Return the segments of rows of copies: one for each continuation."""
    starts, C = copies.starts, copies.starts.shape[1]
    real, index = starts < C, jnp.arange(C)
    bounds = jnp.stack([jnp.zeros_like(starts[:, 0]), real.sum(1)], axis=1)
    return PackedSegments(
        segment_ids=jnp.where(real, starts + 1, 0),
        positions=jnp.where(real, index - starts, 0),
        starts=starts,
        ends=copies.ends,
        cu_seqlens=bounds,  # not of these documents, and read nowhere
    )


def _take(x: Float[Array, "B N *V"], index: Int[Array, "B M"]) -> Float[Array, "B M *V"]:
    """Return the tokens of these places, zeros for those beyond the row."""
    return jax.vmap(lambda x, index: jnp.take(x, index, axis=0, mode="fill", fill_value=0))(x, index)


@jax.custom_vjp
def _spread(x: Float[Array, "B T *V"], copies: ForkCopies) -> Float[Array, "B C *V"]:
    """Return the values of all copies."""
    return _take(x, copies.rows)


def _spread_backward(copies: ForkCopies, dy):
    total = sum(_take(dy, copies.places[:, k]).astype(jnp.float32) for k in range(copies.places.shape[1]))
    return total.astype(dy.dtype), None  # type: ignore[union-attr]


_spread.defvjp(lambda x, copies: (_spread(x, copies), copies), _spread_backward)


@jax.custom_vjp
def _collect(y: Float[Array, "B C *V"], copies: ForkCopies) -> Float[Array, "B T *V"]:
    """Return each token's value at its own place."""
    return _take(y, copies.places[:, 0])


def _collect_backward(copies: ForkCopies, dx):
    is_first = _take(copies.places[:, 0], copies.rows) == jnp.arange(copies.rows.shape[1])
    is_first &= copies.rows < dx.shape[1]
    return jnp.where(is_first.reshape(*is_first.shape, *(1,) * (dx.ndim - 2)), _take(dx, copies.rows), 0), None


_collect.defvjp(lambda y, copies: (_collect(y, copies), copies), _collect_backward)
