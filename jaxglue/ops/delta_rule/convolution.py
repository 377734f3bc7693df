"""The causal convolution of each channel within its document, and silu."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.segments import PackedSegments


def causal_convolution(
    x: Float[Array, "B T C"], weight: Float[Array, "C 1 W"], segments: PackedSegments
) -> Float[Array, "B T C"]:
    """Return silu of the sum over the last W tokens of a document, each channel by its weights, in x's dtype.

    Sums are in float32; tokens before a document's first are zeros, and so is padding's result. The backward pass
    computes the sums again.

    Args:
        x: packed rows.
        weight: the last of a channel's is the token's own, as torch's `Conv1d` with groups of one channel stores them.
        segments: the rows' documents.

    Raises:
        ValueError: shapes that do not fit.
    """
    if weight.ndim != 3 or weight.shape[:2] != (x.shape[-1], 1):
        raise ValueError(f"weight must be [C, 1, W] with C = {x.shape[-1]} channels of x, got shape {weight.shape}")
    if x.ndim != 3 or segments.segment_ids.shape != x.shape[:2]:
        raise ValueError(f"x must be [B, T, C] with rows {segments.segment_ids.shape}, got shape {x.shape}")
    return jax.checkpoint(_convolve)(x, weight, segments)


def _convolve(x, weight, segments: PackedSegments):
    taps = jnp.flip(weight[:, 0].astype(jnp.float32), axis=1).T  # [W, C], a token's own first
    places = jnp.where(segments.segment_ids > 0, segments.positions, -1)
    total = jnp.zeros(x.shape, jnp.float32)
    for back, tap in enumerate(taps):
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]]
        total += jnp.where((places >= back)[..., None], earlier.astype(jnp.float32) * tap, 0.0)
    return jax.nn.silu(total).astype(x.dtype)
