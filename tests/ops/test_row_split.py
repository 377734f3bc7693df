"""Tokens of rows are split over devices evenly, and attention over their keys is that of whole rows."""

import numpy as np
import pytest

from jaxglue.ops import row_split
from jaxglue.ops.row_split import split_segments
from jaxglue.ops.segments import pack_segments


@pytest.fixture
def short_chunks(monkeypatch):
    """Cut documents that would stay whole."""
    monkeypatch.setattr(row_split, "_LEAST_CHUNK", 2)


@pytest.mark.parametrize("devices", [2, 4, 5])
def test_devices_have_as_many_tokens_and_as_much_to_attend_to(short_chunks, devices):
    lengths, T = [[120, 3, 77, 20, 5], [200, 39], [5] * 47, [240], []], 240
    segments = pack_segments(lengths, seq_len=T)
    split = split_segments(segments, devices)
    rows = split.split.rows.reshape(len(lengths), devices, -1)
    assert (np.sort(rows.reshape(len(lengths), T), axis=1) == np.arange(T)).all()
    assert (np.diff(rows, axis=2) > 0).all()  # kernels need them in the row's order
    pairs = np.take_along_axis(segments.positions + 1, rows.reshape(len(lengths), T), axis=1).reshape(rows.shape).sum(2)
    assert pairs[1].max() < 1.05 * pairs[1].min()
    assert pairs[3].max() < 1.02 * pairs[3].min()


def test_short_documents_stay_whole():
    split = split_segments(pack_segments([[60, 50, 40, 30, 40, 20, 8]], seq_len=256), 2).split
    rows, ends = split.rows.reshape(2, -1), np.cumsum([60, 50, 40, 30, 40, 20, 8])
    documents = [set(np.searchsorted(ends, part, side="right")) for part in rows]
    assert len(documents[0] & documents[1]) == 0
