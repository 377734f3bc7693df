"""Steps of a run on answers of a stand-in for the model: which prompts are answered, and which are trained on."""

import copy
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from jaxglue.data.store import TokenStore
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.rl.config import RolloutConfig
from jaxglue.rl.loop import RolloutSteps
from jaxglue.rl.plan import RolloutPlan
from jaxglue.rl.prompts import Prompt, PromptDataset
from jaxglue.rl.rewards import RewardSpec
from jaxglue.rl.sampler import Sample


class Policy:
    """Answers a prompt with its number in the run, and the answer's; notes passes, and is its own teacher."""

    teacher_matrix, differs = np.zeros((9, 1), np.float32), True
    """`differs`: log-probabilities of training are not those of sampling."""
    seconds = 0.0
    """Of sampling."""
    weights = 0
    """Which sampling puts in the place of log-probabilities, and a pass adds to its own."""

    def __init__(self, calls):
        self._calls = calls

    def log_probs(self, batch, *, reference=False):
        self._calls.append("reference" if reference else "old")
        if not self.differs:
            return np.zeros(batch.targets.shape, np.float32)
        return self.weights / 8 - batch.targets.astype(np.float32)

    def snapshot(self):
        return copy.copy(self)

    def draft_acceptance(self):
        return None

    def teacher_hidden(self, batch):
        return np.zeros((*batch.targets.shape, 1), np.float32)

    def sample(self, prompts, indices, count, images):
        time.sleep(self.seconds)

        def answer(index, number):
            tokens = np.array([index, number, 9], np.int32)
            return Sample(tokens, np.full(3, -self.weights, np.float32), True, f"{index}")

        return [[answer(index, number) for number in range(count)] for index in indices]


class Judge:
    """Gives answers of prompts with these numbers in the run one reward, or none, and others rewards that differ."""

    names, weights, specs, digests = ["stub"], np.ones(1), [RewardSpec("stub", "", {})], {}

    def __init__(self, equal, reward, calls):
        self._equal, self._reward, self._calls = equal, reward, calls

    def load_models(self, tokenizer, rules):
        pass

    def score(self, written):
        self._calls.append("rewards")

        def reward(sample):
            return self._reward if int(sample.text) in self._equal else float(sample.tokens[1])

        return np.array([[[reward(sample)] for sample in group.samples] for group in written])


@pytest.fixture
def make_steps(tmp_path):
    """Build steps of two prompts with three answers each."""
    prompts = tuple(Prompt(f"x:{n}", f"{n}", [n, 8], {}) for n in range(5))
    tokens, lengths = np.array([t for p in prompts for t in p.tokens], np.int32), np.full(5, 2)
    info = {"digest": "", "max_token": 8}
    store = TokenStore(tokens=tokens, mask=np.zeros(10, np.uint8), offsets=np.arange(0, 11, 2), info=info)
    fields = {"documents": np.arange(5), "lengths": lengths, "targets": np.zeros(5, int)}
    dataset = PromptDataset(store=store, **fields, prompts=prompts, answer=3)

    def make(equal=(), reward=1.0, held_out=False, calls=None, loss=None, tile=None, policy=None, **settings):
        calls = [] if calls is None else calls
        config = RolloutConfig(reward=("exact",), num_generations=3, generation_batch_size=6, **settings)
        objective = ObjectiveConfig(**{"objective": "grpo", **(loss or {})}).make()
        parts = {"dataset": dataset, "held_out": dataset if held_out else None, "judge": Judge(equal, reward, calls)}
        sizes = {"seq_len": 32, "batch_size": 1, "seed": 3, "tile": tile}
        steps = RolloutSteps(RolloutPlan(objective=objective, config=config, **parts, **sizes), tmp_path)
        steps.begin(policy or Policy(calls), SimpleNamespace())
        return steps

    return make


def trained(step) -> list[int]:
    """Return the numbers in the run of a step's prompts."""
    (batch,) = step.micro_batches
    owners = np.asarray(batch.rollouts.owners)[0]
    return [int(batch.targets[0][owners == slot][0]) for slot in (0, 3)]


def test_every_prompt_is_answered_once_an_epoch(make_steps, tmp_path):
    steps = make_steps()
    numbers = [number for _ in range(5) for number in trained(next(steps))]
    assert numbers == list(range(10))
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    origins = [json.loads(line)["origin"] for line in lines[::3]]
    assert len(set(origins[:5])) == len(set(origins[5:])) == 5 and origins[:5] != origins[5:]


