import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxglue.training.metrics import MetricsWriter, read_metrics


def write(folder, losses, **options):
    with MetricsWriter(folder, clock=lambda: 0.0, **options) as metrics:
        for step, loss in losses.items():
            metrics.write(step, {"loss": loss, "mfu": None})
    return metrics.path


def scalars(folder, tag):
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_a_line_and_an_event_for_every_step(tmp_path):
    path = write(tmp_path, {1: 3.0, 2: 2.5})
    assert path.read_text().splitlines() == ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": 2.5}']
    assert scalars(tmp_path, "loss") == {1: 3.0, 2: 2.5}


def test_a_line_is_on_disk_at_once(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"loss": 1.0})
        assert list(read_metrics(metrics.path)) == [{"step": 1, "loss": 1.0}]


def test_after_a_resume_no_step_is_there_twice(tmp_path):
    write(tmp_path, {1: 3.0, 2: 2.5, 3: 9.0, 4: 9.0})
    path = write(tmp_path, {3: 2.0}, resume_step=2)
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 3.0), (2, 2.5), (3, 2.0)]
    assert scalars(tmp_path, "loss") == {1: 3.0, 2: 2.5, 3: 2.0}


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path):
    path = write(tmp_path, {1: 3.0})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(write(tmp_path, {2: 2.0}, resume_step=1))] == [1, 2]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_diverged_loss_is_still_json(tmp_path, loss):
    (line,) = write(tmp_path, {1: loss}).read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "loss": None}
