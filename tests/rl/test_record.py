"""Answers on disk: damaged ones are not used, and damaged lines are moved aside."""

import json

import numpy as np
import pytest

from jaxglue.rl.prompts import Prompt
from jaxglue.rl.record import KEPT, LINES, Generation, RolloutFolder
from jaxglue.rl.sampler import Sample
from jaxglue.ui.run_files import read_rollouts

PROMPT = Prompt("prompts.jsonl:1", "a", [5, 6], {})


@pytest.fixture
def answers() -> Generation:
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(0, 99, n, np.int32), rng.random(n, np.float32), n > 3, "text") for n in (3, 5)]
    return Generation(
        rows=[0],
        numbers=[0],
        following=1,
        prompts=[PROMPT],
        samples=[samples],
        rewards=np.array([[[0.5], [np.nan]]]),
        sampled=1,
    )


def content(generation: Generation) -> str:
    """Return all that a generation consists of."""
    return repr([(s.tokens.tolist(), s.log_probs.tolist(), s[2:]) for s in generation.all_samples]) + repr(
        (generation.numbers, generation.following, generation.rewards.tolist(), generation.sampled)
    )


def test_answers_with_a_flipped_bit_are_equal_or_not_used(tmp_path, answers, caplog):
    folder = RolloutFolder(tmp_path, {"seed": 1}, {})
    folder.save(2, answers)
    file, rng = tmp_path / KEPT / "step-2.npz", np.random.default_rng(1)
    whole, unused = file.read_bytes(), 0
    for bit in rng.integers(0, 8 * len(whole), 300):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        loaded = folder.load(2, [PROMPT])
        assert loaded is None or content(loaded) == content(answers), bit
        unused += loaded is None
    assert unused > 290 and "step-2.npz is damaged" in caplog.text  # others are in the length of the comment
    file.write_bytes(whole[:-100])
    assert folder.load(2, [PROMPT]) is None
    file.write_bytes(whole)
    loaded = folder.load(2, [PROMPT])
    assert loaded is not None and content(loaded) == content(answers)


@pytest.mark.parametrize("damage", [b"\xff{}\n", b'{"stop": 2}\n', b'{"step": 2, "answer": "\n', b"[1]\n"])
def test_damaged_lines_are_moved_aside(tmp_path, answers, damage, caplog):
    folder, path = RolloutFolder(tmp_path, {}, {}), tmp_path / LINES
    for step in (1, 2, 3):
        folder.record(step, answers, ["exact"], np.zeros((1, 2)))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage, *lines[3:]]))
    assert len(read_rollouts(path)[0]) >= 4  # the page shows what can be read
    again = RolloutFolder(tmp_path, {}, {})
    again.record(3, answers, ["exact"], np.zeros((1, 2)))
    assert path.read_bytes().splitlines(keepends=True) == [*lines[:2], *lines[3:]]
    assert (tmp_path / f"{LINES}.damaged").read_bytes() == damage and "damaged lines (1) were moved" in caplog.text
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 1, 2, 3, 3]
