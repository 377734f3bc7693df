"""The norm of each head's output, and its gate."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.norm_rope import rms_norm


def gated_rms_norm(
    x: Float[Array, "*B V"], gate: Float[Array, "*B V"], weight: Float[Array, " V"], eps: float
) -> Float[Array, "*B V"]:
    """Return silu(gate) · `rms_norm`(x) in x's dtype, the gate's product in float32.

    Raises:
        ValueError: shapes that do not fit.
    """
    if gate.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(f"gate must be {x.shape} and weight {x.shape[-1:]} as x, got {gate.shape} and {weight.shape}")
    normed = rms_norm(x, weight, eps).astype(jnp.float32)
    return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
