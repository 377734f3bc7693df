"""The kept weights of a run: best, last or both, an early end, and exported checkpoints."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from selection import repeats_parts_of

from jaxglue import commands
from jaxglue.hf.adapter import load_adapter
from jaxglue.training.checkpoint_export import choose_step, export_checkpoint
from jaxglue.training.evaluation import Evaluation
from jaxglue.training.train import train


@pytest.fixture
def scripted_losses(monkeypatch):
    """Return a function that scripts the eval losses of a run."""

    def script(losses):
        def read(self, step, *_):
            self._count(losses[step], step)
            return {"eval_loss": losses[step]}

        monkeypatch.setattr(Evaluation, "read", read)

    return script


def weights(folder):
    return load_adapter(folder).tensors


def snapshot(run):
    """Return content and time of every file."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}


def equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_best_and_last_weights_are_kept_at_an_early_end(make_config, scripted_losses, tmp_path, capsys):
    scripted_losses({1: 3.0, 2: 2.0, 3: 2.5, 4: 2.5})
    config = make_config(
        steps=9, eval_fraction=0.2, eval_every=1, save_every=4, keep="both", early_stopping=2, keep_checkpoints=9
    )
    summary = train(config)
    run = tmp_path / "run"
    assert (summary.steps, summary.best_eval_step, summary.adapter_step) == (4, 2, 2)
    assert "no eval loss below 2.0000, of step 2, in 2 evaluations" in summary.stopped_early
    assert summary.stopped_early in " ".join(capsys.readouterr().out.split())
    assert not equal(weights(run / "adapter"), weights(run / "adapter-last"))

    commands.main(["export", "--run", str(run), "--checkpoint", "best", "--output", str(tmp_path / "best")])
    assert "step 2" in capsys.readouterr().out
    assert equal(weights(tmp_path / "best"), weights(run / "adapter"))
    assert export_checkpoint(run, "last", tmp_path / "last") == 4
    assert equal(weights(tmp_path / "last"), weights(run / "adapter-last"))
    assert export_checkpoint(run, "1", tmp_path / "first") == 1
    with pytest.raises(ValueError, match="has 1, 2, 4; give one of these, best or last"):
        choose_step(run / "checkpoints", "3")

    resumed, before = replace(config, run=replace(config.run, resume=True)), snapshot(run)
    assert train(resumed) == summary
    assert snapshot(run) == before
    assert "done before" in capsys.readouterr().out
    (run / ".jaxglue-old-a.moving").mkdir()  # a killed --overwrite
    (run / "checkpoints").rename(run / ".jaxglue-old-a.moving/checkpoints")
    assert train(resumed).steps == 4 and (run / "checkpoints/4").is_dir()
    copied = shutil.copytree(run, tmp_path / "copied")
    (copied / "adapter/adapter_model.safetensors").write_bytes(b"")
    assert train(replace(config, run=replace(config.run, resume=True, output=copied))).adapter == copied / "adapter"
    assert equal(weights(copied / "adapter"), weights(tmp_path / "best"))

    scripted_losses({5: 2.2})  # patience of one more evaluation
    longer = train(replace(resumed, run=replace(resumed.run, early_stopping=3)))
    assert (longer.steps, longer.adapter_step) == (5, 2)
    assert equal(weights(run / "adapter"), weights(tmp_path / "best"))


def test_keeping_the_best_needs_held_out_data(make_config):
    with pytest.raises(
        ValueError, match="--early-stopping 1 needs --eval-data or --eval-fraction: it goes by the eval loss"
    ):
        make_config(early_stopping=1)
    with pytest.raises(ValueError, match="--keep best needs --eval-data or"):
        make_config(keep="best")


def test_resuming_with_more_steps_extends_the_run(make_config, tmp_path, capsys):
    train(make_config(steps=2))
    summary = train(make_config(steps=4, resume=True, log_every=2))
    shown = capsys.readouterr().out
    assert summary.steps == 4
    assert "the run ends at step 4 in place of 2, by the cosine schedule of 4 steps" in shown
    assert "changed setting run.log_every: saved 1, now 2" in shown and "changed setting run.steps: saved 2" in shown
    with pytest.raises(ValueError, match="the run has done 4 steps, more than the 3 asked for"):
        train(make_config(steps=3, resume=True))
    with pytest.raises(ValueError, match=r"\n  optimizer.learning_rate: saved 0.01, now 0.02\n"):
        train(make_config(steps=5, resume=True, learning_rate=0.02))


@repeats_parts_of("test_resuming_with_more_steps_extends_the_run")
def test_resuming_with_more_epochs_extends_the_run(make_config, tmp_path):
    first = train(make_config(epochs=1, output=tmp_path / "short"))
    longer = train(make_config(epochs=2, output=tmp_path / "short", resume=True))
    assert longer.steps == 2 * first.steps
