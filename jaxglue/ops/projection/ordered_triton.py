"""Launches of the kernel of products in one order, and its tiles."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import triton
from jaxtyping import Array, Bool, Float

from jaxglue.ops import backend
from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher, dot_precision
from jaxglue.ops.projection.adapted_kernels import AdaptedSpec, adapted_kernel
from jaxglue.ops.projection.few_rows_operands import MULTIPROCESSORS
from jaxglue.ops.projection.ordered_kernels import OrderedSpec, ordered_kernel
from jaxglue.ops.projection.triton import rank_lanes

_GROUP = 8
"""Blocks of rows that programs of the same weights share in the L2 cache."""


@dataclass(frozen=True, kw_only=True)
class OrderedTiles:
    """Rows of x and of a weight in a program, columns in a step, and how it is compiled."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def _tiles(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> OrderedTiles:
    sizes = {"block_m": block_m, "block_n": block_n, "block_k": block_k}
    return OrderedTiles(**sizes, num_warps=num_warps, num_stages=num_stages)


FEW_ROWS = _tiles(64, 64, 128, 4, 4)
"""Tiles of at most 64 rows; all are as measured on an H200 with matrices of Qwen3-8B (`exact_prices_h200.json`)."""
ALONE_ROWS = replace(FEW_ROWS, num_stages=7)
"""The same of programs that have a multiprocessor each, whose shared memory they fill."""
CROWDED_ROWS = _tiles(64, 64, 64, 4, 6)
"""Tiles of at most 64 rows with so many weights that a multiprocessor has two programs at a time."""
MANY_ROWS = _tiles(256, 128, 64, 8, 4)
"""Tiles of so many rows that they fill the GPU."""
SOME_ROWS = (128, _tiles(128, 64, 128, 4, 4)), (256, _tiles(128, 128, 64, 8, 6)), (512, MANY_ROWS)
"""Tiles by the most rows: all programs read x and weights by way of the L2 cache, and large tiles read less."""
GATED_ROWS = (64, _tiles(64, 64, 64, 4, 4)), (128, _tiles(128, 64, 64, 8, 3)), (512, _tiles(256, 64, 64, 8, 4))
"""The same of gate and up, whose program has tiles of both."""


