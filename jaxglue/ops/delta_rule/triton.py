"""Launches of the kernels in `kernels.py`, `row_kernels.py` and `step_kernels.py`."""

import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jaxglue.ops.delta_rule import kernels, row_kernels, step_kernels
from jaxglue.ops.delta_rule.kernels import DeltaKernelSpec
from jaxglue.ops.delta_rule.reference import DeltaHeads
from jaxglue.ops.delta_rule.vjp import Prepared
from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, dot_precision, shape_dtype_of
from jaxglue.ops.segments import PackedSegments


@dataclass(frozen=True, kw_only=True)
class DeltaKernelTiles:
    """A program's part of a call, and how it is compiled."""

    columns: int = 64
    """Columns of values at a time."""
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True, kw_only=True)
class DeltaTiles:
    """Tiles of each kernel."""

    prepare: DeltaKernelTiles = field(default_factory=DeltaKernelTiles)
    state: DeltaKernelTiles = field(default_factory=lambda: DeltaKernelTiles(num_stages=3))
    output: DeltaKernelTiles = field(default_factory=lambda: DeltaKernelTiles(columns=128))
    state_gradient: DeltaKernelTiles = field(default_factory=DeltaKernelTiles)
    gradient: DeltaKernelTiles = field(default_factory=lambda: DeltaKernelTiles(num_warps=8))


