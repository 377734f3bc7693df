"""Metrics of a run: reading them back, and telling divergence."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Return the lines of a `metrics.jsonl`; a last line cut short by a crash is skipped."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return (json.loads(line) for line in lines if line.endswith("\n"))


def check_finite(step: int, values: Mapping[str, float]) -> None:
    """Raise ValueError if training has diverged, from which no later step recovers."""
    wrong = ", ".join(f"{name} is {value}" for name, value in values.items() if not math.isfinite(value))
    if wrong:
        raise ValueError(
            f"step {step}: {wrong}. Training has diverged and stops; earlier checkpoints are intact. Try a lower "
            "--learning-rate, a longer --warmup-ratio or a smaller --clip-norm, or look at this step's documents"
        )
