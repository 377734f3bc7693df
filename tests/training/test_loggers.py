import json
import math
import resource

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxglue.training.record import check_finite, read_metrics
from jaxglue.training.trackers import JsonLinesLogger, TensorBoardLogger, open_loggers


def write(folder, losses, **options):
    with open_loggers(folder, **options) as loggers:
        for step, loss in losses.items():
            loggers.log(step, {"loss": loss, "mfu": None})
    return folder / "metrics.jsonl"


def scalars(folder, tag):
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_each_step_writes_a_line_and_an_event(tmp_path):
    path = write(tmp_path, {1: 3.0, 2: 2.5})
    assert path.read_text().splitlines() == ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": 2.5}']
    assert scalars(tmp_path, "loss") == {1: 3.0, 2: 2.5}


def test_lines_are_flushed_at_once(tmp_path):
    with open_loggers(tmp_path) as loggers:
        loggers.log(1, {"loss": 1.0})
        assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]


def test_resume_replaces_repeated_steps(tmp_path):
    write(tmp_path, {1: 3.0, 2: 2.5, 3: 9.0, 4: 9.0})
    path = write(tmp_path, {3: 2.0}, resume_step=2)
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 3.0), (2, 2.5), (3, 2.0)]
    assert scalars(tmp_path, "loss") == {1: 3.0, 2: 2.5, 3: 2.0}


def test_line_cut_short_by_a_crash_is_dropped(tmp_path):
    path = write(tmp_path, {1: 3.0})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(write(tmp_path, {2: 2.0}, resume_step=1))] == [1, 2]


@pytest.mark.parametrize("damage", [b"{\n", b"\0\0\n", b"[2]\n", b'{"step": "2"}\n', b"\xff\n", b"[" * 99 + b"\n"])
def test_damaged_lines_are_moved_aside(tmp_path, damage, caplog):
    path = write(tmp_path, {1: 3.0})
    with path.open("ab") as file:
        file.write(damage + b'{"step": 2, "loss": 2.5}\n' + damage)
    write(tmp_path, {3: 2.0}, resume_step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == 2 * damage
    assert "damaged lines (2) were moved to" in caplog.text


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_non_finite_loss_is_null(tmp_path, loss):
    (line,) = write(tmp_path, {1: loss}).read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "loss": None}


@pytest.mark.parametrize("kind", [JsonLinesLogger, TensorBoardLogger])
def test_full_disk_names_the_file_and_does_not_hang(tmp_path, kind):
    def fill():
        logger = kind(tmp_path / "out")
        for step in range(1000):
            logger.log(step, {"loss": 1.0})
        logger.close()

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="out could not be written"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_divergence_names_step_and_value():
    check_finite(3, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"step 3: loss is nan, grad_norm is inf\. Training has diverged"):
        check_finite(3, {"loss": math.nan, "grad_norm": math.inf, "learning_rate": 1.0})
