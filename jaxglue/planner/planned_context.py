"""A layer context whose attention has a fused backend's shapes and names, for tracing where no GPU is."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxglue.models.context import PackedContext
from jaxglue.ops.attention.rotation import rotated_flash_attention
from jaxglue.ops.attention.vjp import FlashSpec, flash_attention
from jaxglue.planner.cost import ATTENTION_BACKWARD, ATTENTION_FORWARD


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
    """An `AttentionBackend` in place of the kernels; the planner recognizes its functions by name."""

    def forward(self, q, k, v, sinks, segments, *, window):
        return _named(ATTENTION_FORWARD, lambda q, k, v: (q * 0, jnp.zeros(q.shape[:3], jnp.float32)))(q, k, v)

    def backward(self, q, k, v, sinks, segments, out, lse, dout, *, window):
        def gradients(q, k, v, out, lse, dout):
            return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)

        dsinks = None if sinks is None else jnp.zeros_like(sinks)
        return *_named(ATTENTION_BACKWARD, gradients)(q, k, v, out, lse, dout), dsinks

    def rotated_backward(self, q, k, z, segments, out, lse, dout, rotation, *, window):
        return _named(ATTENTION_BACKWARD, lambda q, k, z, out, lse, dout: jnp.zeros_like(z))(q, k, z, out, lse, dout)


def _named(name: str, function):
    function.__name__ = name
    return jax.jit(function)
