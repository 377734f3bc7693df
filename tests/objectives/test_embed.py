"""Embeddings against sentence-transformers: losses and gradients, in two passes; equal texts are no negatives."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from read_units import read_dataset, require_gradients

from jaxglue.data.iterator import BatchIterator
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.hf.loading import load_model
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.objectives.contrastive import ANCHOR, NEGATIVE, POSITIVE, UNUSED, Contrast, Sizes, Texts, text_losses
from jaxglue.objectives.retrieval import ranking_measures
from jaxglue.sharding.rules import SINGLE_DEVICE
from jaxglue.training.step import with_gradients

GOLDENS = Path(__file__).parents[1] / "goldens"
GOLDEN = json.loads((GOLDENS / "embeddings.json").read_text())


@pytest.fixture(scope="module")
def model():
    model = load_model(GOLDENS / "qwen3_tied", dtype=jnp.float32)
    return model.config, *split_model(model, nnx.Param)


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_losses_and_gradients_equal_sentence_transformers(model, name):
    case = GOLDEN["cases"][name]
    count = case["columns"]
    config, graphdefs, trainable, frozen = model
    settings = ObjectiveConfig(objective="embed", **{k: tuple(v) if isinstance(v, list) else v
                                                     for k, v in case["settings"].items()})  # fmt: skip
    units = [
        ([], [(tokens, min(kind, NEGATIVE), [unit["score"]]) for kind, tokens in enumerate(unit["texts"])][:count])
        for unit in GOLDEN["units"]
    ]
    objective = settings.make()
    dataset = read_dataset(units, settings.task(shared_prompt=False), seq_len=32)
    batches = BatchIterator(dataset, seq_len=32, batch_size=1, documents_per_step=len(units), epochs=1)
    executor = Executor(graphdefs, config, policy=PRESETS["full"], dtype=jnp.float32, objective=objective)
    parts = SimpleNamespace(
        run=SimpleNamespace(objective=objective, batches=batches),
        place=lambda step: jax.device_put(step.micro_batches),
        executor=executor,
        first_pass=None,
        layout=SINGLE_DEVICE,
    )
    state = SimpleNamespace(trainable=trainable, frozen=frozen)
    step = with_gradients(parts, state, next(batches))
    assert len(step.micro_batches) > 1
    sums, gradients = executor.loss_and_gradients(trainable, frozen, step.micro_batches, float(step.targets))
    assert float(sums[0]) == pytest.approx(case["loss"], rel=1e-6)
    require_gradients(flatten_names(gradients), case["gradients"])


def make_texts(kinds, ids, gold=None):
    gold = np.zeros(len(kinds)) if gold is None else gold
    return Texts(jnp.array(kinds), jnp.array(ids), jnp.array(gold, jnp.float32))


def plain_loss(embeddings, anchors, positives, candidates, known):
    """Return InfoNCE whose anchors leave out the candidates in `known`."""
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    losses = []
    for anchor, positive, left_out in zip(anchors, positives, known, strict=True):
        logits = {c: 20 * unit[anchor] @ unit[c] for c in candidates if c not in left_out}
        losses.append(np.log(sum(np.exp(list(logits.values())))) - logits[positive])
    return sum(losses)


def test_equal_texts_are_no_negatives_of_each_other():
    """Pairs 0 and 1 have one positive, pairs 1 and 2 one anchor; pair 3's negative is the positive of 2."""
    kinds = [ANCHOR, POSITIVE, ANCHOR, POSITIVE, UNUSED, ANCHOR, POSITIVE, ANCHOR, POSITIVE, NEGATIVE]
    ids = [0, 10, 1, 10, -1, 1, 12, 3, 13, 12]
    embeddings = np.random.default_rng(0).normal(size=(10, 6))
    wanted = plain_loss(embeddings, [0, 2, 5, 7], [1, 3, 6, 8], [1, 3, 6, 8, 9], [{3}, {1, 6}, {3, 9}, set()])
    total, _ = text_losses(Contrast(), Sizes(8, 1), jnp.array(embeddings, jnp.float32), make_texts(kinds, ids))
    assert float(total) == pytest.approx(wanted, rel=1e-5)


def test_blocks_of_anchors_give_the_loss_and_gradient_of_all_at_once(monkeypatch):
    rng = np.random.default_rng(1)
    kinds, ids = np.tile([ANCHOR, POSITIVE, NEGATIVE], 512), np.arange(1536)
    embeddings, texts = jnp.array(rng.normal(size=(1536, 8)), jnp.float32), make_texts(kinds, ids)

    def loss(x):
        return text_losses(Contrast(symmetric=True), Sizes(512, 1), x, texts)[0]

    whole = jax.value_and_grad(loss)(embeddings)
    monkeypatch.setattr("jaxglue.objectives.contrastive._BLOCK", 2**15)
    blocks = jax.value_and_grad(loss)(embeddings)
    np.testing.assert_allclose(blocks[0], whole[0], rtol=1e-6)
    np.testing.assert_allclose(blocks[1], whole[1], atol=1e-5)


def test_ranking_measures_are_those_computed_by_hand():
    found = ranking_measures([np.array([0.0, 1, 0, 1]), np.array([1.0, 0])], [2.0, 1.0])
    ideal = 1 + 1 / np.log2(3)
    assert found["ndcg@10"] == pytest.approx(((1 / np.log2(3) + 1 / np.log2(5)) / ideal + 1) / 2)
    assert found["mrr@10"] == pytest.approx(0.75)
    assert found["recall@1"] == pytest.approx(0.5)
    assert found["recall@10"] == 1
