"""Differentiation rule of the gated delta rule by kernels."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops.delta_rule.reference import DeltaHeads
from jaxglue.ops.names import ATTENTION_OUT
from jaxglue.ops.segments import PackedSegments


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Values of chunks that forward and backward pass read; see `kernels.py`."""

    factors: Float[Array, "B N 8 T"]
    inverses: Float[Array, "B N T C"]
    scores: Float[Array, "B N T C"]
    updates: Float[Array, "B T N V"]
    states: Float[Array, "B N chunks H V"]


class DeltaBackend(Protocol):
    """Kernels of a forward and a backward pass, which both read values that a first pass over the chunks prepares."""

    chunk: int

    def prepare(self, qkv, g, beta, segments: PackedSegments, heads: DeltaHeads, *, dtype=None) -> Prepared:
        """Return the values of chunks that both passes read, states among them, by default in qkv's dtype."""

    def forward(self, qkv, prepared: Prepared, segments: PackedSegments, heads: DeltaHeads) -> Float[Array, "B T N V"]:
        """Return the outputs."""

    def backward(self, qkv, prepared: Prepared, segments: PackedSegments, heads: DeltaHeads, dout) -> tuple[Array, ...]:
        """Return the gradients (dqkv, dg, dbeta)."""


class RowsBackend(Protocol):
    """Kernels around the rule, which read and write every value once."""

    def convolve(self, x, taps: Float[Array, "C W"], bias: Float[Array, " C"] | None, starts) -> Float[Array, "B T C"]:
        """Return `causal_convolution` of x, within documents that begin at `starts` [B, T]."""

    def convolve_gradient(self, x, taps: Float[Array, "C W"], bias, starts, dy) -> Float[Array, "B T C"]:
        """Return the gradient to x."""

    def gated_norm(self, x, gate, weight, *, eps: float) -> Float[Array, "*B V"]:
        """Return `gated_rms_norm`."""

    def gated_norm_gradient(self, x, gate, weight, dout, *, eps: float) -> tuple[Array, ...]:
        """Return (dx, dgate)."""


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """Static, hashable arguments of `fused_delta_rule`."""

    backend: DeltaBackend
    heads: DeltaHeads
    named: bool = True
    """Name the outputs for checkpoint policies."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_delta_rule(spec: DeltaSpec, qkv, g, beta, segments: PackedSegments) -> Float[Array, "B T N V"]:
    """Compute `gated_delta_rule` by kernels; under a policy that saves the outputs, they are computed once."""
    return spec.backend.forward(qkv, spec.backend.prepare(qkv, g, beta, segments, spec.heads), segments, spec.heads)


def _forward(spec: DeltaSpec, qkv, g, beta, segments: PackedSegments):
    prepared = spec.backend.prepare(qkv, g, beta, segments, spec.heads)
    out = spec.backend.forward(qkv, prepared, segments, spec.heads)
    out = checkpoint_name(out, ATTENTION_OUT) if spec.named else out
    return out, (qkv, beta, prepared, segments)


def _backward(spec: DeltaSpec, residuals, dout):
    qkv, beta, prepared, segments = residuals
    dqkv, dg, dbeta = spec.backend.backward(qkv, prepared, segments, spec.heads, dout)
    return dqkv, dg, dbeta.astype(beta.dtype), None


fused_delta_rule.defvjp(_forward, _backward)
