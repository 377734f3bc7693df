"""Advantages, losses, metrics and gradients of policy gradients equal TRL's, from the same answers and models."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import repeat, repeats, repeats_parts_of

from jaxglue.data.batch import Batch, Rollouts
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.loading import load_model
from jaxglue.models import config_from_hf
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.objectives.advantages import Rewards
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.objectives.policy_gradient import k3
from jaxglue.objectives.rollouts import StepCounts
from jaxglue.ops.delta_rule import DELTA_RULE
from jaxglue.ops.segments import pack_segments
from jaxglue.rl.advantages import compare, reward_metrics
from jaxglue.rl.pack import Group, TrainedAnswer, pack_groups, with_mean_weight

GOLDENS = Path(__file__).parent.parent / "goldens"
GOLDEN = json.loads((GOLDENS / "policy.json").read_text())
FOLDER = GOLDENS / "qwen3_tied"
EOS, WEIGHTS, LONGEST = 1, np.array([1, 0.5]), 16


@cache
def models():
    """Return (graphdefs, frozen parameters, those of the reference, of the writer, and in training)."""
    graphdefs, reference, frozen = split_model(load_model(FOLDER, dtype=jnp.float32), nnx.Param)

    def times(factor):
        return lambda weight: weight * np.float32(factor(np.arange(weight.size)).reshape(weight.shape))

    writer = jax.tree.map(times(lambda index: 1 + 0.1 * np.cos(index)), reference)
    trained = jax.tree.map(times(lambda index: 1 + 0.02 * np.sin(index)), writer)
    return graphdefs, frozen, reference, writer, trained


def config_of(name: str) -> ObjectiveConfig:
    """Return a golden's settings; TRL corrects for sampling only where asked."""
    settings = {key: value for key, value in GOLDEN["cases"][name]["settings"].items() if key != "on_policy"}
    return ObjectiveConfig(objective=name.partition(",")[0], **{"importance_sampling_mode": "none", **settings})


def rewards(divergence=0.0) -> Rewards:
    by_function = np.array([group["rewards"] for group in GOLDEN["groups"]], np.float64)
    return Rewards(by_function=by_function, weights=WEIGHTS, divergence=divergence)


def groups_of(config: ObjectiveConfig, advantages) -> list[Group]:
    found = []
    for group, values in zip(GOLDEN["groups"], advantages, strict=True):
        answers = []
        for tokens, log_probs, advantage in zip(group["answers"], group["sampled"], values, strict=True):
            counted = np.full(len(tokens), tokens[-1] == EOS or not config.mask_truncated_completions)
            fields = {"tokens": np.array(tokens), "log_probs": np.array(log_probs), "counted": counted}
            answers.append(TrainedAnswer(**fields, advantage=advantage))
        found.append(Group(group["prompt"], answers))
    return found


def make_executor(config: ObjectiveConfig) -> Executor:
    shape = config_from_hf(read_config(FOLDER))
    return Executor(models()[0], shape, policy=PRESETS["full"], dtype=jnp.float32, objective=config.make())


def with_log_probs(executor: Executor, batch: Batch, config: ObjectiveConfig) -> Batch:
    """Return the batch with the writer's and the reference's log-probabilities."""
    _, frozen, reference, writer, _ = models()
    old = executor.log_probs(writer, frozen, batch)
    known = executor.log_probs(reference, frozen, batch) if config.beta else None
    return replace(batch, rollouts=replace(batch.rollouts, old=old, reference=known))


def advantages_of(config: ObjectiveConfig, executor: Executor):
    if not config.make().divergence_in_reward:
        return compare(config.make(), rewards())
    ((batch, _),) = pack_groups(groups_of(config, np.zeros((3, 4))), seq_len=96, batch_size=1, slots=16)
    batch = with_log_probs(executor, batch, config)
    divergence = np.zeros((3, 4))
    if config.beta:
        sums = batch.rollouts.sums(batch.rollouts.old - batch.rollouts.reference)
        divergence = np.asarray(sums)[0, :12].reshape(3, 4)
    return compare(config.make(), rewards(divergence))


def counts_of(groups: list[Group], micro_batches: int = 1) -> StepCounts:
    answers = [answer for group in groups for answer in group.answers]
    return StepCounts(len(answers), sum(answer.counted.sum() for answer in answers), micro_batches, LONGEST)


def close(got, expected, tolerance=5e-5):
    assert abs(got - expected) <= tolerance * max(abs(expected), 0.1), (got, expected)


OTHERS = "dapo", "dapo, token_mask", "dapo, sequence_truncate", "dr_grpo, entropy bonus"
"""Cases whose settings others have, one by one."""


