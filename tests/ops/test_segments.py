import jax
import numpy as np
import pytest

from jaxglue.ops.attention import packed_attention
from jaxglue.ops.segments import (
    LONG_DOCUMENT,
    UNIT,
    batch_kind,
    pack_segments,
    segment_bucket,
)


def test_tokens_carry_the_bounds_of_their_segment():
    segments = pack_segments([[3, 2], [6]], seq_len=6)
    np.testing.assert_array_equal(segments.segment_ids, [[1, 1, 1, 2, 2, 0], [1] * 6])
    np.testing.assert_array_equal(segments.positions, [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    np.testing.assert_array_equal(segments.starts, [[0, 0, 0, 3, 3, 6], [0] * 6])
    np.testing.assert_array_equal(segments.ends, [[3, 3, 3, 5, 5, 5], [6] * 6])
    np.testing.assert_array_equal(segments.cu_seqlens, [[0, 3, 5], [0, 6, 6]])
    assert {leaf.dtype for leaf in jax.tree.leaves(segments)} == {np.dtype(np.int32)}


def test_starts_and_ends_bound_the_visible_keys():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, size=12).tolist()
    segments = pack_segments([lengths], seq_len=sum(lengths) + 5)
    ids, starts, ends = segments.segment_ids[0], segments.starts[0], segments.ends[0]
    q, k = np.arange(len(ids))[:, None], np.arange(len(ids))[None, :]
    visible = (ids[:, None] == ids[None, :]) & (ids[:, None] > 0) & (k <= q)
    np.testing.assert_array_equal(visible, (k >= starts[:, None]) & (k <= q))
    np.testing.assert_array_equal(visible, (k <= q) & (q < ends[None, :]) & (ids[:, None] > 0))


def test_a_row_without_documents_is_padding():
    segments = pack_segments([[], [2]], seq_len=3)
    np.testing.assert_array_equal(segments.segment_ids[0], [0, 0, 0])
    np.testing.assert_array_equal(segments.starts[0], [3, 3, 3])
    np.testing.assert_array_equal(segments.ends[0], [0, 0, 0])


def test_units_of_long_documents_come_first_and_cover_each_token_once():
    lengths = [40, 5 * UNIT + 1, 8 * UNIT, 9]
    segments = pack_segments([lengths, [1]], seq_len=15 * UNIT)
    start = 40 + 5 * UNIT + 1
    queries, keys = segments.units[0, :, 0]
    np.testing.assert_array_equal(keys[:8], np.arange(start, start + 8 * UNIT, UNIT))
    np.testing.assert_array_equal(keys[10:17], [*range(40, start, UNIT), 0])
    np.testing.assert_array_equal(np.sort(queries), np.sort(keys))
    assert queries[9] == start


@pytest.mark.parametrize("seed", range(8))
def test_units_cover_each_token_once(seed):
    rng = np.random.default_rng(seed)
    T = int(rng.integers(1, 30 * UNIT))
    lengths = rng.integers(1, [3, 4, 5, 9][seed % 4] * UNIT, size=30)
    lengths = lengths[np.cumsum(lengths) <= T].tolist()
    for firsts, ends in pack_segments([lengths], seq_len=T).units[0]:
        used = firsts < ends
        tokens = np.concatenate([np.arange(*bounds) for bounds in zip(firsts[used], ends[used], strict=True)])
        np.testing.assert_array_equal(np.sort(tokens), np.arange(T))
        assert (ends - firsts).max() <= UNIT


@pytest.mark.parametrize(("count", "slots"), [(0, 1), (1, 1), (2, 2), (3, 4), (26, 32), (64, 64)])
def test_segment_slots_are_bucketed(count, slots):
    assert segment_bucket(count) == slots
    assert pack_segments([[1] * count], seq_len=64).cu_seqlens.shape == (1, slots + 1)


@pytest.mark.parametrize(
    ("lengths", "kind"),
    [
        ([[LONG_DOCUMENT]], (True, 4)),
        ([[LONG_DOCUMENT - 1]], (False, 64)),
        ([[8 * LONG_DOCUMENT, 100, 100, 100]], (True, 4)),
        ([[8 * LONG_DOCUMENT, 100, 100, 100, 100]], (True, 64)),
        ([[LONG_DOCUMENT], [LONG_DOCUMENT - 1] * 4], (False, 64)),
        ([[LONG_DOCUMENT] * 4, [7], []], (True, 4)),
        ([[]], (False, 64)),
        ([], (False, 64)),
    ],
)
def test_kind_of_a_batch(lengths, kind):
    assert batch_kind(lengths, 60) == kind


def test_few_long_documents_take_few_slots():
    few, many = [[2 * LONG_DOCUMENT, 5]], [[LONG_DOCUMENT] + [1] * 20]
    packed = [pack_segments(rows, seq_len=3 * LONG_DOCUMENT, max_segments=60) for rows in (few, many)]
    assert [segments.cu_seqlens.shape for segments in packed] == [(1, 5), (1, 65)]
    assert [segments.long for segments in packed] == [True, True]
    assert pack_segments(few, seq_len=3 * LONG_DOCUMENT, max_segments=2).cu_seqlens.shape == (1, 3)


def test_batches_of_a_bucket_share_one_compilation():
    x = np.ones((1, 16, 1, 4), np.float32)
    attend = jax.jit(lambda segments: packed_attention(x, x, x, segments))
    for lengths in ([1, 2, 3], [4, 4, 4, 4], [16]):
        attend(pack_segments([lengths], seq_len=16, max_segments=4))
    assert attend._cache_size() == 1


@pytest.mark.parametrize("row", [[3, 0, 2], [5, -1], [5, 4]])
def test_bad_lengths_are_refused(row):
    with pytest.raises(ValueError, match=r"row 0: document lengths .* must be positive and add up to at most 8"):
        pack_segments([row], seq_len=8)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([4, 4], "row 0: expected a list of"), ([[4], [1.5]], "row 1: expected"), ([], "has no row")],
)
def test_other_than_rows_of_lengths_is_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        pack_segments(lengths, seq_len=8)


def test_more_documents_than_slots_are_refused():
    with pytest.raises(ValueError, match="max_segments=2, but a row holds 3 documents"):
        pack_segments([[1, 1, 1]], seq_len=8, max_segments=2)
