"""Experts with few tokens each, as in decoding: three launches read their matrices once, as they are stored."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton
from jax_triton.triton_lib import TensorDescriptor
from jaxtyping import Array, Float, Int, UInt8
from triton.experimental.gluon.language import NVMMASharedLayout

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.moe import few_rows_kernels, few_rows_ring
from jaxglue.ops.moe.kernels import combine_kernel
from jaxglue.ops.moe.reference import GPT_OSS_ALPHA, GPT_OSS_LIMIT, Activation, ExpertAdapter
from jaxglue.ops.moe.routing import GroupMetadata, Order, Routing, RowTiles, few_rows_tile
from jaxglue.ops.moe.tiles import row_block
from jaxglue.ops.projection.few_rows_operands import MULTIPROCESSORS
from jaxglue.ops.quant.blocks import dynamic_code
from jaxglue.ops.quant.formats import Quantized
from jaxglue.ops.quant.fp8 import FP8Weight
from jaxglue.ops.quant.int8 import LARGEST, Int8Weight
from jaxglue.ops.quant.mxfp4 import MXFP4
from jaxglue.ops.quant.nf4 import BLOCK, NF4, VALUES
from jaxglue.ops.quant.stack import Stack


@dataclass(frozen=True, kw_only=True)
class RingTiles:
    """Tiles of `few_rows_ring`."""

    groups: int
    """Warpgroups of a program that multiply, 64 rows of a matrix each: two or three."""
    stages: int
    """Places of the ring."""
    programs: int
    """Programs of a multiprocessor."""


@dataclass(frozen=True, kw_only=True)
class ExpertsTiles:
    """Columns of a matrix in a program, the length of a step of the sum, and how it is compiled."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    registers: int | None = None
    """Most registers of a thread."""
    half: bool = False
    """Multiply FP8 and int8 in float16: three of four instructions that decode them go."""
    shrink_k: int | None = 512
    """Columns of an adapter's first matrix in a program, rounded to steps; None for all in one."""
    ring: RingTiles | None = None
    """Tiles of the ring that reads GPT-OSS's experts in MXFP4; None reads them as other formats."""


_TILES = {
    "plain": ExpertsTiles(block_n=64, block_k=128, num_warps=4, num_stages=4),
    "bytes": ExpertsTiles(block_n=64, block_k=128, num_warps=4, num_stages=5, half=True),
    "nf4": ExpertsTiles(block_n=128, block_k=128, num_warps=4, num_stages=4),
}
_RING = RingTiles(groups=2, stages=4, programs=2)
_MXFP4_TILES = {
    16: ExpertsTiles(
        block_n=64, block_k=256, num_warps=4, num_stages=3, ring=RingTiles(groups=3, stages=4, programs=2)
    ),
    32: ExpertsTiles(block_n=64, block_k=128, num_warps=4, num_stages=4, ring=_RING),
    # Three programs at a time without a ring.
    64: ExpertsTiles(block_n=128, block_k=128, num_warps=4, num_stages=3, registers=168, ring=_RING),
}


def fitting_tiles(kind: str, rows: int) -> ExpertsTiles:
    """Return tiles for matrices stored as `kind` and tiles of so many rows."""
    return _MXFP4_TILES[min(rows, 64)] if kind == "mxfp4" else _TILES[kind]


ORDERS = {"plain": "", "mxfp4": "codes", "bytes": "pairs", "nf4": "pairs"}
"""Order of columns in which matrices are multiplied, by how they are stored."""


class _StoredMatrices(NamedTuple):
    """Matrices of all experts as a kernel reads them."""

    kind: str
    values: Array
    scales: Array | None = None
    factor: float = 1.0
    nf4: tuple[Array, Array, Array] | None = None
    """Groups' factors, offset, and the values of scales' codes."""

    @property
    def bytes(self) -> int:
        """Return the bytes of all matrices."""
        return sum(part.size * part.dtype.itemsize for part in (self.values, self.scales) if part is not None)


def _stored(matrices: Array | Quantized) -> _StoredMatrices:
    if isinstance(matrices, MXFP4):
        return _StoredMatrices("mxfp4", matrices.blocks, matrices.scales)
    if not isinstance(matrices, Stack):
        assert isinstance(matrices, jax.Array)
        return _StoredMatrices("plain", matrices)
    rows = matrices.rows
    if isinstance(rows, NF4):
        return _StoredMatrices(
            "nf4", rows.codes, rows.scales, nf4=(rows.scale_absmax, rows.scale_offset, jnp.asarray(dynamic_code()))
        )
    if isinstance(rows, Int8Weight):
        return _StoredMatrices("bytes", rows.codes, rows.absmax, 1 / LARGEST)
    assert isinstance(rows, FP8Weight)
    return _StoredMatrices("bytes", rows.values, rows.scales)


