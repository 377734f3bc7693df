"""Scores of rows of data by a reward model or classifier."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import batched, chain
from typing import Any

import numpy as np

from jaxglue.data.config import parse_source
from jaxglue.data.encode import Encoder
from jaxglue.data.files import Row
from jaxglue.data.formats import CHATS, PAIRS, detect_format, detect_preference
from jaxglue.data.prepare import image_folder
from jaxglue.data.readers import read_rows
from jaxglue.data.tokenize import find_format
from jaxglue.generation.scoring import TextScorer
from jaxglue.serve.config import ScoreConfig
from jaxglue.vision.rows import Image

_CHUNK = 1024
"""Rows of data that are packed together."""


def score_rows(config: ScoreConfig) -> Iterator[tuple[Row, tuple[float, ...]]]:
    """Yield rows of data with their scores: one, those of the preferred and of the other answer, or of each label.

    Texts are read without their end, as transformers' pipelines read them for a classifier.

    Raises:
        ValueError: bad folders, tensors, tokenizer or data.
    """
    model = TextScorer(config)
    for source in (parse_source(name, rename=config.columns) for name in config.data):
        rows = read_rows(source)
        head = list(next(batched(rows, _CHUNK), ()))
        format = find_format(head, source, _detect if model.labels == 1 else detect_format)
        rules = None if model.rules is None else replace(model.rules, folder=image_folder(source))
        given: dict[str, Any] = {"loss_on": None, "system": config.system or "", "images": rules}
        encoder = Encoder(model.tokenizer, format=format, **given)
        for chunk in batched(chain(head, rows), _CHUNK):
            yield from zip(chunk, _score_chunk(model, encoder, chunk, 2 if format == PAIRS else 1), strict=True)


def _detect(row: dict[str, Any]) -> str:
    return detect_preference(row) if "chosen" in row else detect_format(row)


def _score_chunk(model: TextScorer, encoder: Encoder, rows: Sequence[Row], answers: int) -> Iterator[tuple[float, ...]]:
    encoded = encoder.encode(rows)
    documents = np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1])
    for row, length in zip(rows, encoded.lengths[::answers], strict=True):
        if length > model.limit:
            raise ValueError(f"{row.origin}: {length:,} tokens are above the model's limit of {model.limit:,}")
    if model.labels > 1 and encoder.format not in CHATS:
        end = model.tokenizer.eos_token_id
        documents = [document[:-1] if document[-1:] == end else document for document in documents]
    images, records = list[list[Image]](), encoded.images
    if records is not None and len(records):
        owned = map(records.of_document, range(len(documents)))
        images = [[Image.of(records.record(image)) for image in own] for own in owned]
    return batched(model.scores(documents, images).ravel().tolist(), answers * model.labels)
