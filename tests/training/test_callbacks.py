"""Callbacks receive a run's events and may end it; rows in memory train as their file does."""

import json
from types import SimpleNamespace

import pytest
from selection import repeat

import jaxglue
from jaxglue.training.record import read_metrics
from jaxglue.training.report import read_summary
from jaxglue.training.train import train


class Log(jaxglue.Callback):
    """Keeps all events, and stops at a step."""

    def __init__(self, stop_at: int | None = None):
        self.events: list[tuple] = []
        self.stop_at = stop_at

    def on_start(self, step, total_steps):
        self.events.append(("start", step, total_steps))

    def on_step(self, step, values):
        self.events.append(("step", step, values["loss"]))
        return "stop" if step == self.stop_at else None

    def on_evaluation(self, step, values):
        self.events.append(("evaluation", step, values["eval_loss"]))

    def on_save(self, step, folder):
        self.events.append(("save", step, folder.name))

    def on_end(self, summary):
        self.events.append(("end", summary.steps, summary.stopped_early))

    def of(self, kind):
        return [event[1:] for event in self.events if event[0] == kind]


def test_events_in_order_from_rows_in_memory(settings, chat_rows, tmp_path):
    log, out = Log(), tmp_path / "run"
    more = {"eval_data": chat_rows(3), "steps": 4, "eval_every": 2, "output": str(out)}
    summary = jaxglue.train(data=chat_rows(24), callbacks=[log], **settings, **more)
    losses = [(line["step"], line["loss"]) for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
    assert log.of("start") == [(0, 4)] and log.of("step") == losses and len(losses) == 4
    assert [step for step, _ in log.of("evaluation")] == [2, 4]
    assert log.of("save") == [(2, "checkpoints"), (4, "checkpoints")]
    assert log.of("end") == [(4, None)] and log.events[-1][0] == "end"
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(24)))
    again = jaxglue.train(data=str(path), **settings, **more | {"output": str(tmp_path / "other"), "eval_data": ()})
    assert (again.first_loss, again.last_loss) == (summary.first_loss, summary.last_loss)


@pytest.mark.parametrize("event", ["on_step", repeat("on_evaluation")])
def test_an_error_of_a_callback_ends_a_run_after_a_checkpoint(settings, chat_rows, tmp_path, event):
    seen = []

    def fail(self, step, values):
        seen.extend(values.values())
        if step == 2:
            raise RuntimeError("a fault of the user's")

    more = {"data": chat_rows(24), "eval_data": chat_rows(3), "eval_every": 2, "save_every": 9, "steps": 9}
    callback = type("Failing", (jaxglue.Callback,), {event: fail})()
    with pytest.raises(RuntimeError, match="a fault of the user's"):
        jaxglue.train(callbacks=[callback], **settings, **more, output=str(tmp_path / "run"))
    (saved,) = (int(path.name) for path in (tmp_path / "run/checkpoints").iterdir() if path.name.isdigit())
    assert 2 <= saved <= 5 and seen and all(type(value) is float for value in seen)
    summary = jaxglue.train(**settings, **more | {"steps": 6}, output=str(tmp_path / "run"), resume=True)
    assert summary.steps == 6


def test_stop_ends_a_run_with_its_result_for_good(settings, chat_rows, tmp_path):
    log, more = Log(stop_at=2), {"data": chat_rows(24), "steps": 9, "output": str(tmp_path / "run")}
    summary = jaxglue.train(callbacks=[log], **settings, **more)
    assert 2 < summary.steps <= 5 and summary.stopped_early == "stopped by Log.on_step" and summary.adapter.is_dir()
    assert log.of("save") == [(summary.steps, "checkpoints")]
    resumed = jaxglue.train(resume=True, callbacks=[log], **settings, **more)
    assert resumed.steps == summary.steps
    saved = json.loads((tmp_path / "run/summary.json").read_text())
    saved = {key: value for key, value in saved.items() if key not in ("fingerprint", "keep", "early_stopping")}
    assert read_summary(saved).stopped_early == summary.stopped_early


def test_answers_and_objects_are_checked(settings, chat_rows, tmp_path):
    class Wrong(jaxglue.Callback):
        def on_step(self, step, values):
            return True

    more = {"data": chat_rows(24), "steps": 2, "output": str(tmp_path / "run")}
    with pytest.raises(ValueError, match=r'Wrong.on_step returned True: return "stop" or None'):
        jaxglue.train(callbacks=[Wrong()], **settings, **more)
    with pytest.raises(ValueError, match=r"callbacks: expected objects of jaxglue.Callback, got <function"):
        jaxglue.train(callbacks=[lambda: None], **settings, **more | {"output": str(tmp_path / "other")})


def test_callbacks_are_refused_in_several_processes(make_config):
    with pytest.raises(ValueError, match="callbacks: they run in one process alone"):
        train(make_config(steps=1), processes=SimpleNamespace(count=2, is_main=True), callbacks=[Log()])
