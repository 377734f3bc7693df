"""Whole runs: results, resuming, refusals."""

import dataclasses
import gc
import itertools
import json
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat, repeats_parts_of

from jaxglue.data.tokenize import encode_here
from jaxglue.hf.adapter import find_base, load_adapter
from jaxglue.hf.checkpoint import save_tensors
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import load_model
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.ops.adam import reference as adam
from jaxglue.settings.recipe import load_config
from jaxglue.training.config import TrainConfig
from jaxglue.training.record import read_metrics
from jaxglue.training.report import plan_rows
from jaxglue.training.setup import resolve
from jaxglue.training.step import train_step
from jaxglue.training.train import train


def modification_times(folder):
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def losses(folder):
    return {line["step"]: line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line}


def test_run_learns_and_writes_its_results(whole_runs, make_config, tmp_path, monkeypatch):
    left_out, unfreeze = [], gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: (left_out.append(gc.get_freeze_count()), unfreeze()))
    prompts = ("What is 3 plus 4?", "Hello")
    summary = train(make_config(epochs=4, batch_size=2, eval_fraction=0.2, sample_prompt=prompts, sample_tokens=5))
    run = tmp_path / "run"
    curve = losses(run)
    assert list(curve) == list(range(1, summary.steps + 1))
    assert curve[summary.steps] == summary.last_loss < summary.first_loss - 0.3
    evals = {line["step"]: line["eval_loss"] for line in read_metrics(run / "metrics.jsonl") if "eval_loss" in line}
    assert len(evals) >= 4 and summary.best_eval_loss == min(evals.values())
    adapter = load_adapter(run / "adapter")
    config, tensors = adapter.config, adapter.tensors
    assert config.rank == 4 and len(tensors) == 2 * 7 * 2
    assert all(np.abs(tensor).max() > 0 for tensor in tensors.values())
    assert find_base(run / "adapter") == (run / "base").resolve() and adapter.base == identify(run / "base")
    assert (run / "loss.png").stat().st_size > 0 and (run / "adapter" / "tokenizer.json").exists()
    assert (run / "checkpoints" / str(summary.steps)).is_dir()
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [
        (step, prompt) for step in (0, *evals) for prompt in prompts
    ]
    assert json.loads((run / "summary.json").read_text())["last_loss"] == summary.last_loss
    # The collector left out what lives on until the last step.
    assert left_out[0] > 100_000 and gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("dropout", "gradient_accumulation_steps", "moments", "layers_per_program"),
    [(0.0, 2, "8bit", 1), repeat(0.2, 1, "float32", 1), repeat(0.2, 1, "8bit", 2)],
)
def test_resumed_run_is_bit_identical(
    make_config, tmp_path, monkeypatch, dropout, gradient_accumulation_steps, moments, layers_per_program
):
    monkeypatch.setattr(adam, "SMALLEST", 64)
    options = {
        "epochs": 2,
        "targets": ("q_proj", "down_proj"),
        "dropout": dropout,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "moments": moments,
        "neftune_alpha": 5 * dropout,
        "layers_per_program": layers_per_program,
    }
    whole = train(make_config(**options, output=tmp_path / "whole"))
    stop_at = whole.steps // 2 + 1  # in the second epoch, between its ends

    def interrupted(*arguments):
        state, result = train_step(*arguments)
        if result.step == stop_at:
            signal.raise_signal(signal.SIGTERM)
        return state, result

    with monkeypatch.context() as patch:
        patch.setattr("jaxglue.training.loop.train_step", interrupted)
        assert train(make_config(**options)) is None
    assert max(losses(tmp_path / "run")) == stop_at < whole.steps
    resumed = train(make_config(**options, resume=True))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert (resumed.first_loss, resumed.last_loss) == (whole.first_loss, whole.last_loss)
    expected, got = (load_adapter(tmp_path / name / "adapter").tensors for name in ("whole", "run"))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    before = modification_times(tmp_path / "run")
    again = train(make_config(**options, resume=True))
    assert (again.steps, again.last_loss) == (whole.steps, whole.last_loss)
    assert modification_times(tmp_path / "run") == before


