"""Tile sizes of the Triton kernels: a fixed table per GPU generation, because autotuning is not kept between runs."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Launch configuration of one kernel."""

    block_m: int
    """Query rows (tokens × query heads of a group) in a tile."""
    block_n: int
    """Keys in a tile."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline."""


@dataclass(frozen=True, kw_only=True)
class KernelTiles:
    """The configurations of the three kernels."""

    forward: Tiles
    dq: Tiles
    dkdv: Tiles


def _tiles(*sizes: tuple[int, int, int, int]) -> KernelTiles:
    forward, dq, dkdv = (Tiles(block_m=m, block_n=n, num_warps=w, num_stages=s) for m, n, w, s in sizes)
    return KernelTiles(forward=forward, dq=dq, dkdv=dkdv)


# Compute capability at least → head dim at most → (block_m, block_n, warps, stages) of forward, dq, dkdv.
_FULL = {
    (9, 0): {
        64: _tiles((128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 8, 3)),
        128: _tiles((128, 128, 8, 2), (128, 64, 8, 2), (64, 128, 8, 2)),
        256: _tiles((128, 64, 8, 2), (64, 64, 8, 1), (32, 64, 8, 1)),
    },
    (8, 0): {
        64: _tiles((128, 64, 4, 3), (128, 64, 8, 2), (64, 128, 8, 2)),
        128: _tiles((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2)),
        256: _tiles((64, 32, 8, 2), (64, 32, 8, 1), (32, 32, 8, 1)),
    },
}
# With 99 KiB of shared memory per block instead of 163 or more.
_SMALL_SHARED_MEMORY = {
    64: _tiles((128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    128: _tiles((64, 64, 4, 2), (64, 32, 4, 1), (32, 64, 4, 1)),
    256: _tiles((64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 8, 1)),
}


def kernel_tiles(compute_capability: tuple[int, int], head_dim: int) -> KernelTiles:
    """The launch configurations for a GPU and a head dim up to 256."""
    if compute_capability in ((8, 6), (8, 9), (12, 0), (12, 1)):
        table = _SMALL_SHARED_MEMORY
    else:
        table = _FULL[9, 0] if compute_capability >= (9, 0) else _FULL[8, 0]
    return next(tiles for size, tiles in table.items() if head_dim <= size)
