"""Causal convolutions of a few tokens of each channel within its document, and their states between tokens."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxglue.ops.delta_rule.forks import with_copies
from jaxglue.ops.names import ATTENTION_OUT
from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.zeros import zeros_on


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ConvolutionStates:
    """All that a layer of short convolutions remembers of sequences, each in a slot. A pytree."""

    inputs: Float[Array, "slots W-1 C"]
    """The last inputs, the oldest first; zeros before a sequence's first token."""

    def write(self, slots: Int[Array, " S"], inputs: Float[Array, "S W-1 C"]) -> "ConvolutionStates":
        """Return the states after these inputs of the slots."""
        return replace(self, inputs=self.inputs.at[slots].set(inputs.astype(self.inputs.dtype)))

    @classmethod
    def empty(cls, slots: int, width: int, channels: int, dtype, device=None) -> "ConvolutionStates":
        """Return the empty states of slots, of convolutions of `width` tokens, on a device or sharding."""
        return cls(inputs=zeros_on(device, (slots, width - 1, channels), dtype))


def short_convolution(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C 1 W"],
    bias: Float[Array, " C"] | None,
    segments: PackedSegments,
) -> Float[Array, "B T C"]:
    """Return the sum over the last W tokens of a document, each channel by its weights, plus its bias, in x's dtype.

    Sums are in float32; tokens before a document's first are zeros. The backward pass computes the sums again. Under
    `jax.checkpoint`, a policy that saves `ATTENTION_OUT` computes them once.

    Args:
        x: packed rows.
        weight: the last of a channel's is the token's own, as torch's `Conv1d` with groups of one channel stores them.
        bias: of each channel; None for none.
        segments: the rows' documents.

    Raises:
        ValueError: shapes that do not fit, or forked segments without copies of their beginnings.
    """
    if segments.gap_starts is not None and segments.copies is None:
        raise ValueError("segments fork, and a convolution follows one continuation: add copies of their beginnings")
    if weight.ndim != 3 or weight.shape[:2] != (x.shape[-1], 1):
        raise ValueError(f"weight must be [C, 1, W] with C = {x.shape[-1]} channels of x, got shape {weight.shape}")
    if x.ndim != 3 or segments.segment_ids.shape != x.shape[:2]:
        raise ValueError(f"x must be [B, T, C] with rows {segments.segment_ids.shape}, got shape {x.shape}")

    def compute(segments: PackedSegments, x) -> Array:
        return jax.checkpoint(_convolve)(x, weight, bias, segments)

    y = compute(segments, x) if segments.copies is None else with_copies(compute, segments, x)
    return checkpoint_name(y, ATTENTION_OUT)


def _convolve(x, weight, bias, segments: PackedSegments):
    taps = jnp.flip(weight[:, 0].astype(jnp.float32), axis=1).T  # [W, C], a token's own first
    places = jnp.where(segments.segment_ids > 0, segments.positions, -1)
    total = jnp.zeros(x.shape, jnp.float32) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    for back, tap in enumerate(taps):
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]]
        total += jnp.where((places >= back)[..., None], earlier.astype(jnp.float32) * tap, 0.0)
    return total.astype(x.dtype)


def short_convolution_step(
    x: Float[Array, "S C"],
    inputs: Float[Array, "S W-1 C"],
    weight: Float[Array, "C 1 W"],
    bias: Float[Array, " C"] | None,
) -> tuple[Float[Array, "S C"], Float[Array, "S W-1 C"]]:
    """Return `short_convolution` of a token behind each of the inputs, and the inputs with it."""
    seen = jnp.concatenate([inputs, x[:, None].astype(inputs.dtype)], axis=1)
    total = jnp.einsum("swc,cw->sc", seen.astype(jnp.float32), weight[:, 0].astype(jnp.float32))
    total = total if bias is None else total + bias.astype(jnp.float32)
    return total.astype(x.dtype), seen[:, 1:]