@dataclass(frozen=True, kw_only=True)
class TritonDeltaRule(Launcher):
    """`DeltaBackend` by our own kernels."""

    tiles: DeltaTiles = field(default_factory=DeltaTiles)
    chunk: int = 64

    def prepare(self, qkv, g, beta, segments: PackedSegments, heads: DeltaHeads, *, dtype=None) -> Prepared:
        """See `DeltaBackend`."""
        spec, (B, N) = self._spec(qkv, heads), (qkv.shape[0], heads[1])
        square = jax.ShapeDtypeStruct((B, N, spec.T, spec.chunk), qkv.dtype)
        factor = jax.ShapeDtypeStruct((B, N, kernels.FACTORS.value, spec.T), jnp.float32)
        arrays = qkv, g, beta, segments.starts
        flops = 2 * B * spec.T * N * spec.chunk * (2 * spec.H + 4 * spec.chunk)
        tiles, grid = self.tiles.prepare, (N, spec.chunks, B)
        factors, inverses, scores = self._run(
            kernels.prepare_kernel, arrays, (factor, square, square), grid, tiles, spec, flops
        )
        types = jax.ShapeDtypeStruct((B, spec.T, N, spec.V), qkv.dtype), self._states(qkv, spec, dtype)
        operands, tiles = (qkv, segments.starts, segments.ends, factors, inverses), self.tiles.state
        flops = 2 * B * spec.T * N * spec.V * (2 * spec.H + spec.chunk)
        updates, states = self._run(
            kernels.state_kernel, operands, types, self._parts(spec, tiles, B), tiles, spec, flops
        )
        return Prepared(factors=factors, inverses=inverses, scores=scores, updates=updates, states=states)

    def forward(self, qkv, prepared: Prepared, segments: PackedSegments, heads: DeltaHeads) -> jax.Array:
        """See `DeltaBackend`."""
        spec, B, p = self._spec(qkv, heads), qkv.shape[0], prepared
        arrays, tiles = (qkv, segments.starts, p.factors, p.scores, p.updates, p.states), self.tiles.output
        flops = 2 * B * spec.T * heads[1] * spec.V * (spec.H + spec.chunk)
        types = (shape_dtype_of(p.updates),)
        return self._run(kernels.output_kernel, arrays, types, self._parts(spec, tiles, B), tiles, spec, flops)[0]

    def backward(self, qkv, prepared: Prepared, segments: PackedSegments, heads: DeltaHeads, dout):
        """See `DeltaBackend`; the gradients to g and β are in float32."""
        spec, (B, N), p, tiles = self._spec(qkv, heads), (qkv.shape[0], heads[1]), prepared, self.tiles.state_gradient
        arrays = qkv, segments.starts, segments.ends, p.factors, p.inverses, p.scores, dout
        types, grid = (shape_dtype_of(qkv), self._states(qkv, spec)), self._parts(spec, tiles, B)
        flops = 2 * B * spec.T * N * spec.V * (3 * spec.H + 2 * spec.chunk)
        dqkv, dstates = self._run(kernels.state_gradient_kernel, arrays, types, grid, tiles, spec, flops)
        written = [jax.new_ref(x) for x in (dqkv, *(jax.lax.empty((B, spec.T, N), jnp.float32) for _ in range(2)))]
        arrays = qkv, segments.starts, p.factors, p.updates, p.states, dstates, dout, *written
        flops = 2 * B * spec.T * N * (3 * spec.H * spec.V + spec.chunk * (2 * spec.V + 4 * spec.H))
        grid, tiles = (spec.K, spec.chunks, B), self.tiles.gradient
        self._run(kernels.gradient_kernel, arrays, (), grid, tiles, spec, flops)
        return tuple(map(jax.freeze, written))

    def _states(self, qkv, spec: DeltaKernelSpec, dtype=None) -> jax.ShapeDtypeStruct:
        N = spec.K * spec.G
        return jax.ShapeDtypeStruct((qkv.shape[0], N, spec.chunks, spec.H, spec.V), dtype or qkv.dtype)

    def _parts(self, spec: DeltaKernelSpec, tiles: DeltaKernelTiles, B: int) -> tuple[int, int, int]:
        return spec.K * spec.G * spec.V // min(tiles.columns, spec.V), spec.chunks, B

    def _spec(self, qkv, heads: DeltaHeads) -> DeltaKernelSpec:
        (K, N, H), (_, T, width), precision = heads, qkv.shape, dot_precision(qkv.dtype)
        V = DeltaHeads(*heads).value_dim(width)
        return DeltaKernelSpec(T=T, K=K, G=N // K, H=H, V=V, precision=precision, chunk=self.chunk)

    def _run(self, kernel, arrays, types, grid, tiles: DeltaKernelTiles, spec: DeltaKernelSpec, flops: int):
        spec = replace(spec, columns=min(tiles.columns, spec.V), stages=tiles.num_stages)
        cost = KernelCost(kind=KernelKind.DELTA_RULE, flops=flops)
        return self._launch(kernel, arrays, types, grid, {"spec": spec}, tiles.num_warps, tiles.num_stages, cost=cost)


_COST = KernelCost(kind=KernelKind.ROWS)
_CHANNELS, _VALUES = 1024, 2048
"""Channels of a tile of the convolution, and values of a tile of the norm."""


@dataclass(frozen=True, kw_only=True)
class TritonDeltaRows(Launcher):
    """`RowsBackend` by our own kernels."""

    tokens: int = 8
    """Tokens in a tile of the convolution."""
    num_warps: int = 4

    def convolve(self, x, taps, bias, starts) -> jax.Array:
        """See `RowsBackend`."""
        return self._convolve(row_kernels.convolution_kernel, x, taps, bias, starts)

    def convolve_gradient(self, x, taps, bias, starts, dy) -> jax.Array:
        """See `RowsBackend`."""
        return self._convolve(row_kernels.convolution_gradient_kernel, x, taps, bias, starts, dy)

    def _convolve(self, kernel, x, *others) -> jax.Array:
        (B, T, C), channels = x.shape, math.gcd(x.shape[2], _CHANNELS)
        sizes = {"T": T, "C": C, "BLOCK_T": self.tokens, "BLOCK_C": channels}
        grid = C // channels, -(-T // self.tokens), B
        return self._launch(kernel, (x, *others), (shape_dtype_of(x),), grid, sizes, self.num_warps, cost=_COST)[0]

    def gated_norm(self, x, gate, weight, *, eps: float) -> jax.Array:
        """See `RowsBackend`."""
        return self._norm(row_kernels.gated_norm_kernel, (x, gate, weight), eps, 1)[0]

    def gated_norm_gradient(self, x, gate, weight, dout, *, eps: float) -> tuple[jax.Array, ...]:
        """See `RowsBackend`."""
        return self._norm(row_kernels.gated_norm_gradient_kernel, (x, gate, weight, dout), eps, 2)

    def _norm(self, kernel, arrays, eps: float, outputs: int) -> tuple[jax.Array, ...]:
        """Launch programs for tiles of rows of the last axis; results are like the first array."""
        x, V = arrays[0], arrays[0].shape[-1]
        rows = [y.reshape(-1, V) if y.ndim > 1 else y for y in arrays]
        M, block = len(rows[0]), 1 << (V - 1).bit_length()
        lines = max(_VALUES // block, 1)
        sizes = {"M": M, "V": V, "EPS": eps, "BLOCK_M": lines, "BLOCK_V": block}
        types = (shape_dtype_of(rows[0]),) * outputs
        out = self._launch(kernel, rows, types, (-(-M // lines),), sizes, self.num_warps, cost=_COST)
        return tuple(y.reshape(x.shape) for y in out)


@dataclass(frozen=True, kw_only=True)
class TritonDeltaStep(Launcher):
    """`advance_states` and `advance_rows` by our own kernels, in place."""

    one: DeltaKernelTiles = field(default_factory=lambda: DeltaKernelTiles(columns=32))
    several: DeltaKernelTiles = field(default_factory=lambda: DeltaKernelTiles(columns=32, num_warps=1))
    """Tiles of several tokens: sums within one warp wait for no barrier (`benchmarks/delta_rule.py --tiles`)."""

    def __call__(self, states, slots, begun, qkv, g, beta, heads: DeltaHeads) -> tuple[jax.Array, jax.Array]:
        """Return (outputs, states)."""
        token, out = (qkv, g, beta), (*g.shape, states.shape[-1])
        out, states = self._advance(step_kernels.step_kernel, self.one, states, slots, begun, token, out, heads)
        return out, states

    def rows(self, states, slots, begun, kept, counts, tokens, heads: DeltaHeads) -> tuple[jax.Array, jax.Array]:
        """Return `advance_rows`' (outputs, states)."""
        (S, R, N), V = tokens[1].shape, states.shape[-1]
        if not R:  # a kernel takes no empty arrays
            tokens = kept
        arrays, sizes = (*kept, counts, *tokens), {"KEPT": kept[1].shape[1], "ROWS": R}
        at, out = (states, slots, begun), (S, max(R, 1), N, V)
        out, states = self._advance(step_kernels.rows_kernel, self.several, *at, arrays, out, heads, **sizes)
        return out[:, :R], states

    def _advance(self, kernel, tiles: DeltaKernelTiles, states, slots, begun, arrays, out, heads: DeltaHeads, **sizes):
        """Launch programs for columns of each sequence's heads; `out` is the outputs' shape."""
        S, (_, N, H, V) = len(slots), states.shape
        written = jax.new_ref(states), jax.new_ref(jax.lax.empty(out, arrays[0].dtype))
        columns = min(tiles.columns, V)
        sizes |= {"K": heads.keys, "G": N // heads.keys, "H": H, "V": V, "BLOCK_V": columns}
        cost = KernelCost(kind=KernelKind.ROWS, bytes=2 * S * N * H * V * 4)
        arrays = *arrays, slots, begun.astype(jnp.int32), *written
        self._launch(kernel, arrays, (), (V // columns, N, S), sizes, tiles.num_warps, tiles.num_stages, cost=cost)
        states, out = map(jax.freeze, written)
        return out, states


_STEP_CHANNELS = 512
"""Channels that a program of a convolution's step has."""


@dataclass(frozen=True, kw_only=True)
class TritonConvolutionStep(Launcher):
    """`convolve_rows` by our own kernel, in place."""

    def __call__(self, inputs, slots, begun, x, weight, bias, kept, counts) -> tuple[jax.Array, jax.Array]:
        """Return (outputs, inputs)."""
        (S, R, C), taps = x.shape, weight.shape[2]
        written = jax.new_ref(inputs), jax.new_ref(jax.lax.empty((S, max(R, 1), C), x.dtype))
        arrays = {
            "x": x if R else kept,  # a kernel takes no empty arrays
            "kept": kept,
            "counts": counts,
            "taps": weight,
            "bias": bias,
            "slots": slots,
            "begun": begun.astype(jnp.int32),
            "inputs": written[0],
            "out": written[1],
        }
        sizes = {"ROWS": R, "KEPT": 0 if kept is None else kept.shape[1], "TAPS": taps, "C": C, "BLOCK": _STEP_CHANNELS}
        grid = -(-C // _STEP_CHANNELS), S
        self._launch(step_kernels.convolution_kernel, arrays, (), grid, sizes, 4, cost=_COST)
        inputs, out = map(jax.freeze, written)
        return out[:, :R], inputs
