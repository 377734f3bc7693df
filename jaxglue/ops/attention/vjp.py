"""Differentiation rule of the fused backends, with residuals that a checkpoint policy can name."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops.names import ATTENTION_LSE, ATTENTION_OUT
from jaxglue.ops.segments import PackedSegments

Gradients = tuple[Array, Array, Array, Array | None]


class AttentionBackend(Protocol):
    """Kernels of a forward and backward pass; `lse` is float32, includes the sinks, and each backend has its layout."""

    def forward(
        self, q, k, v, sinks, segments, *, window: int | None, softcap: float | None = None
    ) -> tuple[Array, Array]:
        """Return (out, lse)."""

    def backward(
        self, q, k, v, sinks, segments, out, lse, dout, *, window: int | None, softcap: float | None = None
    ) -> Gradients:
        """Return (dq, dk, dv, dsinks); dsinks is None without sinks."""


@dataclass(frozen=True, kw_only=True)
class FlashSpec:
    """Static, hashable arguments of `flash_attention`."""

    backend: AttentionBackend
    window: int | None
    softcap: float | None = None

    @property
    def scores(self) -> dict[str, Any]:
        """Return the keywords of a backend's passes."""
        return {"window": self.window, "softcap": self.softcap}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash_attention(
    spec: FlashSpec,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K values"],
    sinks: Float[Array, " N"] | None,
    segments: PackedSegments,
) -> Float[Array, "B T N values"]:
    """Compute packed attention by a fused backend."""
    return spec.backend.forward(q, k, v, sinks, segments, **spec.scores)[0]


def _flash_forward(spec, q, k, v, sinks, segments):
    out, lse = spec.backend.forward(q, k, v, sinks, segments, **spec.scores)
    out, lse = checkpoint_name(out, ATTENTION_OUT), checkpoint_name(lse, ATTENTION_LSE)
    return out, (q, k, v, sinks, segments, out, lse)


def _flash_backward(spec, residuals, dout):
    gradients = spec.backend.backward(*residuals, dout, **spec.scores)
    return *gradients, None


flash_attention.defvjp(_flash_forward, _flash_backward)
