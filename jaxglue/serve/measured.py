"""Rows read by a model that answers in one pass: their measures, embeddings, and mined negatives."""

from collections.abc import Iterator, Sequence
from itertools import batched
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from jaxglue.data.config import Source, parse_source
from jaxglue.data.files import Row
from jaxglue.data.formats import row_images
from jaxglue.data.questions import TYPES
from jaxglue.data.read_rows import has_image
from jaxglue.data.readers import read_rows
from jaxglue.generation.reading import LoadedModel, PartReader, find_record, texts, vectors
from jaxglue.objectives import calibration
from jaxglue.objectives.decide import gold_outputs
from jaxglue.objectives.embed import embed_rows
from jaxglue.serve.config import EmbedConfig, EvaluateConfig

_CHUNK = 512
"""Rows that are read at a time."""
_QUERIES = 256


class Measured(NamedTuple):
    """Measures of rows by name, and the bins of a reliability diagram of decisions."""

    kind: str
    values: dict[str, float]
    bins: list[calibration.Bin]


def measure_rows(config: EvaluateConfig) -> Measured:
    """Return the measures of rows with gold answers; decisions at the temperatures fitted in training.

    Raises:
        ValueError: bad folders, tensors, tokenizer or rows.
    """
    sources = _rows(config.data, config.columns)
    rows = [row for _, each in sources for row in each]
    if not rows:
        raise ValueError(f"--data {' '.join(config.data)}: no rows")
    record = find_record(config) or {"kind": "decide" if "questions" in rows[0].value else "rerank"}
    if config.system:
        record = {**record, "system": config.system}
    reader = PartReader(LoadedModel.load(config), record)
    if not reader.sees and (row := next((row for row in rows if row_images(row.value)), None)) is not None:
        raise ValueError(f"{row.origin}: this model sees no images: leave out such rows, or the key")
    found, dataset = reader.read_rows(sources)
    if reader.kind != "decide":
        return Measured(reader.kind, reader.objective.measure(found, dataset), [])
    logits, gold, kinds = gold_outputs(found)
    fitted = record.get("temperatures", {})
    temperatures = np.array([float(fitted.get(name, 1.0)) for name in TYPES])
    log_p = calibration.log_softmax(logits, temperatures[kinds])
    values = calibration.measures(log_p, gold)
    before = calibration.measures(calibration.log_softmax(logits), gold)
    values |= {f"{name}/uncalibrated": before[name] for name in ("nll", "ece")}
    return Measured("decide", values, calibration.reliability(np.exp(log_p), gold))


def embedded_rows(config: EmbedConfig) -> tuple[list[Row], Float32[np.ndarray, "rows D"]]:
    """Return rows with the embedding of each one's text.

    Raises:
        ValueError: a model for something else, or a row without a text.
    """
    reader, sources = _embedder(config), _rows(config.data, "")
    for row in (row for _, rows in sources for row in rows):
        value = row.value.get(config.column)
        if not has_image(value) and (not isinstance(value, str) or not value.strip()):
            raise ValueError(f"{row.origin}: {config.column!r} must be a text that is not empty; see --column")
    parts = []
    for source, rows in sources:
        reader.read_files_of(source)
        for chunk in batched((row.value[config.column] for row in rows), _CHUNK):
            units = texts(reader, chunk, query=config.query)
            parts.append(vectors(reader.read(reader.encode(units)), config.dimensions))
    found = np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)
    return [row for _, rows in sources for row in rows], found


def mined_rows(config: EmbedConfig) -> Iterator[dict[str, Any]]:
    """Yield rows of pairs with hard negatives: of all rows' positives those most similar to the anchor.

    Positives of an equal anchor are none, nor those that are more similar than the margin allows.

    Raises:
        ValueError: as `embedded_rows`.
    """
    reader, sources = _embedder(config), _rows(config.data, "")
    rows = [row for _, each in sources for row in each]
    found, _ = reader.read_rows(sources)
    unit = vectors(found, config.dimensions)
    pairs = embed_rows(found)
    documents, firsts = np.unique(pairs.positives, return_index=True)
    named = [_positive(rows[pairs.units[first]].value) for first in firsts]
    matrix = unit[pairs.positive_rows[firsts]]
    known: dict[int, set[int]] = {}
    for anchor, positive in zip(pairs.anchors.tolist(), pairs.positives.tolist(), strict=True):
        known.setdefault(anchor, set()).add(positive)
    for start in range(0, len(pairs.units), _QUERIES):
        scores = unit[pairs.anchor_rows[start : start + _QUERIES]] @ matrix.T
        for index, row_scores in enumerate(scores, start):
            own = row_scores[np.searchsorted(documents, pairs.positives[index])]
            allowed = row_scores <= config.mine_margin * own if own > 0 else row_scores < own
            order = np.argsort(-row_scores, kind="stable")
            left_out = known[int(pairs.anchors[index])]
            chosen = [at for at in order.tolist() if allowed[at] and int(documents[at]) not in left_out][: config.mine]
            yield {**rows[pairs.units[index]].value, "negative": [named[at] for at in chosen]}


def _embedder(config: EmbedConfig) -> PartReader:
    record = find_record(config)
    if record.get("kind") != "embed":
        name = config.adapter or config.folder
        raise ValueError(f"{name} is no embedding model: train one with jaxglue train --objective embed")
    return PartReader(LoadedModel.load(config), record)


def _rows(names: Sequence[str], columns: str) -> list[tuple[Source, list[Row]]]:
    sources = [parse_source(name, rename=columns) for name in names]
    return [(source, list(read_rows(source))) for source in sources]


def _positive(row: dict[str, Any]) -> str:
    return str(row["positive"] if row.get("positive") is not None else row["document"])
