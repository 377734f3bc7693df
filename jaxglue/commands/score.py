"""Score data with a reward model: `jaxglue score --adapter runs/reward/adapter --data pairs.jsonl`."""

import json
from collections.abc import Iterator
from typing import IO

import numpy as np

from jaxglue.atomic import atomic_file
from jaxglue.data.files import Row
from jaxglue.generation.config import ScoreConfig
from jaxglue.generation.scoring import score_rows
from jaxglue.terminal import echo

_KEYS: dict[int, tuple[str, ...]] = {1: ("score",), 2: ("chosen_score", "rejected_score")}
"""Keys of the scores of a row, by their number."""


def main(config: ScoreConfig) -> None:
    """Print the scores, or write the rows with them, and of pairs accuracy, margin and mean."""
    if config.output is None:
        scores = list(_print_scores(config))
    else:
        with (
            atomic_file(config.output) as target,
            target.open("w", encoding="utf-8", errors="backslashreplace") as lines,
        ):
            scores = list(_write_rows(config, lines))
        echo(f"wrote {config.output}")
    echo(_summary(scores))


def _print_scores(config: ScoreConfig) -> Iterator[tuple[float, ...]]:
    for row, scores in score_rows(config):
        echo("  ".join([row.origin, *(f"{score:.4f}" for score in scores)]))
        yield scores


def _write_rows(config: ScoreConfig, file: IO[str]) -> Iterator[tuple[float, ...]]:
    for row, scores in score_rows(config):
        print(json.dumps(_scored(row, scores), ensure_ascii=False, default=str), file=file)
        yield scores


def _scored(row: Row, scores: tuple[float, ...]) -> dict[str, object]:
    return row.value | dict(zip(_KEYS[len(scores)], scores, strict=True))


def _summary(scores: list[tuple[float, ...]]) -> str:
    pairs = np.array([each for each in scores if len(each) == 2]).reshape(-1, 2)
    text = f"{len(scores):,} rows, mean score {np.mean([np.mean(each) for each in scores]):.4f}"
    if not len(pairs):
        return text
    margin = pairs[:, 0] - pairs[:, 1]
    return f"{text}; {len(pairs):,} pairs: accuracy {np.mean(margin > 0):.1%}, margin {margin.mean():.4f}"
