"""Relative errors of layers against a reference of their frozen parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.engine import transfer
from jaxglue.engine.executor import LayerExecutor
from jaxglue.models.parameters import Params
from jaxglue.sharding.gather import merge_gathered, select_to_gather


def layer_errors(
    executor: LayerExecutor, trainable: Params, frozen: Params, batch: Any, reference: Callable[[Params], Params]
) -> list[float]:
    """Return every layer's ‖y − z‖ / ‖z − x‖ on a batch, with z from `reference` of its frozen parameters.

    Each layer gets the reference's x, so the errors are each layer's own.
    """
    trainable, frozen = transfer.commit((trainable, frozen))
    x, contexts = executor._entry_head.embed(trainable, frozen, batch, None)
    stored, errors = executor._stored_weights(trainable, frozen), []
    gathered = executor._gather_first(stored)
    for layer, context in zip(executor._layers, contexts, strict=True):
        train, froze = merge_gathered(gathered, stored.take())
        y, gathered = layer.apply(train, froze, x, context, select_to_gather(executor._layout, stored.following))
        z, _ = layer.apply(train, reference(froze), x, context)
        errors.append(float(_relative_error(y, z, x)))
        x = z
    return errors


@jax.jit
def _relative_error(y: Array, z: Array, x: Array) -> Float[Array, ""]:
    """Return ‖y − z‖ / ‖z − x‖ in float32."""
    y, z, x = (array.astype(jnp.float32) for array in (y, z, x))
    return jnp.linalg.norm(jnp.ravel(y - z)) / jnp.linalg.norm(jnp.ravel(z - x))
