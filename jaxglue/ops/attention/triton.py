"""The Triton backend: launches of the kernels in `kernels.py`, `backward_kernels.py` and `rotated.py`."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import triton
from jax_triton.triton_lib import TensorDescriptor
from jaxtyping import Array, Float, Int

from jaxglue.ops.attention import backward_kernels, kernels, rotated
from jaxglue.ops.attention.kernels import AttentionKernelSpec
from jaxglue.ops.attention.rotation import Rotation
from jaxglue.ops.attention.tiles import AttentionKernelTiles, AttentionTiles, tile_columns
from jaxglue.ops.attention.vjp import Gradients
from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.segments import UNIT, PackedSegments


@dataclass(frozen=True, kw_only=True)
class TritonAttention(Launcher):
    """`AttentionBackend` by our own kernels; lse is [B, N/P, T, P] for tiles of P query heads of one key/value head.

    v may have other heads before the values, of which its gradient has nothing.
    """

    reads_joined_values: ClassVar[bool] = True

    tiles: AttentionKernelTiles
    aligned: bool = False
    """Tiles of keys begin at multiples of their size, so that a query's sums have one order in any window."""

    @property
    def descriptors(self) -> bool:
        """Return whether tiles are loaded through the tensor memory accelerator."""
        return self.compute_capability >= 90

    def forward(self, q, k, v, sinks, segments, *, window, softcap=None):
        """Return (out, lse)."""
        sizes, tiles = KernelSizes.of(q, k), self.tiles.forward
        count, units, unit = _tiles_in_order(segments, sizes.T, tiles.block_m // sizes.P)
        spec = _spec(sizes, v, window, segments, softcap)
        operands, by_descriptor = self._operands(q, k, v, tiles, spec)
        return self._launch_tiles(
            kernels.forward_kernel,
            (*operands, q if sinks is None else sinks, starts_of(segments), units),
            (jax.ShapeDtypeStruct((*q.shape[:3], spec.values), q.dtype), sizes.statistics()),
            (count * sizes.packs, sizes.B),
            tiles,
            replace(spec, has_sinks=sinks is not None, q_descriptor=by_descriptor, aligned=self.aligned, **unit),
            KernelKind.ATTENTION_FORWARD,
        )

    def backward(self, q, k, v, sinks, segments, out, lse, dout, *, window, softcap=None) -> Gradients:
        """Return (dq, dk, dv, dsinks)."""
        spec, outputs = _spec(KernelSizes.of(q, k), v, window, segments, softcap), (out, lse, dout)
        dq, delta = self._query_gradient(backward_kernels.dq_kernel, q, (q, k, v), segments, outputs, spec)
        types = shape_dtype_of(k), shape_dtype_of(v)
        arrays = (q, k, v), segments, (lse, delta, dout)
        if self.tiles.dv is None:
            dk, dv = self._key_value_gradients(backward_kernels.dkdv_kernel, types, *arrays, spec)
        else:
            alone = replace(spec, dvalues=False), replace(spec, dkeys=False)
            (dk,) = self._key_value_gradients(backward_kernels.dk_kernel, types[:1], *arrays, alone[0])
            (dv,) = self._key_value_gradients(backward_kernels.dv_kernel, types[1:], *arrays, alone[1])
        return dq, dk, dv, None if sinks is None else sink_gradient(sinks, lse, delta)

    def rotated_backward(self, q, k, z, segments, out, lse, dout, rotation: Rotation, *, window) -> jax.Array:
        """Return the gradient to z, whose last heads are values and whose others became q and k by the rotation."""
        norms, cos, sin = rotation.norms, rotation.cos, rotation.sin
        spec = _spec(KernelSizes.of(q, k), z, window, segments)
        spec = replace(spec, norm_eps=None if norms is None else norms.eps)
        q_weight, k_weight = (cos, cos) if norms is None else norms.weights
        arrays, outputs = ((q, k, z), segments), (out, lse, dout, z, q_weight, cos, sin)
        dz, delta = self._query_gradient(rotated.rotated_dq_kernel, z, *arrays, outputs, spec)
        written = jax.new_ref(dz)
        others = lse, delta, dout, z, k_weight, cos, sin, written
        self._key_value_gradients(rotated.rotated_dkdv_kernel, (), *arrays, others, spec)
        return jax.freeze(written)

    def _query_gradient(self, kernel, like, arrays, segments, outputs, spec: AttentionKernelSpec):
        """Return (an array like another with the gradient, delta)."""
        q, k, v = arrays
        sizes, tiles = KernelSizes.of(q, k), self.tiles.dq
        count, units, unit = _tiles_in_order(segments, sizes.T, tiles.block_m // sizes.P)
        operands, by_descriptor = self._operands(q, k, v, tiles, spec)
        return self._launch_tiles(
            kernel,
            (*operands, starts_of(segments), units, *outputs),
            (shape_dtype_of(like), sizes.statistics()),
            (count * sizes.packs, sizes.B),
            tiles,
            replace(spec, q_descriptor=by_descriptor, **unit),
            KernelKind.ATTENTION_BACKWARD,
        )

    def _key_value_gradients(self, kernel, out_type, arrays, segments, outputs, spec: AttentionKernelSpec):
        q, k, v = arrays
        lse, delta, dout, *others = outputs
        sizes, tiles = KernelSizes.of(q, k), self.tiles.dkdv if spec.dkeys else self.tiles.dv
        assert tiles is not None
        count, units, unit = _tiles_in_order(segments, sizes.S, tiles.block_n)
        block, ends = (tiles.block_m // sizes.P, sizes.P), _ends(segments, spec.window)
        first, rest = self._parts(q, spec.width, spec.rest, *block)
        by_descriptor = self.descriptors and tiles.k_descriptor
        keys = _descriptor(k, tiles.block_n, 1, spec.width) if by_descriptor else k
        operands = first, keys, v, rest, k if spec.rest else None, v if spec.values_rest else None
        douts = self._parts(dout, spec.width, spec.values_rest, *block)
        return self._launch_tiles(
            kernel,
            (*operands, ends, units, lse, delta, *douts, *others),
            out_type,
            (count * sizes.K, sizes.B),
            tiles,
            replace(spec, k_descriptor=by_descriptor, **unit),
            KernelKind.ATTENTION_BACKWARD,
        )

    def _operands(self, q, k, v, tiles: AttentionTiles, spec: AttentionKernelSpec) -> tuple[tuple, bool]:
        """Return (q, k, v and the rests of them, or their descriptors; whether q is a descriptor).

        A tile loaded by descriptor lies in registers, which pays for small tiles of wide heads. Triton 3.7.1 multiplies
        it wrongly where a tile has as many keys as a head has columns.
        """
        small = tiles.block_m <= 64 and tiles.block_n < spec.width
        by_descriptor = self.descriptors and spec.width >= 128 and small and tiles.block_n != spec.rest
        block = tiles.block_m // spec.P, spec.P
        first, rest = self._parts(q, spec.width, spec.rest, *block) if by_descriptor else (q, q if spec.rest else None)
        keys, keys_rest = self._parts(k, spec.width, spec.rest, tiles.block_n, 1)
        values, values_rest = self._parts(v, spec.width, spec.values_rest, tiles.block_n, 1)
        return (first, keys, values, rest, keys_rest, values_rest), by_descriptor

    def _parts(self, x, width: int, rest: int, tokens: int, heads: int) -> tuple:
        """Return the sources of the tiles of an array's first columns, and of the rest, or None without such."""
        return self._tiled(x, tokens, heads, width), self._tiled(x, tokens, heads, rest) if rest else None

    def _tiled(self, x, tokens: int, heads: int, width: int):
        """Return the array as a descriptor of [tokens, heads, width] tiles where the GPU has them."""
        return _descriptor(x, tokens, heads, width) if self.descriptors else x

    def _launch_tiles(
        self, kernel, arrays, out_type, grid, tiles: AttentionTiles, spec: AttentionKernelSpec, kind: KernelKind
    ):
        block_m, block_n, late = tiles.block_m, tiles.block_n, tiles.late
        spec = replace(spec, descriptors=self.descriptors, block_m=block_m, block_n=block_n, late=late)
        constants, compiled = {"spec": spec}, (tiles.num_warps, tiles.num_stages)
        cost, registers = KernelCost(kind=kind), tiles.registers
        return self._launch(kernel, arrays, out_type, grid, constants, *compiled, cost=cost, registers=registers)


@dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """Sizes of a call: B rows of T queries and S keys, K key/value heads with G query heads each, head dim H."""

    B: int
    T: int
    S: int
    K: int
    G: int
    P: int
    """Query heads in a tile: the largest power of two that divides G, at most 16."""
    H: int

    @classmethod
    def of(cls, q, k) -> "KernelSizes":
        """Return the sizes of a call."""
        B, T, N, H = q.shape
        G = N // k.shape[2]
        return cls(B=B, T=T, S=k.shape[1], K=k.shape[2], G=G, P=math.gcd(G, 16), H=H)

    @property
    def packs(self) -> int:
        """Return the number of tiles that hold a token's heads."""
        return self.K * self.G // self.P

    def statistics(self) -> jax.ShapeDtypeStruct:
        """Return the type of lse and delta."""
        return jax.ShapeDtypeStruct((self.B, self.packs, self.T, self.P), jnp.float32)

    def constants(self, window: int | None) -> dict:
        """Return the constants that all kernels share."""
        sizes = {"T": self.T, "K": self.K, "G": self.G, "P": self.P, "H": self.H}
        return sizes | {"WINDOW": window or 0, "SCALE": self.H**-0.5}


def _spec(
    sizes: KernelSizes, v, window: int | None, segments: PackedSegments, softcap: float | None = None
) -> AttentionKernelSpec:
    """Return the constants of a call, but not its tiles'."""
    values = v.shape[3]
    width, rest = tile_columns(sizes.H, values)
    return AttentionKernelSpec(
        T=sizes.T,
        S=sizes.S,
        K=sizes.K,
        V=v.shape[2],
        G=sizes.G,
        P=sizes.P,
        H=sizes.H,
        values=values,
        width=width,
        rest=rest,
        scale=sizes.H**-0.5,
        window=window or 0,
        forks=segments.gap_starts is not None,
        split=segments.own_keys is not None,
        softcap=softcap,
    )


def _tiles_in_order(segments: PackedSegments, T: int, tokens: int) -> tuple[int, Int[Array, "..."], dict]:
    """Return the tiles of so many tokens in a row, the units that they are in, and a unit's tokens.

    Without units, or for larger tiles, tiles start as they lie in a row; a unit has 0 tokens then.
    """
    if segments.units is None or tokens > UNIT:
        return triton.cdiv(T, tokens), segments.starts, {"unit": 0, "units": 0}
    count = segments.units.shape[3]
    return count * (UNIT // tokens), segments.units, {"unit": UNIT, "units": count}


def starts_of(segments: PackedSegments) -> Int[Array, "B *bounds T"]:
    """Return the first keys of queries; beside them the bounds of the keys that they skip, or their own keys."""
    lines = segments.starts, segments.gap_starts, segments.gap_ends, segments.own_keys
    bounds = [line for line in lines if line is not None]
    return jnp.stack(bounds, axis=1) if len(bounds) > 1 else segments.starts


def _ends(segments: PackedSegments, window: int) -> Int[Array, "B ..."]:
    """Return the ends of keys' queries; beside them the first ones, and in forked segments with a window positions.

    A second continuation's keys are followed by their own queries alone, so the window ends them.
    """
    if segments.first_queries is not None:
        lines = segments.ends, segments.first_queries
        positions = (segments.key_positions, segments.positions) if window and segments.gap_starts is not None else ()
        return jnp.concatenate([*lines, *positions], axis=1)
    if segments.gap_starts is None or segments.gap_ends is None or not window:
        return segments.ends
    last = jnp.arange(segments.ends.shape[1], dtype=jnp.int32) + window
    ends = jnp.where(segments.gap_ends > segments.gap_starts, jnp.minimum(segments.ends, last), segments.ends)
    return jnp.stack([ends, segments.positions], axis=1)


def _descriptor(x: Float[Array, "B T N H"], tokens: int, heads: int, width: int) -> TensorDescriptor:
    B, T, N, H = x.shape
    return TensorDescriptor.from_array(x.reshape(B * T, N, H), (tokens, heads, width))


def sink_gradient(
    sinks: Float[Array, " N"], lse: Float[Array, "B N/P T P"], delta: Float[Array, "B N/P T P"]
) -> Float[Array, " N"]:
    """Compute −Σ exp(sink − lse)·delta: a sink is a key with value zero; padding has delta 0."""
    sink = sinks.astype(jnp.float32).reshape(lse.shape[1], 1, lse.shape[3])
    return -(jnp.exp(sink - lse) * delta).sum((0, 2)).reshape(sinks.shape).astype(sinks.dtype)
