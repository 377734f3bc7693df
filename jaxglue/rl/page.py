"""A page about a run's rollouts, in one file: charts, and the latest answers to search."""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxglue.files.atomic import atomic_file
from jaxglue.files.json_file import parse_object
from jaxglue.rl.record import LINES

PAGE = "rollouts.html"
_MOST = 2000
"""Answers on the page."""
_POINTS = 500
"""Points of a chart."""
_CHARTS = (
    *("reward", "rewards/", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio", "kl"),
    *("entropy", "clip_ratio/", "cispo_clip_ratio", "vespo/", "sampling/", "teacher_kl", "loss", "grad_norm"),
)
"""Metrics, or beginnings of their names, in the order of their charts."""


def write_page(folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write the page of a run's folder from the lines of its metrics and its `rollouts.jsonl`.

    Texts of models are data there: the page adds them as text, and its policy allows no request.
    """
    latest, count = deque[bytes](maxlen=_MOST), 0
    if (folder / LINES).is_file():
        with (folder / LINES).open("rb") as file:
            for count, line in enumerate(file, 1):  # noqa: B007 - of all lines, which may be many GB
                latest.append(line)
    rollouts = [{key: value for key, value in line.items() if key != "log_probs"} for line in _intact(latest)]
    data = {"metrics": _charts(list(lines)), "rollouts": rollouts, "left": count - len(rollouts)}
    # "<" would end the script that holds the data, as "</script>" of an answer.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    with atomic_file(folder / PAGE) as temporary:
        temporary.write_text(template.replace("DATA", text, 1), encoding="utf-8")


def _intact(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError):  # of a damaged one
            yield parse_object(line, LINES)


def _charts(lines: list[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each metric, thinned."""
    names = list(
        dict.fromkeys(name for line in lines for name, value in line.items() if isinstance(value, int | float))
    )
    found = {}
    for chart in _CHARTS:
        for name in names:
            if name == chart or (chart.endswith("/") and name.startswith(chart)):
                points = [(line["step"], line[name]) for line in lines if _is_finite(line.get(name))]
                found[name] = points[:: -(-len(points) // _POINTS)]
    return found


def _is_finite(value: Any) -> bool:
    """Tell whether a value is a number that JSON has."""
    return isinstance(value, int | float) and math.isfinite(value)
