"""Tile sizes of the Triton kernels: a fixed table per GPU generation, since jax-triton does not persist autotuning.

The Hopper sizes are tuned on an H200; the others fit the shared memory of their generation.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp

_SMALLEST = 16
"""Smallest side of a tensor core's tile."""
_WARPGROUP_ROWS = 64
"""Fewest rows of Hopper's warpgroup matmul instruction."""


@dataclass(frozen=True, kw_only=True)
class MatmulTiles:
    """Launch configuration of one kernel."""

    block_m: int
    """Rows in a tile of the output."""
    block_n: int
    """Columns in a tile of the output."""
    block_k: int
    """Length of a step of the sum."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline."""
    group_m: int = 8
    """Row tiles that take each column of tiles in turn, so that concurrent programs share loads in the L2 cache."""

    @property
    def constants(self) -> dict[str, int]:
        """Return the constants that a kernel is compiled for."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP_M": self.group_m}

    def tail(self, n: int) -> int:
        """Return the columns of the last tile: fewer where it would be at least half empty, as for GPT-OSS's 2880."""
        rest = n % self.block_n
        return fit(self.block_n, rest) if rest else self.block_n

    @property
    def half(self) -> int:
        """Return the rows of the smaller tile for a group's few last rows."""
        return self.block_m // 2 if self.block_m >= 2 * _WARPGROUP_ROWS else self.block_m

    def fitted(self, *, m: int, n: int, k: int) -> "MatmulTiles":
        """Return tiles no larger than the problem, such as an adapter's rank."""
        block_n = fit(self.block_n, n)
        return replace(
            self,
            block_m=fit(self.block_m, m),
            block_n=block_n,
            block_k=fit(self.block_k, k),
            num_warps=min(self.num_warps, 4) if block_n <= 64 else self.num_warps,
        )


@dataclass(frozen=True, kw_only=True)
class GroupedTiles:
    """Launch configurations of the matmul and outer-product kernels."""

    matmul: MatmulTiles
    outer: MatmulTiles

    def of(self, dtype, block_m: int) -> MatmulTiles:
        """Return matmul's tiles of this many rows: as many bytes of 8-bit values as of 16-bit ones in a step."""
        steps = 2 if jnp.dtype(dtype).itemsize == 1 else 1
        return replace(self.matmul, block_m=block_m, block_k=steps * self.matmul.block_k)


def _tiles(*sizes: tuple[int, int, int, int, int]) -> GroupedTiles:
    matmul, outer = (MatmulTiles(block_m=m, block_n=n, block_k=k, num_warps=w, num_stages=s) for m, n, k, w, s in sizes)
    return GroupedTiles(matmul=matmul, outer=outer)


# (block_m, block_n, block_k, warps, stages) of matmul, outer; matmul's block_m comes from `RowTiles.rows`.
_HOPPER = _tiles((128, 256, 64, 8, 4), (128, 256, 64, 8, 3))
_AMPERE = _tiles((128, 128, 32, 8, 4), (128, 128, 32, 8, 4))  # 164 KiB of shared memory in a block
_SMALL = _tiles((128, 128, 32, 8, 3), (128, 128, 32, 8, 3))  # 99 KiB: 8.6, 8.9, 12.x


def grouped_tiles(compute_capability: tuple[int, int]) -> GroupedTiles:
    """Return the launch configurations for a GPU of this compute capability, (major, minor)."""
    if compute_capability in ((8, 6), (8, 7), (8, 9)) or compute_capability >= (12, 0):
        return _SMALL
    return _AMPERE if compute_capability < (9, 0) else _HOPPER


def row_blocks(row_tile: int) -> tuple[int, int]:
    """Split a tile's rows into two powers of two, of which the second may be 0."""
    first = 1 << row_tile.bit_length() - 1
    return first, row_tile - first


def row_block(columns: int) -> int:
    """Return the columns in a step of the row kernels: 512, or 256 where that leaves less of the last step empty."""
    return fit(min((512, 256), key=lambda block: -columns % block), columns)


def fit(block: int, size: int) -> int:
    """Return the block, or the power of two that covers the size if that is smaller."""
    return min(block, max(_SMALLEST, 1 << (size - 1).bit_length()))
