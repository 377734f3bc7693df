"""The causal convolution of each channel within its document, and silu."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.segments import PackedSegments


def reference_convolution(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C 1 W"],
    bias: Float[Array, " C"] | None,
    segments: PackedSegments,
) -> Float[Array, "B T C"]:
    """Compute `causal_convolution` in plain JAX; the backward pass computes the sums again."""
    return jax.checkpoint(_convolve)(x, weight, bias, segments)


def _convolve(x, weight, bias, segments: PackedSegments):
    taps = jnp.flip(weight[:, 0].astype(jnp.float32), axis=1).T  # [W, C], a token's own first
    places = jnp.where(segments.segment_ids > 0, segments.positions, -1)
    total = jnp.zeros(x.shape, jnp.float32)
    for back, tap in enumerate(taps):
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]]
        total += jnp.where((places >= back)[..., None], earlier.astype(jnp.float32) * tap, 0.0)
    if bias is None:
        return jax.nn.silu(total).astype(x.dtype)
    return jnp.where((places >= 0)[..., None], jax.nn.silu(total + bias.astype(jnp.float32)), 0.0).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_convolution(
    kernels: Any,
    x: Float[Array, "B T C"],
    weight: Float[Array, "C 1 W"],
    bias: Float[Array, " C"] | None,
    segments: PackedSegments,
) -> Float[Array, "B T C"]:
    """Compute `causal_convolution` by kernels (`RowsBackend`); weights get gradients only where they train."""
    return kernels.convolve(x, weight[:, 0], bias, segments.starts)


def _forward(kernels, x, weight, bias, segments):
    values = jax.tree.map(lambda primal: primal.value, (x, weight, bias, segments))
    trained = weight.perturbed or (bias is not None and bias.perturbed)
    return fused_convolution(kernels, *values), (*values, () if trained else None)


def _backward(kernels, residuals, dy):
    x, weight, bias, segments, trained = residuals
    dx = kernels.convolve_gradient(x, weight[:, 0], bias, segments.starts, dy)
    if trained is None:
        return dx, None, None, None
    # By XLA: only full fine-tuning trains convolutions.
    pull = jax.vjp(lambda weight, bias: _convolve(x, weight, bias, segments), weight, bias)[1]
    return dx, *pull(dy), None


fused_convolution.defvjp(_forward, _backward, symbolic_zeros=True)
