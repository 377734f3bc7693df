"""Differentiation rules of the fused backends; residuals are the backward kernels' inputs."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jaxglue.ops.norm_rope.reference import LLAMA_NORM, HeadNorms, NormStyle, reference_norm, reference_rotate

HeadWeights = tuple[Float[Array, " H"], Float[Array, " H"]]
Heads = tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]


FP8Values = tuple[Float[Array, "*B D"], Float[Array, "*B 1"], Float[Array, "*B 1"]]


class NormBackend(Protocol):
    """Kernels that pass over x once forward and once backward."""

    def norm(self, x, weight, stream=None, *, eps: float, style: NormStyle) -> Float[Array, "*B D"]:
        """Return `reference_norm` of x, plus a stream if there is one."""

    def fp8_norm(self, x, weight, *, eps: float, style: NormStyle) -> FP8Values:
        """Return e4m3 values of `reference_norm` of x, their scales [*B, 1], and 1 / x's root mean square [*B, 1]."""

    def norm_gradient(self, x, weight, dstream, dout, *, eps: float, style: NormStyle) -> Float[Array, "*B D"]:
        """Return the norm's gradient to x, plus dstream if there is one."""


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Static, hashable arguments of `fused_stream_norm` and `fused_norm`."""

    backend: NormBackend
    eps: float
    style: NormStyle = LLAMA_NORM
    fp8: bool = False
    """Return e4m3 values instead of the norm."""

    def outputs(self, x, weight) -> tuple[Array, ...]:
        """Return x and its `reference_norm`, or x twice and the e4m3 values of the norm."""
        if self.fp8:
            return x, x, *self.backend.fp8_norm(x, weight, **self.norm)
        return x, self.backend.norm(x, weight, **self.norm)

    @property
    def norm(self) -> dict[str, Any]:
        """Return the keywords of a backend's functions."""
        return {"eps": self.eps, "style": self.style}

    def weight_gradient(self, x, weight, dout) -> Float[Array, " D"]:
        """Return the norm's gradient to its weight by XLA in float32: only full fine-tuning trains norms."""
        x, dout = _float32(x), _float32(dout)
        return jax.vjp(lambda weight: reference_norm(x, weight, self.eps, self.style), weight)[1](dout)[0]


@partial(jax.tree_util.register_dataclass, data_fields=["x", "weight"], meta_fields=["weight_needs_grad"])
@dataclass(frozen=True, kw_only=True)
class _NormResiduals:
    x: Array
    weight: Array
    weight_needs_grad: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_stream_norm(spec: NormSpec, x: Float[Array, "*B D"], weight: Float[Array, " D"]) -> tuple[Array, ...]:
    """Return `spec.outputs` by a fused backend; the weight gets a gradient only where it trains.

    The gradient of the second result is that to the norm, in e4m3 or not.
    """
    return spec.outputs(x, weight)


def _norm_forward(spec, x, weight):
    residuals = _NormResiduals(x=x.value, weight=weight.value, weight_needs_grad=weight.perturbed)
    return spec.outputs(x.value, weight.value), residuals


def _norm_backward(spec, r: _NormResiduals, cotangents):
    dstream, dout = map(_instantiated, cotangents[:2])  # e4m3 values have none
    dx = spec.backend.norm_gradient(r.x, r.weight, dstream, dout, **spec.norm)
    return dx, spec.weight_gradient(r.x, r.weight, dout) if r.weight_needs_grad else None


