"""Launches of the kernels in `kernels.py`, and their tile sizes, measured on an H200."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Array, Float

from jaxglue.ops.gated_mlp.kernels import joined_swiglu_gradient_kernel, joined_swiglu_kernel
from jaxglue.ops.gated_mlp.swiglu import Matrices
from jaxglue.ops.kernel_cost import KernelCost, KernelKind, turns
from jaxglue.ops.launch import dot_precision, shape_dtype_of
from jaxglue.ops.norm_rope.triton import TritonNormRope
from jaxglue.ops.projection.triton import LoraTiles, rank_lanes
from jaxglue.ops.small_layer import kernels
from jaxglue.ops.small_layer.layer import ExtendedWeights, Pair, Partials, WeightGroup, extended_width


@dataclass(frozen=True, kw_only=True)
class LayerTiles(LoraTiles):
    """SwiGLU's programs cover `length` columns forward; those of ranks add up block_n partial sums at once."""

    block_m: int = 64
    block_n: int = 128
    length: int = 1024
    num_warps: int = 4
    num_stages: int = 3


EXTEND_TILES = LayerTiles(num_warps=8)
ADD_NORM_TILES = LayerTiles(block_m=16, block_n=256, num_stages=2)
MIDDLE_TILES = LayerTiles(num_warps=8)
ENTERED_TILES = LayerTiles(num_warps=8)
SWIGLU_TILES = LayerTiles(block_n=64)
SWIGLU_GRADIENT_TILES = LayerTiles(block_n=64)
RANKS_TILES = LayerTiles(block_m=32, block_n=4, num_stages=6)
GRADIENT_TILES = LayerTiles(num_stages=6)
WEIGHT_TILES = LayerTiles(block_m=4, block_n=1024, num_warps=2, num_stages=1)

_PROGRAMS = 264
"""Programs of SwiGLU's backward kernel that an H200 runs at a time."""