def test_full_fine_tuning_writes_a_model_folder(make_config, tmp_path, model_folder, tiny_model):
    shape = json.loads((model_folder / "config.json").read_text())
    model = tiny_model(**shape)
    before = flatten_names(split_model(model, nnx.Param)[1])
    save_tensors(tmp_path / "weights", before)
    (tmp_path / "weights" / "model.safetensors").rename(model_folder / "model.safetensors")
    options = {"random_weights": False, "method": "full", "learning_rate": 1e-3, "dtype": "float32", "steps": 3}
    summary = train(make_config(**options))
    after = flatten_names(split_model(load_model(summary.adapter, dtype=jnp.float32), nnx.Param)[1])
    moved = [float(jnp.abs(after[name] - before[name]).max()) for name in before]
    assert after.keys() == before.keys() and min(moved) > 1e-5

    path = summary.adapter / "model.safetensors"
    written = path.read_bytes()
    path.write_bytes(written[:-1])  # a run that resumes finds its result damaged
    assert train(make_config(**options, resume=True)).steps == 3 and path.read_bytes() == written


def test_update_in_backward_changes_no_loss(make_config, tmp_path):
    options = {"method": "full", "steps": 4, "learning_rate": 1e-3, "clip_norm": 0.0, "gradient_accumulation_steps": 2}
    train(make_config(**options, output=tmp_path / "after"))
    train(make_config(**options, update_in_backward=True))
    expected, got = losses(tmp_path / "after"), losses(tmp_path / "run")
    np.testing.assert_allclose([*got.values()], [*expected.values()], rtol=1e-6)


@repeats_parts_of("test_offload_changes_no_gradient")
def test_offload_changes_no_loss(make_config, tmp_path):
    train(make_config(steps=4, output=tmp_path / "device"))
    train(make_config(steps=4, weights="host", remat="offload"))
    expected, got = losses(tmp_path / "device"), losses(tmp_path / "run")
    np.testing.assert_allclose([*got.values()], [*expected.values()], rtol=1e-5)


def test_profiled_steps_leave_a_trace(make_config, tmp_path):
    train(make_config(steps=6, profile=2))
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_recompilation_is_warned_of(make_config, monkeypatch, caplog):
    counts = itertools.count()
    monkeypatch.setattr("jaxglue.engine.executor.Executor.compilations", lambda self: next(counts))
    train(make_config(steps=4))
    assert "compiled programs again" in caplog.text


def test_dry_run_prints_the_plan_and_writes_nothing(make_config, tmp_path, capsys):
    assert train(make_config(dry_run=True, epochs=2)) is None
    printed = capsys.readouterr().out
    for part in ("parameters train", "packed", "2.00 epochs", "GiB for weights, gradients and optimizer"):
        assert part in printed
    assert not (tmp_path / "run").exists()


