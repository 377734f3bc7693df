"""The delta rule where rows are split over devices: a state passes from token to token, so heads are split instead.

Devices exchange tokens for heads before the convolution, each then has whole rows of its part of the heads, and back
for the rule's outputs (as attention in DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.collectives import axis_size
from jaxglue.ops.delta_rule.reference import DeltaHeads
from jaxglue.ops.row_split import CONTEXT, to_heads, to_tokens, whole_segments
from jaxglue.ops.segments import PackedSegments


def own_heads(heads: DeltaHeads) -> DeltaHeads:
    """Return the sizes of this device's heads. Per device."""
    parts = axis_size(CONTEXT)
    return heads._replace(keys=heads.keys // parts, values=heads.values // parts)


def by_device(x: Float[Array, "... C"], heads: DeltaHeads) -> Float[Array, "... C"]:
    """Return channels of queries, keys and values in the order of devices. Per device."""
    parts, keys = axis_size(CONTEXT), heads.keys * heads.key_dim
    blocks = (part.reshape(*x.shape[:-1], parts, -1) for part in jnp.split(x, (keys, 2 * keys), axis=-1))
    return jnp.concatenate([*blocks], axis=-1).reshape(x.shape)


def exchanged(
    x: Float[Array, "B T/N C"], weight: Float[Array, "C 1 W"], segments: PackedSegments, heads: DeltaHeads
) -> tuple[Float[Array, "B T C/N"], Float[Array, "C/N 1 W"]]:
    """Return whole rows of this device's channels, and their weights of the convolution. Per device."""
    ordered = jnp.moveaxis(by_device(jnp.moveaxis(weight, 0, -1), heads), -1, 0)
    local_weight = ordered.reshape(axis_size(CONTEXT), -1, *weight.shape[1:])[jax.lax.axis_index(CONTEXT)]
    return to_heads(by_device(x, heads), segments.split), local_weight


@dataclass(frozen=True)
class SplitDeltaRule:
    """`DeltaBackend` of this device's heads: qkv are of whole rows, gates and outputs of all heads of its tokens.

    Args:
        backend: of the kernels.
    """

    backend: Any

    def prepare(self, qkv, g, beta, segments: PackedSegments, heads: DeltaHeads, *, dtype=None):
        """Return the values of chunks that both passes read."""
        g, beta = (to_heads(gate, segments.split) for gate in (g, beta))
        return self.backend.prepare(qkv, g, beta, whole_segments(segments), own_heads(heads), dtype=dtype)

    def forward(self, qkv, prepared, segments: PackedSegments, heads: DeltaHeads) -> Float[Array, "B T/N N V"]:
        """Return the outputs."""
        out = self.backend.forward(qkv, prepared, whole_segments(segments), own_heads(heads))
        return outputs(out, segments)

    def backward(self, qkv, prepared, segments: PackedSegments, heads: DeltaHeads, dout) -> tuple[Array, ...]:
        """Return the gradients (dqkv, dg, dbeta)."""
        local_heads, B = own_heads(heads), dout.shape[0]
        dout = to_heads(dout.reshape(*dout.shape[:2], -1), segments.split)
        dout = dout.reshape(B, dout.shape[1], local_heads.values, -1)
        dqkv, dg, dbeta = self.backend.backward(qkv, prepared, whole_segments(segments), local_heads, dout)
        return dqkv, *(to_tokens(gradient, segments.split) for gradient in (dg, dbeta))


def outputs(out: Float[Array, "B T N V"], segments: PackedSegments) -> Float[Array, "B T/N all V"]:
    """Return the outputs of all heads for this device's tokens. Per device."""
    values = to_tokens(out.reshape(*out.shape[:2], -1), segments.split)
    return values.reshape(*values.shape[:2], -1, out.shape[-1])
