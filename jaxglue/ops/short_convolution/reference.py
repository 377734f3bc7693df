"""The gated convolution in plain JAX, over packed rows and of one token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.segments import PackedSegments


def convolution_inputs(values: Float[Array, "*B 3C"]) -> tuple[Float[Array, "*B C"], Float[Array, "*B C"]]:
    """Return (before · x, gate) of before, gate and x."""
    before, gate, x = jnp.split(values, 3, axis=-1)
    return before * x, gate


def reference_convolution(
    values: Float[Array, "B T 3C"],
    weight: Float[Array, "C 1 W"],
    bias: Float[Array, " C"] | None,
    segments: PackedSegments,
) -> Float[Array, "B T C"]:
    """Compute `short_convolution` of packed rows; the backward pass computes the sums again."""
    return jax.checkpoint(convolve)(values, weight, bias, segments)


def convolve(values, weight, bias, segments: PackedSegments) -> Float[Array, "B T C"]:
    """Compute `reference_convolution`; the backward pass reads the sums."""
    x, gate = convolution_inputs(values)
    taps = jnp.flip(weight[:, 0].astype(jnp.float32), axis=1).T  # [W, C], a token's own first
    places = jnp.where(segments.segment_ids > 0, segments.positions, -1)
    total = jnp.zeros(x.shape, jnp.float32) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    for back, tap in enumerate(taps):
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]]
        total += jnp.where((places >= back)[..., None], earlier.astype(jnp.float32) * tap, 0.0)
    return gate * total.astype(x.dtype)


def convolution_step(
    weight: Float[Array, "C 1 W"],
    bias: Float[Array, " C"] | None,
    inputs: Float[Array, "S W-1 C"],
    values: Float[Array, "S 3C"],
) -> tuple[Float[Array, "S C"], Float[Array, "S W-1 C"]]:
    """Return `short_convolution` of a token behind each of the inputs, and the inputs with it."""
    x, gate = convolution_inputs(values)
    seen = jnp.concatenate([inputs, x[:, None].astype(inputs.dtype)], axis=1)
    total = jnp.einsum("swc,cw->sc", seen.astype(jnp.float32), weight[:, 0].astype(jnp.float32))
    total = total if bias is None else total + bias.astype(jnp.float32)
    return gate * total.astype(x.dtype), seen[:, 1:]
