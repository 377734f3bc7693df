"""The causal convolution of each channel within its document, and silu."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.segments import PackedSegments


def reference_convolution(
    x: Float[Array, "B T C"], weight: Float[Array, "C 1 W"], segments: PackedSegments
) -> Float[Array, "B T C"]:
    """Compute `causal_convolution` in plain JAX; the backward pass computes the sums again."""
    return jax.checkpoint(_convolve)(x, weight, segments)


def _convolve(x, weight, segments: PackedSegments):
    taps = jnp.flip(weight[:, 0].astype(jnp.float32), axis=1).T  # [W, C], a token's own first
    places = jnp.where(segments.segment_ids > 0, segments.positions, -1)
    total = jnp.zeros(x.shape, jnp.float32)
    for back, tap in enumerate(taps):
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]]
        total += jnp.where((places >= back)[..., None], earlier.astype(jnp.float32) * tap, 0.0)
    return jax.nn.silu(total).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_convolution(
    kernels: Any, x: Float[Array, "B T C"], weight: Float[Array, "C 1 W"], segments: PackedSegments
) -> Float[Array, "B T C"]:
    """Compute `causal_convolution` by kernels (`RowsBackend`); the weight gets a gradient only where it trains."""
    return kernels.convolve(x, weight[:, 0], segments.starts)


def _forward(kernels, x, weight, segments):
    values = jax.tree.map(lambda primal: primal.value, (x, weight, segments))
    return fused_convolution(kernels, *values), (*values, () if weight.perturbed else None)


def _backward(kernels, residuals, dy):
    x, weight, segments, trained = residuals
    dx = kernels.convolve_gradient(x, weight[:, 0], segments.starts, dy)
    if trained is None:
        return dx, None, None
    # By XLA: only full fine-tuning trains convolutions.
    return dx, *jax.vjp(lambda weight: _convolve(x, weight, segments), weight)[1](dy), None


fused_convolution.defvjp(_forward, _backward, symbolic_zeros=True)
