"""Where the groups of a grouped matmul begin, and which group each tile of rows belongs to."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

ROW_TILES = (16, 192)
"""Fewest and most rows in a tile of the kernels."""


@partial(jax.tree_util.register_dataclass, data_fields=["sizes", "offsets", "tile_group"], meta_fields=["row_tile"])
@dataclass(frozen=True, kw_only=True)
class Groups:
    """Consecutive rows in E groups; a pytree that lives on the device, made once and shared by every matmul."""

    sizes: Int[Array, " E"]
    """Rows of each group; zero is fine."""
    offsets: Int[Array, " E+1"]
    """First row of each group, then the number of rows."""
    tile_group: Int[Array, "4 tiles"]
    """Group of each tile of `row_tile` rows, the group's first row, the first row after it, and its first tile; the
    group is E for the tiles that are not needed."""
    row_tile: int
    """A tile holds rows of one group, so a group's last tile is partly empty."""

    @classmethod
    def of(cls, sizes: Int[Array, " E"], rows: int, *, row_tile: int | None = None) -> "Groups":
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
        return cls(sizes=sizes, offsets=offsets, tile_group=_tiles(sizes, offsets, rows, row_tile), row_tile=row_tile)

    def row_group(self, rows: int) -> Int[Array, " rows"]:
        """The group of each row."""
        return jnp.repeat(jnp.arange(self.sizes.shape[0]), self.sizes, total_repeat_length=rows)


def _row_tile(mean: int) -> int:
    smallest, largest = ROW_TILES
    return largest if mean >= largest else max(smallest, 1 << mean.bit_length() >> 1)


def _tiles(sizes, offsets, rows: int, row_tile: int) -> Int[Array, "4 tiles"]:
    """A group of n rows takes ⌈n / row_tile⌉ tiles: at most rows // row_tile + E in all, whatever the sizes are."""
    E = sizes.shape[0]
    tile = jnp.arange(rows // row_tile + min(E, rows), dtype=jnp.int32)
    ends = jnp.cumsum((sizes + row_tile - 1) // row_tile)
    group = (tile[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32)
    return jnp.stack([group, offsets[group], offsets[group + 1], jnp.pad(ends, (1, 0))[group]]).astype(jnp.int32)


def _check_sizes(sizes: np.ndarray, rows: int) -> None:
    if sizes.ndim != 1 or (sizes < 0).any():
        raise ValueError(f"group_sizes must be a vector of sizes of at least 0, got {sizes.tolist()}")
    if sizes.sum() != rows:
        raise ValueError(f"group_sizes must sum to the {rows} rows of lhs, got a sum of {sizes.sum()}")
