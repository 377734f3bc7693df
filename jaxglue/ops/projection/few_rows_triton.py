"""Launches of the kernel of few rows, and its tiles."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import triton
from jaxtyping import Array, Float

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher
from jaxglue.ops.projection import few_rows_kernels as kernels
from jaxglue.ops.projection import many_rows_kernels
from jaxglue.ops.projection.few_rows_operands import (
    MANY_GATE_ROWS,
    MANY_WEIGHT_ROWS,
    MOST_ROWS,
    MOST_WIDE_ROWS,
    MULTIPROCESSORS,
    FewRows,
)
from jaxglue.ops.projection.fp8 import e4m3_factor
from jaxglue.ops.quant.blocks import dynamic_code
from jaxglue.ops.quant.nf4 import BLOCK, VALUES

_SHRINK_COLUMNS = 512
"""Columns of a program that multiplies a part of the adapters' input, where the GPU has place for more programs."""


@dataclass(frozen=True, kw_only=True)
class FewRowsTiles:
    """Rows of a weight in a program, columns in a step, and how it is compiled."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int
    """Programs to reach by splitting sums, as many as run at a time."""


def _tiles(block_k: int, num_warps: int, num_stages: int, programs: int = MULTIPROCESSORS) -> FewRowsTiles:
    return FewRowsTiles(block_n=64, block_k=block_k, num_warps=num_warps, num_stages=num_stages, programs=programs)


_MANY_ROWS = (256, _tiles(64, 4, 5), _tiles(64, 8, 4))
_TILES = ((16, _tiles(128, 4, 4), _tiles(128, 4, 3)), (64, _tiles(128, 4, 4), _tiles(64, 4, 4, 264)), _MANY_ROWS)
"""Tiles by the most rows: of projections, and of gate and up together; measured on an H200 (many rows: an H100).

