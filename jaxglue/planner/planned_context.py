"""A layer context whose attention has a fused backend's shapes and names, for tracing where no GPU is."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxglue.models.context import PackedContext
from jaxglue.ops.attention.rotation import rotated_flash_attention
from jaxglue.ops.attention.vjp import FlashSpec, flash_attention
from jaxglue.ops.kernel_cost import KernelCost, KernelKind, stand_in

_BACKWARD = KernelCost(kind=KernelKind.ATTENTION_BACKWARD)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PlannedContext(PackedContext):
    """Context of packed rows whose attention is traced, never run."""

    def attend(self, q, k, v, *, window=None, sinks=None, softcap=None):
        """Return the shape of attention's output, with a fused backend's differentiation rule."""
        if self.attention_out is not None:
            return self.attention_out
        spec = FlashSpec(backend=_ShapesOnly(), window=window)
        return flash_attention(spec, q, k, v, sinks, self.segments)

    def attend_rotated(self, rotation, z, *, window=None):
        """Do as `attend` with the heads of z."""
        return rotated_flash_attention(FlashSpec(backend=_ShapesOnly(), window=window), rotation, z, self.segments)


@dataclass(frozen=True)
class _ShapesOnly:
    """An `AttentionBackend` of stand-ins for the kernels, whose time documents' lengths decide."""

    def forward(self, q, k, v, sinks, segments, *, window):
        lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
        return tuple(stand_in(KernelCost(kind=KernelKind.ATTENTION_FORWARD), (q, k, v), (q, lse)))

    def backward(self, q, k, v, sinks, segments, out, lse, dout, *, window):
        dsinks = None if sinks is None else jnp.zeros_like(sinks)
        return *stand_in(_BACKWARD, (q, k, v, out, lse, dout), (q, k, v)), dsinks

    def rotated_backward(self, q, k, z, segments, out, lse, dout, rotation, *, window):
        return stand_in(_BACKWARD, (q, k, z, out, lse, dout), (z,))[0]
