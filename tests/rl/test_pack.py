"""Groups of answers in rows: every answer once after its prompt, rows nearly full, prompts rarely repeated."""

import numpy as np
import pytest

from jaxglue.rl.pack import Group, TrainedAnswer, pack_groups, unpack


def make_groups(count: int, answers: int, prompt: int, longest: int, seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)

    def answer() -> TrainedAnswer:
        size = int(np.clip(rng.lognormal(np.log(longest / 2.5), 0.7), 1, longest))
        fields = {"log_probs": rng.normal(size=size).astype(np.float32), "counted": rng.random(size) < 0.8}
        return TrainedAnswer(tokens=rng.integers(0, 99, size), **fields, teacher=rng.normal(size=(size, 3)))

    return [Group(rng.integers(0, 99, prompt).tolist(), [answer() for _ in range(answers)]) for _ in range(count)]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seq_len", [48, 256])
def test_every_answer_is_packed_once_after_its_prompt(seq_len, shared):
    groups = make_groups(7, 4, 6, 40)
    packed = pack_groups(groups, seq_len=seq_len, batch_size=3, slots=28, shared=shared)
    for name in ("targets", "loss_weights", "rollouts.sampler", "rollouts.teacher"):
        values = [batch for batch, _ in packed]
        for part in name.split("."):
            values = [getattr(value, part) for value in values]
        fields = {"targets": "tokens", "loss_weights": "counted", "rollouts.sampler": "log_probs"}
        expected = [getattr(a, fields.get(name, "teacher")) for group in groups for a in group.answers]
        for got, own in zip(unpack(packed, values), expected, strict=True):
            np.testing.assert_array_equal(got, own)
    number = dict(enumerate(g for g in groups for _ in g.answers))
    for batch, rows in packed:
        assert batch.tokens.shape == (3, seq_len)
        for row, numbers in enumerate(rows):
            for slot, answer in enumerate(numbers):
                first = np.flatnonzero(batch.rollouts.owners[row] == slot)[0]
                seen = batch.segments.positions[row, first]
                prompt = number[answer].prompt
                assert seen == len(prompt) - 1 and batch.tokens[row, first] == prompt[-1]


def test_rows_of_a_usual_step_are_nearly_full():
    groups = make_groups(64, 8, 200, 1024)
    packed = pack_groups(groups, seq_len=16384, batch_size=1, slots=512)
    tokens = sum(group.length for group in groups)
    assert len(packed) - 1 <= 1.03 * tokens / 16384
    pieces = sum(len(np.unique(batch.segments.segment_ids)) - 1 for batch, _ in packed)
    assert pieces <= 64 + len(packed)  # a copy of a prompt a row


@pytest.mark.parametrize("tile", [8, 32])
def test_parts_begin_at_tiles_and_keep_their_positions(tile):
    groups = make_groups(7, 4, 13, 40)
    packed = pack_groups(groups, seq_len=256, batch_size=2, slots=28, tile=tile)
    tokens = unpack(packed, [batch.targets for batch, _ in packed])
    for got, own in zip(tokens, (a.tokens for group in groups for a in group.answers), strict=True):
        np.testing.assert_array_equal(got, own)
    for batch, rows in packed:
        segments = batch.segments
        for row, numbers in enumerate(rows):
            for slot in range(len(numbers)):
                own = np.flatnonzero(batch.rollouts.owners[row] == slot)
                assert own[0] % tile == 0 and segments.starts[row, own[0]] % tile == 0
                np.testing.assert_array_equal(segments.positions[row, own], 12 + np.arange(len(own)))
                gap = segments.gap_starts[row, own], segments.gap_ends[row, own]
                assert (gap[0] == segments.starts[row, own[0]] + 12).all() and (gap[1] == own[0]).all()
