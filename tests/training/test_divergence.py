"""Divergence: what is saved, said and left out."""

import dataclasses
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat, repeats_parts_of

from jaxglue.data.iterator import BatchIterator, Step
from jaxglue.engine.array_checks import check_arrays, non_finite
from jaxglue.hf.adapter import load_adapter
from jaxglue.ops.segments import BatchKind, pack_segments
from jaxglue.rl.pack import Group, TrainedAnswer, pack_groups
from jaxglue.training import divergence
from jaxglue.training.divergence import Spikes, explain_divergence, load_step, save_step
from jaxglue.training.record import Diverged, read_metrics
from jaxglue.training.step import train_step
from jaxglue.training.train import train


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_any_flipped_bit_changes_the_digest():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((5, 7)), rng.integers(0, 255, 9, dtype=np.uint8), np.float32(3)]
    for array in map(np.asarray, (*arrays, np.asarray(jnp.arange(6, dtype=jnp.bfloat16)))):
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        digest = check_arrays([jnp.asarray(array)])["0"].digest
        for bit in rng.choice(array.nbytes * 8, 8, replace=False):
            raw = bytearray(array.tobytes())
            raw[bit // 8] ^= 1 << bit % 8
            flipped = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
            assert check_arrays([jnp.asarray(flipped)])["0"].digest != digest


def test_digests_are_those_of_earlier_versions():
    """Checkpoints hold them: with others every earlier checkpoint would count as damaged."""
    tree = {"a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "b": jnp.arange(5, dtype=jnp.uint8)}
    assert {name: check.digest for name, check in check_arrays(tree).items()} == {
        "a": "8844354f0c34071e",
        "b": "9afd8705676c250c",
    }


def test_arrays_that_are_not_finite_are_named():
    tree = {"good": jnp.ones(3), "bad": {"w": jnp.array([1.0, jnp.inf])}, "codes": jnp.full(3, 255, jnp.uint8)}
    assert non_finite(tree) == ["bad.w"]


def test_failed_step_is_read_back(random_batch, tmp_path):
    batches = tuple(random_batch([[5, 3], [4]], seq_len=12, seed=seed) for seed in range(2))
    few = pack_segments([[5], [4]], seq_len=12, kind=BatchKind(long=True, slots=1))
    batches = (*batches, dataclasses.replace(batches[0], segments=few))
    save_step(tmp_path / "step.npz", Step(micro_batches=batches, tokens=24, targets=11))
    step = load_step(tmp_path / "step.npz")
    assert (step.tokens, step.targets) == (24, 11)
    jax.tree.map(np.testing.assert_array_equal, step.micro_batches, batches)


def test_failed_step_of_rollouts_is_read_back(tmp_path):
    rng = np.random.default_rng(0)

    def answer(size: int) -> TrainedAnswer:
        values = {name: rng.normal(size=size).astype(np.float32) for name in ("log_probs", "old", "reference")}
        return TrainedAnswer(tokens=rng.integers(0, 9, size), counted=np.ones(size, bool), advantage=0.5, **values)

    groups = [Group([1, 2, 3], [answer(4), answer(2)]) for _ in range(3)]
    packed = pack_groups(groups, seq_len=16, batch_size=1, slots=6)
    batches = tuple(batch for batch, _ in packed)
    save_step(tmp_path / "step.npz", Step(micro_batches=batches, tokens=24, targets=18))
    jax.tree.map(np.testing.assert_array_equal, load_step(tmp_path / "step.npz").micro_batches, batches)


def test_spikes_are_told_from_noise():
    spikes, rng = Spikes(6.0), np.random.default_rng(0)
    values = ({"loss": 2 + rng.normal() / 10, "grad_norm": 1 + rng.normal() / 10} for _ in range(60))
    assert all(spikes.accepts(step, value) for step, value in enumerate(values))
    assert not spikes.accepts(60, {"loss": 2.0, "grad_norm": 2.5})
    assert not spikes.accepts(61, {"loss": math.nan, "grad_norm": 1.0})
    resumed = Spikes(6.0)
    resumed.set_state(json.loads(json.dumps(spikes.get_state())))
    assert resumed.steps == [60, 61]
    with pytest.raises(Diverged, match="step 69: the last 10 steps were spikes, loss nan"):
        [resumed.accepts(step, {"loss": math.nan, "grad_norm": 1.0}) for step in range(62, 80)]


def test_ruined_weights_are_set_aside_and_explained(make_config, tmp_path):
    config = make_config(steps=8, save_every=1, keep_checkpoints=1, learning_rate=1e17, warmup_ratio=0.0)
    with pytest.raises(ValueError, match=r"step \d+: .*First not finite: .*lower --learning-rate") as error:
        train(config)
    run, message = tmp_path / "run", str(error.value)
    failed = int(message.split()[1].rstrip(":"))
    assert load_step(run / f"failed-step-{failed}.npz").tokens > 0
    assert f"checkpoint {failed - 1} is set aside as {failed - 1}.diverged" in message
    assert checkpoints(run)[-1] == f"{failed - 1}.diverged" and str(failed - 1) not in checkpoints(run)
    assert {line["step"]: line["loss"] for line in read_metrics(run / "metrics.jsonl")}[failed] is None


@pytest.fixture
def poisoned(monkeypatch):
    """Make the rows of step 5 yield gradients that are not finite, whenever they are read."""
    draw, seen = BatchIterator.__next__, []

    def poisoning(self):
        step = draw(self)
        seen.append(step.micro_batches[0].tokens.tobytes())
        if len(seen) < 5 or seen[-1] != seen[4]:
            return step
        batch = step.micro_batches[0]
        return dataclasses.replace(
            step, micro_batches=(dataclasses.replace(batch, loss_weights=np.full_like(batch.loss_weights, np.inf)),)
        )

    monkeypatch.setattr(BatchIterator, "__next__", poisoning)


@pytest.mark.usefixtures("poisoned")
def test_bad_rows_are_blamed_and_can_be_left_out(make_config, tmp_path):
    with pytest.raises(
        ValueError, match=r"step 5: .*failed-step-5.npz. First not finite: .*look at these, or leave them out"
    ) as error:
        train(make_config(steps=7, save_every=2))
    assert "--resume continues from checkpoint 4" in str(error.value)
    summary = train(make_config(steps=7, save_every=2, resume=True, on_spike="skip"))
    assert summary.skipped_steps == [5] and math.isfinite(summary.last_loss)
    assert checkpoints(tmp_path / "run") == ["6", "7"]


@pytest.mark.usefixtures("poisoned")
@repeats_parts_of("test_rewinding_goes_back_past_a_checkpoint_that_only_spikes_followed")
def test_rewinding_returns_to_the_checkpoint_and_leaves_the_rows_out(make_config, tmp_path, capsys):
    summary = train(make_config(steps=7, save_every=3, on_spike="rewind"))
    assert "step 5: spike" in (shown := capsys.readouterr().out) and "back to the weights of step 3" in shown
    lines = {line["step"]: line for line in read_metrics(tmp_path / "run/metrics.jsonl")}
    assert list(lines) == list(range(1, 8)) and [step for step in lines if "skipped" in lines[step]] == [5]
    assert summary.skipped_steps == [5] and math.isfinite(summary.last_loss)
    assert json.loads((tmp_path / "run/summary.json").read_text())["skipped_steps"] == [5]


def poison(monkeypatch, failing):
    """Make the losses of these steps NaN, whichever rows they have."""

    def failing_step(parts, state, batch, accepts):
        def judge(step, values):
            return accepts(step, {**values, "loss": math.nan} if step in failing else values)

        return train_step(parts, state, batch, accepts and judge)

    monkeypatch.setattr("jaxglue.training.loop.train_step", failing_step)


@repeats_parts_of("test_rewinding_goes_back_past_a_checkpoint_that_only_spikes_followed")
def test_no_checkpoint_is_saved_while_spikes_follow_each_other(make_config, tmp_path, monkeypatch):
    poison(monkeypatch, range(5, 99))
    config = make_config(steps=20, save_every=1, keep_checkpoints=3, on_spike="skip")
    with pytest.raises(ValueError, match=r"step 14: the last 10 steps were spikes") as error:
        train(config)
    # Nothing finite followed the weights of step 4.
    assert checkpoints(tmp_path / "run") == ["2", "3", "4.diverged"]
    assert str(error.value).endswith("checkpoint 4 is set aside as 4.diverged. --resume continues from checkpoint 3.")


@pytest.mark.parametrize(("failing", "saved"), [([4, 5], ["6", "7"]), repeat([7], ["4"])])
def test_a_checkpoint_that_a_spike_delays_is_saved_after_it(make_config, tmp_path, monkeypatch, failing, saved):
    poison(monkeypatch, failing)
    config = make_config(steps=7, save_every=4, on_spike="skip")
    assert train(config).skipped_steps == failing
    assert checkpoints(tmp_path / "run") == saved
    assert load_adapter(tmp_path / "run" / "adapter")


def test_rewinding_goes_back_past_a_checkpoint_that_only_spikes_followed(make_config, tmp_path, monkeypatch, capsys):
    poison(monkeypatch, {5, 6})
    train(make_config(steps=8, save_every=2, keep_checkpoints=4, on_spike="rewind"))
    shown = capsys.readouterr().out
    assert "step 5: spike" in shown and "back to the weights of step 4" in shown
    assert "step 6: spike" in shown and "back to the weights of step 2" in shown
    assert checkpoints(tmp_path / "run") == ["2", "4.diverged", "7", "8"]


def judged(spikes, losses):
    """Return whether each loss is accepted, with a gradient norm that never is a spike."""
    return [spikes.accepts(step, {"loss": loss, "grad_norm": 1.0}) for step, loss in enumerate(losses)]


def test_a_spike_is_judged_by_the_latest_128_good_steps():
    noise = np.random.default_rng(0).normal(size=112)
    spikes = Spikes(6.0)
    assert all(judged(spikes, [*(5 + noise), *(5 + noise[:16] / 100)]))
    assert judged(spikes, [8.0]) == [True]  # among the 16 last alone it would stand out
    resumed = Spikes(6.0)
    resumed.set_state(json.loads(json.dumps(spikes.get_state())))
    for each in (spikes, resumed):
        assert all(judged(each, 1 + noise / 100)) and all(judged(each, 1 + noise / 100))
        assert judged(each, [3.0]) == [False]  # earlier losses are forgotten


def test_spikes_are_no_part_of_what_they_are_judged_by():
    spikes = Spikes(6.0)
    assert judged(spikes, [*(2 + np.random.default_rng(0).normal(size=20) / 10), 50.0, 50.0])[-3:] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(("step", "blames"), [(1, "No update came before it"), (7, "Its rows or the updates before")])
def test_a_cause_that_is_not_found_is_not_named(monkeypatch, step, blames):
    monkeypatch.setattr(divergence, "check_parameters", lambda frozen: [])
    checkpoints = SimpleNamespace(reject=lambda first: [], latest_step=None)
    model = None, SimpleNamespace(features=None), SimpleNamespace(frozen=None), checkpoints
    text = explain_divergence(*model, Diverged(step, "loss nan"), start={}, first=step, replay=False)
    assert text.startswith(blames) and text.endswith("No checkpoint is left") and "ruined" not in text