class _Adapter(NamedTuple):
    """Adapter of one matrix of all experts as a kernel reads it."""

    A: Float[Array, "E R K"]
    B: Float[Array, "E N R"]
    scale: float
    used: UInt8[Array, "S R"] | None
    """Whether a row uses a rank (not zero); None where all use all."""

    @classmethod
    def of(cls, adapter: ExpertAdapter | None, scale: float) -> "_Adapter | None":
        """Return the operands of an adapter; None without."""
        if adapter is None:
            return None
        return cls(adapter.A, adapter.B, scale, None if adapter.used is None else adapter.used.astype(jnp.uint8))

    @property
    def constants(self) -> dict[str, Any]:
        """Return the kernel's constants."""
        rank = self.A.shape[1]
        block_r = max(16, triton.next_power_of_2(rank))
        return {"R": rank, "block_r": block_r, "factor_of_adapter": self.scale}

    @property
    def bytes(self) -> int:
        """Return the bytes of both matrices of all experts."""
        return sum(part.size * part.dtype.itemsize for part in (self.A, self.B))


def _columns(count: int, order: str) -> int:
    """Return the columns of x in an order, of which those beyond `count` are zeros."""
    return -(-count // 128) * 128 if order == "codes" else count


def _fewer(rows: int) -> tuple[tuple[int, int], ...]:
    """Return the numbers of rows, as sums of two, by which a kernel multiplies tiles of fewer, the fewest first."""
    if rows <= 16:
        return ()
    return ((rows // 2, 0),) if rows == 32 else ((rows // 2, 0), (rows // 2, rows // 4))


def ordered(x: Float[Array, "M K"], order: str) -> Float[Array, "M C"]:
    """Return x with its columns in the order in which stored matrices are multiplied, and zeros in `_columns`.

    A thread's operands of 16 columns are neighboring pairs 0 and 4 of eight, of which three more threads have others.
    In "pairs" a thread has eight neighboring columns of 32, which it reads at once; in "codes" the 32 of a block of
    128, by pairs four columns apart.
    """
    if order == "codes":
        x = jnp.pad(x, ((0, 0), (0, _columns(x.shape[1], order) - x.shape[1])))
        x = x.reshape(len(x), -1, 4, 4, 2, 4).transpose(0, 1, 3, 5, 2, 4).reshape(x.shape)
    elif order == "pairs":
        x = x.reshape(len(x), -1, 4, 4, 2).swapaxes(2, 3).reshape(x.shape)
    return x


def divided(x: Float[Array, "M K"]) -> tuple[Float[Array, "M K"], Float[Array, " M"]]:
    """Return rows divided by powers of two so that float16 holds them, and the powers.

    Of 16 bits only values below 2⁻²⁸ of their row's largest lose any.
    """
    largest = jnp.abs(x).max(axis=1).astype(jnp.float32)
    exponents = jax.lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    powers = jnp.maximum(jax.lax.bitcast_convert_type(exponents, jnp.float32), 2.0**-100) * 2.0**-14
    return (x.astype(jnp.float32) / powers[:, None]).astype(jnp.float16), powers


@dataclass(frozen=True, kw_only=True)
class TritonFewRowsExperts(Launcher):
    """`moe_mlp` of few tokens by our own kernels, without gradients."""

    tiles: ExpertsTiles | None = None
    """Tiles; None takes those measured on an H100 or H200."""
    plain: bool = False
    """Decode MXFP4 and NF4 without instructions that Triton's interpreter lacks."""

    def choose(self, scores: Float[Array, "M E"], k: int) -> Int[Array, "M k"]:
        """Return the experts of the k largest scores of each token, of equal ones the first."""
        return self._choose(scores, k, softmax_first=False, normalize=False)[0]

    def _choose(self, scores, k: int, *, softmax_first: bool, normalize: bool) -> tuple[Array, Array]:
        """Return each token's experts, and their weights."""
        M, E = scores.shape
        constants = {"E": E, "X": k, "SOFTMAX_FIRST": softmax_first, "NORMALIZE": normalize}
        constants |= {"BLOCK_E": triton.next_power_of_2(E), "BLOCK_X": triton.next_power_of_2(k)}
        out_types = tuple(jax.ShapeDtypeStruct((M, k), dtype) for dtype in (jnp.int32, jnp.float32))
        cost, kernel = KernelCost(kind=KernelKind.ROWS), few_rows_kernels.choose_kernel
        return self._launch(kernel, (scores,), out_types, (M,), constants, 1, cost=cost)

    def route(self, logits: Float[Array, "M E"], k: int, *, order: Order, normalize: bool) -> Routing:
        """Compute `route` in two launches."""
        (M, E), A = logits.shape, len(logits) * k
        rows = few_rows_tile(A // E)
        normalize = normalize or order == "topk_softmax"
        expert_ids, weights = self._choose(logits, k, softmax_first=order == "softmax_topk", normalize=normalize)
        cost, group = KernelCost(kind=KernelKind.ROWS), few_rows_kernels.group_kernel
        tiles = A // rows + min(E, A)
        constants = {"A": A, "E": E, "ROWS": rows, "TILES": tiles}
        constants |= {"BLOCK_A": triton.next_power_of_2(A), "BLOCK_E": triton.next_power_of_2(E + 1)}
        constants["BLOCK_T"] = triton.next_power_of_2(tiles)
        ints = (A,), (M, k), (E,), (E + 1,), (4, tiles)
        out_types = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ints)
        permutation, inverse, sizes, offsets, table = self._launch(
            group, (expert_ids,), out_types, (E + 1,), constants, 4, cost=cost
        )
        tiled = RowTiles(table=table, rows=rows)
        groups = GroupMetadata(sizes=sizes, offsets=offsets, tiles=tiled, gathered_tiles=tiled)
        return Routing(expert_ids=expert_ids, weights=weights, permutation=permutation, inverse=inverse, groups=groups)

    def mlp(
        self,
        x: Float[Array, "M D"],
        routing: Routing,
        matrices,
        biases,
        adapters: tuple[ExpertAdapter | None, ExpertAdapter | None] = (None, None),
        *,
        activation: Activation,
        transpose_rhs: bool,
        lora_scales: tuple[float, float] = (1.0, 1.0),
        exact: bool = False,
    ) -> Float[Array, "M D"]:
        """Compute `moe_mlp` from (gate_up, down) of matrices, biases and adapters without their scales."""
        D, F = x.shape[1], (matrices[1].shape[2] if transpose_rhs else matrices[1].shape[1])
        first, second = map(_stored, matrices)
        hidden = self._multiply(
            ordered(x, ORDERS[first.kind]),
            routing,
            first,
            biases[0],
            _Adapter.of(adapters[0], lora_scales[0]),
            (D, F),
            activation=activation,
            transpose_rhs=transpose_rhs,
            tokens=routing.tokens,
            order=ORDERS[second.kind],
            exact=exact,
        )
        adapter = _Adapter.of(adapters[1], lora_scales[1])
        sizes = F, D
        options: dict[str, Any] = {"transpose_rhs": transpose_rhs, "exact": exact}
        rows = self._multiply(hidden, routing, second, None, adapter, sizes, activation=None, **options)
        extra = (None,) * 3 if biases[1] is None else (routing.weights, routing.expert_ids, biases[1])
        arrays, block = (rows, routing.inverse, *extra), row_block(D)
        constants = {"D": D, "X": routing.inverse.shape[1], "BLOCK": block}
        cost, warps = KernelCost(kind=KernelKind.ROWS), max(1, block // 128)
        return self._launch(combine_kernel, arrays, (shape_dtype_of(x),), (len(x),), constants, warps, cost=cost)[0]

    def _multiply(
        self,
        x,
        routing: Routing,
        matrices: _StoredMatrices,
        bias,
        adapter: _Adapter | None,
        sizes: tuple[int, int],
        *,
        activation: Activation | None,
        transpose_rhs,
        tokens=None,
        order: str = "",
        exact: bool = False,
    ) -> Float[Array, "S C"]:
        """Multiply rows by their experts' matrices of these columns and rows; with an activation, times their weights.

        Columns of x are in the order of the matrices, those of the result in `order`.
        """
        S, (K, N), out_columns, dtype = routing.permutation.size, sizes, _columns(sizes[1], order), x.dtype
        row_tiles, gated = routing.groups.gathered_tiles, activation not in (None, "relu2")
        tiles = self.tiles or fitting_tiles(matrices.kind, row_tiles.rows)
        if tiles.ring is not None and activation in (None, "gpt_oss") and not exact and not self.plain:
            rows = x if tokens is None else x[tokens]
            return self._ring(rows, routing, matrices, bias, adapter, tiles.ring, sizes, activation)
        table, E = row_tiles.table, routing.group_sizes.shape[0]
        is_half = tiles.half and matrices.kind == "bytes" and (adapter is None or not exact)
        if is_half and not self.tiles and (row_tiles.rows == 64 or adapter is not None):
            tiles = replace(tiles, block_n=128, num_stages=4)  # decoded by few instructions, from few registers
        rows, (x, powers) = x, divided(x) if is_half else (x, None)
        arrays: tuple[Any, ...] = (
            x,
            powers,
            rows if is_half and adapter is not None else None,
            tokens,
            matrices.values,
            matrices.scales,
            matrices.nf4,
            jnp.asarray(np.array(VALUES, np.float32)) if self.plain and matrices.nf4 else None,
            bias,
            None if activation is None else routing.row_weights,
            table,
            # A constant: launches of a program run one after another, and each leaves zeros.
            None if adapter is None else (adapter.A, adapter.B, jnp.zeros((2, table.shape[1]), jnp.int32)),
            None if adapter is None else adapter.used,
        )
        least = {"nf4": BLOCK, "mxfp4": 128}.get(matrices.kind, 32)
        block_k = min(max(tiles.block_k, least), max(least, triton.next_power_of_2(K)))
        block_n = min(tiles.block_n // (2 if gated else 1), max(16, triton.next_power_of_2(N)))
        # In training's order a sum is one program's.
        shrink_steps = triton.cdiv(min(K, tiles.shrink_k) if tiles.shrink_k and not exact else K, block_k)
        shrinks = triton.cdiv(triton.cdiv(K, block_k), shrink_steps)
        # Results come last, those of adapters first; arguments without use are None.
        results: list[tuple[tuple[int, ...], Any]] = [((S, out_columns), dtype)]
        if adapter is None:
            arrays += None, None
        else:
            ranks = adapter.constants["block_r"]
            results.insert(0, ((S, ranks), dtype))
            if shrinks > 1:
                results.insert(0, ((shrinks, S, ranks), jnp.float32))
            else:
                arrays += (None,)
        spec = few_rows_kernels.ExpertsSpec(
            E=E,
            K=K,
            N=N,
            x_columns=x.shape[1],
            out_columns=out_columns,
            tiles=table.shape[1],
            transposed=transpose_rhs,
            stored=matrices.kind,
            factor=matrices.factor,
            order=order,
            plain=self.plain,
            gated=gated,
            gpt_oss=activation == "gpt_oss",
            gelu=activation == "geglu",
            alpha=GPT_OSS_ALPHA,
            limit=GPT_OSS_LIMIT,
            block_m=row_tiles.rows,
            fewer=_fewer(row_tiles.rows),
            block_n=block_n,
            block_k=block_k,
            exact=exact,
            **({} if adapter is None else adapter.constants),
            **({} if adapter is None or shrinks == 1 else {"shrinks": shrinks, "shrink_steps": shrink_steps, "S": S}),
        )
        columns, rank = 2 * N if gated else N, spec.R
        stored = matrices.bytes + (0 if adapter is None else adapter.bytes)
        moved = round(stored * min(1.0, S / E)) + S * (K + N) * x.dtype.itemsize
        flops = 2 * S * (K * columns + rank * (K + columns))
        cost = KernelCost(kind=KernelKind.EXPERTS_MATMUL, flops=flops, bytes=moved)
        grid = table.shape[1], triton.cdiv(N, block_n) + (spec.shrinks if rank else 0)
        compiled = tiles.num_warps, tiles.num_stages
        out_types = tuple(jax.ShapeDtypeStruct(*result) for result in results)
        kernel, registers = few_rows_kernels.experts_kernel, tiles.registers
        *_, out = self._launch(
            kernel, arrays, out_types, grid, {"spec": spec}, *compiled, cost=cost, registers=registers
        )
        return out

    def _ring(
        self,
        x,
        routing: Routing,
        matrices: _StoredMatrices,
        bias,
        adapter: _Adapter | None,
        tiles: RingTiles,
        sizes: tuple[int, int],
        activation: Activation | None,
    ) -> Float[Array, "S C"]:
        """Multiply rows by their experts' matrices through a ring of tiles; see `_multiply`."""
        (S, columns), (K, N), row_tiles = x.shape, sizes, routing.groups.gathered_tiles
        gated, E = activation is not None, routing.group_sizes.shape[0]
        rows, block_m = 2 * N if gated else N, row_tiles.rows
        threads = (tiles.groups + 1) * 128
        registers = min(255, 65536 // (tiles.programs * threads) // 8 * 8)
        spec = few_rows_ring.RingSpec(
            E=E,
            K=K,
            rows=rows,
            out_columns=_columns(N, "codes" if gated else ""),
            tiles=row_tiles.table.shape[1],
            gated=gated,
            alpha=GPT_OSS_ALPHA,
            limit=GPT_OSS_LIMIT,
            block_m=block_m,
            groups=tiles.groups,
            stages=tiles.stages,
            programs=tiles.programs * MULTIPROCESSORS,
            registers=(min((registers * threads - 24 * 128) // (128 * tiles.groups) // 8 * 8, 240), 24),
            R=0 if adapter is None else adapter.A.shape[1],
            factor=1.0 if adapter is None else adapter.scale,
        )
        codes = matrices.values.reshape(E * rows, K // 2)
        codes = TensorDescriptor.from_array(codes, (64, 64), NVMMASharedLayout(64, 8, rank=2))
        low_ranks, up = [None] * 3, None
        if adapter is not None:
            low_ranks, up = _by_rows(self._low_ranks(x, row_tiles, adapter, E, K)), adapter.B.reshape(E * rows, -1)
        assert matrices.scales is not None
        scales, weights = matrices.scales.reshape(E * rows, K // 32), routing.row_weights if gated else None
        arrays = codes, *_by_rows(x), scales, *low_ranks, up, bias, weights, row_tiles.table
        stored = matrices.bytes + (0 if adapter is None else adapter.B.size * adapter.B.dtype.itemsize)
        moved = round(stored * min(1.0, S / E)) + S * (columns + N) * x.dtype.itemsize
        cost = KernelCost(kind=KernelKind.EXPERTS_MATMUL, flops=2 * S * (K + spec.R) * rows, bytes=moved)
        out_type, grid = jax.ShapeDtypeStruct((S, spec.out_columns), x.dtype), (spec.programs,)
        kernel, constants = few_rows_ring.ring_kernel, {"spec": spec}
        return self._launch(kernel, arrays, (out_type,), grid, constants, cost=cost, registers=registers)[0]

    def _low_ranks(self, x, row_tiles: RowTiles, adapter: _Adapter, E: int, K: int) -> Float[Array, "S 64"]:
        """Multiply rows by their experts' first matrices of an adapter; columns beyond the ranks have no values."""
        (S, columns), R, tiles, block_k = x.shape, adapter.A.shape[1], row_tiles.table.shape[1], 128
        steps = 256 // block_k
        shrinks = triton.cdiv(triton.cdiv(K, block_k), steps)
        spec = few_rows_kernels.ExpertsSpec(
            E=E,
            K=K,
            N=0,
            x_columns=columns,
            out_columns=0,
            tiles=tiles,
            transposed=True,
            stored="mxfp4",
            factor=1.0,
            order="codes",
            plain=self.plain,
            gated=False,
            gpt_oss=False,
            gelu=False,
            alpha=0.0,
            limit=0.0,
            block_m=row_tiles.rows,
            fewer=(),
            block_n=64,
            block_k=block_k,
            R=R,
            block_r=adapter.constants["block_r"],
            low_columns=64,
            **({"shrinks": shrinks, "shrink_steps": steps, "S": S} if shrinks > 1 else {}),
        )
        arrays: tuple[Any, ...] = x, row_tiles.table, adapter.A, jnp.zeros((2, tiles), jnp.int32), adapter.used
        results = [((shrinks, S, spec.block_r), jnp.float32), ((S, 64), x.dtype)]
        if shrinks == 1:
            arrays, results = (*arrays, None), results[1:]
        moved = round(adapter.A.size * adapter.A.dtype.itemsize * min(1.0, S / E)) + S * columns * x.dtype.itemsize
        cost = KernelCost(kind=KernelKind.EXPERTS_MATMUL, flops=2 * S * R * K, bytes=moved)
        out_types, kernel = tuple(jax.ShapeDtypeStruct(*result) for result in results), few_rows_kernels.shrink_kernel
        return self._launch(kernel, arrays, out_types, (tiles, shrinks), {"spec": spec}, 4, 3, cost=cost)[-1]


def _by_rows(x: Float[Array, "S C"]) -> list[TensorDescriptor]:
    """Describe x by tiles of 16, 32 and 64 rows, and 64 columns."""
    return [TensorDescriptor.from_array(x, (rows, 64), NVMMASharedLayout(128, 16, rank=2)) for rows in (16, 32, 64)]
