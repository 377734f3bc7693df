"""Launches of the kernels in `kernels.py`."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax

from jaxglue.ops.delta_rule.triton import DeltaKernelTiles
from jaxglue.ops.kda import kernels
from jaxglue.ops.kda.kernels import KDAKernelSpec
from jaxglue.ops.kda.vjp import KernelParts
from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, dot_precision, shape_dtype_of


class _Followed(NamedTuple):
    """Values that the backward pass reads."""

    inverses: jax.Array
    updates: jax.Array
    states: jax.Array


@dataclass(frozen=True, kw_only=True)
class TritonKDA(Launcher):
    """`KDABackend` by our own kernels."""

    inverse: DeltaKernelTiles = field(default_factory=DeltaKernelTiles)
    state: DeltaKernelTiles = field(default_factory=lambda: DeltaKernelTiles(num_stages=2))
    output: DeltaKernelTiles = field(default_factory=lambda: DeltaKernelTiles(columns=128))
    state_gradient: DeltaKernelTiles = field(default_factory=DeltaKernelTiles)
    gradient: DeltaKernelTiles = field(default_factory=lambda: DeltaKernelTiles(num_warps=8))
    chunk: int = 64

    def forward(self, parts: KernelParts, values, starts, ends, *, dtype=None) -> tuple[jax.Array, _Followed]:
        """See `KDABackend`."""
        spec, (B, T, N, V) = self._spec(parts, values), values.shape
        square = jax.ShapeDtypeStruct((B, N, T, spec.chunk), values.dtype)
        of_similar, flops = (parts.similar, parts.beta), 4 * spec.chunk**2
        (inverses,) = self._run(kernels.inverse_kernel, of_similar, (square,), self.inverse, spec, flops, whole=True)
        kept = jax.ShapeDtypeStruct((B, N, spec.chunks, spec.H, V), dtype or values.dtype)
        followed = parts.read, parts.written, values, parts.beta, inverses, parts.kept, starts, ends
        types, flops = (shape_dtype_of(values), kept), V * (2 * spec.H + spec.chunk)
        updates, states = self._run(kernels.state_kernel, followed, types, self.state, spec, flops)
        arrays, flops = (parts.asked, parts.scores, updates, states, starts), V * (spec.H + spec.chunk)
        (out,) = self._run(kernels.output_kernel, arrays, (shape_dtype_of(values),), self.output, spec, flops)
        return out, _Followed(inverses, updates, states)

    def backward(self, parts: KernelParts, kept: _Followed, starts, ends, dout) -> tuple[KernelParts, jax.Array]:
        """See `KDABackend`."""
        spec = self._spec(parts, dout)
        flops = spec.V * (3 * spec.H + 2 * spec.chunk)
        followed = *parts[:3], parts.scores, kept.inverses, parts.beta, parts.kept, starts, ends, dout
        states = jax.ShapeDtypeStruct(kept.states.shape, dout.dtype)
        kernel, tiles = kernels.state_gradient_kernel, self.state_gradient
        dvalues, dstates = self._run(kernel, followed, (shape_dtype_of(dout), states), tiles, spec, flops)
        arrays = parts.beta, kept.updates, kept.states, dstates, dout, dvalues, starts
        like = tuple(map(shape_dtype_of, parts))
        gradients = self._run(kernels.gradient_kernel, arrays, like, self.gradient, spec, flops, whole=True)
        return KernelParts(*gradients), dvalues

    def _spec(self, parts: KernelParts, values) -> KDAKernelSpec:
        _, T, N, V = values.shape
        H, precision = parts.asked.shape[-1], dot_precision(values.dtype)
        return KDAKernelSpec(T=T, N=N, H=H, V=V, precision=precision, chunk=self.chunk)

    def _run(
        self, kernel, arrays, types, tiles: DeltaKernelTiles, spec: KDAKernelSpec, flops: int, *, whole=False
    ) -> tuple[jax.Array, ...]:
        """Launch programs for chunks of heads, or for parts of their columns, of so many products a token and head."""
        columns, B = min(tiles.columns, spec.V), len(arrays[0])
        grid = spec.N if whole else spec.N * spec.V // columns, spec.chunks, B
        spec = replace(spec, columns=columns, stages=tiles.num_stages)
        cost = KernelCost(kind=KernelKind.DELTA_RULE, flops=2 * B * spec.T * spec.N * flops)
        return self._launch(kernel, arrays, types, grid, {"spec": spec}, tiles.num_warps, tiles.num_stages, cost=cost)
