"""Launches of the kernels in `kernels.py` and `row_kernels.py`."""

import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, dot_precision, shape_dtype_of
from jaxglue.ops.segments import PackedSegments
from jaxglue.ops.state_space import kernels, row_kernels
from jaxglue.ops.state_space.kernels import StateSpaceSpec
from jaxglue.ops.state_space.reference import StateHeads
from jaxglue.ops.state_space.vjp import Prepared

_BLOCK = 16
"""Heads whose decays a program sums."""
_WIDEST = 128
"""Most rows of a state of which two are in shared memory at a time."""


@dataclass(frozen=True, kw_only=True)
class StateSpaceTiles:
    """A program's part of a call, and how it is compiled."""

    columns: int = 64
    """Columns of a state."""
    heads: int = 8
    """Heads of a group, at most."""
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True, kw_only=True)
class TritonStateSpace(Launcher):
    """`StateSpaceBackend` by our own kernels."""

    decays: StateSpaceTiles = field(default_factory=lambda: StateSpaceTiles(heads=_BLOCK))
    state: StateSpaceTiles = field(default_factory=lambda: StateSpaceTiles(num_stages=3))
    output: StateSpaceTiles = field(default_factory=lambda: StateSpaceTiles(num_stages=2))
    input_gradient: StateSpaceTiles = field(default_factory=lambda: StateSpaceTiles(num_stages=2))
    group_gradient: StateSpaceTiles = field(default_factory=lambda: StateSpaceTiles(num_warps=8))
    chunk: int = 64

    def prepare(self, xbc, step, g, segments: PackedSegments, heads: StateHeads, *, dtype=None) -> Prepared:
        """See `StateSpaceBackend`."""
        spec, B, N, bounds = self._spec(xbc, heads), len(xbc), heads.values, (segments.starts, segments.ends)
        types = (jax.ShapeDtypeStruct((B, N, kernels.FACTORS.value, spec.T), jnp.float32),)
        (factors,) = self._run(kernels.decay_kernel, (step, g, bounds[0]), types, self.decays, spec, None)
        types, flops = (self._states(xbc, spec, dtype),), spec.S * spec.P
        (states,) = self._run(kernels.state_kernel, (xbc, *bounds, factors), types, self.state, spec, flops)
        return Prepared(factors=factors, states=states)

    def forward(self, xbc, skip, prepared: Prepared, segments: PackedSegments, heads: StateHeads) -> jax.Array:
        """See `StateSpaceBackend`."""
        spec, tiles = self._spec(xbc, heads), self._heads(self.output, heads)
        arrays = xbc, segments.starts, prepared.factors, prepared.states, skip
        types = (jax.ShapeDtypeStruct((len(xbc), spec.T, heads.values, spec.P), xbc.dtype),)
        flops = spec.S * spec.P + spec.chunk * (spec.P + spec.S // tiles.heads)
        return self._run(kernels.output_kernel, arrays, types, tiles, spec, flops)[0]

    def backward(self, xbc, skip, prepared: Prepared, segments: PackedSegments, heads: StateHeads, dout):
        """See `StateSpaceBackend`."""
        spec, B, p, starts = self._spec(xbc, heads), len(xbc), prepared, segments.starts
        bounded = xbc, starts, segments.ends, p.factors, dout
        flops, types = spec.S * spec.P, (self._states(xbc, spec),)
        (dstates,) = self._run(kernels.state_gradient_kernel, bounded, types, self.state, spec, flops)

        arrays, tiles = (xbc, starts, p.factors, p.states, dstates), self._heads(self.input_gradient, heads)
        gradients, pairs = (shape_dtype_of(xbc), shape_dtype_of(p.factors)), 2 * spec.chunk * spec.P
        inputs = *arrays, skip, dout
        dxbc, dfactors = self._run(kernels.input_gradient_kernel, inputs, gradients, tiles, spec, 2 * flops + pairs)

        tiles = self._heads(self.group_gradient, heads)
        parts = heads.values // heads.groups // tiles.heads
        types, pairs = (jax.ShapeDtypeStruct((parts, B, spec.T, 2 * heads.group_width), jnp.float32),), pairs // 2
        (sums,) = self._run(kernels.group_gradient_kernel, (*arrays, dout), types, tiles, spec, 2 * flops + pairs)
        groups = sums.sum(0).astype(dxbc.dtype)
        dxbc = jax.lax.dynamic_update_slice_in_dim(dxbc, groups, heads.value_width, axis=2)

        gates, kernel = (
            (jax.ShapeDtypeStruct((B, spec.T, heads.values), jnp.float32),) * 2,
            kernels.decay_gradient_kernel,
        )
        return dxbc, *self._run(kernel, (dfactors, starts), gates, self.decays, spec, None)

    def _states(self, xbc, spec: StateSpaceSpec, dtype=None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(xbc), spec.N, spec.chunks, spec.S, spec.P), dtype or xbc.dtype)

    def _heads(self, tiles: StateSpaceTiles, heads: StateHeads) -> StateSpaceTiles:
        """Return the tiles with as many heads as divide a group, and one stage where two of a state find no room."""
        stages = tiles.num_stages if heads.state_dim <= _WIDEST else 1
        return replace(tiles, heads=math.gcd(tiles.heads, heads.values // heads.groups), num_stages=stages)

    def _spec(self, xbc, heads: StateHeads) -> StateSpaceSpec:
        N, P, G, S = heads
        precision = dot_precision(xbc.dtype)
        return StateSpaceSpec(T=xbc.shape[1], G=G, R=N // G, S=S, P=P, precision=precision, chunk=self.chunk)

    def _run(self, kernel, arrays, types, tiles: StateSpaceTiles, spec: StateSpaceSpec, flops: int | None):
        """Launch programs for chunks and parts of heads, of products of so many values of a token and head; or none."""
        spec = replace(spec, columns=min(tiles.columns, spec.P), heads=tiles.heads, stages=tiles.num_stages)
        along_documents = kernel in (kernels.state_kernel, kernels.state_gradient_kernel)
        parts, B = spec.values // spec.columns if along_documents else -(-spec.N // spec.heads), len(arrays[0])
        cost = KernelCost(kind=KernelKind.ROWS)
        if flops is not None:
            cost = KernelCost(kind=KernelKind.DELTA_RULE, flops=2 * B * spec.T * spec.N * flops)
        grid, constants = (parts, spec.chunks, B), {"spec": spec}
        return self._launch(kernel, arrays, types, grid, constants, tiles.num_warps, tiles.num_stages, cost=cost)


_COLUMNS = 32
"""Columns of a state that a step's program advances."""


@dataclass(frozen=True, kw_only=True)
class TritonStateStep(Launcher):
    """`advance_states` by our own kernel, in place."""

    def __call__(self, states, slots, begun, xbc, step, g, skip, heads: StateHeads) -> tuple[jax.Array, jax.Array]:
        """Return (outputs, states)."""
        (N, P, G, S), sequences = heads, len(xbc)
        written, columns = (jax.new_ref(states), jax.new_ref(jax.lax.empty((sequences, N, P), xbc.dtype))), _COLUMNS
        sizes = {"N": N, "G": G, "S": S, "P": P, "BLOCK_P": min(columns, P)}
        cost = KernelCost(kind=KernelKind.ROWS, bytes=2 * sequences * N * S * P * 4)
        arrays = xbc, step, g, skip, slots, begun.astype(jnp.int32), *written
        grid = P // min(columns, P), N, sequences
        self._launch(row_kernels.step_kernel, arrays, (), grid, sizes, 4, cost=cost)
        states, out = map(jax.freeze, written)
        return out, states


_NORM_COST, _VALUES = KernelCost(kind=KernelKind.ROWS), 2048
"""Values of a tile of the norm, at least a group's."""


@dataclass(frozen=True, kw_only=True)
class TritonGatedNorm(Launcher):
    """`GatedNormBackend` by our own kernels."""

    def gated_norm(self, x, gate, weight, *, groups: int, eps: float) -> jax.Array:
        """See `GatedNormBackend`."""
        return self._norm(row_kernels.gated_norm_kernel, (x, gate, weight), groups, eps, 1)[0]

    def gated_norm_gradient(self, x, gate, weight, dout, *, groups: int, eps: float) -> tuple[jax.Array, ...]:
        """See `GatedNormBackend`."""
        return self._norm(row_kernels.gated_norm_gradient_kernel, (x, gate, weight, dout), groups, eps, 2)

    def _norm(self, kernel, arrays, groups: int, eps: float, outputs: int) -> tuple[jax.Array, ...]:
        """Launch programs for tiles of rows of a group's width; results are like the first array."""
        x, V = arrays[0], arrays[0].shape[-1] // groups
        rows = [y.reshape(-1, V) for y in arrays]
        M, block = len(rows[0]), 1 << (V - 1).bit_length()
        lines = max(_VALUES // block, 1)
        sizes = {"M": M, "V": V, "GROUPS": groups, "EPS": eps, "BLOCK_M": lines, "BLOCK_V": block}
        types, warps = (shape_dtype_of(rows[0]),) * outputs, min(max(4, block // 512), 16)
        out = self._launch(kernel, rows, types, (-(-M // lines),), sizes, warps, cost=_NORM_COST)
        return tuple(y.reshape(x.shape) for y in out)