def test_dry_run_explains_its_automatic_choices(make_config, capsys):
    train(make_config(dry_run=True, explain=True, remat="auto"))
    printed = " ".join(capsys.readouterr().out.partition("─ choices ─")[2].replace("│", " ").split())
    for part in (
        "mesh one GPU",
        "remat dots; bound by the device",
        "dtype float32; bound by",
        "loss reference; bound by",
    ):
        assert part in printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 512}, "--seq-len 512 is above the model's limit of 256 positions"),
        ({"targets": ("q_proj", "qproj")}, "LoRA targets qproj do not exist in this model: use down_proj, gate_proj"),
        ({"random_weights": False}, "has neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_bad_input_is_refused_before_training(make_config, changes, message):
    with pytest.raises(ValueError, match=message):
        train(make_config(**changes))


@pytest.mark.parametrize("objective", ["sft", repeat("dpo")])
def test_rows_have_the_models_positions_where_these_are_few(make_config, write_jsonl, tmp_path, capsys, objective):
    pair = {"prompt": "What is 1? ", "chosen": "It is 1.", "rejected": "Good"}
    data = {"data": (write_jsonl([pair] * 3, "pairs.jsonl"),)} if objective == "dpo" else {}
    config = make_config(seq_len=None, steps=1, **data)
    train(dataclasses.replace(config, objective=ObjectiveConfig(objective=objective)))
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert shown.count("rows of 256 tokens (all positions of the model, fewer than the default of 4,096 tokens)") == 1
    assert "\nseq_len = 256\n" in (tmp_path / "run" / "config.toml").read_text()


def test_rows_without_a_length_have_4096_tokens(make_config, model_folder):
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    rows = plan_rows(resolve(make_config(seq_len=None)))
    assert rows["batch"] == "1 × 1 rows of 4,096 tokens"


@pytest.mark.parametrize("stored", [None, repeat(96)])
def test_resumed_run_keeps_its_row_length(make_config, model_folder, tmp_path, stored):
    train(make_config(seq_len=stored, steps=1))
    recorded = load_config(TrainConfig, tmp_path / "run" / "config.toml")
    assert recorded.data.seq_len == (stored or 256)
    further = dataclasses.replace(recorded, run=dataclasses.replace(recorded.run, steps=2, resume=True))
    assert train(further).steps == 2
    if stored is None:  # flags without a length, too
        assert train(make_config(seq_len=None, steps=3, resume=True)).steps == 3


@repeats_parts_of("test_resuming_another_run_names_the_difference")
def test_resume_needs_same_configuration_model_and_data(make_config, model_folder, write_jsonl, chat_rows, tmp_path):
    train(make_config(steps=2))
    other_data = (write_jsonl(chat_rows(20, seed=5), "other.jsonl"),)
    different = {
        "seed": {"seed": 1},
        "lora.rank": {"rank": 8},
        "optimizer.learning_rate": {"learning_rate": 1e-3},
        "batch.seq_len": {"seq_len": 64},
        "data": {"data": other_data},
    }

    def written():
        files = (path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != ".jaxglue-run")
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = written()
    for entry, changes in different.items():
        with pytest.raises(ValueError, match=rf"cannot resume, this run differs[\s\S]*{re.escape(entry)}: saved"):
            train(make_config(**{"steps": 2, **changes}, resume=True))
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    with pytest.raises(ValueError, match=r"cannot resume[\s\S]*model.rope.rope_theta: saved 10000.0, now 500000.0"):
        train(make_config(steps=2, resume=True))
    assert written() == before


def test_streams_are_closed_with_their_run(make_config, monkeypatch):
    opened, ended = [], []

    def encode(encoder, jobs, workers):
        opened.append(True)
        try:
            yield from encode_here(encoder, jobs)
        finally:
            ended.append(True)

    monkeypatch.setattr("jaxglue.data.stream.encode_in_processes", encode)
    runs = []  # as in a traceback or at the interpreter's end, nothing frees them

    def settle(*args, **options):
        runs.append(resolve(*args, **options))
        return runs[-1]

    monkeypatch.setattr("jaxglue.training.train.resolve", settle)
    settings = {"streaming": True, "stream_tokens": 200, "save_every": 1}
    train(make_config(steps=1, **settings))
    assert len(opened) == len(ended) > 0
    train(make_config(steps=2, resume=True, **settings))
    assert len(opened) == len(ended)


def test_steps_of_documents_equal_those_of_full_rows_with_the_same_documents(make_config, tmp_path, caplog):
    """One step over all documents is the same gradient, however they are packed into micro-batches."""
    settings = {"steps": 2, "learning_rate": 1e-3, "dtype": "float32", "warmup_steps": 2, "warmup_ratio": 0.0}
    losses = []
    for name, options in (("rows", {"gradient_accumulation_steps": 100}), ("documents", {"documents_per_step": 24})):
        train(make_config(output=tmp_path / name, **settings, **options))
        losses.append([(line["loss"], line["grad_norm"]) for line in read_metrics(tmp_path / name / "metrics.jsonl")])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert "rises over 2 warm-up steps, and the run has 2" in caplog.text
