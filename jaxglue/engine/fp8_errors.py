"""Relative errors of FP8 products on a batch, of each layer and of the head."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.data.batch import Batch
from jaxglue.engine.compiler import jit_step
from jaxglue.engine.embed_head import EmbedHead
from jaxglue.engine.executor import Executor
from jaxglue.models.parameters import Params
from jaxglue.ops.collectives import per_device
from jaxglue.sharding.gather import gather
from jaxglue.sharding.rules import Layout


class FP8Errors(NamedTuple):
    """Relative errors of FP8 products."""

    layers: list[float]
    """‖y − z‖ / ‖z − x‖ of each layer, with z in the activations' dtype; x is z of the layer before."""
    head: float | None
    """Error of the gradient to the last output; None where the head is not in FP8."""


def fp8_errors(executor: Executor, trainable: Params, frozen: Params, batch: Batch) -> FP8Errors:
    """Return the errors of a batch's forward pass, each layer's own."""
    x, errors = None, []
    for x, y, z in executor.outputs_in(trainable, frozen, batch, lambda context: replace(context, fp8=False)):
        errors.append(float(_relative_error(y, z, x)))
        x = z
    return FP8Errors(errors, _head_error(executor.embed_head, executor.layout, trainable, frozen, x, batch))


def _head_error(head: EmbedHead, layout: Layout, trainable: Params, frozen: Params, x, batch: Batch) -> float | None:
    if not head.fp8_head:
        return None
    weights, batch = (head.parts(trainable), head.parts_on_device(frozen)), batch.without_lengths()
    stored = layout.param_specs(weights)

    def gradient(weights, x, batch, fp8: bool):
        def program(weights, x, batch):
            trainable, frozen = gather(layout, weights, stored)
            return jax.grad(lambda x: head.local_loss(trainable, frozen, x, batch, jnp.float32(1), fp8=fp8)[0])(x)

        specs = stored, layout.batch_spec, layout.batch_specs(batch)
        return per_device(program, layout.mesh, specs, layout.batch_spec)(weights, x, batch)

    compute = jit_step(gradient, static_argnames="fp8")
    return float(_relative_error(*(compute(weights, x, batch, fp8=fp8) for fp8 in (True, False))))


@jax.jit
def _relative_error(y: Array, z: Array, x: Array | float = 0.0) -> Float[Array, ""]:
    """Return ‖y − z‖ / ‖z − x‖ in float32."""
    y, z, x = (jnp.asarray(array, jnp.float32) for array in (y, z, x))
    return jnp.linalg.norm(jnp.ravel(y - z)) / jnp.linalg.norm(jnp.ravel(z - x))
