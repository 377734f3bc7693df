"""Losses, metrics and gradients of every objective equal TRL's, from the same pairs, model and reference."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import repeat

from jaxglue.data.answers import select_answers
from jaxglue.data.config import DataConfig, Source
from jaxglue.data.iterator import EvalBatches
from jaxglue.data.packing import plan_packing
from jaxglue.data.store import TokenStore
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.loading import load_model
from jaxglue.models import config_from_hf
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.objectives.answers import Pairs
from jaxglue.objectives.config import ObjectiveConfig

GOLDENS = Path(__file__).parent.parent / "goldens"
GOLDEN = json.loads((GOLDENS / "preferences.json").read_text())
FOLDER = GOLDENS / "qwen3_tied"


@cache
def parts():
    """Return (graphdefs, the model's parameters, the reference's, no frozen ones)."""
    graphdefs, reference, frozen = split_model(load_model(FOLDER, dtype=jnp.float32), nnx.Param)

    def perturbed(weight):
        wave = np.cos(np.arange(weight.size)).reshape(weight.shape)
        return weight * np.float32(1 + 0.1 * wave)

    return graphdefs, jax.tree.map(perturbed, reference), reference, frozen


def config_of(name: str) -> ObjectiveConfig:
    settings = GOLDEN["cases"][name]["settings"]
    names = {"rpo": "dpo", "wpo": "dpo"}
    kind = name.partition(",")[0]
    return ObjectiveConfig(objective=names.get(kind, kind), **settings)


def documents(labeled: bool) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, answer) of every document; labeled rows have one empty answer."""
    rows = []
    for index, pair in enumerate(GOLDEN["pairs"]):
        answers = [pair["chosen_ids"], pair["rejected_ids"]]
        kept = [not labeled or (index % 3 > 0) == (which == 0) for which in range(2)]
        rows += [(pair["prompt_ids"] if keep else [], a if keep else []) for a, keep in zip(answers, kept, strict=True)]
    return rows


def make_batches(config: ObjectiveConfig, *, shared: bool, seq_len: int = 64, rows=None) -> EvalBatches:
    rows = documents(config.objective == "kto") if rows is None else rows
    store = TokenStore(
        tokens=np.array([token for prompt, answer in rows for token in prompt + answer], np.int32),
        mask=np.array([flag for prompt, answer in rows for flag in [0] * len(prompt) + [1] * len(answer)], np.uint8),
        offsets=np.cumsum([0, *(len(prompt) + len(answer) for prompt, answer in rows)]),
        info={"digest": "", "max_token": 23},
    )
    task = config.task(shared_prompt=shared)
    assert task is not None
    selection = select_answers(store, DataConfig(data=("x",), seq_len=seq_len), Source(name="x"), task)
    return EvalBatches(selection.dataset, seq_len=seq_len, batch_size=8, max_segments=8)


def make_executor(config: ObjectiveConfig) -> Executor:
    shape = config_from_hf(read_config(FOLDER))
    loss = config.make()
    return Executor(parts()[0], shape, policy=PRESETS["full"], dtype=jnp.float32, objective=loss)


def in_order(batches: EvalBatches, values) -> np.ndarray:
    """Return the values [B, U, 2] of a single batch by pair."""
    (rows,) = batches.documents()
    ordered = np.zeros((len(batches.dataset), 2), np.float32)
    for own, found in zip(rows, np.asarray(values), strict=True):
        ordered[own] = found[: len(own)]
    return ordered


@cache
def log_probs() -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs' log-probabilities under the model and the reference."""
    config = config_of("dpo")
    _, trainable, reference, frozen = parts()
    executor, batches = make_executor(config), make_batches(config, shared=True)
    (batch,) = batches
    model, start = (in_order(batches, executor.answer_log_probs(p, frozen, batch)) for p in (trainable, reference))
    return model, start


def close(got, expected, tolerance=1e-5, rounding=0.0):
    assert abs(got - expected) <= tolerance * max(abs(expected), 0.1) + rounding, (got, expected)


def close_metrics(metrics, expected, beta):
    """Compare all of TRL's metrics, but for a supervised loss that has no weight and is 0 there.

    Rewards and divergences are β times differences of sums of log-probabilities, which processors round differently:
    by as much as the sums of a whole batch are rounded, however small their difference.
    """
    assert expected.keys() - metrics.keys() <= {key for key, value in expected.items() if value == 0}
    assert len(expected) >= 6
    sums = len(GOLDEN["pairs"]) * max(abs(value) for key, value in expected.items() if key.startswith("logps/"))
    rounding = 2 * beta * sums * float(np.finfo(np.float32).eps)  # of the model's sums and the reference's
    for key in metrics.keys() & expected.keys():
        of_sums = key == "kl" or key.startswith("rewards/")
        close(float(metrics[key]), expected[key], rounding=rounding if of_sums else 0.0)


WHOLE = ("dpo", "rpo", "wpo", "ipo", "orpo", "simpo", "kto")


@pytest.mark.parametrize("name", sorted(GOLDEN["cases"].keys() - set(WHOLE)))
def test_loss_types_equal_trl(name):
    counts = np.array([[len(pair["chosen_ids"]), len(pair["rejected_ids"])] for pair in GOLDEN["pairs"]])
    pairs = Pairs(*(column for values in (*log_probs(), counts) for column in values.T))
    objective, golden = config_of(name).make(), GOLDEN["cases"][name]
    close(float(objective.losses(pairs).mean()), golden["loss"])
    metrics = {key: values.mean() for key, values in objective.measures(pairs).items()}
    close_metrics(metrics, golden["metrics"], config_of(name).beta)


