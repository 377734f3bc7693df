"""The experts' gated activations, and their product with the routing weights."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.moe.groups import GroupMetadata

Activation = Literal["swiglu", "gpt_oss"]
GPT_OSS_ALPHA = 1.702
GPT_OSS_LIMIT = 7.0


class ActivationBackend(Protocol):
    """One pass over the projections forward, one backward; what rows of no group get is unspecified."""

    def activate(self, projected, weights, groups: GroupMetadata, activation: Activation) -> Float[Array, "S F"]:
        """activation(projected[s]) · weights[s], in projected's dtype."""

    def activate_gradient(
        self, projected, weights, groups: GroupMetadata, dout, activation: Activation
    ) -> tuple[Array, Array]:
        """Gradients of projected and of weights."""


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """What is static in a call: it must be hashable."""

    backend: ActivationBackend
    activation: Activation


def activate(projected: Float[Array, "S 2F"], activation: Activation) -> Float[Array, "S F"]:
    """The gated activation, in float32.

    `swiglu` is silu(gate) · up with the gate in the first half; `gpt_oss` clamps, scales the gate's sigmoid by 1.702
    and adds one to up, with gate and up alternating (Hugging Face's `GptOssExperts`).
    """
    projected = projected.astype(jnp.float32)
    if activation == "swiglu":
        gate, up = jnp.split(projected, 2, axis=-1)
        return jax.nn.silu(gate) * up
    gate = jnp.minimum(projected[:, ::2], GPT_OSS_LIMIT)
    up = jnp.clip(projected[:, 1::2], -GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    return gate * jax.nn.sigmoid(GPT_OSS_ALPHA * gate) * (up + 1.0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_activation(
    spec: ActivationSpec, projected: Float[Array, "S 2F"], weights: Float[Array, " S"], groups: GroupMetadata
) -> Float[Array, "S F"]:
    """`activate` times the weights of the rows, by a fused backend; what rows of no group get is unspecified."""
    return spec.backend.activate(projected, weights, groups, spec.activation)


def _forward(spec, projected, weights, groups):
    return fused_activation(spec, projected, weights, groups), (projected, weights, groups)


def _backward(spec, residuals, dout):
    return *spec.backend.activate_gradient(*residuals, dout, spec.activation), None


fused_activation.defvjp(_forward, _backward)
