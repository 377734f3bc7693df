"""Score data with a reward model or classifier: `jaxglue score --adapter runs/reward/adapter --data pairs.jsonl`."""

import json
from collections.abc import Iterator
from typing import IO

import numpy as np

from jaxglue.data.files import Row
from jaxglue.files.atomic import atomic_file
from jaxglue.serve.config import ScoreConfig
from jaxglue.serve.scores import score_rows
from jaxglue.terminal.lines import echo


def main(config: ScoreConfig) -> None:
    """Print the scores, or write the rows with them, and of pairs accuracy, margin and mean."""
    if config.output is None:
        scored = list(_print_scores(config))
    else:
        with (
            atomic_file(config.output) as target,
            target.open("w", encoding="utf-8", errors="backslashreplace") as lines,
        ):
            scored = list(_write_rows(config, lines))
        echo(f"wrote {config.output}")
    echo(_summary(scored))


def _print_scores(config: ScoreConfig) -> Iterator[tuple[Row, tuple[float, ...]]]:
    for row, scores in score_rows(config):
        echo("  ".join([row.origin, *(f"{score:.4f}" for score in scores)]))
        yield row, scores


def _write_rows(config: ScoreConfig, file: IO[str]) -> Iterator[tuple[Row, tuple[float, ...]]]:
    for row, scores in score_rows(config):
        print(json.dumps(_scored(row, scores), ensure_ascii=False, default=str), file=file)
        yield row, scores


def _scored(row: Row, scores: tuple[float, ...]) -> dict[str, object]:
    """Return a row with its score, those of its two answers, or those of a classifier's labels and the largest one."""
    if len(scores) == 1:
        return row.value | {"score": scores[0]}
    if _is_pair(row):
        return row.value | dict(zip(("chosen_score", "rejected_score"), scores, strict=True))
    return row.value | {"scores": list(scores), "predicted": int(np.argmax(scores))}


def _is_pair(row: Row) -> bool:
    return "chosen" in row.value


def _summary(scored: list[tuple[Row, tuple[float, ...]]]) -> str:
    pairs = np.array([scores for row, scores in scored if _is_pair(row)]).reshape(-1, 2)
    classes = [(row, scores) for row, scores in scored if len(scores) > 1 and not _is_pair(row)]
    if classes:
        known = [row.value["label"] == int(np.argmax(scores)) for row, scores in classes if "label" in row.value]
        return f"{len(scored):,} rows" + (f", accuracy {np.mean(known):.1%} by `label`" if known else "")
    text = f"{len(scored):,} rows, mean score {np.mean([np.mean(scores) for _, scores in scored]):.4f}"
    if not len(pairs):
        return text
    margin = pairs[:, 0] - pairs[:, 1]
    return f"{text}; {len(pairs):,} pairs: accuracy {np.mean(margin > 0):.1%}, margin {margin.mean():.4f}"
