"""Batches compared with a token-by-token construction."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxglue.data.dataset import TokenDataset
from jaxglue.data.encode import Encoded
from jaxglue.data.packing import plan_packing
from jaxglue.data.store_files import open_store, write_store

LENGTHS = [7, 1, 12, 3, 9, 5, 2, 12]


@pytest.fixture
def store(tmp_path):
    rng = np.random.default_rng(0)
    lengths = np.array(LENGTHS, np.int32)
    tokens = rng.integers(1, 99, lengths.sum()).astype(np.int32)
    mask = rng.integers(0, 2, lengths.sum()).astype(np.uint8)
    write_store(tmp_path / "store", [Encoded(tokens, mask, lengths)])
    return open_store(tmp_path / "store")


@pytest.fixture
def dataset(store):
    """All documents except the fifth, truncated to 10 tokens."""
    chosen = np.array([0, 1, 2, 3, 5, 6, 7])
    ends = store.offsets[:-1] + np.minimum(store.lengths, 10)
    return TokenDataset(
        store=store,
        documents=chosen,
        lengths=np.minimum(store.lengths[chosen], 10),
        targets=store.targets_within(ends)[chosen],
    )


def plain_row(dataset, members, seq_len):
    """Return tokens, targets and weights of a row, built document by document."""
    tokens, targets, weights = [], [], []
    for member in members:
        first, length = dataset.store.offsets[dataset.documents[member]], dataset.lengths[member]
        document, mask = (a[first : first + length].tolist() for a in (dataset.store.tokens, dataset.store.mask))
        tokens += document
        targets += [*document[1:], 0]
        weights += [*mask[1:], 0]
    padding = [0] * (seq_len - len(tokens))
    return tokens + padding, targets + padding, weights + padding


def test_rows_equal_a_plain_construction(dataset):
    plan = plan_packing(dataset.lengths, seq_len=16, rng=np.random.default_rng(0))
    batch = dataset.build_batch(plan, np.arange(plan.rows), plan.documents, seq_len=16, max_segments=8)
    for r in range(plan.rows):
        members = plan.documents[plan.bounds[r] : plan.bounds[r + 1]]
        tokens, targets, weights = plain_row(dataset, members, 16)
        np.testing.assert_array_equal(batch.tokens[r], tokens)
        np.testing.assert_array_equal(batch.targets[r], targets)
        np.testing.assert_array_equal(batch.loss_weights[r], weights)
        sizes = np.bincount(batch.segments.segment_ids[r])[1:]
        np.testing.assert_array_equal(sizes, dataset.lengths[members])


def test_the_weights_add_up_to_the_target_tokens(dataset):
    plan = plan_packing(dataset.lengths, seq_len=16)
    batch = dataset.build_batch(plan, np.arange(plan.rows), plan.documents, seq_len=16, max_segments=8)
    assert batch.loss_weights.sum() == dataset.targets.sum()


def test_targets_within_equals_a_loop(store):
    ends = store.offsets[:-1] + np.minimum(store.lengths, 10)
    looped = [store.mask[a + 1 : b].sum() for a, b in zip(store.offsets[:-1], ends, strict=True)]
    np.testing.assert_array_equal(store.targets_within(ends), looped)


def test_rows_past_the_end_are_empty(dataset):
    plan = plan_packing(dataset.lengths, seq_len=16)
    batch = dataset.build_batch(plan, np.array([plan.rows, plan.rows + 3]), plan.documents, seq_len=16, max_segments=8)
    assert batch.tokens.shape == (2, 16)
    assert not batch.segments.segment_ids.any()
    assert batch.loss_weights.sum() == 0


def test_a_batch_is_a_pytree(dataset):
    plan = plan_packing(dataset.lengths, seq_len=16)
    batch = dataset.build_batch(plan, np.arange(2), plan.documents, seq_len=16, max_segments=8)
    shapes = jax.tree.map(np.shape, batch)
    assert (shapes.tokens, shapes.segments.cu_seqlens) == ((2, 16), (2, 9))


def test_fingerprint_changes_with_the_selection(dataset):
    shorter = dataclasses.replace(dataset, lengths=np.minimum(dataset.lengths, 8))
    same = dataclasses.replace(dataset, documents=dataset.documents.copy(), lengths=dataset.lengths.copy())
    assert dataset.fingerprint == same.fingerprint != shorter.fingerprint


def test_interrupted_store_is_not_published(tmp_path, store):
    def chunks():
        yield Encoded(store.tokens[:7], store.mask[:7], np.array([7], np.int32))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_store(tmp_path / "other", chunks())
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
