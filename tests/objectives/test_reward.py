"""Reward models against TRL and transformers: losses, metrics, gradients and scores."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.data.answers import select_answers
from jaxglue.data.config import DataConfig, Source
from jaxglue.data.formats import PAIR_COLUMNS
from jaxglue.data.iterator import EvalBatches
from jaxglue.data.store import TokenStore
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.hf.loading import load_model
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.objectives.config import ObjectiveConfig

GOLDENS = Path(__file__).parent.parent / "goldens"
GOLDEN = json.loads((GOLDENS / "rewards.json").read_text())
PAIRS = json.loads((GOLDENS / "preferences.json").read_text())["pairs"]


def make_store(margins=None, after=()) -> TokenStore:
    """Return the pairs' documents, each followed by the tokens `after`."""
    rows = [(pair["prompt_ids"], pair[name]) for pair in PAIRS for name in ("chosen_ids", "rejected_ids")]
    documents = [prompt + answer + list(after) for prompt, answer in rows]
    masks = [[0] * len(prompt) + [1] * len(answer) + [0] * len(after) for prompt, answer in rows]
    return TokenStore(
        tokens=np.concatenate(documents).astype(np.int32),
        mask=np.concatenate(masks).astype(np.uint8),
        offsets=np.cumsum([0, *map(len, documents)]),
        columns={} if margins is None else {"margin": np.array(margins, np.float32)},
        info={"digest": "", "max_token": 23},
    )


def make_batches(store: TokenStore, *, shared: bool = True) -> EvalBatches:
    task = ObjectiveConfig(objective="reward").task(shared_prompt=shared)._replace(padding=0)
    selection = select_answers(store, DataConfig(data=("x",), seq_len=64), Source(name="x"), task, PAIR_COLUMNS)
    return EvalBatches(selection.dataset, seq_len=64, batch_size=8, max_segments=8)


def make_parts(folder: str):
    model = load_model(GOLDENS / folder, dtype=jnp.float32, labels=1)
    weight = model.score.weight.get_value()
    model.score.weight = nnx.Param(jnp.cos(jnp.arange(weight.size, dtype=jnp.float32)).reshape(weight.shape))
    return model.config, *split_model(model, nnx.Param)


def make_executor(config, graphdefs, **settings) -> Executor:
    loss = ObjectiveConfig(objective="reward", **settings).make()
    return Executor(graphdefs, config, policy=PRESETS["full"], dtype=jnp.float32, objective=loss)


def close(got, expected):
    assert abs(got - expected) <= 1e-5 * max(abs(expected), 0.1), (got, expected)


@pytest.mark.parametrize(("name", "shared"), [("plain", True), ("centered", True), ("margins", True), ("plain", False)])
def test_loss_metrics_and_gradients_equal_trl(name, shared):
    golden = GOLDEN["cases"][name]
    config, graphdefs, trainable, frozen = make_parts("qwen3_tied")
    executor = make_executor(config, graphdefs, **golden["settings"])
    (batch,) = make_batches(make_store(golden["margins"]), shared=shared)
    sums, gradients = executor.loss_and_gradients(trainable, frozen, [batch], len(PAIRS))
    close(float(sums[0]), golden["loss"])
    metrics = ObjectiveConfig(objective="reward").make().metrics(sums)
    for key, value in golden["metrics"].items():
        close(float(metrics[key]), value)
    flat = flatten_names(gradients)
    for key, (norm, projection) in golden["gradients"].items():
        gradient = np.asarray(flat[key], np.float64).ravel()
        close(np.linalg.norm(gradient), norm)
        assert abs(gradient @ np.cos(np.arange(gradient.size) / 10) - projection) <= 1e-5 * max(norm, 0.1)


@pytest.mark.parametrize("folder", sorted(GOLDEN["scores"]))
def test_scores_equal_transformers(folder):
    config, graphdefs, trainable, frozen = make_parts(folder)
    batches = make_batches(make_store(after=(0, 0)))  # padding is skipped
    (batch,), (rows,) = batches, batches.documents()
    values = np.asarray(make_executor(config, graphdefs).answer_log_probs(trainable, frozen, batch))
    found = np.zeros((len(PAIRS), 2))
    for own, row in zip(rows, values, strict=True):
        found[own] = row[: len(own)]
    np.testing.assert_allclose(found, GOLDEN["scores"][folder], rtol=1e-5, atol=1e-5)


def test_last_token_counts_though_the_loss_mask_leaves_it_out():
    (batch,) = make_batches(make_store(after=(5,)))
    counted = np.asarray(batch.tokens)[np.asarray(batch.loss_weights) > 0]
    assert (counted == 5).all() and len(counted) == 2 * len(PAIRS)


def test_margin_that_is_no_number_names_its_row(tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * len(PAIRS))
    store = make_store([0.0, 0.0, np.nan, *[0.0] * 5])
    task = ObjectiveConfig(objective="reward").task(shared_prompt=True)
    with pytest.raises(ValueError, match=r"pairs.jsonl:3: 'margin' must be a finite number"):
        select_answers(store, DataConfig(data=(str(data),), seq_len=64), Source(name=str(data)), task, PAIR_COLUMNS)
    selection = select_answers(
        replace(store, columns={}), DataConfig(data=("x",), seq_len=64), Source(name="x"), task, PAIR_COLUMNS
    )
    assert (selection.dataset.columns["margin"] == 0).all()