def even_length(rows: int, blocks: int, block_m: int) -> int:
    """Return the rows of a program of a block of columns, of `blocks`, so that the last programs are not few."""

    def length(waves: int) -> int:
        parts = max(_PROGRAMS * waves // blocks, 1)
        return -(-rows // (parts * block_m)) * block_m

    waves = min((1, 2, 3), key=lambda waves: waves * (length(waves) + block_m))
    return length(waves)


_TYPES = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}


@dataclass(frozen=True, kw_only=True)
class TritonSmallLayer(TritonNormRope):
    """`SmallLayerBackend` by our own kernels."""

    extend_tiles: LayerTiles = EXTEND_TILES
    add_norm_tiles: LayerTiles = ADD_NORM_TILES
    middle_tiles: LayerTiles = MIDDLE_TILES
    entered_tiles: LayerTiles = ENTERED_TILES
    swiglu_tiles: LayerTiles = SWIGLU_TILES
    swiglu_gradient_tiles: LayerTiles = SWIGLU_GRADIENT_TILES
    ranks_tiles: LayerTiles = RANKS_TILES
    gradient_tiles: LayerTiles = GRADIENT_TILES
    weight_tiles: LayerTiles = WEIGHT_TILES

    def extend_weights(self, groups: Sequence[WeightGroup]) -> list[ExtendedWeights]:
        """Return the weights and adapters of each group for one matmul."""
        tiles, dtype = self.weight_tiles, groups[0].weights[0].dtype
        rank, rows, outs = len(groups[0].adapters[0][0]), list[tuple[int, ...]](), list[jax.Ref]()
        extended: list[list[jax.Ref]] = []
        numbers = itertools.count()
        for group in groups:
            columns, total, width = group.weights[0].shape[1], sum(map(len, group.weights)), group.width(rank)
            lanes = rank_lanes(rank * len(group.adapters))
            shapes = [(width, columns)] if group.joined else [(total, width), (lanes, columns)]
            firsts, below, end = len(outs) + len(shapes) - 1, total if group.joined else 0, shapes[-1][0]
            above = itertools.accumulate(map(len, group.weights), initial=0)
            for part, (weight, top, number) in enumerate(zip(group.weights, above, numbers, strict=False)):
                copy = number, len(weight), columns, len(outs), shapes[0][1], top, part * rank
                rows += [(*copy, first, 0) for first in range(0, len(weight), tiles.block_m)]
                here = below + part * rank
                count = rank if part < len(group.weights) - 1 else end - here
                copy = number, count, columns, firsts, columns, here, 0
                rows += [(*copy, first, 1) for first in range(0, count, tiles.block_m)]
            made = [jax.new_ref(jax.lax.empty(shape, dtype)) for shape in shapes]
            outs, extended = [*outs, *made], [*extended, made]
        most = max(group.width(rank) - group.weights[0].shape[1] for group in groups if not group.joined)
        constants = {"R": rank, "DTYPE": _TYPES[dtype.name], "BLOCK_R": triton.next_power_of_2(most)}
        constants |= {"ALIGNMENT": math.gcd(16, *(row[i] for row in rows for i in (2, 4)))}
        constants |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
        weights = tuple(weight for group in groups for weight in group.weights)
        downs, ups = zip(*(adapter for group in groups for adapter in group.adapters), strict=True)
        arrays = jnp.asarray(np.array(rows, np.int32)), weights, ups, downs, tuple(outs)
        cost = KernelCost(kind=KernelKind.ROWS)
        self._run(kernels.extend_weights_kernel, arrays, (), (len(rows),), constants, tiles, cost)
        return [ExtendedWeights(*map(jax.freeze, made)) for made in extended]

    def extend(self, x, weight, downs, ranks: int, *, eps: float):
        """Return the norm of x with its ranks and zeros beside it."""
        (M, D), tiles = x.shape, self.extend_tiles
        sizes = {"WIDTH": extended_width(D, ranks), "EPS": eps}
        out_type = (jax.ShapeDtypeStruct((M, sizes["WIDTH"]), x.dtype),)
        return self._rows_of(kernels.extend_kernel, (x, weight, downs), out_type, tiles, sizes, len(downs))[0]

    def add_norm(self, x, product, up, weight, *, eps: float):
        """Return x plus a product with ranks beside it and these times up; its norm; and the ranks."""
        R, tiles = up.shape[1], self.add_norm_tiles
        out_type = shape_dtype_of(x), shape_dtype_of(x), jax.ShapeDtypeStruct((len(x), R), x.dtype)
        sizes = {"R": R, "WIDTH": product.shape[1], "EPS": eps}
        arrays = x, product, up, weight
        return self._rows_of(kernels.add_norm_kernel, arrays, out_type, tiles, sizes, rank_lanes(R))

    def entered_gradient(self, x, weight, dresidual, dextended, extended, downs, *, eps: float):
        """Return the gradient to x of `extend`, whose result was extended, plus dresidual, with more columns or not."""
        arrays = x, weight, dresidual, dextended, extended, downs, None
        return self._norm_gradient(arrays, len(downs), 0, self.entered_tiles, eps)

    def middle_gradient(self, x, weight, dresidual, dout, up, *, eps: float):
        """Return dresidual plus the gradient to x of its norm, extended by their product with up."""
        arrays = x, weight, dresidual, dout, None, None, up
        return self._norm_gradient(arrays, 0, up.shape[1], self.middle_tiles, eps)

    def _norm_gradient(self, arrays, lanes: int, rank: int, tiles: LayerTiles, eps: float):
        x, _, dresidual, dout, *_ = arrays
        M, D = x.shape
        width = extended_width(D, rank) if rank else D
        sizes = {"R": rank, "RESIDUAL": dresidual.shape[1], "WIDTH": dout.shape[1], "OUT": width, "EPS": eps}
        sizes["BLOCK_U"] = rank_lanes(rank)
        out_type = (jax.ShapeDtypeStruct((M, width), x.dtype),)
        return self._rows_of(kernels.norm_gradient_kernel, arrays, out_type, tiles, sizes, lanes)[0]

    def swiglu(self, z, matrices: Matrices):
        """Return `extend` of `lora_swiglu` for z with gate, up and their ranks side by side."""
        (M, width), (F, R), tiles = z.shape, matrices[0].shape, self.swiglu_tiles
        parts, wide = triton.cdiv(F, tiles.length), extended_width(F, R)
        out_type = jax.ShapeDtypeStruct((M, wide), z.dtype), jax.ShapeDtypeStruct((parts, M, R), jnp.float32)
        sizes = {"M": M, "F": F, "R": R, "WIDTH": width, "OUT": wide, "COLUMNS": tiles.length}
        constants = sizes | self._constants(tiles, rank_lanes(R), z.dtype)
        grid = triton.cdiv(M, tiles.block_m), parts
        cost = KernelCost(kind=KernelKind.ROWS, turns=turns(min(tiles.length, F), tiles.block_n))
        out, partials = self._run(joined_swiglu_kernel, (z, *matrices), out_type, grid, constants, tiles, cost)
        return self._with_ranks(out, partials, F)

    def swiglu_gradient(self, z, matrices: Matrices, dextended):
        """Return the gradient to z, and partial sums of those to the matrices [parts, F, R], the last one's turned."""
        (M, width), (F, R), tiles = z.shape, matrices[0].shape, self.swiglu_gradient_tiles
        blocks = triton.cdiv(F, tiles.block_n)
        length = even_length(M, blocks, tiles.block_m)
        parts = triton.cdiv(M, length)
        sums = (
            jax.ShapeDtypeStruct((blocks, M, 2 * R), z.dtype),
            *[jax.ShapeDtypeStruct((parts, F, R), jnp.float32)] * 3,
        )
        sizes = {"M": M, "F": F, "R": R, "WIDTH": width, "OUT": dextended.shape[1], "ROWS": length}
        constants = sizes | self._constants(tiles, rank_lanes(R), z.dtype)
        arrays, out_type = (z, *matrices, dextended), (shape_dtype_of(z), *sums)
        cost, grid = KernelCost(kind=KernelKind.ROWS, turns=turns(min(length, M), tiles.block_m)), (blocks, parts)
        dz, dranks, *dmatrices = self._run(
            joined_swiglu_gradient_kernel, arrays, out_type, grid, constants, tiles, cost
        )
        return self._with_ranks(dz, dranks, 2 * F)[0], dmatrices

    def _with_ranks(self, out, partials, D: int):
        """Return `out`, written up to column D, with the sums of its ranks and zeros behind; and these sums."""
        (parts, M, R), width, tiles = partials.shape, out.shape[1], self.ranks_tiles
        refs = [jax.new_ref(array) for array in (out, jax.lax.empty((M, R), out.dtype))]
        constants = {"M": M, "D": D, "R": R, "WIDTH": width, "PARTS": parts, "BLOCK_R": rank_lanes(R)}
        constants |= {"BLOCK_M": tiles.block_m, "BLOCK_P": tiles.block_n, "STAGES": tiles.num_stages}
        cost, grid = KernelCost(kind=KernelKind.ROWS), (triton.cdiv(M, tiles.block_m),)
        self._run(kernels.ranks_kernel, (partials, *refs), (), grid, constants, tiles, cost)
        return [jax.freeze(ref) for ref in refs]

    def adapter_gradients(
        self, pairs: Sequence[Pair], sums: Sequence[Partials], rank: int
    ) -> list[Float[Array, "..."]]:
        """Return the float32 gradients of all pairs, then of all sums, in one launch."""
        tiles, M = self.gradient_tiles, len(pairs[0].wide)
        wides, narrows = (_distinct(arrays) for arrays in ([p.wide for p in pairs], [p.narrow for p in pairs]))
        jobs = []
        for pair in pairs:
            columns = pair.columns.stop - pair.columns.start
            wide = _index(wides, pair.wide), pair.wide.shape[1], pair.columns.start, columns
            narrow = _index(narrows, pair.narrow), pair.narrow.shape[1], pair.first
            jobs.append((columns, pair.is_second, (*wide, *narrow), (0, 0)))
        for number, (partials, is_second) in enumerate(sums):
            parts, columns, _ = partials.shape
            jobs.append((columns, is_second, (0, 0, 0, columns, 0, 0, 0), (number, parts)))
        rows, outs = [], list[jax.Ref]()
        for columns, is_second, described, partial in jobs:
            target = len(outs), *((rank, 1) if is_second else (1, columns))
            rows += [(*described, *target, first, *partial) for first in range(0, columns, tiles.block_n)]
            shape = (columns, rank) if is_second else (rank, columns)
            outs.append(jax.new_ref(jax.lax.empty(shape, jnp.float32)))
        constants = {"M": M, "R": rank, "DTYPE": _TYPES[wides[0].dtype.name]}
        constants |= {"ALIGNMENT": math.gcd(16, *(row[i] for row in rows for i in (1, 2, 3, 5, 6, 10)))}
        constants |= self._constants(tiles, rank_lanes(rank), wides[0].dtype)
        partial_sums = tuple(array for array, _ in sums)
        arrays = jnp.asarray(np.array(rows, np.int32)), tuple(wides), tuple(narrows), partial_sums, tuple(outs)
        cost = KernelCost(kind=KernelKind.ADAPTER_GRADIENTS)
        self._run(kernels.gradients_kernel, arrays, (), (len(rows),), constants, tiles, cost)
        return [jax.freeze(out) for out in outs]

    def _rows_of(self, kernel, arrays, out_type, tiles: LayerTiles, sizes: dict, lanes: int):
        """Launch a program for block_m rows each of the first array."""
        M, D = arrays[0].shape
        constants = {"M": M, "D": D} | sizes | self._constants(tiles, lanes, arrays[0].dtype)
        cost = KernelCost(kind=KernelKind.ROWS, turns=turns(D, tiles.block_n))
        return self._run(kernel, arrays, out_type, (triton.cdiv(M, tiles.block_m),), constants, tiles, cost)

    def _constants(self, tiles: LayerTiles, lanes: int, dtype) -> dict:
        blocks = {"BLOCK_R": lanes, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
        return blocks | {"STAGES": tiles.num_stages, "PRECISION": dot_precision(dtype)}

    def _run(self, kernel, arrays, out_type, grid, constants, tiles: LayerTiles, cost: KernelCost):
        compiled = tiles.num_warps, tiles.num_stages
        return self._launch(kernel, arrays, tuple(out_type), grid, constants, *compiled, cost=cost)


def _distinct(arrays: Sequence[Array]) -> list[Array]:
    return list({id(array): array for array in arrays}.values())


def _index(arrays: Sequence[Array], array: Array) -> int:
    return next(i for i, other in enumerate(arrays) if other is array)


def shallow_tiles(kernels: type) -> dict[str, LayerTiles]:
    """Return the tiles of a class of kernels, by field, for 99 KiB of shared memory."""
    tiles = {field.name: field.default for field in fields(kernels) if isinstance(field.default, LayerTiles)}
    low = tiles | dict.fromkeys(("middle_tiles", "entered_tiles"), LayerTiles(block_m=32))
    return {name: replace(each, num_stages=min(each.num_stages, 2)) for name, each in low.items()}
