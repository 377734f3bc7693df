"""The order in which Hopper's backward pass visits tiles, computed in Python."""

from types import FunctionType, SimpleNamespace

import pytest

pytest.importorskip("jax_triton")

from hypothesis import given
from hypothesis import strategies as st

from jaxglue.ops.attention.hopper import visits as kernel

_GL = SimpleNamespace(where=lambda condition, a, b: a if condition else b, minimum=min)


def _in_python(name: str, **functions):
    """Return a kernel's function over numbers."""
    return FunctionType(getattr(kernel, name).fn.__code__, {"gl": _GL, **functions})


visited_between = _in_python("visited_between")
visited = _in_python("visited", visited_between=visited_between)


@given(st.integers(1, 90), st.integers(1, 8), st.integers(1, 64), st.data())
def test_every_tile_of_every_head_is_visited_once_and_masked_where_it_must_be(count, group, chunk, data):
    full = data.draw(st.integers(0, count))
    cut = data.draw(st.integers(full, count))
    sizes = SimpleNamespace(G=group, P=1, CHUNK=chunk)
    bounds = SimpleNamespace(full=full, cut=cut, count=count)
    order = [visited(n, bounds, sizes) for n in range(count * group)]
    assert order[0] == (0, count - 1)
    assert sorted(order) == [(part, tile) for part in range(group) for tile in range(count)]
    begin, end = count - cut, count - full
    for first, last in ((0, begin), (begin, end), (end, count)):
        for n in range(first * group, last * group):
            assert visited_between(n, first, last, bounds, sizes) == order[n]
    assert all(full <= tile < cut for _, tile in order[begin * group : end * group])


def test_chunks_are_long_where_documents_are_much_longer_than_their_window():
    lengths, windows = (1, 4096, 8192, 16_384, 65_536), (None, 1, 1024, 8192, 16_384, 65_536, 1 << 22)
    assert [kernel.tiles_in_chunk(document, 4096) for document in lengths] == [1, 1, 8, 24, 64]
    assert [kernel.tiles_in_chunk(65_536, window) for window in windows] == [1, 1, 31, 64, 64, 1, 1]
