"""The norm of each head's output, and its gate."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.norm_rope import rms_norm


def reference_gated_norm(
    x: Float[Array, "*B V"], gate: Float[Array, "*B V"], weight: Float[Array, " V"], eps: float
) -> Float[Array, "*B V"]:
    """Compute `gated_rms_norm` in plain JAX."""
    normed = rms_norm(x, weight, eps).astype(jnp.float32)
    return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def fused_gated_norm(
    kernels: Any, eps: float, x: Float[Array, "*B V"], gate: Float[Array, "*B V"], weight: Float[Array, " V"]
) -> Float[Array, "*B V"]:
    """Compute `gated_rms_norm` by kernels (`RowsBackend`); the weight gets a gradient only where it trains."""
    return kernels.gated_norm(x, gate, weight, eps=eps)


def _forward(kernels, eps, x, gate, weight):
    out = kernels.gated_norm(x.value, gate.value, weight.value, eps=eps)
    return out, (x.value, gate.value, weight.value, () if weight.perturbed else None)


def _backward(kernels, eps, residuals, dout):
    x, gate, weight, trained = residuals
    dx, dgate = kernels.gated_norm_gradient(x, gate, weight, dout, eps=eps)
    if trained is None:
        return dx, dgate, None
    # By XLA in float32: only full fine-tuning trains norms.
    x, gate, dout = (y.astype(jnp.float32) for y in (x, gate, dout))
    return dx, dgate, *jax.vjp(lambda weight: reference_gated_norm(x, gate, weight, eps), weight)[1](dout)


fused_gated_norm.defvjp(_forward, _backward, symbolic_zeros=True)
