"""Tile sizes of the Triton kernels: a fixed table per GPU generation, so that every run compiles the same programs.

Measured on an H200; the other generations have sizes that fit their shared memory.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AttentionTiles:
    """Launch configuration of one kernel."""

    block_m: int
    """Query rows (tokens × query heads of a group) in a tile."""
    block_n: int
    """Keys in a tile."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline."""
    registers: int | None = None
    """Limit for a thread, where it makes room for one more program on a multiprocessor; None for no limit."""
    late: bool = False
    """Run a loop's last matmul one tile late, under the next tile's exponentials; not for dkdv and dv."""
    k_descriptor: bool = False
    """Load keys, from Hopper on, through TMA into registers, from which they are multiplied; for dkdv and dv."""


@dataclass(frozen=True, kw_only=True)
class AttentionKernelTiles:
    """Launch configurations of the kernels."""

    forward: AttentionTiles
    dq: AttentionTiles
    dkdv: AttentionTiles
    """Tiles of dk and dv, or of dk alone if dv has a kernel of its own."""
    dv: AttentionTiles | None = None
    """Tiles of dv where both sums leave no registers; scores are then multiplied once more."""


def _tiles(*sizes: tuple[int, ...]) -> AttentionKernelTiles:
    names = "block_m", "block_n", "num_warps", "num_stages", "registers"
    fields: list[dict[str, Any]] = [dict(zip(names, size, strict=False)) for size in sizes]
    forward, dq, dkdv, *dv = (AttentionTiles(**field) for field in fields)
    return AttentionKernelTiles(forward=forward, dq=dq, dkdv=dkdv, dv=dv[0] if dv else None)


MOST_PARTED = 128
"""Columns of a tile, at most, in place of which heads have two parts: those of 72 (towers), 80 and 96 among them."""
Table = dict[int, AttentionKernelTiles]
"""Tiles by most columns of a head (`tile_columns`).

They are (block_m, block_n, warps, stages, registers) of forward, dq, dkdv and dv."""

_WIDEST = _tiles((64, 16, 8, 2), (64, 16, 8, 2), (32, 64, 8, 1), (32, 64, 8, 1))
"""Tiles of heads of 512, whose sums leave few registers (Gemma 4)."""
_PARTS = _tiles((64, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2))
"""Tiles of heads in two parts before Hopper, whose registers hold the sums of no larger ones."""
# Several small programs on a multiprocessor hide their start, most of the time of a short loop.
_HOPPER: Table = {
    64: _tiles((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3)),
    96: _tiles((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3)),
    128: _tiles((64, 32, 4, 4), (64, 32, 4, 3, 168), (64, 64, 4, 2)),
    256: _tiles((64, 32, 4, 3), (64, 16, 4, 3), (32, 128, 8, 2), (32, 64, 4, 2)),
    512: _WIDEST,
}
_HOPPER_WINDOW: Table = {
    64: _tiles((64, 32, 4, 3), (64, 32, 4, 3), (64, 64, 4, 3)),
    96: _tiles((64, 32, 4, 3), (64, 32, 4, 3), (32, 64, 4, 3)),
    128: _tiles((64, 32, 4, 3), (64, 32, 4, 3, 168), (32, 64, 4, 3)),
    256: _tiles((64, 32, 4, 3), (64, 16, 4, 3), (64, 64, 8, 1)),
    512: _WIDEST,
}
_HOPPER_LONG: Table = {
    64: _HOPPER[64],
    96: _tiles((128, 64, 8, 2, 128), (64, 64, 4, 3), (64, 64, 4, 3)),
    128: _tiles((128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 8, 3)),
    256: _tiles((64, 32, 4, 3), (64, 16, 4, 3), (32, 128, 8, 2), (64, 128, 8, 2)),
    512: _WIDEST,
}
_HOPPER_LATENT = {  # queries and keys of 192, values of 128
    False: _tiles((64, 32, 4, 3), (64, 32, 4, 3), (32, 64, 4, 2)),
    True: _tiles((128, 64, 8, 2), (128, 64, 8, 2), (32, 64, 4, 2)),
}
_AMPERE: Table = {  # 164 KiB of shared memory in a block
    64: _tiles((128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3)),
    96: _PARTS,
    128: _tiles((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2)),
    256: _tiles((64, 32, 8, 2), (64, 32, 8, 1), (32, 32, 8, 1)),
}
_SMALL: Table = {  # 99 KiB: 8.6, 8.9, 12.x
    64: _tiles((128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    96: _PARTS,
    128: _tiles((64, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2)),
    256: _tiles((64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
}
_SHORT_WINDOW = 512


def kernel_tiles(
    compute_capability: tuple[int, int],
    head_dim: int,
    *,
    value_dim: int | None = None,
    window: int | None = None,
    long: bool = False,
) -> AttentionKernelTiles:
    """Return the launch configurations for a GPU and a head dim up to `largest_head_dim`.

    Args:
        compute_capability: of the GPU, as (major, minor).
        head_dim: H.
        value_dim: of values; None for H.
        window: tokens visible to a query; None for all.
        long: most visible pairs are in long documents, which get large tiles.
    """
    if (9, 0) <= compute_capability < (12, 0) and 128 < head_dim <= 192 and value_dim == 128:
        return _HOPPER_LATENT[long]
    table = _table(compute_capability, window is not None and window <= _SHORT_WINDOW, long)
    columns = sum(tile_columns(head_dim, value_dim or head_dim))
    return next(tiles for size, tiles in table.items() if columns <= size)


def tile_columns(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the columns of a head's tile, a power of two, and those of a second one for the rest of it; 0 for none.

    Values have the second one where they are as wide as keys, and up to `MOST_PARTED`, if both have fewer columns then.

    Args:
        head_dim: of queries and keys.
        value_dim: of values, at most as many.
    """
    whole = power_of_two(value_dim)
    if value_dim < head_dim:
        return whole, power_of_two(head_dim - whole) if whole < head_dim else 0
    first = whole // 2
    rest = power_of_two(value_dim - first)
    return (first, rest) if whole <= MOST_PARTED and first + rest < whole else (whole, 0)


def power_of_two(columns: int) -> int:
    """Return the least power of two that is not less, and at least a matmul's least depth."""
    return max(1 << (columns - 1).bit_length(), 16)


def key_tile(head_dim: int) -> int:
    """Return the keys in a tile of the forward pass over documents that are not long, on any device.

    Where each part of a document begins at a multiple of it, a query's sums have one order: beginning by beginning, in
    tiles of so many keys.
    """
    return kernel_tiles((9, 0), head_dim).forward.block_n


def largest_head_dim(compute_capability: tuple[int, int]) -> int:
    """Return the largest head dim of which tiles fit the GPU."""
    return max(_table(compute_capability, False, False))


def _table(compute_capability: tuple[int, int], short_window: bool, long: bool) -> Table:
    if compute_capability in ((8, 6), (8, 7), (8, 9)) or compute_capability >= (12, 0):
        return _SMALL
    if compute_capability < (9, 0):
        return _AMPERE
    if short_window:
        return _HOPPER_WINDOW
    return _HOPPER_LONG if long else _HOPPER


_SUMS = 2**30
"""Bytes of the gradients of queries that the Hopper kernels sum at once."""


def heads_summed_at_once(kv_heads: int, bytes_of_one: int) -> int:
    """Return the key/value heads whose gradients of queries, float32, are summed at once: as many as take 1 GiB."""
    fitting = (heads for heads in range(kv_heads, 0, -1) if kv_heads % heads == 0 and heads * bytes_of_one <= _SUMS)
    return next(fitting, 1)
