"""Packing: every document once, no row too long, few rows."""

import numpy as np
import pytest

from jaxglue.data.packing import best_fit, plan_epoch, plan_packing


def naive_best_fit(lengths, seq_len, max_segments):
    """Find the fullest row with room by searching all rows."""
    rooms, counts, rows = [], [], []
    for length in lengths:
        fits = [r for r, room in enumerate(rooms) if room >= length and counts[r] < max_segments]
        if not fits:
            rooms.append(seq_len)
            counts.append(0)
            fits = [len(rooms) - 1]
        row = min(fits, key=lambda r: rooms[r])
        rooms[row] -= length
        counts[row] += 1
        rows.append(row)
    return rooms, rows


@pytest.mark.parametrize("max_segments", [3, 1000])
def test_as_full_as_plain_best_fit(max_segments):
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    rows, count = best_fit(lengths, seq_len=100, max_segments=max_segments)
    rooms, _ = naive_best_fit(lengths, 100, max_segments)
    used = np.bincount(rows, lengths, minlength=count)
    assert sorted(100 - used) == sorted(rooms)
    assert np.bincount(rows).max() <= max_segments


def test_every_document_once_and_within_the_row():
    lengths = np.random.default_rng(1).integers(1, 101, 200)
    plan = plan_packing(lengths, seq_len=100, rng=np.random.default_rng(2))
    assert sorted(plan.documents) == list(range(200))
    assert np.add.reduceat(lengths[plan.documents], plan.bounds[:-1]).max() <= 100
    assert plan.max_segments == np.diff(plan.bounds).max()


def test_the_plan_depends_on_the_generator_alone():
    lengths = np.random.default_rng(1).integers(1, 50, 100)
    one, same, other = (plan_packing(lengths, seq_len=64, rng=np.random.default_rng([0, e])) for e in (0, 0, 1))
    np.testing.assert_array_equal(one.documents, same.documents)
    assert one.documents.tolist() != other.documents.tolist()


def test_without_a_generator_documents_keep_their_order():
    plan = plan_packing(np.array([4, 4, 4, 4]), seq_len=8)
    assert plan.documents.tolist() == [0, 1, 2, 3]
    assert plan.bounds.tolist() == [0, 2, 4]


def test_documents_are_shuffled_before_packing_and_rows_afterwards():
    pairs = np.full(33, 4)
    plans = [plan_packing(pairs, seq_len=8, rng=np.random.default_rng(seed)) for seed in range(8)]
    together = [{frozenset(plan.row(row).tolist()) for row in range(plan.rows)} for plan in plans]
    assert len({frozenset(rows) for rows in together}) == 8
    alone = [int(np.diff(plan.bounds).argmin()) for plan in plans]  # the row opened last has one document
    assert len(set(alone)) > 4


def test_epochs_differ_and_follow_their_seed():
    lengths = np.random.default_rng(1).integers(1, 50, 100)
    one, again, later, other = (
        plan_epoch(lengths, seq_len=64, seed=seed, epoch=epoch).documents.tolist()
        for seed, epoch in ((0, 1), (0, 1), (0, 2), (1, 1))
    )
    assert one == again and one != later and one != other and later != other
