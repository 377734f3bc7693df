"""Experts with few tokens each, as in decoding: three launches read their matrices once, as they are stored."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton
from jaxtyping import Array, Float

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.moe import few_rows_kernels
from jaxglue.ops.moe.kernels import combine_kernel
from jaxglue.ops.moe.reference import GPT_OSS_ALPHA, GPT_OSS_LIMIT, Activation
from jaxglue.ops.moe.routing import GroupMetadata, Order, Routing, RowTiles, few_rows_tile
from jaxglue.ops.moe.tiles import row_block
from jaxglue.ops.quant.mxfp4 import MXFP4


@dataclass(frozen=True, kw_only=True)
class ExpertsTiles:
    """Columns of a matrix in a program, the length of a step of the sum, and how it is compiled."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


_TILES = ExpertsTiles(block_n=64, block_k=128, num_warps=4, num_stages=4)
_MXFP4_TILES = ExpertsTiles(block_n=128, block_k=64, num_warps=4, num_stages=6)


@dataclass(frozen=True, kw_only=True)
class TritonFewRowsExperts(Launcher):
    """`moe_mlp` of few tokens by our own kernels, without gradients."""

    tiles: ExpertsTiles | None = None
    """Tiles; None takes those measured on an H100."""
    plain: bool = False
    """Decode MXFP4 without instructions that Triton's interpreter lacks."""

    def route(self, logits: Float[Array, "M E"], k: int, *, order: Order, normalize: bool) -> Routing:
        """Compute `route` in two launches."""
        (M, E), A = logits.shape, len(logits) * k
        rows = few_rows_tile(A // E)
        constants = {"E": E, "X": k, "SOFTMAX_FIRST": order == "softmax_topk"}
        constants |= {"NORMALIZE": normalize or order == "topk_softmax"}
        constants |= {"BLOCK_E": triton.next_power_of_2(E), "BLOCK_X": triton.next_power_of_2(k)}
        cost = KernelCost(kind=KernelKind.ROWS)
        out_types = tuple(jax.ShapeDtypeStruct((M, k), dtype) for dtype in (jnp.int32, jnp.float32))
        choose, group = few_rows_kernels.choose_kernel, few_rows_kernels.group_kernel
        expert_ids, weights = self._launch(choose, (logits,), out_types, (M,), constants, 1, cost=cost)
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
        self, x: Float[Array, "M D"], routing: Routing, matrices, biases, *, activation: Activation, transpose_rhs: bool
    ) -> Float[Array, "M D"]:
        """Compute `moe_mlp` from (gate_up, down) of matrices and biases."""
        D, F = x.shape[1], (matrices[1].shape[2] if transpose_rhs else matrices[1].shape[1])
        options: dict[str, Any] = {"activation": activation, "transpose_rhs": transpose_rhs}
        first, second = (isinstance(matrix, MXFP4) for matrix in matrices)
        x = _in_code_order(x) if first else x
        options |= {"tokens": routing.tokens, "code_order": second}
        hidden = self._multiply(x, routing, matrices[0], biases[0], F, **options)
        rows = self._multiply(hidden, routing, matrices[1], None, D, activation=None, transpose_rhs=transpose_rhs)
        extra = (None,) * 3 if biases[1] is None else (routing.weights, routing.expert_ids, biases[1])
        arrays, block = (rows, routing.inverse, *extra), row_block(D)
        constants = {"D": D, "X": routing.inverse.shape[1], "BLOCK": block}
        cost, warps = KernelCost(kind=KernelKind.ROWS), max(1, block // 128)
        return self._launch(combine_kernel, arrays, (shape_dtype_of(x),), (len(x),), constants, warps, cost=cost)[0]

    def _multiply(
        self,
        x,
        routing: Routing,
        matrices,
        bias,
        N: int,
        *,
        activation: Activation | None,
        transpose_rhs,
        tokens=None,
        code_order: bool = False,
    ) -> Float[Array, "S N"]:
        """Multiply rows by their experts' matrices; with an activation, times their weights.

        Columns of x are in the order of MXFP4's codes for matrices in it, those of the result with `code_order`.
        """
        S, K, packed = routing.permutation.size, x.shape[1], isinstance(matrices, MXFP4)
        row_tiles, gated = routing.groups.gathered_tiles, activation is not None
        tiles = self.tiles or (_MXFP4_TILES if packed else _TILES)
        table, E = row_tiles.table, routing.group_sizes.shape[0]
        arrays = (
            x,
            tokens,
            matrices.blocks if packed else matrices,
            matrices.scales if packed else None,
            bias,
            routing.row_weights if gated else None,
            table,
        )
        block_n = min(tiles.block_n // (2 if gated else 1), max(16, triton.next_power_of_2(N)))
        constants: dict[str, Any] = {
            "E": E,
            "K": K,
            "N": N,
            "TILES": table.shape[1],
            "TRANSPOSED": transpose_rhs,
            "MXFP4": packed,
            "CODE_ORDER": code_order,
            "PLAIN": self.plain,
            "GATED": gated,
            "GPT_OSS": activation == "gpt_oss",
            "GELU": activation == "geglu",
            "ALPHA": GPT_OSS_ALPHA,
            "LIMIT": GPT_OSS_LIMIT,
            "BLOCK_M": triton.next_power_of_2(row_tiles.rows),
            "BLOCK_N": block_n,
            "BLOCK_K": min(tiles.block_k, max(32, triton.next_power_of_2(K))),
        }
        columns = 2 * N if gated else N
        size = matrices.blocks.size + matrices.scales.size if packed else matrices.size * matrices.dtype.itemsize
        moved = round(size * min(1.0, S / E)) + S * (K + N) * x.dtype.itemsize
        cost = KernelCost(kind=KernelKind.EXPERTS_MATMUL, flops=2 * S * K * columns, bytes=moved)
        grid = table.shape[1], triton.cdiv(N, block_n)
        compiled = tiles.num_warps, tiles.num_stages
        out_type = jax.ShapeDtypeStruct((S, N), x.dtype)
        return self._launch(
            few_rows_kernels.experts_kernel, arrays, (out_type,), grid, constants, *compiled, cost=cost
        )[0]


def _in_code_order(x: Float[Array, "M D"]) -> Float[Array, "M D"]:
    """Return x with its columns in the order in which those of MXFP4 are multiplied (`code_order`)."""
    return x.reshape(len(x), -1, 4, 2, 4).transpose(0, 1, 4, 2, 3).reshape(x.shape)
