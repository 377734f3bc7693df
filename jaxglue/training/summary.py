"""The panels of plan and results, and `summary.json`."""

import dataclasses
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxglue.training.progress import format_duration

PATHS = ("adapter", "last_adapter", "checkpoints", "metrics", "curve")
"""Fields of the results that name a file or folder in the run's."""
_BORDER = 6
"""Width of a panel's border and of the space between its columns."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The results of a run; None for results that do not exist."""

    steps: int
    first_loss: float
    last_loss: float
    """Train losses, nats per target token."""
    best_eval_loss: float | None
    best_eval_step: int | None
    tokens_per_second: float
    mfu: float | None
    peak_memory_gb: float
    seconds: float
    startup_seconds: dict[str, float]
    """By stage, up to the end of the first step."""
    adapter: Path | None
    """Folder of the trained adapter, or of the model after full fine-tuning."""
    checkpoints: Path | None
    metrics: Path
    curve: Path
    adapter_step: int | None = None
    """Step whose weights `adapter` holds; None is the last."""
    last_adapter: Path | None = None
    """Folder of the last step's weights, where `adapter` holds the best."""
    stopped_early: str | None = None
    """Why the run ended before its last step."""
    skipped_steps: list[int] = field(default_factory=list)
    """Steps whose update was left out as a spike's."""


def print_panel(console: Console, title: str, rows: Mapping[str, object]) -> None:
    """Print a titled table of names and values; rows of None are left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    width = max(console.width - max(map(len, rows)) - _BORDER, 1)
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, Text(_with_breaks(str(value), width)))
    console.print(Panel(table, title=title, title_align="left", expand=False))


def _with_breaks(text: str, width: int) -> str:
    """Break words wider than the column, such as paths, after their slashes."""
    words = (
        word if len(word) <= width else "\n".join(textwrap.wrap(word.replace("/", "/ "), width)).replace("/ ", "/")
        for word in text.split(" ")
    )
    return " ".join(words)


def summary_rows(summary: RunSummary) -> dict[str, object]:
    """Return the rows of the closing panel."""
    best = summary.best_eval_loss
    return {
        "train loss": f"{summary.first_loss:.4f} → {summary.last_loss:.4f} in {summary.steps:,} steps",
        "best eval loss": best if best is None else f"{best:.4f} at step {summary.best_eval_step:,}",
        "spikes": f"{len(summary.skipped_steps)} steps left out" if summary.skipped_steps else None,
        "tokens/s": f"{summary.tokens_per_second:,.0f}",
        "MFU": summary.mfu if summary.mfu is None else f"{summary.mfu:.1%}",
        "peak memory": f"{summary.peak_memory_gb:.1f} GB",
        "time": format_duration(summary.seconds),
        "stopped early": summary.stopped_early,
        "adapter": _of_step(summary.adapter, summary.adapter_step),
        "last adapter": _of_step(summary.last_adapter, summary.steps),
        "checkpoints": summary.checkpoints,
        "metrics": summary.metrics,
        "loss curve": summary.curve,
    }


def _of_step(folder: Path | None, step: int | None) -> str | None:
    return None if folder is None else f"{folder}" + (f" (step {step:,})" if step is not None else "")


def summary_json(summary: RunSummary) -> dict[str, object]:
    """Return the results for `summary.json`, paths as text."""
    values = dataclasses.asdict(summary)
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def read_summary(values: Mapping[str, Any]) -> RunSummary:
    """Return the results that `summary_json` wrote."""
    return RunSummary(**{**values, **{name: Path(values[name]) for name in PATHS if values.get(name)}})