@dataclass(frozen=True, kw_only=True)
class TritonOrdered(Launcher):
    """`ordered_products` by our own kernel."""

    tiles: OrderedTiles | None = None
    """Tiles; None takes `tiles_of`."""

    def multiply(
        self,
        x: Float[Array, "M K"],
        weights: tuple[Float[Array, "N K"], ...],
        dtype,
        part: int | None = None,
        joined: int = 1,
    ) -> list[Float[Array, "M N"]]:
        """Return x·Wᵀ of each weight in `dtype`, those of the last `joined` weights side by side.

        See `ordered_products` for `part`.
        """
        (M, K), sizes = x.shape, [len(weight) for weight in weights]
        tiles = self.tiles or tiles_of(M, sizes, in_parts=part is not None)
        tiles = replace(
            tiles,
            block_m=min(tiles.block_m, max(16, triton.next_power_of_2(M))),
            block_k=min(tiles.block_k, max(16, triton.next_power_of_2(K))),
        )
        assert part is None or part % tiles.block_k == 0
        alone = len(sizes) - joined
        widths = [*sizes[:alone], sum(sizes[alone:])]
        outs = tuple(jax.new_ref(jax.lax.empty((M, width), dtype)) for width in widths)
        spec = OrderedSpec(
            M=M,
            K=K,
            widths=tuple(sizes),
            firsts=tuple(sum(triton.cdiv(size, tiles.block_n) for size in sizes[:i]) for i in range(len(sizes))),
            tiles=sum(triton.cdiv(size, tiles.block_n) for size in sizes),
            outs=tuple(min(i, alone) for i in range(len(sizes))),
            columns=tuple(sum(sizes[alone:i]) for i in range(len(sizes))),
            strides=tuple(widths[min(i, alone)] for i in range(len(sizes))),
            part=part,
            block_m=tiles.block_m,
            block_n=tiles.block_n,
            block_k=tiles.block_k,
            group=_GROUP,
        )
        grid = (programs_of(M, sizes, tiles),)
        moved = (M + sum(sizes)) * K * x.dtype.itemsize + M * sum(sizes) * jnp.dtype(dtype).itemsize
        cost = KernelCost(kind=KernelKind.ROWS, flops=2 * M * K * sum(sizes), bytes=moved)
        launched = tiles.num_warps, tiles.num_stages
        self._launch(ordered_kernel, (x, weights, outs), (), grid, {"spec": spec}, *launched, cost=cost)
        return [jax.freeze(out) for out in outs]

    def adapt(
        self,
        x: Float[Array, "M K"],
        weights: Sequence[Float[Array, "N K"]],
        downs: Sequence[Float[Array, "R K"]],
        matrices: Sequence[Float[Array, "N R"]],
        factors: Sequence[float],
        *,
        used: Bool[Array, "M R"] | None,
        stream: Float[Array, "M N"] | None,
        activation: str | None,
        part: int | None,
    ) -> list[Float[Array, "M N"]]:
        """Return the products of `adapted_products`."""
        (M, K), R, sizes = x.shape, len(downs[0]), [len(weight) for weight in weights]
        gated = next(tiles for most, tiles in GATED_ROWS if most >= M)
        tiles = self.tiles or (tiles_of(M, sizes) if activation is None else gated)
        block_m = min(tiles.block_m, max(16, triton.next_power_of_2(M)))
        block_k = min(tiles.block_k, max(16, triton.next_power_of_2(K)))
        block_r = rank_lanes(R)
        block_n, blocks = max(tiles.block_n, block_r), triton.cdiv(M, block_m)
        assert part is None or part % block_k == 0
        outs = tuple(jax.new_ref(jax.lax.empty((M, N), x.dtype)) for N in sizes[: 1 if activation else None])
        *firsts, count = itertools.accumulate((triton.cdiv(N, block_n) for N in sizes[: len(outs)]), initial=0)
        parts, adapters = 1 if part is None else triton.cdiv(K, part), blocks * len(sizes)
        programs = (len(sizes) * parts + count) * blocks
        spec = AdaptedSpec(
            M=M,
            K=K,
            R=R,
            widths=tuple(sizes),
            firsts=tuple(firsts),
            tiles=count,
            factors=tuple(factors),
            part=part,
            activation=activation,
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            block_r=block_r,
            precision=dot_precision(x.dtype),
        )
        arrays = {
            "x": x,
            "weights": tuple(weights),
            "downs": tuple(downs),
            "matrices": tuple(matrices),
            "used": None if used is None else used.astype(jnp.uint8),
            "stream": stream,
            "counters": jnp.zeros(adapters + blocks, jnp.int32),
            "parts": jax.new_ref(
                jax.lax.empty((adapters * parts * block_n * block_m if parts > 1 else 1,), jnp.float32)
            ),
            "low_ranks": jax.new_ref(jax.lax.empty((adapters * block_r * block_m,), x.dtype)),
            "outs": outs,
        }
        moved = (M + sum(sizes)) * K * x.dtype.itemsize + M * sum(out.shape[1] for out in outs) * x.dtype.itemsize
        cost = KernelCost(kind=KernelKind.ROWS, flops=2 * M * K * sum(sizes), bytes=moved)
        self._launch(
            adapted_kernel, arrays, (), (programs,), {"spec": spec}, tiles.num_warps, tiles.num_stages, cost=cost
        )
        return [jax.freeze(out) for out in outs]


def programs_of(rows: int, sizes: list[int], tiles: OrderedTiles) -> int:
    """Return the programs of products of so many rows with weights of these sizes."""
    return triton.cdiv(rows, tiles.block_m) * sum(triton.cdiv(size, tiles.block_n) for size in sizes)


def tiles_of(rows: int, sizes: list[int], *, in_parts: bool = False) -> OrderedTiles:
    """Return tiles that fill the GPU, which change no sum.

    Sums in parts have two accumulators, for which large tiles have no registers.
    """
    if rows <= FEW_ROWS.block_m:
        programs = programs_of(rows, sizes, FEW_ROWS)
        if programs > 2 * MULTIPROCESSORS and "crowded rows in one order" not in backend.UNTRIED:
            return CROWDED_ROWS
        return ALONE_ROWS if programs <= MULTIPROCESSORS else FEW_ROWS
    if in_parts:
        return FEW_ROWS
    if programs_of(rows, sizes, MANY_ROWS) >= 2 * MULTIPROCESSORS:
        return MANY_ROWS
    return next((tiles for most, tiles in SOME_ROWS if most >= rows), FEW_ROWS)
