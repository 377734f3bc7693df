"""Classifiers against transformers and PEFT: losses, scores and gradients; the way of labels from rows to folders."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.data.config import DataConfig, Source
from jaxglue.data.iterator import EvalBatches
from jaxglue.data.labeled import select_labeled
from jaxglue.data.store import TokenStore
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.generation.config import AssistantConfig
from jaxglue.generation.scoring import TextScorer
from jaxglue.hf.loading import add_adapter, load_model
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.objectives.config import ObjectiveConfig

GOLDENS = Path(__file__).parents[1] / "goldens"
GOLDEN = json.loads((GOLDENS / "classes/classes.json").read_text())
PROBLEMS = ("single_label_classification", "multi_label_classification")


def make_batches(objective: ObjectiveConfig, after=(), **changes) -> EvalBatches:
    """Return the documents with their labels, each followed by the tokens `after`."""
    documents, several = [[*document, *after] for document in GOLDEN["documents"]], np.array(GOLDEN["labels"])
    columns = {"label": np.array(GOLDEN["label"], np.float32)}
    columns |= {f"labels.{i}": several[:, i].astype(np.float32) for i in range(3)}
    store = TokenStore(
        tokens=np.concatenate(documents).astype(np.int32),
        mask=np.ones(sum(map(len, documents)), np.uint8),
        offsets=np.cumsum([0, *map(len, documents)]),
        columns=columns | changes,
        info={"digest": "", "max_token": 23},
    )
    task = objective.task(shared_prompt=True)._replace(padding=0, end=22)
    config = DataConfig(data=("x",), seq_len=64)
    selection = select_labeled(store, config, Source(name="x"), task, objective.columns)
    return EvalBatches(selection.dataset, seq_len=64, batch_size=1, max_segments=8)


@pytest.fixture(scope="module")
def classifier():
    model = load_model(GOLDENS / "qwen3_tied", dtype=jnp.float32, labels=3)
    add_adapter(model, GOLDENS / "classes/adapter")
    model.score.weight = nnx.LoRAParam(model.score.weight.get_value())
    return model.config, *split_model(model, nnx.LoRAParam)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_losses_and_gradients_equal_transformers(classifier, problem):
    config, graphdefs, trainable, frozen = classifier
    golden, settings = GOLDEN[problem], ObjectiveConfig(objective="classify", num_labels=3, problem_type=problem)
    (batch,) = make_batches(settings, after=(22, 0))  # end and padding, which are not read
    objective = settings.make()
    executor = Executor(graphdefs, config, policy=PRESETS["full"], dtype=jnp.float32, objective=objective)
    sums, gradients = executor.loss_and_gradients(trainable, frozen, [batch], float(batch.loss_weights.sum()))
    assert float(sums[0]) == pytest.approx(golden["loss"], rel=1e-5)
    scores, several = np.array(golden["scores"]), np.array(GOLDEN["labels"])
    right = scores.argmax(1) == GOLDEN["label"] if problem == PROBLEMS[0] else (scores > 0) == several
    assert float(objective.metrics(sums)["accuracy"]) == pytest.approx(right.mean(), rel=1e-6)
    flat = flatten_names(gradients)
    for name, (norm, projection) in golden["gradients"].items():
        gradient = np.asarray(flat[name], np.float64).ravel()
        assert np.linalg.norm(gradient) == pytest.approx(norm, rel=1e-4)
        assert gradient @ np.cos(np.arange(gradient.size) / 10) == pytest.approx(projection, abs=1e-4 * norm)


def test_scores_of_a_peft_classifier_equal_transformers(make_tokenizer, monkeypatch):
    monkeypatch.setattr("jaxglue.generation.assistant.load_own_tokenizer", lambda *folders: make_tokenizer())
    scorer = TextScorer(AssistantConfig(model=GOLDENS / "qwen3_tied", adapter=GOLDENS / "classes/adapter"))
    found = scorer.scores(GOLDEN["documents"])
    np.testing.assert_allclose(found, GOLDEN[PROBLEMS[0]]["scores"], atol=1e-5)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [("label", 3, r"'label' is 3, expected a whole number from 0 to 2: mend it, or raise --num-labels"),
     ("label", np.nan, "'label' must be a finite number: every row needs one, also in place of a name"),
     ("labels.1", np.nan, "'labels.1' must be a finite number: every row needs a list of numbers in 'labels'"),
     ("labels.1", 2, r"'labels.1' is 2, expected a whole number from 0 to 1: mend it$")],
)  # fmt: skip
def test_labels_that_are_none_are_refused(monkeypatch, column, value, message):
    monkeypatch.setattr("jaxglue.data.labeled.row_origin", lambda source, row: f"{source}:{row + 1}")
    monkeypatch.setattr("jaxglue.data.dataset.row_origin", lambda source, row: f"{source}:{row + 1}")
    problem = PROBLEMS[column != "label"]
    settings = ObjectiveConfig(objective="classify", num_labels=3, problem_type=problem)
    with pytest.raises(ValueError, match=rf"x:5: {message}"):
        make_batches(settings, **{column: np.array([0, 0, 0, 0, value], np.float32)})


def test_one_label_for_all_documents_is_refused():
    with pytest.raises(ValueError, match=r"--num-labels 1 leaves nothing to learn"):
        ObjectiveConfig(objective="classify", num_labels=1).validate()
    ObjectiveConfig(objective="classify", num_labels=1, problem_type=PROBLEMS[1]).validate()
