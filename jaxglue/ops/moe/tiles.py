"""Tile sizes of the Triton kernels: a fixed table per GPU generation, because autotuning is not kept between runs.

Measured on an H200; the other generations have sizes that fit their shared memory.
"""

from dataclasses import dataclass, replace

_SMALLEST = 16
"""What a tensor core takes at least."""
_HALVED = 64
"""Rows that Hopper's matmul instructions of four warps take at least."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """ProcessInfo configuration of one kernel."""

    block_m: int
    """Rows in a tile of the output."""
    block_n: int
    """Columns in a tile of the output."""
    block_k: int
    """Length of a step of the sum."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline."""
    GROUP_M: int = 8
    """Row tiles that take turns before the next column of tiles: those that run at one time share what they load."""

    @property
    def constants(self) -> dict[str, int]:
        """What a kernel is compiled for."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "BAND": self.GROUP_M}

    def tail(self, n: int) -> int:
        """Columns of the last tile: fewer where it would be half empty or more, as for GPT-OSS's 2880."""
        rest = n % self.block_n
        return fit(self.block_n, rest) if rest else self.block_n

    @property
    def half(self) -> int:
        """Rows of the tile that computes a group's last rows where they are few."""
        return self.block_m // 2 if self.block_m >= 2 * _HALVED else self.block_m

    def fitted(self, *, m: int, n: int, k: int) -> "Tiles":
        """No larger than a problem needs, as for the rank of an adapter."""
        block_n = fit(self.block_n, n)
        return replace(
            self,
            block_m=fit(self.block_m, m),
            block_n=block_n,
            block_k=fit(self.block_k, k),
            num_warps=min(self.num_warps, 4) if block_n <= 64 else self.num_warps,
        )


@dataclass(frozen=True, kw_only=True)
class KernelTiles:
    """The configurations of the two kernels."""

    matmul: Tiles
    outer: Tiles


def _tiles(*sizes: tuple[int, int, int, int, int]) -> KernelTiles:
    matmul, outer = (Tiles(block_m=m, block_n=n, block_k=k, num_warps=w, num_stages=s) for m, n, k, w, s in sizes)
    return KernelTiles(matmul=matmul, outer=outer)


# (block_m, block_n, block_k, warps, stages) of matmul, outer; matmul's block_m follows the `GroupMetadata`' row_tile.
_HOPPER = _tiles((128, 256, 64, 8, 4), (128, 256, 64, 8, 3))
_AMPERE = _tiles((128, 128, 32, 8, 4), (128, 128, 32, 8, 4))  # 164 KiB of shared memory in a block
_SMALL = _tiles((128, 128, 32, 8, 3), (128, 128, 32, 8, 3))  # 99 KiB: 8.6, 8.9, 12.x


def kernel_tiles(compute_capability: tuple[int, int]) -> KernelTiles:
    """The launch configurations for a GPU of this compute capability, (major, minor)."""
    if compute_capability in ((8, 6), (8, 7), (8, 9)) or compute_capability >= (12, 0):
        return _SMALL
    return _AMPERE if compute_capability < (9, 0) else _HOPPER


def row_blocks(row_tile: int) -> tuple[int, int]:
    """The rows of a tile as two powers of two, the second perhaps 0."""
    first = 1 << row_tile.bit_length() - 1
    return first, row_tile - first


def row_block(columns: int) -> int:
    """Columns in a step of the kernels that go through rows: 512, or 256 where less of the last step is empty."""
    return fit(min((512, 256), key=lambda block: -columns % block), columns)


def fit(block: int, size: int) -> int:
    """The block, or the power of two that covers the size if that is smaller."""
    return min(block, max(_SMALLEST, 1 << (size - 1).bit_length()))
