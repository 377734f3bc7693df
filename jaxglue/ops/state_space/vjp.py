"""Differentiation rules of Mamba-2's recurrence and gated norm by kernels."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.norm_rope import rms_norm
from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.state_space.reference import StateHeads


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Values of chunks that forward and backward pass read; see `kernels.py`."""

    factors: Float[Array, "B N 2 T"]
    states: Float[Array, "B N chunks S P"]


class StateSpaceBackend(Protocol):
    """Kernels of a forward and a backward pass, which both read values that a first pass over the chunks prepares."""

    chunk: int

    def prepare(self, xbc, step, g, segments: PackedSegments, heads: StateHeads, *, dtype=None) -> Prepared:
        """Return the values of chunks that both passes read, states among them, by default in xbc's dtype."""

    def forward(self, xbc, skip, prepared: Prepared, segments: PackedSegments, heads: StateHeads) -> Array:
        """Return the outputs [B, T, N, P]."""

    def backward(self, xbc, skip, prepared: Prepared, segments: PackedSegments, heads: StateHeads, dout) -> Any:
        """Return the gradients (dxbc, dstep, dg)."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def fused_state_space(
    backend: StateSpaceBackend, heads: StateHeads, xbc, step, g, skip, segments: PackedSegments
) -> Float[Array, "B T N P"]:
    """Compute `state_space` by kernels; the skip's factors get a gradient only where they train."""
    return backend.forward(xbc, skip, backend.prepare(xbc, step, g, segments, heads), segments, heads)


def _forward(backend, heads, xbc, step, g, skip, segments):
    trained = () if skip.perturbed else None
    xbc, step, g, skip, segments = jax.tree.map(lambda primal: primal.value, (xbc, step, g, skip, segments))
    prepared = backend.prepare(xbc, step, g, segments, heads)
    return backend.forward(xbc, skip, prepared, segments, heads), (xbc, skip, prepared, segments, trained)


def _backward(backend, heads, residuals, dout):
    xbc, skip, prepared, segments, trained = residuals
    dxbc, dstep, dg = backend.backward(xbc, skip, prepared, segments, heads, dout)
    if trained is None:
        return dxbc, dstep, dg, None, None
    # By XLA: only full fine-tuning trains these.
    x = jnp.where((segments.segment_ids > 0)[..., None, None], heads.split(xbc)[0], 0).astype(jnp.float32)
    return dxbc, dstep, dg, jnp.sum(x * dout.astype(jnp.float32), axis=(0, 1, 3)).astype(skip.dtype), None


fused_state_space.defvjp(_forward, _backward, symbolic_zeros=True)


class GatedNormBackend(Protocol):
    """Kernels of `gated_group_norm`, which read and write every value once."""

    def gated_norm(self, x, gate, weight, *, groups: int, eps: float) -> Float[Array, "*B I"]:
        """Return `gated_group_norm`."""

    def gated_norm_gradient(self, x, gate, weight, dout, *, groups: int, eps: float) -> tuple[Array, ...]:
        """Return (dx, dgate)."""


def reference_gated_norm(x, gate, weight, groups: int, eps: float) -> Float[Array, "*B I"]:
    """Compute `gated_group_norm` in plain JAX."""
    products = x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
    grouped = products.reshape(*x.shape[:-1], groups, -1)
    normed = rms_norm(grouped, jnp.ones(grouped.shape[-1], jnp.float32), eps).reshape(x.shape).astype(x.dtype)
    return normed * weight.astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def fused_gated_norm(kernels: GatedNormBackend, groups: int, eps: float, x, gate, weight) -> Float[Array, "*B I"]:
    """Compute `gated_group_norm` by kernels; the weight gets a gradient only where it trains."""
    return kernels.gated_norm(x, gate, weight, groups=groups, eps=eps)


def _norm_forward(kernels, groups, eps, x, gate, weight):
    out = kernels.gated_norm(x.value, gate.value, weight.value, groups=groups, eps=eps)
    return out, (x.value, gate.value, weight.value, () if weight.perturbed else None)


def _norm_backward(kernels, groups, eps, residuals, dout):
    x, gate, weight, trained = residuals
    dx, dgate = kernels.gated_norm_gradient(x, gate, weight, dout, groups=groups, eps=eps)
    if trained is None:
        return dx, dgate, None
    # By XLA in float32: only full fine-tuning trains norms.
    x, gate, dout = (y.astype(jnp.float32) for y in (x, gate, dout))
    of_weight = jax.vjp(lambda weight: reference_gated_norm(x, gate, weight, groups, eps), weight)[1](dout)
    return dx, dgate, *of_weight


fused_gated_norm.defvjp(_norm_forward, _norm_backward, symbolic_zeros=True)