@pytest.mark.parametrize(("name", "shared"), [*((name, True) for name in WHOLE), repeat("dpo", False), ("kto", False)])
def test_loss_metrics_and_gradients_equal_trl(name, shared):
    config, golden = config_of(name), GOLDEN["cases"][name]
    _, trainable, reference, frozen = parts()
    executor, (batch,) = make_executor(config), make_batches(config, shared=shared)
    if config.kind.needs_reference:
        values = executor.answer_log_probs(reference, frozen, batch)
        batch = replace(batch, answers=replace(batch.answers, reference=values))
    sums, gradients = executor.loss_and_gradients(trainable, frozen, [batch], len(GOLDEN["pairs"]))
    close(float(sums[0]), golden["loss"])
    close_metrics(config.make().metrics(sums), golden["metrics"], config.beta)
    flat = flatten_names(gradients)
    for key, (norm, projection) in golden["gradients"].items():
        gradient = np.asarray(flat[key], np.float64).ravel()
        close(np.linalg.norm(gradient), norm)
        assert abs(gradient @ np.cos(np.arange(gradient.size) / 10) - projection) <= 1e-5 * max(norm, 0.1)


def test_weights_of_pairs_are_the_mean_alignments_of_their_answers():
    """Also of answers of one token."""
    config, rows = config_of("wpo"), [([1, 2], [3]), ([1, 2], [4]), ([1], [5, 6, 7]), ([1], [8])]
    (batch,) = make_batches(config, shared=True, rows=rows)
    objective = config.make()
    shape = np.asarray(batch.tokens).shape
    values = [SimpleNamespace(log_probs=jnp.full(shape, -1.0), alignment=jnp.full(shape, x)) for x in (0.0, -0.3)]
    sums = np.zeros((*batch.answers.used.shape, 2), np.float32)
    batch = replace(batch, answers=replace(batch.answers, reference=sums))
    plain, weighed = (objective.units(value, batch, batch.answers)[0] for value in values)
    used = batch.answers.used > 0
    np.testing.assert_allclose((weighed / plain)[used], np.exp(-0.6), rtol=1e-6)
    assert used.sum() == 2


@pytest.mark.parametrize("name", [repeat("rpo"), "orpo"])
def test_micro_batches_equal_one_batch(name):
    config = config_of(name)
    _, trainable, reference, frozen = parts()
    executor = make_executor(config)
    (whole,) = make_batches(config, shared=True)
    dataset = make_batches(config, shared=True).dataset
    if config.kind.needs_reference:
        values = in_order(make_batches(config, shared=True), executor.answer_log_probs(reference, frozen, whole))
        dataset = replace(dataset, reference=values)
    step = np.arange(len(dataset))
    plan = plan_packing(dataset.lengths, seq_len=64)
    assert plan.rows == 2
    sizes = {"seq_len": 64, "max_segments": 8}
    one = dataset.build_batch(plan, np.arange(2), step, **sizes)
    micro = [dataset.build_batch(plan, np.array([row]), step, **sizes) for row in range(2)]
    results = [executor.loss_and_gradients(trainable, frozen, batches, 8) for batches in ([one], micro)]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 1e-6 * max(np.abs(np.asarray(b)).max(), 1)


def test_thirty_steps_follow_trl():
    config = config_of("dpo")
    _, trainable, reference, frozen = parts()
    executor, batches = make_executor(config), make_batches(config, shared=True)
    dataset = batches.dataset
    (batch,) = batches
    first = executor.answer_log_probs(reference, frozen, batch)
    dataset = replace(dataset, reference=in_order(batches, first))
    halves = [
        next(iter(EvalBatches(dataset.select(np.arange(start, start + 4)), seq_len=64, batch_size=8, max_segments=8)))
        for start in (0, 4)
    ]
    optimizer = optax.adamw(1e-3, weight_decay=0.0)
    state, losses = optimizer.init(trainable), []
    update = jax.jit(optimizer.update)
    for step in range(len(GOLDEN["curve"])):
        sums, gradients = executor.loss_and_gradients(trainable, frozen, [halves[step % 2]], 4)
        updates, state = update(gradients, state, trainable)
        trainable = optax.apply_updates(trainable, updates)
        losses.append(float(sums[0]))
    np.testing.assert_allclose(losses, GOLDEN["curve"], atol=2e-4)


SUMS = np.array([(0.0, 0.0), (-2.0, 0.0), (0.0, -2.0), (-1e-7, -200.0)], np.float32)


@pytest.mark.parametrize("name", sorted(GOLDEN["cases"].keys() - {"kto"}))
def test_answers_of_probability_one_have_finite_losses_and_gradients(name):
    objective = config_of(name).make()

    def losses(chosen, rejected):
        pairs = Pairs(chosen, rejected, jnp.float32(-1.0), jnp.float32(-1.0), jnp.float32(4), jnp.float32(4))
        return objective.losses(pairs), objective.measures(pairs)

    (loss, metrics), gradients = jax.vmap(jax.value_and_grad(losses, argnums=(0, 1), has_aux=True))(*SUMS.T)
    assert np.isfinite(np.array([loss, *gradients, *metrics.values()])).all()
