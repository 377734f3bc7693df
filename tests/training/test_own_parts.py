"""Metrics, optimizers and tokenizers of the caller's."""

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import jaxglue
from jaxglue.training.record import read_metrics
from tests.selection import repeat, repeats_parts_of


@pytest.fixture
def rows(chat_rows):
    return [{**row, "hard": float(number % 2)} for number, row in enumerate(chat_rows(24))]


@repeats_parts_of("test_sums_by_source_equal_single_tokens")
def test_metrics_are_of_single_tokens_of_held_out_documents(settings, rows, tmp_path):
    seen = []

    def compute_metrics(found: jaxglue.Predictions):
        seen.append(found)
        right = found.predicted == found.targets
        hard = found.columns["hard"] > 0
        exact = np.bincount(found.documents, ~right) == 0
        return {
            "loss_again": -found.log_probs.mean(),
            "accuracy": right.mean(),
            "hard": right[hard].mean(),
            "exact": exact.mean(),
        }

    more = {"eval_data": rows[:5], "steps": 2, "eval_every": 1, "batch_size": 2, "learning_rate": 1e-2, "seq_len": 128}
    events = []

    class Keep(jaxglue.Callback):
        def on_evaluation(self, step, values):
            events.append(values)

    given = {"compute_metrics": compute_metrics, "columns": {"hard": 0.0}, "callbacks": [Keep()]}
    jaxglue.train(data=rows, output=str(tmp_path / "run"), **given, **settings | more)
    jaxglue.train(data=rows, output=str(tmp_path / "plain"), **settings | more)
    ours, plain = (
        [line for line in read_metrics(tmp_path / name / "metrics.jsonl") if "eval_loss" in line]
        for name in ("run", "plain")
    )
    for line, without, event, found in zip(ours, plain, events, seen, strict=True):
        assert line["eval_loss"] == pytest.approx(without["eval_loss"], rel=1e-6)
        assert line["eval_loss_again"] == pytest.approx(line["eval_loss"], rel=1e-5)
        assert line["eval_accuracy"] == pytest.approx(without["eval_token_accuracy"], rel=1e-6)
        assert event["eval_hard"] == line["eval_hard"]
        assert sorted({*found.documents.tolist()}) == list(range(5))
        hard = [found.columns["hard"][found.documents == document] for document in range(5)]
        assert sorted(values[0] for values in hard) == [0, 0, 0, 1, 1] and all(len({*values}) == 1 for values in hard)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compute_metrics": len}, "compute_metrics: it reads held-out data: give eval_data"),
        ({"columns": {"hard": 0.0}}, "columns: compute_metrics reads them"),
        ({"callbacks": jaxglue.Callback()}, "callbacks: expected a list of them, got <"),
        (
            {"optimizer": optax.sgd(0.1), "learning_rate": 0.1},
            "learning_rate: an optimizer given as an object has its own",
        ),
        ({"tokenizer": 3}, "tokenizer: expected a folder or a tokenizer of transformers, got 3"),
    ],
)
def test_parts_that_do_not_fit_are_refused(settings, rows, given, message):
    with pytest.raises(ValueError, match=message):
        jaxglue.train(data=rows, steps=1, **settings | given)


@pytest.mark.parametrize("by_session", [True, repeat(False)])
def test_a_transformation_of_optax_updates_the_whole_tree(settings, rows, tmp_path, by_session):
    """Two groups with rates of their own, one of which sees the norm of all gradients."""

    def label(tree):
        return jax.tree_util.tree_map_with_path(lambda path, _: "b" if "lora_B" in str(path[-1]) else "a", tree)

    groups = {"a": optax.set_to_zero(), "b": optax.sgd(0.5, momentum=0.9)}
    optimizer = optax.chain(optax.clip_by_global_norm(1e-3), optax.multi_transform(groups, label))
    folder = tmp_path / "run/adapter"
    if by_session:
        with jaxglue.Session(optimizer=optimizer, rank=4, **settings) as session:
            session.forward_backward(rows[:4])
            values = session.optim_step()
            session.save(folder)
    else:
        more = {"rank": 4, "steps": 1, "documents_per_step": 4, "output": str(tmp_path / "run"), "log_every": 1}
        jaxglue.train(data=rows[:4], optimizer=optimizer, **more, **settings)
        (values,) = (line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in line)
    moved = load_file(folder / "adapter_model.safetensors")
    total = np.sqrt(sum(np.sum(tensor**2) for name, tensor in moved.items() if "lora_B" in name))
    assert values["grad_norm"] > 1e-3 and total == pytest.approx(0.5e-3, rel=1e-4)  # A has no gradient while B is 0


def test_a_tokenizer_object_is_used_and_saved(settings, rows, make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("user", "person")
    given = {"tokenizer": tokenizer, "steps": 1, "output": str(tmp_path / "run")}
    summary = jaxglue.train(data=rows, **given, **settings)
    assert jaxglue.load_tokenizer(summary.adapter).chat_template == tokenizer.chat_template
    with pytest.raises(ValueError, match=r"its token \d+ is beyond the model's 400 rows"):
        grown = make_tokenizer()
        grown.add_tokens([f"<{number}>" for number in range(99)])
        jaxglue.train(data=rows, **given | {"tokenizer": grown, "overwrite": True}, **settings)
