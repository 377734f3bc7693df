"""Causal convolutions of a few tokens of each channel within its document."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.delta_rule import last_inputs
from jaxglue.ops.recurrence import Recurrence
from jaxglue.ops.segments import PackedSegments


def short_convolution(weight: Float[Array, "C 1 W"], bias: Float[Array, " C"] | None = None) -> Recurrence:
    """Return the sum over the last W tokens of a document, each channel by its weights, plus its bias, in x's dtype.

    Sums are in float32; tokens before a document's first are zeros. The backward pass computes the sums again. The
    state is the last W - 1 inputs [W - 1, C], the oldest first.

    Args:
        weight: the last of a channel's is the token's own, as torch's `Conv1d` with groups of one channel stores them.
        bias: of each channel; None for none.

    Raises:
        ValueError: weights of another shape.
    """
    if weight.ndim != 3 or weight.shape[1] != 1:
        raise ValueError(f"weight must be [C, 1, W], got shape {weight.shape}")

    def whole(segments: PackedSegments, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        return jax.checkpoint(_convolve)(x, weight, bias, segments)

    def last(segments: PackedSegments, x: Float[Array, "B T C"]) -> Float[Array, "B S W-1 C"]:
        return last_inputs(x, segments, weight.shape[2] - 1)

    return Recurrence(whole, last, partial(_step, weight, bias))


def _convolve(x, weight, bias, segments: PackedSegments):
    taps = jnp.flip(weight[:, 0].astype(jnp.float32), axis=1).T  # [W, C], a token's own first
    places = jnp.where(segments.segment_ids > 0, segments.positions, -1)
    total = jnp.zeros(x.shape, jnp.float32) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    for back, tap in enumerate(taps):
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]]
        total += jnp.where((places >= back)[..., None], earlier.astype(jnp.float32) * tap, 0.0)
    return total.astype(x.dtype)


def _step(weight, bias, inputs, x):
    seen = jnp.concatenate([inputs, x[:, None].astype(inputs.dtype)], axis=1)
    total = jnp.einsum("swc,cw->sc", seen.astype(jnp.float32), weight[:, 0].astype(jnp.float32))
    total = total if bias is None else total + bias.astype(jnp.float32)
    return total.astype(x.dtype), seen[:, 1:]
