"""Epochs, fixed shapes and exactly resumable states."""

import dataclasses
import json
import math
from collections import Counter

import jax
import numpy as np
import pytest

from jaxglue.data import iterator as iterator_module
from jaxglue.data.dataset import TokenDataset
from jaxglue.data.encode import Encoded
from jaxglue.data.iterator import BatchIterator, EvalBatches
from jaxglue.data.store_files import open_store, write_store
from jaxglue.ops import segments

SIZES = {"seq_len": 32, "batch_size": 2, "gradient_accumulation_steps": 3, "seed": 5}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Document d repeats the number d + 1, to identify documents in batches."""
    lengths = np.random.default_rng(0).integers(2, 30, 60).astype(np.int32)
    tokens = np.repeat(np.arange(1, 61, dtype=np.int32), lengths)
    folder = tmp_path_factory.mktemp("data") / "store"
    write_store(folder, [Encoded(tokens, np.ones_like(tokens, np.uint8), lengths)])
    return TokenDataset(store=open_store(folder), documents=np.arange(60), lengths=lengths, targets=lengths - 1)


@pytest.fixture
def iterate(dataset):
    """Make iterators, closed after the test."""
    made = []

    def make(data=dataset, **options):
        made.append(BatchIterator(data, **{**SIZES, **options}))
        return made[-1]

    yield make
    for iterator in made:
        iterator.close()


def micro_batches(steps):
    return [batch for step in steps for batch in step.micro_batches]


def token_counts(batches):
    return Counter(np.concatenate([b.tokens[b.segments.segment_ids > 0] for b in batches]).tolist())


def assert_same(one, other):
    """Assert that two batches, or tuples of batches, are equal."""
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("epochs", [0.1, 0.5, 1.5, 2])
def test_a_part_of_an_epoch_has_its_first_steps(iterate, epochs, ahead):
    iterator, whole = iterate(epochs=epochs), list(iterate(epochs=2))
    per_epoch = iterator.steps_per_epoch
    iterator.begin = (lambda images: None) if ahead else None
    steps = list(iterator)
    assert len(steps) == iterator.total_steps == math.ceil(epochs * per_epoch) and 2 * per_epoch == len(whole)
    for step, other in zip(steps, whole, strict=False):
        assert_same(step.micro_batches, other.micro_batches)


def test_every_document_once_per_epoch_in_another_order(dataset, iterate):
    iterator = iterate(epochs=2)
    steps = list(iterator)
    assert len(steps) == iterator.total_steps
    first, second = steps[: iterator.steps_per_epoch], steps[iterator.steps_per_epoch :]
    expected = Counter(dataset.store.tokens.tolist())
    for epoch in (first, second):
        assert token_counts(micro_batches(epoch)) == expected
    one, other = (micro_batches(epoch)[0] for epoch in (first, second))
    assert one.tokens.tolist() != other.tokens.tolist()


def test_a_step_counts_its_tokens_and_targets(dataset, iterate):
    for step in iterate(epochs=2):
        assert step.tokens == sum((batch.segments.segment_ids > 0).sum() for batch in step.micro_batches)
        assert step.targets == sum(batch.loss_weights.sum() for batch in step.micro_batches)
    assert EvalBatches(dataset, seq_len=32, batch_size=4).targets == dataset.targets.sum()


def test_all_batches_have_the_same_shapes(iterate):
    iterator = iterate(epochs=4)
    shapes = {str(jax.tree.map(np.shape, batch)) for batch in micro_batches(iterator)}
    assert len(shapes) == 1
    assert iterator.max_segments & (iterator.max_segments - 1) == 0


@pytest.mark.parametrize("steps", [0, 2, "epoch", "epoch and 1"])
def test_resumed_state_continues_bit_for_bit(iterate, steps):
    iterator = iterate()
    count = {"epoch": iterator.steps_per_epoch, "epoch and 1": iterator.steps_per_epoch + 1}.get(steps, steps)
    for _ in range(count):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    resumed = iterate()
    resumed.set_state(state)
    for _ in range(iterator.steps_per_epoch + 2):
        assert_same(next(iterator).micro_batches, next(resumed).micro_batches)


def test_other_seeds_give_other_batches(iterate):
    one, other = (next(iterate(seed=seed)).micro_batches[0] for seed in (5, 6))
    assert one.tokens.tolist() != other.tokens.tolist()


def test_a_state_of_other_data_or_sizes_is_refused(dataset, iterate):
    state = iterate().get_state()
    with pytest.raises(ValueError, match=r"cannot resume.*seed: 5 then, 6 now; batch_size: 2 then, 4 now"):
        iterate(seed=6, batch_size=4).set_state(state)
    rest = {name: getattr(dataset, name)[1:] for name in ("documents", "lengths", "targets")}
    fewer = TokenDataset(store=dataset.store, **rest)
    with pytest.raises(ValueError, match=r"cannot resume.*data: "):
        iterate(fewer).set_state(state)


def test_processes_share_the_rows_of_a_batch(iterate):
    whole = next(iterate())
    parts = [next(iterate(process_index=p, process_count=2)) for p in range(2)]
    for micro, *own in zip(whole.micro_batches, *(part.micro_batches for part in parts), strict=True):
        assert_same(micro, jax.tree.map(lambda *arrays: np.concatenate(arrays), *own))
    assert {(step.tokens, step.targets) for step in (whole, *parts)} == {(whole.tokens, whole.targets)}


def test_processes_agree_on_a_batchs_kind(iterate, monkeypatch):
    monkeypatch.setattr(segments, "LONG_DOCUMENT", 16)
    monkeypatch.setattr(segments, "FEW_DOCUMENTS", 2)
    kinds = [
        [batch.segments.long for batch in micro_batches(iterate(epochs=1, process_index=p, process_count=2))]
        for p in range(2)
    ]
    whole = [batch.segments for batch in micro_batches(iterate(epochs=1))]
    assert kinds == [[packed.long for packed in whole]] * 2
    assert {(packed.long, packed.cu_seqlens.shape[1] - 1) for packed in whole} == {(True, 2), (True, 4), (False, 4)}


def test_a_state_continues_in_another_number_of_processes(iterate):
    two = [iterate(process_index=p, process_count=2) for p in range(2)]
    for _ in range(3):
        next(two[0]), next(two[1])
    states = [iterator.get_state() for iterator in two]
    assert states[0] == states[1]
    alone = iterate()
    alone.set_state(states[0])
    whole, *parts = (next(iterator).micro_batches for iterator in (alone, *two))
    assert_same(
        whole, tuple(jax.tree.map(lambda *rows: np.concatenate(rows), *own) for own in zip(*parts, strict=True))
    )


def test_rows_hold_at_most_max_segments(iterate):
    iterator = iterate(epochs=1, max_segments=2)
    assert all(batch.segments.segment_ids.max() <= 2 for batch in micro_batches(iterator))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: expected at least 1"),
        ({"epochs": 0}, "epochs=0: expected above 0"),
        ({"documents_per_step": 0}, "documents_per_step=0: expected at least 1"),
        ({"seq_len": 16}, r"a document has \d+ tokens, but seq_len=16: prepare the data with the same seq_len"),
        ({"process_count": 4}, "batch_size=2 does not divide among 4 processes"),
    ],
)
def test_invalid_sizes_are_refused(iterate, options, message):
    with pytest.raises(ValueError, match=message):
        iterate(**options)


def test_evaluation_visits_everything_in_the_same_order(dataset):
    batches = EvalBatches(dataset, seq_len=32, batch_size=4, max_segments=8)
    first, second = list(batches), list(batches)
    assert len(first) == len(batches)
    assert token_counts(first) == Counter(dataset.store.tokens.tolist())
    assert_same(first, second)
    assert first[-1].segments.cu_seqlens.shape == (4, 9)


def test_steps_of_documents_hold_that_many_each(dataset, iterate):
    iterator = iterate(documents_per_step=7, gradient_accumulation_steps=1, batch_size=2, epochs=2)
    steps = list(iterator)
    assert iterator.steps_per_epoch == 9 and len(steps) == iterator.total_steps == 18
    for epoch in (steps[:9], steps[9:]):
        counts = [token_counts(step.micro_batches) for step in epoch]
        assert [len(count) for count in counts] == [7] * 8 + [4]
        assert sum(counts, Counter()) == Counter({d + 1: int(dataset.lengths[d]) for d in range(60)})
        for step, count in zip(epoch, counts, strict=True):
            assert step.tokens == sum(count.values()) and step.targets == step.tokens - len(count)
            rows = [batch.segments.segment_ids.any(1) for batch in step.micro_batches]
            assert all(rows[0]) or len(count) == 4
            assert len(rows) == -(-int(np.concatenate(rows).sum()) // 2)
    orders = [[sorted(token_counts(step.micro_batches)) for step in epoch] for epoch in (steps[:9], steps[9:])]
    assert orders[0] != orders[1]
    assert {len(step.micro_batches) for step in steps} != {1}


def test_steps_of_documents_resume_and_divide_among_processes(iterate):
    sizes = {"documents_per_step": 7, "gradient_accumulation_steps": 1, "batch_size": 2, "epochs": 1}
    whole = iterate(**sizes)
    next(whole), next(whole)
    state = json.loads(json.dumps(whole.get_state()))
    rest = list(whole)
    resumed = iterate(**sizes)
    resumed.set_state(state)
    assert_same([step.micro_batches for step in resumed], [step.micro_batches for step in rest])
    with pytest.raises(ValueError, match="documents_per_step: 7 then, 8 now"):
        iterate(**sizes | {"documents_per_step": 8}).set_state(state)
    parts = [list(iterate(**sizes, process_index=index, process_count=2)) for index in range(2)]
    for step, own in zip(list(iterate(**sizes)), zip(*parts, strict=True), strict=True):
        assert len({len(part.micro_batches) for part in own} | {len(step.micro_batches)}) == 1
        for batch, pair in zip(
            step.micro_batches, zip(*(part.micro_batches for part in own), strict=True), strict=True
        ):
            np.testing.assert_array_equal(batch.tokens, np.concatenate([part.tokens for part in pair]))


def test_rows_have_room_for_the_targets_of_the_fullest(dataset, iterate):
    few = dataclasses.replace(dataset, targets=np.ones_like(dataset.targets))
    assert {batch.room for batch in micro_batches(iterate(few, epochs=2, seq_len=256))} == {128}
    assert {batch.room for batch in micro_batches(iterate(epochs=1, seq_len=256))} == {None}


def test_the_next_epoch_is_read_from_the_last_step_on(iterate, monkeypatch):
    read, read_ahead = [], iterator_module.read_ahead
    monkeypatch.setattr(iterator_module, "read_ahead", lambda steps: read.append(steps) or read_ahead(steps))
    iterator = iterate(epochs=2)
    for _ in range(iterator.steps_per_epoch - 1):
        next(iterator)
    assert len(read) == 1
    next(iterator)
    assert len(read) == 2 and iterator.epoch == 0
    later = [*iterator]
    assert len(read) == 2 and len(later) == len(read[1])