@pytest.mark.parametrize("name", repeats(GOLDEN["cases"], *OTHERS))
def test_advantages_losses_metrics_and_gradients_equal_trl(name):
    config, golden = config_of(name), GOLDEN["cases"][name]
    executor, (_, frozen, _, writer, trained) = make_executor(config), models()
    advantages = advantages_of(config, executor)
    np.testing.assert_allclose(advantages.values.ravel(), golden["advantages"], atol=1e-5)
    groups = groups_of(config, advantages.values)
    ((batch, _),) = pack_groups(groups, seq_len=96, batch_size=1, slots=16)
    on_policy = golden["settings"].get("on_policy", False)
    if not on_policy:
        batch = with_log_probs(executor, batch, config)
    objective = config.make()
    counts = counts_of(groups)
    total = objective.normalizer(counts)
    if objective.needs_mean_weight:
        batch = with_mean_weight(batch, total / counts.tokens)
    sums, gradients = executor.loss_and_gradients(writer if on_policy else trained, frozen, [batch], total)
    close(float(sums[0]), golden["loss"])
    metrics = {key: float(value) for key, value in objective.metrics(sums).items()}
    metrics |= reward_metrics(rewards().by_function, ["reward0", "reward1"], advantages)
    if config.objective == "rloo":
        golden["metrics"].pop("kl", None)  # a part of its reward, which the loop logs
    assert golden["metrics"].pop("entropy_coef", 0) == config.entropy_coef
    for key, expected in golden["metrics"].items():
        if key.partition("/")[2].partition("/")[2] not in ("min", "max") and not key.endswith(("_min", "_max")):
            close(metrics[key], expected)
    flat = flatten_names(gradients)
    for key, (norm, projection) in golden["gradients"].items():
        gradient = np.asarray(flat[key], np.float64).ravel()
        close(np.linalg.norm(gradient), norm, 1e-5)
        assert abs(gradient @ np.cos(np.arange(gradient.size) / 10) - projection) <= 1e-5 * max(norm, 0.1)


@pytest.mark.parametrize("name", repeats(GOLDEN["curves"], "gspo", "rloo"))
def test_fifteen_updates_on_given_answers_follow_trl(name):
    config, (_, frozen, _, writer, _) = config_of(name), models()
    executor = make_executor(config)
    groups = groups_of(config, advantages_of(config, executor).values)
    ((batch, _),) = pack_groups(groups, seq_len=96, batch_size=1, slots=16)
    batch, total = with_log_probs(executor, batch, config), config.make().normalizer(counts_of(groups))
    optimizer, trainable, losses = optax.adamw(1e-3, weight_decay=0.0), writer, []
    state, update = optimizer.init(trainable), jax.jit(optimizer.update)
    for _ in GOLDEN["curves"][name]:
        sums, gradients = executor.loss_and_gradients(trainable, frozen, [batch], total)
        updates, state = update(gradients, state, trainable)
        trainable = optax.apply_updates(trainable, updates)
        losses.append(float(sums[0]))
    np.testing.assert_allclose(losses, GOLDEN["curves"][name], atol=5e-4)


@pytest.mark.parametrize("name", ["dr_grpo", "dapo", "bnpo"])
def test_ratios_of_whole_answers_are_luspos_in_other_losses(name):
    """LUSPO, which equals TRL's, differs from these in the number that divides the sum alone."""
    (_, frozen, _, _, trained), results = models(), []
    for settings in ({"objective": "luspo"}, {"objective": name, "importance_sampling_level": "sequence"}):
        config = ObjectiveConfig(epsilon_low=0.003, epsilon_high=0.004, beta=0.04, **settings)
        executor = make_executor(config)
        groups = groups_of(config, compare(config.make(), rewards()).values)
        ((batch, _),) = pack_groups(groups, seq_len=96, batch_size=1, slots=16)
        batch = with_log_probs(executor, batch, config)
        total = counts_of(groups).tokens if (config.objective, name) == ("luspo", "bnpo") else 1  # in BNPO's weights
        sums, gradients = executor.loss_and_gradients(trained, frozen, [batch], total)
        results.append((sums[0], gradients))
    assert not config.make().credits_tokens
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def one_by_one(groups: list[Group], seq_len: int) -> Batch:
    """Return a batch with a row for each answer after its prompt, packed without the code under test."""
    rows = [(group.prompt, answer) for group in groups for answer in group.answers]
    arrays = {name: np.zeros((len(rows), seq_len), np.int32) for name in ("tokens", "targets")}
    weights, owners = np.zeros((len(rows), seq_len), np.float32), np.ones((len(rows), seq_len), np.int32)
    sampler = np.full((len(rows), seq_len), np.nan, np.float32)
    lengths = []
    for row, (prompt, answer) in enumerate(rows):
        whole, first = [*prompt, *answer.tokens], len(prompt) - 1
        own = slice(first, len(whole) - 1)
        arrays["tokens"][row, : len(whole) - 1], arrays["targets"][row, : len(whole) - 1] = whole[:-1], whole[1:]
        weights[row, own], owners[row, own], sampler[row, own] = answer.counted, 0, answer.log_probs
        lengths.append([len(whole) - 1])
    advantages = np.array([[answer.advantage] for _, answer in rows], np.float32)
    rollouts = Rollouts(owners=owners, advantages=advantages, sampler=sampler)
    return Batch(**arrays, loss_weights=weights, rollouts=rollouts, segments=pack_segments(lengths, seq_len=seq_len))


