"""Values narrower than keys for kernels that know heads of one size."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from jaxglue.ops.attention.vjp import AttentionBackend, Gradients


@dataclass(frozen=True)
class PaddedValues:
    """`AttentionBackend` that pads values with zeros to the head dim of keys, and cuts its output to theirs.

    Args:
        backend: of the kernels.
    """

    backend: AttentionBackend

    def forward(self, q, k, v, sinks, segments, *, window, softcap=None) -> tuple[Array, Array]:
        """Return (out, lse)."""
        arrays = q, k, _padded(v, k), sinks, segments
        out, lse = self.backend.forward(*arrays, window=window, softcap=softcap)
        return out[..., : v.shape[3]], lse

    def backward(self, q, k, v, sinks, segments, out, lse, dout, *, window, softcap=None) -> Gradients:
        """Return (dq, dk, dv, dsinks)."""
        arrays = q, k, _padded(v, k), sinks, segments, _padded(out, q), lse, _padded(dout, q)
        dq, dk, dv, dsinks = self.backend.backward(*arrays, window=window, softcap=softcap)
        return dq, dk, dv[..., : v.shape[3]], dsinks


def _padded(x: Array, like: Array) -> Array:
    return jnp.pad(x, ((0, 0),) * 3 + ((0, like.shape[3] - x.shape[3]),))