fused_stream_norm.defvjp(_norm_forward, _norm_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_norm(
    spec: NormSpec, x: Float[Array, "*B D"], weight: Float[Array, " D"], stream: Float[Array, "*B D"] | None
) -> Float[Array, "*B D"]:
    """Return `reference_norm` of x by a fused backend, plus a stream if there is one; see `fused_stream_norm`."""
    return spec.backend.norm(x, weight, stream, **spec.norm)


def _added_norm_forward(spec, x, weight, stream):
    residuals = _NormResiduals(x=x.value, weight=weight.value, weight_needs_grad=weight.perturbed)
    out = spec.backend.norm(x.value, weight.value, None if stream is None else stream.value, **spec.norm)
    return out, (residuals, stream is not None)


def _added_norm_backward(spec, residuals, dout):
    r, has_stream = residuals
    dout = _instantiated(dout)
    dx = spec.backend.norm_gradient(r.x, r.weight, None, dout, **spec.norm)
    dweight = spec.weight_gradient(r.x, r.weight, dout) if r.weight_needs_grad else None
    return dx, dweight, dout if has_stream else None


fused_norm.defvjp(_added_norm_forward, _added_norm_backward, symbolic_zeros=True)


def _instantiated(cotangent):
    return jnp.zeros(cotangent.shape, cotangent.dtype) if isinstance(cotangent, SymbolicZero) else cotangent


def _float32(x: Array) -> Array:
    return x.astype(jnp.float32)


class RotateBackend(Protocol):
    """Kernels that pass over q and k once forward and once backward."""

    def rotate(
        self, q, k, weights: HeadWeights | None, cos, sin, *, spec: "RotateSpec", inverse: bool = False
    ) -> Heads:
        """Return (q, k), normed with `weights` if any, and rotated, or rotated back."""

    def rotate_gradient(self, q, k, weights: HeadWeights, cos, sin, dq_out, dk_out, *, spec: "RotateSpec") -> Heads:
        """Return (dq, dk) of normed and rotated heads."""


class NormRopeBackend(NormBackend, RotateBackend, Protocol):
    """Kernels of norms and of rotation."""


@dataclass(frozen=True, kw_only=True)
class RotateSpec:
    """Static, hashable arguments of `fused_rotate`."""

    backend: RotateBackend
    eps: float | None
    """None without norms."""
    style: NormStyle = LLAMA_NORM


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["heads", "weights", "cos", "sin"],
    meta_fields=["weights_need_grad"],
)
@dataclass(frozen=True, kw_only=True)
class _RotateResiduals:
    heads: Heads | None
    """q and k; None without norms."""
    weights: HeadWeights | None
    cos: Array
    sin: Array
    weights_need_grad: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_rotate(
    spec: RotateSpec,
    heads: Heads,
    weights: HeadWeights | None,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
) -> Heads:
    """Norm and rotate heads by a fused backend; weights get a gradient only where they train, the tables none."""
    return spec.backend.rotate(*heads, weights, cos, sin, spec=spec)


def _rotate_forward(spec, *primals):
    heads, weights, cos, sin = jax.tree.map(lambda primal: primal.value, primals)
    needs_grad = any(primal.perturbed for primal in jax.tree.leaves(primals[1]))
    saved_heads = None if weights is None else heads
    out = spec.backend.rotate(*heads, weights, cos, sin, spec=spec)
    return out, _RotateResiduals(heads=saved_heads, weights=weights, cos=cos, sin=sin, weights_need_grad=needs_grad)


def _rotate_backward(spec, r: _RotateResiduals, dout):
    dout = tuple(map(_instantiated, dout))
    if r.heads is None or r.weights is None:
        return spec.backend.rotate(*dout, None, r.cos, r.sin, spec=spec, inverse=True), None, None, None
    dheads = spec.backend.rotate_gradient(*r.heads, r.weights, r.cos, r.sin, *dout, spec=spec)
    return dheads, _weight_gradients(spec, r, dout) if r.weights_need_grad else None, None, None


def _weight_gradients(spec, r: _RotateResiduals, dout) -> HeadWeights:
    """Compute the norms' gradients by XLA in float32: only full fine-tuning trains norms."""
    assert r.heads is not None and r.weights is not None and spec.eps is not None
    q, k = map(_float32, r.heads)

    def rotate(weights: HeadWeights):
        norms = HeadNorms(*weights, spec.eps, spec.style)
        return reference_rotate(q, k, r.cos, r.sin, norms)

    return jax.vjp(rotate, r.weights)[1](tuple(map(_float32, dout)))[0]


fused_rotate.defvjp(_rotate_forward, _rotate_backward, symbolic_zeros=True)
