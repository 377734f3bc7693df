import io
from dataclasses import replace

import pytest

from jaxglue.terminal.console import Console
from jaxglue.training.progress import SAMPLING, StepReport, TrainingProgress, format_duration, format_report

REPORT = StepReport(
    loss=1.23456,
    epoch=0.25,
    learning_rate=2e-4,
    grad_norm=0.5,
    tokens_per_second=12345.6,
    mfu=0.412,
    memory_gb=18.84,
    data_wait=0.001,
)


def test_report_is_one_line():
    line = "loss 1.2346  1:01 left  12,346 tokens/s  epoch 0.25  grad norm 0.5  MFU 41.2%  18.8 GB  lr 2.00e-04"
    assert format_report(REPORT, 61) == line


def test_unknown_and_negligible_values_are_left_out():
    line = format_report(replace(REPORT, mfu=None, data_wait=0.2), None)
    assert "MFU" not in line
    assert "left" not in line
    assert "waiting for data 20%" in line


def test_time_between_batches_has_the_name_of_what_takes_it():
    out = io.StringIO()
    with TrainingProgress(40, waits_for=SAMPLING, console=Console(file=out)) as progress:
        progress.report(6, replace(REPORT, data_wait=0.64))
    assert "sampling and rewards 64%" in out.getvalue()
    assert "waiting" not in out.getvalue()


def test_pipe_gets_only_lines_of_reports():
    out = io.StringIO()
    times = iter([100.0, 120.0])
    with TrainingProgress(40, first_step=8, console=Console(file=out), clock=lambda: next(times)) as progress:
        for step in (20, 30):
            progress.advance(step)
            progress.report(step, REPORT)
            progress.advance(step + 1)
    first, second = out.getvalue().splitlines()
    assert first.startswith("step 20/40  loss 1.2346")
    assert "left" not in first
    assert second.startswith("step 30/40  loss 1.2346  0:20 left")


def test_unknown_gradient_norm_is_left_out():
    assert "grad norm" not in format_report(replace(REPORT, grad_norm=None), None)


def test_terminal_gets_a_bar_and_lines_above_it():
    out = io.StringIO()
    with TrainingProgress(40, console=Console(file=out, force_terminal=True, width=140)) as progress:
        progress.advance(7)
        progress.report(6, REPORT)
        progress.say("[1] kept as it is")
    assert "7/40" in out.getvalue()
    assert "step 6/40  loss 1.2346" in out.getvalue()
    assert "[1] kept as it is" in out.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03")])
def test_durations(seconds, text):
    assert format_duration(seconds) == text
