"""Attention of projections that lie side by side, whose queries and keys it norms and rotates itself."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops.attention.vjp import FlashSpec
from jaxglue.ops.names import ATTENTION_LSE, ATTENTION_OUT
from jaxglue.ops.norm_rope.reference import HeadNorms
from jaxglue.ops.segments import PackedSegments


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Optional norms and rotary embedding of the first N + K heads of z, of N + 2·K in all."""

    kernels: Any = field(metadata={"static": True})
    """`TritonNormRope`."""
    heads: tuple[int, int] = field(metadata={"static": True})
    """N and K."""
    norms: HeadNorms | None
    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]

    def __call__(self, z: Float[Array, "B T heads H"]) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
        """Return queries and keys."""
        B, T, V, H = z.shape
        q, k = self.kernels.split_rotate(z.reshape(B * T, V * H), (*self.heads, H), self.norms, self.cos, self.sin)
        return q.reshape(B, T, -1, H), k.reshape(B, T, -1, H)

    def take_back(self, z, dq, dk, dz) -> Float[Array, "B T heads H"]:
        """Return dz with its first heads from the gradients to queries and keys."""
        B, T, V, H = z.shape
        rows, drows = (x.reshape(B * T, V * H) for x in (z, dz))
        heads, angles = (*self.heads, H), (self.cos, self.sin)
        return self.kernels.split_rotate_gradient(rows, heads, self.norms, *angles, (dq, dk), drows).reshape(z.shape)


@jax.custom_vjp
def rotated_heads(rotation: Rotation, z: Float[Array, "B T heads H"]) -> tuple[Array, Array, Array]:
    """Return queries, keys and z; norms and angles get no gradient."""
    return *rotation(z), z


def _rotated_heads(rotation, z):
    return rotated_heads(rotation, z), (rotation, z)


def _take_back(residuals, gradients):
    rotation, z = residuals
    return None, rotation.take_back(z, *gradients)


rotated_heads.defvjp(_rotated_heads, _take_back)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rotated_flash_attention(
    spec: FlashSpec, rotation: Rotation, z: Float[Array, "B T heads H"], segments: PackedSegments
) -> Float[Array, "B T N H"]:
    """Compute packed attention by a backend whose backward pass goes through the rotation, too."""
    return spec.backend.forward(*rotation(z), z, None, segments, window=spec.window)[0]


def _forward(spec, rotation, z, segments):
    q, k = rotation(z)
    out, lse = spec.backend.forward(q, k, z, None, segments, window=spec.window)
    out, lse = checkpoint_name(out, ATTENTION_OUT), checkpoint_name(lse, ATTENTION_LSE)
    return out, (q, k, z, segments, out, lse, rotation)


def _backward(spec, residuals, dout):
    *arrays, rotation = residuals
    return None, spec.backend.rotated_backward(*arrays, dout, rotation, window=spec.window), None


rotated_flash_attention.defvjp(_forward, _backward)
