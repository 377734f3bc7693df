"""A run beside TRL's SFTTrainer on the same rows, with callback and metrics (golden of `make_sft_trainer.py`)."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxglue
from jaxglue.hf.checkpoint import save_tensors
from jaxglue.models import abstract_model, config_from_hf
from jaxglue.models.parameters import abstract_parameters
from tests.goldens.drawn import drawn

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/goldens/sft_trainer.json").read_text(encoding="utf-8"))
MARKED = json.loads((ROOT / "tests/goldens/masks.json").read_text(encoding="utf-8"))["template"]


def write_model(folder: Path) -> None:
    shapes = abstract_parameters(abstract_model(config_from_hf(GOLDEN["config"])))
    weights = {name: drawn(name, spec.shape) for name, spec in shapes.items()}
    scaled = {name: jnp.asarray(w if name.endswith("norm.weight") else w / 10) for name, w in weights.items()}
    save_tensors(folder, scaled)
    (folder / "config.json").write_text(json.dumps(GOLDEN["config"]))


def compute_metrics(found: jaxglue.Predictions):
    right = found.predicted == found.targets
    counts = np.bincount(found.documents)
    worst = (np.bincount(found.documents, right) / counts).min()
    return {"accuracy": right.mean(), "log_prob": found.log_probs.mean(), "worst": worst}


class Record(jaxglue.Callback):
    """Keeps the values of steps and evaluations."""

    def __init__(self):
        self.steps, self.evaluations = [], []

    def on_step(self, step, values):
        self.steps.append(values)

    def on_evaluation(self, step, values):
        self.evaluations.append(values | {"step": step})


def test_losses_norms_and_metrics_are_those_of_sft_trainer(tmp_path):
    write_model(tmp_path / "model")
    tokenizer = jaxglue.load_tokenizer(ROOT / "jaxglue/recipes/quickstart/model")
    tokenizer.chat_template = MARKED
    record = Record()
    jaxglue.train(
        model=str(tmp_path / "model"),
        method="full",
        tokenizer=tokenizer,
        data=GOLDEN["rows"],
        eval_data=GOLDEN["held_out"],
        documents_per_step=len(GOLDEN["rows"]),
        seq_len=128,
        steps=len(GOLDEN["steps"]),
        eval_every=2,
        warmup_ratio=0.0,
        callbacks=[record],
        compute_metrics=compute_metrics,
        cache_dir=str(tmp_path / "cache"),
        output=str(tmp_path / "run"),
        compilation_cache=None,
        **GOLDEN["settings"],
    )
    for found, expected in ((record.steps, GOLDEN["steps"]), (record.evaluations, GOLDEN["evaluations"])):
        for ours, theirs in zip(found, expected, strict=True):
            for name, value in theirs.items():
                assert ours[name] == pytest.approx(value, rel=1e-5 if "loss" in name else 1e-4), name
