"""Columns of heads' tiles, and the tiles for them."""

import pytest

from jaxglue.ops.attention.tiles import kernel_tiles, tile_columns


@pytest.mark.parametrize(
    ("sizes", "columns"),
    [
        ((64, 64), (64, 0)),
        ((72, 72), (64, 16)),
        ((80, 80), (64, 16)),
        ((96, 96), (64, 32)),
        ((104, 104), (128, 0)),
        ((128, 128), (128, 0)),
        ((160, 160), (256, 0)),
        ((256, 256), (256, 0)),
        ((192, 128), (128, 64)),
        ((72, 64), (64, 16)),
        ((104, 72), (128, 0)),
    ],
)
def test_heads_are_in_two_parts_where_these_have_fewer_columns(sizes, columns):
    assert tile_columns(*sizes) == columns
    head_dim, value_dim = sizes
    assert all(kernel_tiles(gpu, head_dim, value_dim=value_dim).forward.block_m for gpu in ((8, 0), (8, 9), (9, 0)))


def test_heads_in_two_parts_have_tiles_of_their_own():
    assert kernel_tiles((9, 0), 80) == kernel_tiles((9, 0), 72) != kernel_tiles((9, 0), 128)
