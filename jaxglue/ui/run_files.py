"""Reader of a run's folder for its page: of files of any length, a sample that opens at once."""

import mmap
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxglue.files.json_file import parse_object
from jaxglue.files.regular_file import read_regular_text

_WHOLE = 2**22
"""Bytes of a file of lines up to which all of it is read."""
_POINTS = 3000
"""Lines of metrics that are read of a longer file, beside those of evaluations, as many at most."""
_STEPS, _ANSWERS = 24, 512
"""Steps of rollouts that are read of a longer file, and the most answers of one."""
_LARGEST_JSON = 2**24
_KEPT_OF_ROLLOUTS = ("step", "origin", "prompt", "answer", "rewards", "advantage", "tokens", "ended", "turns")


@dataclass(kw_only=True)
class RunRecord:
    """The contents of a run's folder, as JSON has them."""

    name: str
    folder: str
    version: str
    """Changes when a file does."""
    summary: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Groups of the recorded recipe."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    reliability: dict[str, Any] | None = None
    """Bins of confidence of held-out decisions, and their measures."""
    sampled: dict[str, bool] = field(default_factory=dict)
    """Whether metrics and rollouts are a part of their files' lines."""
    results: list[str] = field(default_factory=list)
    """Folders with weights: adapter, model and their variants."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def version_of(folder: Path) -> str:
    """Return a text that changes when a file of the page's does."""
    states = [(name, (folder / name).stat()) for name in _FILES if (folder / name).is_file()]
    return ";".join(f"{name}:{state.st_size}:{state.st_mtime_ns}" for name, state in states)


RELIABILITY = "reliability.json"
"""Confidence and accuracy of held-out decisions."""
_FILES = ("config.toml", "plan.json", "summary.json", "metrics.jsonl", "samples.jsonl", "rollouts.jsonl", RELIABILITY)


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder.

    Raises:
        ValueError: no run is there.
    """
    if not any((folder / name).is_file() for name in ("config.toml", "metrics.jsonl")):
        raise ValueError(f"{folder} holds no run: name the --output of one")
    run = RunRecord(name=folder.resolve().name, folder=str(folder), version=version_of(folder))
    run.summary, run.plan = (_read_json(folder / name) for name in ("summary.json", "plan.json"))
    run.reliability = _read_json(folder / RELIABILITY)
    if (folder / "config.toml").is_file():
        run.settings = tomllib.loads(read_regular_text(folder / "config.toml"))
    run.metrics, is_part = read_metrics(folder / "metrics.jsonl")
    run.sampled["metrics"] = is_part
    run.samples = list(_lines(folder / "samples.jsonl"))
    run.rollouts, is_part = read_rollouts(folder / "rollouts.jsonl")
    run.sampled["rollouts"] = is_part
    names = ("adapter", "model", "adapter-last", "model-last", "base")
    run.results = [name for name in names if (folder / name).is_dir()]
    return run


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return lines of metrics in their order, and whether they are a sample: evenly spaced ones and evaluations."""
    if not path.is_file() or path.stat().st_size <= _WHOLE:
        return list(_lines(path)), False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        starts = {_line_start(data, len(data) * index // _POINTS) for index in range(_POINTS)}
        starts |= {_line_start(data, len(data) - 1)}
        evaluations, position = list[int](), 0
        while (position := data.find(b'"eval_', position)) >= 0:
            evaluations.append(_line_start(data, position))
            position = data.find(b"\n", position)
            if position < 0:
                break
        starts |= set(evaluations[:: -(-len(evaluations) // _POINTS) or 1])
        return [line for start in sorted(starts) if (line := _parsed(_line_at(data, start)))], True


def read_rollouts(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return answers in their order, and whether they are a sample: whole steps, evenly spaced, first and last."""
    if not path.is_file() or path.stat().st_size <= _WHOLE:
        return [_short(line) for line in _lines(path)], False
    answers: dict[int, dict[str, Any]] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for index in range(_STEPS + 1):
            start = _line_start(data, min(len(data) * index // _STEPS, len(data) - 1))
            answers |= _step_around(data, start)
    return [_short(answers[start]) for start in sorted(answers)], True


def _step_around(data: mmap.mmap, start: int) -> dict[int, dict[str, Any]]:
    """Return the answers of the step that the line at `start` is of, by their places."""
    line = _parsed(_line_at(data, start))
    if line is None:
        return {}
    step, answers = line.get("step"), {start: line}
    position = start
    while position > 0 and len(answers) < _ANSWERS // 2:
        position = _line_start(data, position - 1)
        if (line := _parsed(_line_at(data, position))) is None or line.get("step") != step:
            break
        answers[position] = line
    position = start
    while len(answers) < _ANSWERS and (end := data.find(b"\n", position)) >= 0 and end + 1 < len(data):
        position = end + 1
        if (line := _parsed(_line_at(data, position))) is None or line.get("step") != step:
            break
        answers[position] = line
    return answers


def _line_start(data: mmap.mmap, position: int) -> int:
    """Return the place where the line of a position begins; a newline belongs to the line that it ends."""
    return data.rfind(b"\n", 0, position) + 1


def _line_at(data: mmap.mmap, start: int) -> bytes:
    end = data.find(b"\n", start)
    return data[start : len(data) if end < 0 else end]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None for one that is no JSON, such as a line that is being written."""
    try:
        return parse_object(line, "a line")
    except ValueError:
        return None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with path.open("rb") as file:
            yield from (value for line in file if (value := _parsed(line)) is not None)


def _short(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in _KEPT_OF_ROLLOUTS if name in line}


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file() or path.stat().st_size > _LARGEST_JSON:
        return None
    return _parsed(path.read_bytes())
