"""Decisions against plain PyTorch: losses and gradients; questions that do not see each other; measures by hand."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from read_units import read_batches, read_dataset, require_gradients

from jaxglue.data.packing import plan_packing
from jaxglue.data.questions import Labels
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import PRESETS
from jaxglue.hf.loading import load_model
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.objectives import calibration
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.objectives.reading import part_outputs

GOLDENS = Path(__file__).parents[1] / "goldens"
GOLDEN = json.loads((GOLDENS / "reads.json").read_text())
NAMED = {kind: tuple(tuple(group) for group in groups) for kind, groups in GOLDEN["labels"].items()}
LABELS = Labels({kind: ("",) * len(groups) for kind, groups in NAMED.items()}, NAMED)
UNITS = [
    (unit["state"], [(q["tokens"], q["kind"], q["gold"]) for q in unit["questions"]])
    for unit in GOLDEN["decide"]["units"]
]


@pytest.fixture(scope="module")
def model():
    model = load_model(GOLDENS / "qwen3_tied", dtype=jnp.float32)
    return model.config, *split_model(model, nnx.Param)


def make_executor(model, objective, **options):
    config, graphdefs, *_ = model
    return Executor(graphdefs, config, policy=PRESETS["full"], dtype=jnp.float32, objective=objective, **options)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "copied"])
@pytest.mark.parametrize("name", GOLDEN["decide"]["cases"])
def test_losses_and_gradients_equal_plain_pytorch(model, name, shared):
    if not shared and name != "proper":
        pytest.skip("one loss suffices")
    case = GOLDEN["decide"]["cases"][name]
    settings = ObjectiveConfig(objective="decide", **case["settings"])
    batches = read_batches(UNITS, settings.task(shared_prompt=shared), LABELS)
    *_, trainable, frozen = model
    executor = make_executor(model, settings.make())
    sums, gradients = executor.loss_and_gradients(trainable, frozen, list(batches), float(batches.targets))
    assert float(sums[0]) == pytest.approx(case["loss"], rel=1e-5)
    require_gradients(flatten_names(gradients), case["gradients"])


def test_a_head_of_label_rows_has_the_losses_and_gradients_of_labels(model):
    single = {kind: tuple(group[:1] for group in groups) for kind, groups in NAMED.items()}
    labels = Labels(LABELS.names, single)
    scored = load_model(
        GOLDENS / "qwen3_tied",
        dtype=jnp.float32,
        labels=76,
        score_tokens=[*labels.tokens, *[0] * (76 - len(labels.tokens))],
    )
    head = scored.config, *split_model(scored, nnx.Param)
    found = []
    for name, own, whole in (("decide", labels, model), ("decide_head", labels.as_rows(64), head)):
        settings = ObjectiveConfig(objective=name, brier_weight=0.5, rps_weight=0.5)
        batches = read_batches(UNITS, settings.task(shared_prompt=True), own)
        executor = make_executor(whole, settings.make())
        sums, gradients = executor.loss_and_gradients(*whole[2:], list(batches), float(batches.targets))
        found.append((sums, flatten_names(gradients)))
    (sums, of_labels), (own_sums, of_rows) = found
    np.testing.assert_allclose(own_sums, sums, rtol=1e-6)
    for name in (name for name in of_labels if name.startswith("model.layers")):
        np.testing.assert_allclose(of_rows[name], of_labels[name], atol=1e-6)
    embedding = of_labels["model.embed_tokens.weight"] - of_rows["model.embed_tokens.weight"]  # tied
    rows = np.array(labels.tokens)
    np.testing.assert_allclose(of_rows["score.weight"][: len(rows)], embedding[rows], atol=1e-6)


def outputs(model, objective, units):
    task, executor = objective.task(shared_prompt=True), make_executor(model, objective)
    batches = read_batches(units, task, LABELS)
    found = ((batch.reads, np.asarray(executor.read(*model[2:], jax.device_put(batch)))) for batch in batches)
    return part_outputs(found)


def test_a_question_alone_has_the_answer_that_it_has_among_twenty(model):
    rng = np.random.default_rng(0)
    state = rng.integers(7, 24, 8).tolist()
    questions = [(rng.integers(7, 24, rng.integers(1, 4)).tolist(), int(k), [0.5, 0.5]) for k in rng.integers(0, 3, 20)]
    objective = ObjectiveConfig(objective="decide").make()
    together = outputs(model, objective, [(state, questions)]).outputs
    alone = outputs(model, objective, [(state, [question]) for question in questions]).outputs
    probabilities = [np.exp(calibration.log_softmax(each[:, :2])) for each in (together, alone)]
    np.testing.assert_allclose(*probabilities, atol=1e-6)


def test_permuted_options_keep_labels_and_end_and_move_texts_with_their_gold():
    dataset = read_dataset([([20], [([1, 2, 3, 10, 4, 5, 11, 6, 12, 7, 8, 9], 1, [0.7, 0.2, 0.1])])], TASK, LABELS)
    table = dataset.table
    table.intros[:], table.label_sizes[:], table.text_sizes[:] = 3, 1, [2, 1, 1]
    tokens = dataset.store.tokens[table.permuted(0, np.array([2, 0, 1]))]
    assert tokens.tolist() == [1, 2, 3, 10, 7, 11, 4, 5, 12, 6, 8, 9]
    plan = plan_packing(dataset.lengths, seq_len=16)
    batch = dataset.with_permuted_options().build_batch(plan, np.array([0]), np.array([0]), seq_len=16, max_segments=1)
    order = batch.reads.values["order"][0, 0, :3]
    np.testing.assert_allclose(batch.reads.values["gold"][0, 0, :3], np.float32([0.7, 0.2, 0.1])[order])
    assert batch.tokens[0, 1:13].tolist() == dataset.store.tokens[table.permuted(0, order)].tolist()


TASK = ObjectiveConfig(objective="decide").task(shared_prompt=True)


def test_parts_beyond_a_row_become_further_units_with_a_copy_of_the_beginning():
    parts = [([5] * 6, 0, [1.0, 0.0])] * 5
    dataset = read_dataset([([20] * 4, parts), ([21], parts[:1])], TASK, LABELS, seq_len=16)
    assert dataset.counts.tolist() == [2, 2, 1, 1]
    assert dataset.lengths.tolist() == [16, 16, 10, 7]
    assert [dataset.store.tokens[dataset.indices(unit)][0] for unit in range(4)] == [20, 20, 20, 21]
    assert dataset.slots(16) == 4  # three parts fit a row, were units divided


def test_temperatures_and_measures_are_those_computed_by_hand():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4000, 3)) * 2
    gold = np.eye(3)[[rng.choice(3, p=p) for p in np.exp(calibration.log_softmax(logits))]]
    assert calibration.fit_temperature(logits * 2.5, gold) == pytest.approx(2.5, rel=0.05)
    assert calibration.fit_temperature(logits[:9], gold[:9]) == 1.0
    assert calibration.fit_temperature(3 * gold[:20], gold[:20]) > 0.5  # all are right: no reason for certainty
    log_p, wanted = np.log([[0.7, 0.3], [0.9, 0.1]]), np.array([[1.0, 0], [0.0, 1]])
    found = calibration.measures(log_p, wanted)
    assert found["accuracy"] == 0.5
    assert found["nll"] == pytest.approx(-(np.log(0.7) + np.log(0.1)) / 2)
    assert found["brier"] == pytest.approx((2 * 0.3**2 + 2 * 0.9**2) / 2)
    assert found["ece"] == pytest.approx((0.3 + 0.9) / 2)