SEQUENCES = {"objective": "gspo", "epsilon_low": 0.003, "epsilon_high": 0.004, "beta": 0.04}
TOKENS = {"objective": "dapo", "beta": 0.04, "importance_sampling_mode": "sequence_mask"}


@pytest.mark.parametrize("settings", [SEQUENCES, TOKENS])
def test_packed_groups_equal_answers_one_by_one_in_any_micro_batches(settings):
    config, (_, frozen, _, _, trained) = ObjectiveConfig(**settings), models()
    executor = make_executor(config)
    groups = groups_of(config, compare(config.make(), rewards()).values)
    groups[0].answers[0].counted[1:3] = False  # as of a tool
    total, results = config.make().normalizer(counts_of(groups)), []
    packed = [batch for batch, _ in pack_groups(groups, seq_len=24, batch_size=2, slots=16)]
    assert len(packed) > 1
    for batches in (packed, [one_by_one(groups, 24)]):
        batches = [with_log_probs(executor, batch, config) for batch in batches]
        results.append(executor.loss_and_gradients(trained, frozen, batches, total))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 2e-6 * max(np.abs(np.asarray(b)).max(), 1)


@repeats_parts_of("test_packed_groups_equal_answers_one_by_one_in_any_micro_batches")
@pytest.mark.parametrize("policy", ["dots", repeat("full")])
def test_groups_of_a_model_with_linear_attention_equal_answers_one_by_one(tmp_path, policy):
    config, folder = (
        ObjectiveConfig(**SEQUENCES | {"beta": 0.0}),
        shutil.copytree(GOLDENS / "qwen3_5", tmp_path / "model"),
    )
    # The rule's outputs are as small as 2e-4; its norm, with 1e-6, would enlarge their rounding a thousandfold.
    (folder / "config.json").write_text(json.dumps(read_config(folder) | {"rms_norm_eps": 1e-2}))
    graphdefs, trainable, frozen = split_model(load_model(folder, dtype=jnp.float32), nnx.Param)
    shape = config_from_hf(read_config(folder))
    executor = Executor(graphdefs, shape, policy=PRESETS[policy], dtype=jnp.float32, objective=config.make())
    groups = groups_of(config, compare(config.make(), rewards()).values)
    total, results = config.make().normalizer(counts_of(groups)), []
    packed = [batch for batch, _ in pack_groups(groups, seq_len=24, batch_size=2, slots=16, copies=True)]
    with DELTA_RULE.using(None):  # token by token: chunks would round otherwise where documents begin elsewhere
        for batches in (packed, [one_by_one(groups, 24)]):
            results.append(executor.loss_and_gradients(trainable, frozen, batches, total))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 2e-5 * max(np.abs(np.asarray(b)).max(), 1)


def test_log_probabilities_of_uncounted_tokens_change_nothing():
    config, (_, frozen, _, _, trained) = ObjectiveConfig(**TOKENS, top_entropy_quantile=0.5), models()
    executor = make_executor(config)
    groups = groups_of(config, compare(config.make(), rewards()).values)
    groups[0].answers[0].counted[1:3] = False
    ((batch, _),) = pack_groups(groups, seq_len=96, batch_size=1, slots=16)
    batch = with_log_probs(executor, batch, config)
    uncounted = batch.loss_weights == 0

    def spoiled(value, by):
        return jnp.where(uncounted, by, value)

    results = []
    for by in (0.0, 1e3, -1e3, np.nan):
        names = ("old", "sampler", "reference")
        rollouts = replace(batch.rollouts, **{name: spoiled(getattr(batch.rollouts, name), by) for name in names})
        results.append(executor.loss_and_gradients(trained, frozen, [replace(batch, rollouts=rollouts)], 1))
    for result in results[1:]:
        for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(result), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_corrected_divergence_has_the_gradient_of_the_exact_one():
    """Enumerate a vocabulary: expectations under the old policy of the estimator's gradient, against calculus."""
    rng = np.random.default_rng(0)
    logits, old, reference = (jnp.asarray(rng.normal(0, 1, 7), jnp.float32) for _ in range(3))

    def exact(logits):
        log_probs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(log_probs) * (log_probs - jax.nn.log_softmax(reference)))

    def expected(logits):
        log_probs, before = jax.nn.log_softmax(logits), jax.nn.log_softmax(old)
        terms = k3(jax.nn.log_softmax(reference) - log_probs) * jnp.exp(log_probs - before)
        return jnp.sum(jnp.exp(before) * terms)

    np.testing.assert_allclose(jax.grad(expected)(logits), jax.grad(exact)(logits), atol=1e-6)


@pytest.mark.parametrize(("setting", "text"), [({"beta": 0.0, "objective": "dpo"}, "above 0|> 0")])
def test_settings_without_a_meaning_are_refused(setting, text):
    with pytest.raises(ValueError, match=text):
        ObjectiveConfig(**setting)


@pytest.mark.parametrize(("name", "beta"), [("dpo", 0.1), ("distill", 1.0), ("grpo", 0.0), ("rloo", 0.05)])
def test_beta_is_the_objectives_where_none_is_given(name, beta):
    assert ObjectiveConfig(objective=name).beta == beta
