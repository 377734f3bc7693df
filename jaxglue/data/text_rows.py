"""Rows of texts to compare: pairs, with negatives or without, and pairs with a similarity."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from jaxglue.data.messages import listed, number_of
from jaxglue.data.read_rows import (
    MESSAGES_READ,
    PartText,
    UnitEncoder,
    UnitText,
    beginning,
    ending,
    named_texts,
    require_text,
)
from jaxglue.data.store import TOKEN_BYTES

ANCHOR, POSITIVE, NEGATIVE = 0, 1, 2
_ANCHORS, _POSITIVES = ("anchor", "query"), ("positive", "document")
_SCORED = ("sentence1", "sentence2", "score")
_FORMS = (
    "anchor (or query) and positive, with negative or not; or sentence1, sentence2 and score for --embed-loss cosent"
)


class TextEncoder(UnitEncoder):
    """Tokenizer of rows of texts, each a part by itself, as a tokenizer's post-processor frames it.

    Args:
        tokenizer: of the model.
        query: text before anchors.
        document: text before positives and negatives.
        longest: the most tokens of a text.
        scored: rows have a similarity.
    """

    format = "texts"
    keys = MESSAGES_READ | {*_ANCHORS, *_POSITIVES, "negative", "negatives", *_SCORED}
    sees = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        query: str = "",
        document: str = "",
        longest: int = 512,
        scored: bool = False,
    ):
        super().__init__(tokenizer)
        self._query, self._document, self._scored = query, document, scored
        self._ends = beginning(tokenizer), ending(tokenizer)
        self.longest, self.tail = longest, len(self._ends[1]) // TOKEN_BYTES

    def unit(self, row: Mapping[str, Any]) -> UnitText:
        """Return a row's texts."""
        if self._scored:
            return self._pair(row)
        row = _of_messages(row)
        anchor, positive = _named(row, _ANCHORS), _named(row, _POSITIVES)
        negatives = _negatives(row)
        if positive in negatives:
            raise ValueError("a negative is equal to the positive: take one of them out")
        texts = [(ANCHOR, anchor), (POSITIVE, positive), *((NEGATIVE, text) for text in negatives)]
        return UnitText([], [self.part(kind, text) for kind, text in texts])

    def part(self, kind: int, value: Any, gold: float = 1.0) -> PartText:
        """Return a text as it is read, behind its images."""
        return self._part_text(kind, self._query if kind == ANCHOR else self._document, value, gold)

    def _part_text(self, kind: int, prompt: str, value: Any, gold: float) -> PartText:
        (start, end), (text, images) = self._ends, self.shown(value)
        pieces: list[str | bytes] = [start, self.image_tokens(images), prompt + text, end]
        return PartText(pieces=pieces, kind=kind, gold=[gold], images=images)

    def _pair(self, row: Mapping[str, Any]) -> UnitText:
        if math.isnan(score := number_of(row.get("score"))):
            raise ValueError(f"'score' must be a number, a pair's similarity; the row's keys are {listed(dict(row))}")
        texts = [_named(row, (name, *others)) for name, others in (("sentence1", _ANCHORS), ("sentence2", _POSITIVES))]
        return UnitText([], [self._part_text(kind, "", text, score) for kind, text in enumerate(texts)])


def _of_messages(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of messages as one of texts; refuse an instruction, and several positives."""
    if (named := named_texts(row)) is row:
        return row
    if "instruction" in named:
        raise ValueError("a text of messages has a system message: take it out, and name it with --query-prompt")
    if len(positives := named.get("positive", ())) != 1:
        raise ValueError(f"a row has one positive, got {len(positives)}: make a row of each")
    return {**named, "positive": positives[0]}


def _negatives(row: Mapping[str, Any]) -> list[Any]:
    """Return a row's negatives, of `negative` or `negatives`, a text or a list, or of negative_1, negative_2, …

    An object with an image stands for a text, too.
    """
    numbered = [f"negative_{number}" for number in range(1, 65) if row.get(f"negative_{number}") is not None]
    found = [row[name] for name in ("negative", "negatives", *numbered) if row.get(name) is not None]
    texts = [text for each in found for text in (each if isinstance(each, list) else [each])]
    for text in texts:
        require_text("negative", text)
    return texts


def _named(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise ValueError(f"a row of texts needs {_FORMS}; its keys are {listed(dict(row))}")
    return require_text(name, row[name])


def end_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Let a tokenizer end texts with its eos token where it adds none, and tell whether it was changed.

    A model that is read at a text's end needs one there; saved with the model, other programs add it, too.
    """
    if ending(tokenizer) or tokenizer.eos_token_id is None:
        return False
    backend, begins = tokenizer.backend_tokenizer, np.frombuffer(beginning(tokenizer), np.int32).tolist()
    ids = [*begins, tokenizer.eos_token_id]
    *before, end = tokens = list(map(str, tokenizer.convert_ids_to_tokens(ids)))
    template = processors.TemplateProcessing(
        single=[*before, "$A", end], special_tokens=[*zip(tokens, ids, strict=True)]
    )
    others = [each for each in _parts(backend.post_processor) if not isinstance(each, processors.TemplateProcessing)]
    backend.post_processor = processors.Sequence([*others, template])
    assert ending(tokenizer)
    return True


def _parts(processor: processors.PostProcessor | None) -> list[processors.PostProcessor]:
    """Return the parts of a post-processor, of which tokens of a second template would be left out in silence."""
    if isinstance(processor, processors.Sequence):
        return [part for each in cast(Iterable, processor) for part in _parts(each)]
    return [] if processor is None else [processor]