@pytest.mark.parametrize("taken", range(4))
def test_a_state_goes_on_with_the_same_answers_and_rewards(make_steps, taken):
    """Of two steps on each half of the answers: from a state between them by the rewards that were kept."""
    settings = {"steps_per_generation": 2, "num_iterations": 2}
    steps = make_steps(**settings)
    for _ in range(4 + taken):
        next(steps)
    state = json.loads(json.dumps(steps.get_state()))
    assert (state["position"], state["step"], state["taken"]) == (2, 4, taken)
    equal = {2, 3} if taken else ()  # would now be judged otherwise
    later = make_steps(equal=equal, **settings)
    later.set_state(state)
    assert later.get_state() == state
    for _ in range(6 - taken):
        expected, step = next(steps), next(later)
        (batch,), (same,) = expected.micro_batches, step.micro_batches
        np.testing.assert_array_equal(same.targets, batch.targets)
        np.testing.assert_array_equal(same.rollouts.advantages, batch.rollouts.advantages)
        assert step.metrics == expected.metrics


def test_answers_that_are_gone_are_said(make_steps, tmp_path):
    steps = make_steps(num_iterations=2)
    next(steps)
    steps.forget()  # keeps those in use
    steps.set_state(steps.get_state())
    next(steps)
    state = {**steps.get_state(), "step": 0, "position": 0, "taken": 1}
    steps.saved()
    with pytest.raises(ValueError, match="the answers that steps from 1 on train on are gone"):
        steps.set_state(state)


@pytest.mark.parametrize("reward", [1.0, 0.1, np.nan])
def test_dynamic_sampling_replaces_prompts_of_equal_rewards_or_none(make_steps, reward):
    steps = make_steps(equal={0, 2, 3, 7}, reward=reward, dynamic_sampling=True)
    first, second = next(steps), next(steps)
    assert trained(first) == [1, 4] and first.metrics["sampled_prompts"] == 6
    assert trained(second) == [6, 8]  # 5 was sampled for the first step, and is not looked at again
    assert first.metrics["frac_reward_zero_std"] == 0


def test_held_out_prompts_have_numbers_of_their_own_and_take_none(make_steps, tmp_path):
    steps = make_steps(held_out=True, equal={(1 << 30) + n for n in range(4)}, reward=0.5)
    next(steps)
    lines = (tmp_path / "rollouts.jsonl").read_text()
    found = [steps.evaluate() for _ in range(2)]
    assert found[0] == found[1]  # the same random numbers
    assert found[0]["eval_reward"] == pytest.approx((4 * 0.5 + 1) / 5)  # answers 0, 1, 2 to the fifth prompt
    assert found[0]["eval_completions/mean_length"] == 3
    assert (tmp_path / "rollouts.jsonl").read_text() == lines and trained(next(steps)) == [2, 3]


def test_dynamic_sampling_ends_where_no_rewards_differ(make_steps):
    step = next(make_steps(equal=set(range(100)), dynamic_sampling=True))
    assert trained(step) == [0, 1] and step.metrics["frac_reward_zero_std"] == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, ["reference", "rewards"]), ({"dynamic_sampling": True}, ["rewards", "rewards", "reference"])],
)
def test_a_reference_runs_while_rewards_are_judged_or_on_the_chosen_answers(make_steps, settings, expected):
    calls = []
    step = next(make_steps(loss={"beta": 0.1}, calls=calls, equal={0}, **settings))
    (batch,) = step.micro_batches
    answered = np.asarray(batch.loss_weights) > 0
    np.testing.assert_array_equal(batch.rollouts.reference[answered], -batch.targets[answered])
    assert calls == expected


@pytest.mark.parametrize(
    ("loss", "settings", "passes"),
    [
        ({}, {}, []),
        ({"objective": "rloo", "beta": 0.0}, {}, []),  # the present weights wrote the answers, and no reward reads them
        ({"objective": "rloo", "beta": 0.0}, {"dynamic_sampling": True}, []),
        ({"objective": "rloo"}, {}, ["old", "reference"]),
        ({"beta": 0.1}, {}, ["reference"]),
        ({"objective": "rloo", "beta": 0.0}, {"num_iterations": 2}, ["old"]),
        ({"objective": "cispo"}, {"steps_per_generation": 2}, ["old"]),
        ({"objective": "distill"}, {"num_iterations": 2}, []),
    ],
)
def test_log_probabilities_that_nothing_reads_take_no_pass(make_steps, loss, settings, passes):
    calls = []
    step = next(make_steps(loss=loss, calls=calls, **settings))
    assert [call for call in calls if call != "rewards"] == passes
    for batch in step.micro_batches:
        assert (batch.rollouts.old is not None, batch.rollouts.reference is not None) == (
            "old" in passes,
            "reference" in passes,
        )


