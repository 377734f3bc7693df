"""Metadata of a grouped matmul: offsets of the groups, and the group of each tile of rows."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

ROW_TILES = (16, 192)
"""Fewest and most rows in a tile of the kernels."""
_LARGEST_GATHERED = 128
"""Most rows in a tile of gathered rows."""


@partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["rows"])
@dataclass(frozen=True, kw_only=True)
class RowTiles:
    """A partition of the rows into tiles of one group each; a group's last tile may be partly empty."""

    table: Int[Array, "4 tiles"]
    """Group of each tile, the group's first row, its end, and its first tile; the group of an unused tile is E."""
    rows: int
    """Rows in a tile."""

    @classmethod
    def of(cls, sizes: Int[Array, " E"], offsets: Int[Array, " E+1"], total: int, rows: int) -> "RowTiles":
        """Tabulate the tiles: ⌈n / rows⌉ for a group of n rows, so at most total // rows + E for any sizes."""
        tile = jnp.arange(total // rows + min(sizes.shape[0], total), dtype=jnp.int32)
        ends = jnp.cumsum((sizes + rows - 1) // rows)
        group = (tile[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32)
        table = jnp.stack([group, offsets[group], offsets[group + 1], jnp.pad(ends, (1, 0))[group]])
        return cls(table=table.astype(jnp.int32), rows=rows)


@partial(jax.tree_util.register_dataclass, data_fields=["sizes", "offsets", "tiles", "gathered_tiles"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class GroupMetadata:
    """Consecutive rows in E groups. A pytree on the device, computed once and shared by every matmul."""

    sizes: Int[Array, " E"]
    """Rows of each group, which may be zero."""
    offsets: Int[Array, " E+1"]
    """First row of each group, then the number of rows."""
    tiles: RowTiles
    gathered_tiles: RowTiles
    """Tiles for kernels that gather rows as they load them."""

    @classmethod
    def of(cls, sizes: Int[Array, " E"], rows: int, *, row_tile: int | None = None) -> "GroupMetadata":
        """Compute the metadata of `rows` rows.

        Args:
            sizes: rows of each group.
            rows: sum of the sizes.
            row_tile: rows in a tile, a power of two or 192; by default the size of the mean group, within `ROW_TILES`.

        Raises:
            ValueError: sizes on the host (a NumPy array or a sequence) that do not sum to `rows`. Sizes on the device
                are not checked; results for rows beyond their sum are unspecified.
        """
        if not isinstance(sizes, jax.Array):
            _check_sizes(np.asarray(sizes), rows)
        sizes = jnp.asarray(sizes, jnp.int32)
        row_tile = row_tile or _row_tile(rows // sizes.shape[0])
        offsets = jnp.pad(jnp.cumsum(sizes), (1, 0)).astype(jnp.int32)
        tiles = RowTiles.of(sizes, offsets, rows, row_tile)
        gathered = tiles if row_tile <= _LARGEST_GATHERED else RowTiles.of(sizes, offsets, rows, _LARGEST_GATHERED)
        return cls(sizes=sizes, offsets=offsets, tiles=tiles, gathered_tiles=gathered)

    def row_group(self, rows: int) -> Int[Array, " rows"]:
        """Return the group of each row."""
        return jnp.repeat(jnp.arange(self.sizes.shape[0]), self.sizes, total_repeat_length=rows)


def _row_tile(mean: int) -> int:
    smallest, largest = ROW_TILES
    return largest if mean >= largest else max(smallest, 1 << mean.bit_length() >> 1)


def _check_sizes(sizes: np.ndarray, rows: int) -> None:
    if sizes.ndim != 1 or (sizes < 0).any():
        raise ValueError(f"group_sizes must be a vector of sizes of at least 0, got {sizes.tolist()}")
    if sizes.sum() != rows:
        raise ValueError(f"group_sizes must sum to the {rows} rows of lhs, got a sum of {sizes.sum()}")
