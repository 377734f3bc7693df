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
from jaxglue.ops.projection import many_rows_kernels as kernels_of_many
from jaxglue.ops.projection.few_rows_operands import FewRows, LowRank
from jaxglue.ops.projection.fp8 import e4m3_factor
from jaxglue.ops.quant.blocks import dynamic_code
from jaxglue.ops.quant.nf4 import BLOCK, VALUES


@dataclass(frozen=True, kw_only=True)
class ManyRowsTiles:
    """Rows of weights in a program of many rows of x, in two matmuls, and how it is compiled."""

    block_n: int
    few: int
    """Rows of the second matmul; 0 for none."""
    block_k: int
    """Columns of 16-bit values in a step; twice as many of 8 bits."""
    num_warps: int = 8
    num_stages: int = 4
    programs: int = 132
    """Programs to reach by splitting sums, as many as run at a time."""
    wait: bool = True
    """Let all programs of a tile add their parts, instead of the last one."""

    block_m: int = 256
    """Largest number of rows of x."""

    def count(self, rows: int) -> int:
        """Return the tiles of so many rows of weights."""
        return triton.cdiv(rows, self.block_n + self.few)

    def part(self, sizes: list[int]) -> bool:
        """Return whether no tile has rows of two weights of these sizes."""
        first = self.count(sum(sizes)) * self.block_n
        borders = [sum(sizes[:i]) for i in range(1, len(sizes))]
        return all(b % self.block_n == 0 if b <= first else (b - first) % self.few == 0 for b in borders)

    def rows(self, count: int) -> int:
        """Return the rows of x in a program, of so many."""
        return min(max(16, triton.next_power_of_2(count)), self.block_m)

    def columns(self, dtype) -> int:
        """Return the columns of a step."""
        return self.block_k * max(2 // jnp.dtype(dtype).itemsize, 1)


_MANY_GATES = ManyRowsTiles(block_n=128, few=64, block_k=64)
_MANY_PRODUCTS = ManyRowsTiles(block_n=128, few=0, block_k=64)
_LEAST_GATES, _LEAST_PRODUCTS = 65, 257
"""Rows from which a program takes more of weights, as multiplying takes longer than reading."""
_LINE = 128
"""Bytes of a line of the L2 cache."""
_LARGEST_INT32 = 2**31 - 1
_AHEAD = 0
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


def _tiles(block_k: int, num_warps: int, num_stages: int, programs: int = 132) -> FewRowsTiles:
    return FewRowsTiles(block_n=64, block_k=block_k, num_warps=num_warps, num_stages=num_stages, programs=programs)


_MANY_ROWS = (256, _tiles(64, 4, 5), _tiles(64, 8, 4))
_TILES = ((16, _tiles(128, 4, 4), _tiles(128, 4, 3)), (64, _tiles(128, 4, 4), _tiles(64, 4, 4, 264)), _MANY_ROWS)
"""Tiles by the most rows: of projections, and of gate and up together; measured on an H200 (many rows: an H100).

Twice as many programs as multiprocessors have one tile of gate and up each, where one a multiprocessor would leave half
of them idle during the second.
"""
_CROWDED_TILES = ((64, _tiles(128, 4, 4), _tiles(128, 4, 3)), _MANY_ROWS)
"""The same where weights are converted in registers to another dtype, or adapters of many ranks take them."""
_FEW_RANKS = 16
"""Largest rank of adapters whose inputs are multiplied in less time than weights, and that take few registers."""


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
    ahead: int | None = None
    """Bytes of the next launch's weights to ask for; None takes those measured."""

    def project(self, operands: FewRows, stream: Float[Array, "M N"] | None) -> list[Float[Array, "M N"]]:
        """Return the products, adapters' and biases included, of one weight with the stream added."""
        tiles = self._many(operands, _MANY_PRODUCTS, _LEAST_PRODUCTS, gated=False)
        if tiles is not None and tiles.part(list(map(len, operands.weights))):
            return self._multiply_many(operands, stream, tiles)
        return self._multiply(operands, stream, activation=None)

    def gate(self, operands: FewRows, activation: str) -> Float[Array, "M N"]:
        """Return activation(gate) · up of two weights."""
        if (tiles := self._many(operands, _MANY_GATES, _LEAST_GATES, gated=True)) is not None:
            return self._gate_many(operands, activation, tiles)
        return self._multiply(operands, None, activation=activation)[0]

    def _many(self, operands: FewRows, tiles: ManyRowsTiles, least: int, *, gated: bool) -> ManyRowsTiles | None:
        """Return the tiles of a launch for many rows; None for one of few, or with other parts."""
        alike = operands.weights[0].dtype == operands.x.dtype
        rank = 0 if operands.low_rank is None else len(operands.low_rank.downs[0])
        plain = rank <= (_FEW_RANKS if gated else 0) and operands.biases is None and operands.nf4 is None
        values = sum(weight.size for weight in operands.weights)
        if not (alike and plain) or values >= _LARGEST_INT32:
            return None
        return self.many or (tiles if self.tiles is None and len(operands.x) >= least else None)

    def _gate_many(self, operands: FewRows, activation: str, tiles: ManyRowsTiles) -> Float[Array, "M N"]:
        F = len(operands.weights[0])
        out = jax.ShapeDtypeStruct((len(operands.x), F), operands.dtype)
        adapters, R = operands.low_rank, 0 if operands.low_rank is None else operands.low_rank.downs[0].shape[0]
        in_e4m3 = self.rounds and R and operands.x_scales is not None
        constants = {"F": F, "R": R, "BLOCK_R": max(16, triton.next_power_of_2(2 * R)), "ROUND": self.rounds}
        constants |= {"GELU": activation == "gelu_tanh", "E4M3": e4m3_factor(operands.x.shape[1]) if in_e4m3 else 0.0}
        arrays = (operands.x, operands.x_scales, *operands.weights, *(operands.scales or (None, None)))
        if adapters is None:
            arrays += (None,) * 4
        else:
            arrays += low_ranks(adapters), *adapters.ups, jnp.asarray(adapters.factors, jnp.float32)
        count, kernel = tiles.count(2 * F), kernels_of_many.gate_rows_kernel
        return self._launch_many(kernel, operands, arrays, (out,), count, constants, tiles)[0]

    def _multiply_many(self, operands: FewRows, stream, tiles: ManyRowsTiles) -> list[Float[Array, "M N"]]:
        (M, K), sizes, dtype = operands.x.shape, [len(weight) for weight in operands.weights], operands.dtype
        block_m, own = tiles.rows(M), tiles.count(sum(sizes))
        count = own * triton.cdiv(M, block_m)
        steps = triton.cdiv(K, tiles.columns(operands.x.dtype))
        splits = next(n for n in (8, 4, 2, 1) if n == 1 or (n * count <= tiles.programs and steps % n == 0))
        empty = lambda *shape, dtype=jnp.float32: jax.new_ref(jax.lax.empty(shape, dtype))  # noqa: E731
        outs = tuple(empty(M, size, dtype=dtype) for size in sizes)
        parts = count * splits * (tiles.block_n + tiles.few) * block_m if splits > 1 else 1
        scratch = jnp.zeros(count, jnp.int32), empty(parts)
        arrays = (operands.x, operands.x_scales, operands.weights, operands.scales, stream, *scratch, outs)
        constants = {
            **{f"N_{i}": sizes[i] if i < len(sizes) else 0 for i in range(3)},
            "COUNT": len(sizes),
            "TILES": own,
            "SPLITS": splits,
            "STEPS": steps // splits,
            "WAIT": tiles.wait and not self.plain,  # the interpreter runs programs one after another
        }
        self._launch_many(kernels_of_many.many_rows_kernel, operands, arrays, (), own * splits, constants, tiles)
        return [jax.freeze(out) for out in outs]

    def _launch_many(self, kernel, operands: FewRows, arrays, outs, programs: int, constants, tiles: ManyRowsTiles):
        (M, K), itemsize, sizes = operands.x.shape, operands.x.dtype.itemsize, [len(w) for w in operands.weights]
        moved = (M + sum(sizes)) * K * itemsize + M * (sum(sizes) if not outs else sizes[0]) * 2
        cost = KernelCost(kind=KernelKind.ROWS, flops=2 * M * K * sum(sizes), bytes=moved)
        constants |= {
            "M": M,
            "K": K,
            "BLOCK_M": tiles.rows(M),
            "BLOCK_N": tiles.block_n,
            "FEW": tiles.few,
            "BLOCK_K": tiles.columns(operands.x.dtype),
        }
        grid = (programs * triton.cdiv(M, tiles.rows(M)),)
        return self._launch(kernel, arrays, outs, grid, constants, tiles.num_warps, tiles.num_stages, cost=cost)

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
            "FACTOR": operands.factor,
            "ROUND": self.rounds and (rank > 0 or gated),
            "E4M3": e4m3_factor(K) if self.rounds and gated and rank and operands.x_scales is not None else 0.0,
            "ROUND_ADAPTER": self.rounds and not gated and stream is None and operands.x_scales is None,
            **self._ahead_of(operands.ahead, tiles),
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
        arrays = (
            operands.x,
            operands.x_scales,
            operands.weights,
            operands.scales,
            *((None,) * 3 if operands.nf4 is None else operands.nf4),
            None if operands.nf4 is None else jnp.asarray(dynamic_code()),
            jnp.asarray(np.array(VALUES, np.float32)) if self.plain and operands.nf4 else None,
            operands.biases,
            *((None,) * 3 if low_rank is None else (low_rank.source, low_rank.downs, low_rank.ups)),
            None if low_rank is None else jnp.asarray(low_rank.factors, jnp.float32),
            *((None,) * 3 if low_rank is None else (low_rank.norm_weight, low_rank.inverse_rms, low_rank.used)),
            stream,
            operands.ahead if constants["AHEAD"] else None,
            jnp.zeros(constants["TILES"] + count + 1, jnp.int32),
            empty(parts if constants["SPLITS"] > 1 else 1),
            empty(count * block_m * block_r if low_rank else 1, dtype=dtype),
            empty(count * shrinks * block_m * block_r if low_rank else 1),
            outs,
        )
        K, size = constants["K"], sum(len(weight) for weight in operands.weights)
        moved = sum(weight.size * weight.dtype.itemsize for weight in operands.weights)
        moved += M * (K * operands.x.dtype.itemsize + sum(sizes) * jnp.dtype(dtype).itemsize)
        cost = KernelCost(kind=KernelKind.ROWS, flops=2 * block_m * K * size, bytes=moved)
        grid = (count * shrinks + constants["TILES"] * constants["SPLITS"],)
        self._launch(kernels.few_rows_kernel, arrays, (), grid, constants, tiles.num_warps, tiles.num_stages, cost=cost)
        return [jax.freeze(out) for out in outs]

    def _ahead_of(self, weights: tuple[Array, ...], tiles: FewRowsTiles) -> dict[str, int]:
        """Return the sizes of the next launch's weights, and how many bytes to ask for of each row's parts."""
        rows, size = [len(weight) for weight in weights], 0
        row = weights[0].shape[1] * weights[0].dtype.itemsize if weights else 0
        parts = max(tiles.programs // triton.cdiv(sum(rows), tiles.block_n), 1) if rows else 1
        if rows and not self.plain and row % (16 * parts) == 0:
            size = (
                min((_AHEAD if self.ahead is None else self.ahead) // (sum(rows) * parts), row // parts)
                // _LINE
                * _LINE
            )
        sizes = {f"AHEAD_{i}": rows[i] if i < len(rows) else 0 for i in range(3)}
        return {"AHEAD": size, "AHEAD_PARTS": parts, "AHEAD_ROW": row, **sizes, "THREADS": 32 * tiles.num_warps}

    def _tiles(self, block_m: int, operands: FewRows, gated: bool, rank: int) -> FewRowsTiles:
        K, itemsize = operands.x.shape[1], operands.x.dtype.itemsize
        least = 32 if operands.nf4 is None else BLOCK
        table = _CROWDED_TILES if operands.weights[0].dtype.itemsize < itemsize or rank > _FEW_RANKS else _TILES
        tiles = self.tiles or next(found[gated] for most, *found in table if block_m <= most)
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


def low_ranks(adapters: LowRank) -> Float[Array, "M ranks"]:
    """Return the adapters' input at their ranks, side by side, as training rounds it."""
    down = jnp.concatenate(adapters.downs)
    if adapters.norm_weight is not None:
        down *= adapters.norm_weight
    x, contract_last = adapters.source, (((1,), (1,)), ((), ()))
    wide = jax.lax.dot_general(x, down.astype(x.dtype), contract_last, preferred_element_type=jnp.float32)
    if adapters.inverse_rms is not None:
        wide *= adapters.inverse_rms[:, None]
    if adapters.used is not None:
        wide = jnp.where(jnp.tile(adapters.used, len(adapters.downs)), wide, 0.0)
    return wide.astype(x.dtype)
