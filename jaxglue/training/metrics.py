"""Metrics of a run: `metrics.jsonl`, TensorBoard events and the loss curve."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class MetricsWriter:
    """Appends to `metrics.jsonl` and to TensorBoard events in `tensorboard/`, both in the run's folder."""

    def __init__(self, folder: Path, *, resume_step: int = 0, clock: Callable[[], float] = time.time):
        """Opens both; what an earlier run wrote after `resume_step` is dropped, as those steps are done again.

        Args:
            folder: the run's folder.
            resume_step: the last step that the run continues from; 0 for a new run.
            clock: seconds since the epoch, for TensorBoard.
        """
        self.path = folder / "metrics.jsonl"
        self._clock = clock
        _truncate(self.path, resume_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._events = EventFileWriter(str(folder / "tensorboard"), flush_secs=10)
        self._events.add_event(self._event(resume_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """One line for a step; a value that is no finite number becomes `null`, and is left out if it is None."""
        known = {name: float(value) for name, value in values.items() if value is not None}
        line = {name: value if math.isfinite(value) else None for name, value in known.items()}
        self._file.write(json.dumps({"step": step} | line) + "\n")
        self._file.flush()
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in known.items()]
        self._events.add_event(self._event(step, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Flushes and closes the files."""
        self._file.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _event(self, step: int, **content: Any) -> Event:
        return Event(wall_time=self._clock(), step=step, **content)


def check_finite(step: int, values: Mapping[str, float]) -> None:
    """Raises ValueError if training has diverged: no later step would mend the parameters."""
    wrong = ", ".join(f"{name} is {value}" for name, value in values.items() if not math.isfinite(value))
    if wrong:
        raise ValueError(
            f"step {step}: {wrong}. Training has diverged and stops here; its checkpoints are from before. Try a lower "
            "--learning-rate, a longer --warmup-ratio or a smaller --clip-norm, or look at this step's documents"
        )


class NoMetrics(MetricsWriter):
    """For processes that leave the writing to process 0."""

    def __init__(self, folder: Path):
        self.path = folder / "metrics.jsonl"

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; one that a crash cut short, which only the last can be, is passed over."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return (json.loads(line) for line in lines if line.endswith("\n"))


def _truncate(path: Path, last_step: int) -> None:
    kept = [json.dumps(line) + "\n" for line in read_metrics(path) if line["step"] <= last_step]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)
