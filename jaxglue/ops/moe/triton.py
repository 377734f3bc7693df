"""Launches of the Triton kernels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import triton
from jax_triton.triton_lib import TensorDescriptor

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.moe import kernels
from jaxglue.ops.moe.reference import GPT_OSS_ALPHA, GPT_OSS_LIMIT, Activation
from jaxglue.ops.moe.routing import GroupMetadata
from jaxglue.ops.moe.tiles import GroupedTiles, fit, row_block, row_blocks
from jaxglue.ops.moe.vjp import ExpertLowRank, ExpertRows, ExpertScales


@dataclass(frozen=True, kw_only=True)
class TritonMoe(Launcher):
    """`MoeBackend` in Triton."""

    tiles: GroupedTiles

    def matmul(
        self,
        lhs: ExpertRows,
        rhs,
        bias,
        groups: GroupMetadata,
        *,
        transpose_rhs: bool,
        low_rank: ExpertLowRank | None = None,
        scales: ExpertScales | None = None,
    ):
        """See `MoeBackend`."""
        E, S, K = rhs.shape[0], lhs.size, lhs.array.shape[1]
        N = rhs.shape[1] if transpose_rhs else rhs.shape[2]
        row_tiles = groups.tiles if lhs.tokens is None else groups.gathered_tiles
        out_type = jax.ShapeDtypeStruct((S, N), scales.dtype if scales else lhs.array.dtype)
        table = row_tiles.table
        block_m, block_more = row_blocks(row_tiles.rows)
        tiles = self.tiles.of(lhs.array.dtype, block_m).fitted(m=block_m, n=N, k=K)
        block_tail, block_half, descriptors = tiles.tail(N), tiles.half, self._descriptors(lhs.array, rhs)
        moved = _moved((lhs,), rhs, out_type, *(low_rank[:2] if low_rank else ()))
        assert block_more in (0, block_half)
        lhs_tiles, lhs_halves = (_rows(lhs, m, tiles.block_k, descriptors) for m in (tiles.block_m, block_half))
        tail = rhs
        if descriptors:
            rhs, tail = (_matrices(rhs, tiles.block_k, n, transpose_rhs) for n in (tiles.block_n, block_tail))
        values, expand, transpose_expand = low_rank or (None, None, False)
        rank = 0 if values is None else values.shape[1]
        factors = (scales.rows.reshape(-1), scales.groups) if scales else (None, None)
        (out,) = self._launch(
            kernels.matmul_kernel,
            (lhs_tiles, lhs_halves, rhs, tail, lhs.tokens, bias, values, expand, table, *factors),
            (out_type,),
            (table.shape[1] * triton.cdiv(N, tiles.block_n),),
            tiles.constants
            | {"E": E, "K": K, "N": N, "R": rank, "TILES": table.shape[1]}
            | {"BLOCK_R": fit(tiles.block_k, rank), "BLOCK_TAIL": block_tail}
            | {"BLOCK_HALF": block_half, "BLOCK_MORE": block_more}
            | {"TRANSPOSE_RHS": transpose_rhs, "TRANSPOSE_EXPAND": transpose_expand, "DESCRIPTORS": descriptors},
            tiles.num_warps,
            tiles.num_stages,
            cost=_cost(2 * S * K * N * _tile_rows(E, table.shape[1]), moved, fp8=scales is not None),
        )
        return out

    def outer(self, lhs: ExpertRows, rhs: ExpertRows, groups: GroupMetadata, dtype):
        """See `MoeBackend`."""
        E, S, K, N = groups.sizes.shape[0], lhs.size, lhs.array.shape[1], rhs.array.shape[1]
        tiles = self.tiles.outer.fitted(m=K, n=N, k=self.tiles.outer.block_k)
        descriptors = self._descriptors(lhs.array, rhs.array)
        arrays = [_rows(x, tiles.block_k, b, descriptors) for x, b in ((lhs, tiles.block_m), (rhs, tiles.block_n))]
        out_type = jax.ShapeDtypeStruct((E, K, N), dtype)
        (out,) = self._launch(
            kernels.outer_kernel,
            (*arrays, lhs.tokens, rhs.tokens, groups.offsets),
            (out_type,),
            (triton.cdiv(K, tiles.block_m) * triton.cdiv(N, tiles.block_n), E),
            tiles.constants | {"K": K, "N": N, "DESCRIPTORS": descriptors},
            tiles.num_warps,
            tiles.num_stages,
            cost=_cost(2 * S * K * N, _moved((lhs, rhs), out_type)),
        )
        return out

    def activate(self, projected, weights, groups: GroupMetadata, activation: Activation):
        """See `MoeBackend`."""
        S, F = projected.shape[0], projected.shape[1] // (1 if activation == "relu2" else 2)
        out_type, arrays = jax.ShapeDtypeStruct((S, F), projected.dtype), (projected, weights, groups.offsets)
        constants = _activation_constants(F, groups, activation)
        return self._launch_rows(kernels.activation_kernel, arrays, (out_type,), S, F, constants)[0]

    def activate_gradient(self, projected, weights, groups: GroupMetadata, dout, activation: Activation):
        """See `MoeBackend`."""
        (S, F), arrays = dout.shape, (projected, weights, groups.offsets, dout)
        out_types = tuple(map(shape_dtype_of, (projected, weights)))
        constants = _activation_constants(F, groups, activation)
        return self._launch_rows(kernels.activation_gradient_kernel, arrays, out_types, S, F, constants)

    def combine(self, rows, inverse, weights, expert_ids, bias):
        """See `MoeBackend`."""
        (M, X), D = inverse.shape, rows.shape[1]
        out_type = jax.ShapeDtypeStruct((M, D), rows.dtype)
        arrays = rows, inverse, *((None, None, None) if bias is None else (weights, expert_ids, bias))
        return self._launch_rows(kernels.combine_kernel, arrays, (out_type,), M, D, {"D": D, "X": X})[0]

    def _launch_rows(self, kernel, arrays, out_type, rows: int, columns: int, constants):
        """Launch a program for each row."""
        block = row_block(columns)
        constants, cost = constants | {"BLOCK": block}, KernelCost(kind=KernelKind.ROWS)
        return self._launch(kernel, arrays, out_type, (rows,), constants, max(1, block // 128), cost=cost)

    def _descriptors(self, *arrays) -> bool:
        """Return whether loops load through TMA, which needs rows of whole 16 bytes."""
        aligned = all(x.shape[-1] * x.dtype.itemsize % 16 == 0 for x in arrays)
        return self.compute_capability >= 90 and aligned


def _moved(rows: Sequence[ExpertRows], *others) -> int:
    """Return the bytes that a kernel reads and writes; gathered rows are read once for each of their assignments."""
    gathered = sum(x.size * x.array.shape[1] * x.array.dtype.itemsize for x in rows)
    return gathered + sum(math.prod(x.shape) * x.dtype.itemsize for x in others)


def _tile_rows(experts: int, tiles: int) -> float:
    """Return the rows that tiles multiply by those given: a quarter of each expert's last one is empty."""
    return 1 + experts / (4 * (tiles - experts)) if tiles > experts else 1.0


def _cost(flops: float, moved: int, *, fp8: bool = False) -> KernelCost:
    return KernelCost(kind=KernelKind.EXPERTS_MATMUL, flops=round(flops), bytes=moved, fp8=fp8)


def _activation_constants(F: int, groups: GroupMetadata, activation: Activation) -> dict:
    return {
        "F": F,
        "E": groups.sizes.shape[0],
        "GPT_OSS": activation == "gpt_oss",
        "GELU": activation == "geglu",
        "RELU2": activation == "relu2",
        "ALPHA": GPT_OSS_ALPHA,
        "LIMIT": GPT_OSS_LIMIT,
    }


def _rows(rows: ExpertRows, block_s: int, block_k: int, descriptors: bool):
    """Return the source of a kernel's tiles of rows: a descriptor, or the array where rows are gathered."""
    if not descriptors or rows.tokens is not None:
        return rows.array
    return TensorDescriptor.from_array(rows.array, (block_s, block_k))


def _matrices(x, block_k: int, block_n: int, transposed: bool) -> TensorDescriptor:
    return TensorDescriptor.from_array(x, (1, block_n, block_k) if transposed else (1, block_k, block_n))
