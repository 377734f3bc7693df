"""Metrics of a run: reading them back, and telling divergence."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxglue.training.own_lines import OwnLines, read_own_lines


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the intact lines of a `metrics.jsonl`."""
    return read_steps(path).intact


def read_steps(path: Path) -> OwnLines:
    """Read a file whose lines have a whole number as `step`."""
    return read_own_lines(path, lambda line: type(line.get("step")) is int)


class Diverged(ValueError):  # noqa: N818
    """Reports that values of a step, or the arrays after it, are not finite; no later step recovers from that.

    Args:
        step: optimizer steps done with it.
        found: the values, and whether they are infinite or NaN.
    """

    def __init__(self, step: int, found: str):
        super().__init__(f"step {step}: {found}. Training has diverged and stops")
        self.step, self.found = step, found


def check_finite(step: int, values: Mapping[str, float]) -> None:
    """Raise Diverged if a value is not finite."""
    if wrong := ", ".join(f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)):
        raise Diverged(step, wrong)
