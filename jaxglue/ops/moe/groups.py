"""Where the groups of a grouped matmul begin, and which group each tile of rows belongs to."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

ROW_TILES = (16, 192)
"""Fewest and most rows in a tile of the kernels."""
_GATHERED = 128
"""Most of them where rows are gathered."""


@partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["rows"])
@dataclass(frozen=True, kw_only=True)
class RowTiles:
    """The rows in tiles, each of rows of one group: a group's last tile is partly empty."""

    table: Int[Array, "4 tiles"]
    """Group of each tile, the group's first row, the first row after it, and its first tile; the group is E for the
    tiles that are not needed."""
    rows: int
    """In a tile."""

    @classmethod
    def of(cls, sizes: Int[Array, " E"], offsets: Int[Array, " E+1"], total: int, rows: int) -> "RowTiles":
        """A group of n rows takes ⌈n / rows⌉ tiles: at most total // rows + E in all, whatever the sizes are."""
        tile = jnp.arange(total // rows + min(sizes.shape[0], total), dtype=jnp.int32)
        ends = jnp.cumsum((sizes + rows - 1) // rows)
        group = (tile[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32)
        table = jnp.stack([group, offsets[group], offsets[group + 1], jnp.pad(ends, (1, 0))[group]])
        return cls(table=table.astype(jnp.int32), rows=rows)


@partial(jax.tree_util.register_dataclass, data_fields=["sizes", "offsets", "tiles", "gathered_tiles"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class GroupMetadata:
    """Consecutive rows in E groups; a pytree that lives on the device, made once and shared by every matmul."""

    sizes: Int[Array, " E"]
    """Rows of each group; zero is fine."""
    offsets: Int[Array, " E+1"]
    """First row of each group, then the number of rows."""
    tiles: RowTiles
    gathered_tiles: RowTiles
    """Those for rows that are gathered as they are loaded."""

    @classmethod
    def of(cls, sizes: Int[Array, " E"], rows: int, *, row_tile: int | None = None) -> "GroupMetadata":
        """The groups of `rows` rows.

        Args:
            sizes: rows of each group.
            rows: their sum.
            row_tile: a power of two or 192; by default what a group of mean size fills, within `ROW_TILES`.

        Raises:
            ValueError: sizes known on the host (a numpy array or a sequence) that do not sum to `rows`. Sizes on the
                device are not looked at; what rows beyond their sum get is unspecified.
        """
        if not isinstance(sizes, jax.Array):
            _check_sizes(np.asarray(sizes), rows)
        sizes = jnp.asarray(sizes, jnp.int32)
        row_tile = row_tile or _row_tile(rows // sizes.shape[0])
        offsets = jnp.pad(jnp.cumsum(sizes), (1, 0)).astype(jnp.int32)
        tiles = RowTiles.of(sizes, offsets, rows, row_tile)
        gathered = tiles if row_tile <= _GATHERED else RowTiles.of(sizes, offsets, rows, _GATHERED)
        return cls(sizes=sizes, offsets=offsets, tiles=tiles, gathered_tiles=gathered)

    def row_group(self, rows: int) -> Int[Array, " rows"]:
        """The group of each row."""
        return jnp.repeat(jnp.arange(self.sizes.shape[0]), self.sizes, total_repeat_length=rows)


def _row_tile(mean: int) -> int:
    smallest, largest = ROW_TILES
    return largest if mean >= largest else max(smallest, 1 << mean.bit_length() >> 1)


def _check_sizes(sizes: np.ndarray, rows: int) -> None:
    if sizes.ndim != 1 or (sizes < 0).any():
        raise ValueError(f"group_sizes must be a vector of sizes of at least 0, got {sizes.tolist()}")
    if sizes.sum() != rows:
        raise ValueError(f"group_sizes must sum to the {rows} rows of lhs, got a sum of {sizes.sum()}")