def test_weights_of_a_mean_over_the_steps_tokens_are_the_normalizers_share(make_steps):
    step = next(make_steps(loss={"entropy_coef": 0.1}))
    weights = sum((batch.loss_weights * batch.rollouts.mean_weight).sum() for batch in step.micro_batches)
    assert weights == pytest.approx(step.targets)


def test_exact_sampling_is_compared_once_and_gives_old_log_probabilities(make_steps, monkeypatch):
    monkeypatch.setattr(Policy, "differs", False)
    calls = []
    steps = make_steps(calls=calls, tile=4, num_iterations=2)
    batches = [next(steps).micro_batches[0] for _ in range(4)]
    assert calls == ["rewards", "old", "rewards"]  # no pass but that of the comparison
    for batch in batches:
        answered = batch.loss_weights > 0
        np.testing.assert_array_equal(batch.rollouts.old[answered], batch.rollouts.sampler[answered])


def test_exact_sampling_that_does_not_hold_ends_the_run(make_steps):
    steps = make_steps(tile=4)
    with pytest.raises(ValueError, match="does not hold here: of 18 tokens 13 have other log-probabilities"):
        next(steps)


@pytest.mark.parametrize(("tile", "later"), [(None, 4), (4, None)])
def test_a_run_goes_on_with_the_exactness_that_it_began_with(make_steps, tile, later):
    """Which `auto` may choose otherwise on another GPU."""
    state = make_steps(tile=tile).get_state()
    with pytest.raises(ValueError, match=f"tile of --exact-sampling: {tile} then, {later} now"):
        make_steps(tile=later).set_state(state)


def weights_of(step) -> float:
    """Return which weights wrote a step's answers, as the stand-in says."""
    (batch,) = step.micro_batches
    (weights,) = set(-np.asarray(batch.rollouts.sampler)[np.asarray(batch.loss_weights) > 0])
    return weights


@pytest.mark.parametrize(("staleness", "pairs"), [(0, 1), (1, 1), (3, 1), (2, 2)])
def test_answers_are_of_weights_that_are_some_generations_old(make_steps, staleness, pairs):
    policy = Policy([])
    steps = make_steps(policy=policy, staleness=staleness, num_iterations=pairs, equal={0, 5}, dynamic_sampling=True)
    found, metrics = [], []
    for _ in range(6 * pairs):
        step = next(steps)
        found.append((trained(step), weights_of(step)))
        metrics += [step.metrics["staleness"]] if "staleness" in step.metrics else []
        if pairs > 1:  # log-probabilities of the weights before the first of both steps
            (batch,) = step.micro_batches
            answered = np.asarray(batch.loss_weights) > 0
            before = (policy.weights // pairs * pairs) / 8
            np.testing.assert_array_equal(batch.rollouts.old[answered], before - batch.targets[answered])
        policy.weights += 1
    written = [max(number - staleness, 0) * pairs for number in range(6) for _ in range(pairs)]
    assert [weights for _, weights in found] == written
    assert [numbers for numbers, _ in found[::pairs]][:3] == [[1, 2], [4, 6], [8, 9]]  # 0, 5 are equal, 3, 7 left
    assert metrics == ([min(number, staleness) * pairs for number in range(6)] if staleness else [])


def test_a_state_waits_for_answers_of_earlier_weights_and_goes_on_with_them(make_steps):
    policy = Policy([])
    policy.seconds = 0.05
    steps = make_steps(policy=policy, staleness=2)
    for _ in range(3):
        next(steps)
        policy.weights += 1
    state = json.loads(json.dumps(steps.get_state()))
    later = make_steps(policy=policy, staleness=2)
    later.set_state(state)
    found = []
    for _ in range(4):
        found.append(weights_of(next(later)))
        policy.weights += 1
    assert found == [1, 2, 3, 4]


def test_nothing_is_written_ahead_beyond_the_runs_last_step(make_steps):
    calls = []
    steps = make_steps(staleness=4, calls=calls)
    steps.total = 3
    for _ in range(3):
        next(steps)
    steps.get_state()
    assert calls == ["rewards"] * 3


def test_what_fails_ahead_ends_the_run(make_steps):
    policy = Policy([])
    steps = make_steps(policy=policy, staleness=1)
    next(steps)
    policy.sample = None
    next(steps)
    with pytest.raises(TypeError):
        steps.get_state()  # no checkpoint would have its answers
    with pytest.raises(TypeError):
        next(steps)
