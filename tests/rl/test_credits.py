"""Advantages of turns, and rows of episodes in packed batches, by their definitions."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.rl.advantages import turn_credits
from jaxglue.rl.pack import groups_of, of_samples, pack_groups, unpack
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.record import Generation
from jaxglue.rl.sampler import Episode, Sample


def episode(turns, rewards, total, prompts=None):
    """Return an episode of so many tokens a turn, a token of the environment before each but the first."""
    counted = [
        flag for n, length in enumerate(turns) for flag in [False] * bool(n and prompts is None) + [True] * length
    ]
    counted = np.array(counted)
    ends = np.cumsum([length + bool(n and prompts is None) for n, length in enumerate(turns)]).tolist()
    facts = Episode([], prompts or [[1, 2]], ends if prompts else ends[-1:], ends, rewards, {"own": total}, name="own")
    tokens = np.arange(10, 10 + len(counted), dtype=np.int32)
    return Sample(tokens, np.zeros(len(tokens), np.float32), True, counted=counted, episode=facts)


def test_a_turn_has_the_advantage_of_the_rewards_from_it_on():
    nan = np.nan
    group = [episode([2, 1], [1.0, 0.0], 4.0), episode([1, 1, 1], [0.0, nan, 2.0], 2.0), episode([3], [nan], 1.0)]
    rewards = np.array([[[each.episode.rewards["own"]] for each in group]])
    config = ObjectiveConfig(objective="dapo")
    plan = SimpleNamespace(objective=config.make(), judge=SimpleNamespace(names=["own"], weights=np.array([2.0])))
    prompt = Prompt("x:1", [], [1, 2], {})
    generation = Generation(
        rows=[0], numbers=[0], following=1, prompts=[prompt], samples=[group], rewards=rewards, sampled=1
    )
    (credits,) = turn_credits(plan, generation)
    left = [[8.0, 4.0, 2.0], [6.0, 4.0], [4.0]]  # twice the total less what the turns before had
    for turn, values in enumerate(left):
        alone = (np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + 1e-4) if len(values) > 1 else [0.0]
        own = [each for each in range(3) if len(group[each].episode.turn_rewards) > turn]
        for place, expected in zip(own, alone, strict=True):
            first = group[place].episode.turn_ends[turn - 1] if turn else 0
            np.testing.assert_allclose(
                credits[place][first : group[place].episode.turn_ends[turn]], expected, rtol=1e-5
            )


@pytest.mark.parametrize("branches", [False, True])
def test_rows_share_what_all_prompts_begin_with(branches):
    own = [[1, 2, 3], [1, 2, 3, 4]] if branches else None
    first = episode([2, 1], [0.0, 0.0], 1.0, own)
    other = episode([2], [0.0], 0.0, [[1, 2, 5]])
    prompt = Prompt("x:1", [], [1, 2], {})
    objective = ObjectiveConfig(objective="dapo").make()
    credits = [[np.arange(len(sample.tokens), dtype=np.float32) for sample in (first, other)]]
    (group,) = groups_of(objective, [prompt], [[first, other]], np.array([[0.5, -0.5]]), credits)
    assert list(group.prompt) == [1, 2]
    rows = [answer.tokens.tolist() for answer in group.answers]
    assert rows == ([[3, 10, 11], [3, 4, 12], [5, 10, 11]] if branches else [[10, 11, 12, 13], [5, 10, 11]])
    masks = [answer.counted.astype(int).tolist() for answer in group.answers]
    assert masks == ([[0, 1, 1], [0, 0, 1], [0, 1, 1]] if branches else [[1, 1, 0, 1], [0, 1, 1]])
    assert [answer.advantage for answer in group.answers] == ([0.5, 0.5, -0.5] if branches else [0.5, -0.5])
    packed = pack_groups([group], seq_len=32, batch_size=1, slots=8)
    (batch, _) = packed[0]
    counted = np.asarray(batch.loss_weights) > 0
    shown = sorted(zip(batch.targets[counted].tolist(), batch.rollouts.credits[counted].tolist(), strict=True))
    expected = [
        (int(token), float(credit))
        for sample, values in zip((first, other), credits[0], strict=True)
        for token, credit, own in zip(sample.tokens, values, sample.counted, strict=True)
        if own
    ]
    assert shown == sorted(expected)
    values = of_samples([prompt], [[first, other]], unpack(packed, [batch.targets.astype(np.float32)]))
    for sample, back in zip((first, other), values, strict=True):
        assert back.tolist() == sample.tokens.tolist()
