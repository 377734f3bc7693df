import io

import jax.monitoring
import pytest

from jaxglue.engine.program_cache import COMPILED
from jaxglue.terminal.console import Console
from jaxglue.training.progress import Compiling, TrainingProgress


@pytest.mark.parametrize(("predicted", "left"), [(60, ", at most 0:49 left"), (0, "")])
def test_programs_and_time_left_are_said_now_and_then(predicted, left):
    out, times, done = io.StringIO(), iter([0, 5, 11, 12]), []
    with TrainingProgress(4, console=Console(file=out)) as progress:
        with Compiling(progress, predicted, lambda: bool(done), clock=lambda: next(times)):
            for _ in range(3):
                jax.monitoring.record_event_duration_secs(COMPILED, 1.0)
            done.append(1)
            jax.monitoring.record_event_duration_secs(COMPILED, 1.0)
        jax.monitoring.record_event_duration_secs(COMPILED, 1.0)
    assert out.getvalue() == f"compiling: 2 programs in 0:11{left}\n"