Twice as many programs as multiprocessors have one tile of gate and up each, where one a multiprocessor would leave half
of them idle during the second.
"""
_CROWDED_TILES = ((64, _tiles(128, 4, 4), _tiles(128, 4, 3)), _MANY_ROWS)
"""The same where weights are converted in registers to another dtype, or adapters of many ranks take them."""
_E4M3_GATES = _tiles(64, 4, 3, 264)
"""Tiles of gate and up for 17 to 64 rows of e4m3 values without adapters; measured on an H100."""
_FEW_RANKS = 16
"""Largest rank of adapters whose inputs are multiplied in less time than weights, and that take few registers."""


@dataclass(frozen=True, kw_only=True)
class ManyRowsTiles:
    """Tiles of the kernels of many rows, measured on an H100."""

    block_m: int = 256
    """Largest number of rows of x in a program."""
    block_n: int = MANY_WEIGHT_ROWS
    """Rows of weights."""
    few: int = MANY_GATE_ROWS[1]
    """More of them, in a second matmul, of gate and up."""
    block_k: int = 64
    """Columns of 16-bit values in a step; twice as many of 8 bits."""
    num_warps: int = 8

    def rows(self, count: int) -> int:
        """Return the rows of x in a program, of so many."""
        return min(max(16, triton.next_power_of_2(count)), self.block_m)

    def stages(self, count: int) -> int:
        """Return the stages of the loop over columns, as many as shared memory has room for."""
        return 4 if self.rows(count) > 128 else 5


@dataclass(frozen=True, kw_only=True)
class TritonFewRows(Launcher):
    """Projections of few rows by our own kernel."""

    tiles: FewRowsTiles | None = None
    """Tiles; None takes those measured."""
    many: ManyRowsTiles | None = None
    """Tiles for many rows, or for any if they are given."""
    plain: bool = False
    """Decode NF4 without instructions that Triton's interpreter lacks."""
    rounds: bool = True
    """Round values where training does."""

    def project(self, operands: FewRows, stream: Float[Array, "M N"] | None) -> list[Float[Array, "M N"]]:
        """Return the products, adapters' and biases included, of one weight with the stream added."""
        if stream is None and (tiles := self._tiles_of_many(operands, MOST_ROWS)) is not None:
            return self._multiply_many(operands, tiles)
        return self._multiply(operands, stream, activation=None)

    def gate(self, operands: FewRows, activation: str) -> Float[Array, "M N"]:
        """Return activation(gate) · up of two weights."""
        if (tiles := self._tiles_of_many(operands, MOST_WIDE_ROWS)) is not None:
            return self._gate_many(operands, activation, tiles)
        return self._multiply(operands, None, activation=activation)[0]

    def _tiles_of_many(self, operands: FewRows, few: int) -> ManyRowsTiles | None:
        """Return the tiles of a launch for more rows than `few`; None where its kernels lack a part."""
        alike = operands.weights[0].dtype == operands.x.dtype
        if not alike or operands.low_rank is not None or operands.biases is not None:
            return None
        return self.many or (ManyRowsTiles() if self.tiles is None and len(operands.x) > few else None)

    def _gate_many(self, operands: FewRows, activation: str, tiles: ManyRowsTiles) -> Float[Array, "M N"]:
        F = len(operands.weights[0])
        out = jax.ShapeDtypeStruct((len(operands.x), F), operands.dtype)
        constants = {"F": F, "FEW": tiles.few, "GELU": activation == "gelu_tanh", "ROUND": self.rounds}
        arrays = (operands.x, operands.x_scales, *operands.weights, *(operands.scales or (None, None)))
        programs, kernel = triton.cdiv(2 * F, tiles.block_n + tiles.few), many_rows_kernels.gate_rows_kernel
        return self._launch_many(kernel, operands, arrays, (out,), programs, constants, tiles)[0]

    def _multiply_many(self, operands: FewRows, tiles: ManyRowsTiles) -> list[Float[Array, "M N"]]:
        sizes = [len(weight) for weight in operands.weights]
        outs = tuple(jax.new_ref(jax.lax.empty((len(operands.x), size), operands.dtype)) for size in sizes)
        constants = {f"N_{i}": sizes[i] if i < len(sizes) else 0 for i in range(3)} | {"COUNT": len(sizes)}
        arrays = operands.x, operands.x_scales, operands.weights, operands.scales, outs
        programs, kernel = triton.cdiv(sum(sizes), tiles.block_n), many_rows_kernels.many_rows_kernel
        self._launch_many(kernel, operands, arrays, (), programs, constants, tiles)
        return [jax.freeze(out) for out in outs]

    def _launch_many(
        self, kernel, operands: FewRows, arrays, outs: tuple, programs: int, constants: dict, tiles: ManyRowsTiles
    ):
        (M, K), itemsize, rows = operands.x.shape, operands.x.dtype.itemsize, sum(map(len, operands.weights))
        moved = (M + rows) * K * itemsize + M * (outs[0].shape[1] if outs else rows) * jnp.dtype(
            operands.dtype
        ).itemsize
        cost = KernelCost(kind=KernelKind.ROWS, flops=2 * M * K * rows, bytes=moved)
        block_k = tiles.block_k * (2 // itemsize or 1)
        sizes = {"M": M, "K": K, "BLOCK_M": tiles.rows(M), "BLOCK_N": tiles.block_n, "BLOCK_K": block_k}
        grid, launched = (programs * triton.cdiv(M, tiles.rows(M)),), (tiles.num_warps, tiles.stages(M))
        return self._launch(kernel, arrays, outs, grid, constants | sizes, *launched, cost=cost)

    def _multiply(self, operands: FewRows, stream, *, activation: str | None) -> list[Float[Array, "M N"]]:
        (M, K), gated = operands.x.shape, activation is not None
        sizes = [len(weight) for weight in operands.weights]
        block_m = max(16, triton.next_power_of_2(M))
        rank = 0 if operands.low_rank is None else operands.low_rank.downs[0].shape[0]
        tiles = self._tiles(block_m, operands, gated, rank)
        counts = [triton.cdiv(size, tiles.block_n) for size in sizes[: 1 if gated else None]]
        steps = triton.cdiv(K, tiles.block_k)
        splits = _splits(sum(counts), steps, tiles.programs)
        shrink_steps = steps_of_part(steps, tiles, sum(counts) * splits, len(sizes), rank)
        constants = {
            "M": M,
            "K": K,
            **{f"N_{i}": sizes[i] if i < len(sizes) else 0 for i in range(3)},
            "COUNT": len(sizes),
            "FIRST_1": counts[0],
            "FIRST_2": sum(counts[:2]),
            "TILES": sum(counts),
            "SPLITS": splits,
            "STEPS": steps // splits,
            "WHOLE": all(size % tiles.block_n == 0 for size in sizes),
            "GATED": gated,
            "GELU": activation == "gelu_tanh",
            "R": rank,
            "SHRINKS": triton.cdiv(steps, shrink_steps) if rank else 0,
            "SHRINK_STEPS": shrink_steps,
            "BLOCK_M": block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "BLOCK_R": max(16, triton.next_power_of_2(rank)),
            "NF4": operands.nf4 is not None,
            "DECODED": not self.plain and (operands.nf4 is not None or operands.weights[0].dtype != operands.x.dtype),
            "FACTOR": operands.factor,
            "ROUND": self.rounds and (rank > 0 or gated),
            "E4M3": e4m3_factor(K) if self.rounds and gated and rank and operands.x_scales is not None else 0.0,
            "ROUND_ADAPTER": self.rounds and not gated and stream is None and operands.x_scales is None,
        }
        return self._run(operands, stream, constants, tiles)

    def _run(self, operands: FewRows, stream, constants: dict, tiles: FewRowsTiles) -> list[Array]:
        dtype = operands.dtype
        count, shrinks, low_rank = constants["COUNT"], constants["SHRINKS"], operands.low_rank
        M, block_m, block_r = constants["M"], constants["BLOCK_M"], constants["BLOCK_R"]
        parts = constants["TILES"] * constants["SPLITS"] * tiles.block_n * block_m * (2 if constants["GATED"] else 1)
        empty = lambda *shape, dtype=jnp.float32: jax.new_ref(jax.lax.empty(shape, dtype))  # noqa: E731
        sizes = [len(weight) for weight in operands.weights][: 1 if constants["GATED"] else None]
        outs = tuple(empty(M, size, dtype=dtype) for size in sizes)
        blocks, groups, offsets = operands.nf4 or (None, None, None)
        arrays = {
            "x": operands.x,
            "x_scales": operands.x_scales,
            "weights": operands.weights,
            "scales": operands.scales,
            "blocks": blocks,
            "groups": groups,
            "offsets": offsets,
            "codes": None if operands.nf4 is None else jnp.asarray(dynamic_code()),
            "lookup": jnp.asarray(np.array(VALUES, np.float32)) if self.plain and operands.nf4 else None,
            "biases": operands.biases,
            "source": None if low_rank is None else low_rank.source,
            "downs": None if low_rank is None else low_rank.downs,
            "ups": None if low_rank is None else low_rank.ups,
            "factors": None if low_rank is None else jnp.asarray(low_rank.factors, jnp.float32),
            "norm_weight": None if low_rank is None else low_rank.norm_weight,
            "inverse_rms": None if low_rank is None else low_rank.inverse_rms,
            "ranks_used": None if low_rank is None else low_rank.used,
            "stream": stream,
            "counters": jnp.zeros(constants["TILES"] + count + 1, jnp.int32),
            "parts": empty(parts if constants["SPLITS"] > 1 else 1),
            "low_ranks": empty(count * block_m * block_r if low_rank else 1, dtype=dtype),
            "low_rank_parts": empty(count * shrinks * block_m * block_r if low_rank else 1),
            "outs": outs,
        }
        K, size = constants["K"], sum(len(weight) for weight in operands.weights)
        moved = sum(weight.size * weight.dtype.itemsize for weight in operands.weights)
        moved += M * (K * operands.x.dtype.itemsize + sum(sizes) * jnp.dtype(dtype).itemsize)
        cost = KernelCost(kind=KernelKind.ROWS, flops=2 * block_m * K * size, bytes=moved)
        grid = (count * shrinks + constants["TILES"] * constants["SPLITS"],)
        self._launch(kernels.few_rows_kernel, arrays, (), grid, constants, tiles.num_warps, tiles.num_stages, cost=cost)
        return [jax.freeze(out) for out in outs]

    def _tiles(self, block_m: int, operands: FewRows, gated: bool, rank: int) -> FewRowsTiles:
        K, itemsize = operands.x.shape[1], operands.x.dtype.itemsize
        least = 32 if operands.nf4 is None else BLOCK
        table = _CROWDED_TILES if operands.weights[0].dtype.itemsize < itemsize or rank > _FEW_RANKS else _TILES
        tiles = self.tiles or next(choices[gated] for most, *choices in table if block_m <= most)
        if self.tiles is None and gated and itemsize == 1 and rank == 0 and 16 < block_m <= MOST_WIDE_ROWS:
            tiles = _E4M3_GATES
        block_k = max(min(tiles.block_k * (2 // itemsize or 1), triton.next_power_of_2(K)), least)
        while K % block_k and block_k > 64:
            block_k //= 2
        narrowest = min(len(weight) for weight in operands.weights)
        return replace(tiles, block_n=min(tiles.block_n, max(16, triton.next_power_of_2(narrowest))), block_k=block_k)


def _splits(tiles: int, steps: int, programs: int) -> int:
    """Return into how many equal parts of the sum to split each tile."""
    wanted = min(max(programs // tiles, 1), steps)
    return next(splits for splits in range(wanted, 0, -1) if steps % splits == 0)


def steps_of_part(steps: int, tiles: FewRowsTiles, programs: int, adapters: int, rank: int) -> int:
    """Return the steps of a program that multiplies a part of an adapter's input.

    Programs beyond those that run at a time would begin when others end, so few free places take longer parts, unless
    many ranks would make these last longer than the tiles.
    """
    least = min(max(_SHRINK_COLUMNS // tiles.block_k, 1), steps)
    free = (tiles.programs - programs) // adapters
    return max(least, triton.cdiv(steps, free)) if free > 0 and rank <= _FEW_RANKS else least
