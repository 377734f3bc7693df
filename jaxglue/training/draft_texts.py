"""Texts that a draft head learns on: rows of data, or what the model answers to them itself."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxglue.data.batch import Batch, row_of_documents
from jaxglue.data.config import parse_source
from jaxglue.data.encode import Encoder
from jaxglue.data.formats import detect_format
from jaxglue.data.packing import PackPlan, plan_packing
from jaxglue.data.readers import read_rows
from jaxglue.data.tokenize import find_format
from jaxglue.files.journal import Journal
from jaxglue.generation.assistant import Assistant
from jaxglue.generation.scheduler import Request
from jaxglue.ops.segments import segment_bucket
from jaxglue.training.draft_config import DraftConfig
from jaxglue.training.draft_steps import BLOCK

_FEWEST = 3
"""Tokens of a text in which one is drafted: that by which it is, the one after and itself."""


class DraftText(NamedTuple):
    """A text of n tokens."""

    tokens: Int[np.ndarray, " n"]
    counted: Bool[np.ndarray, " n"]
    """Tokens of answers, which alone are drafted."""


def given_texts(config: DraftConfig, assistant: Assistant) -> Iterator[tuple[str, DraftText]]:
    """Yield the texts of rows with their origins.

    Raises:
        ValueError: bad data.
    """
    for source in (parse_source(name, rename=config.columns) for name in config.data):
        rows = list(read_rows(source))
        format = find_format(rows, source, detect_format)
        if format == "text" and config.answers == "own":
            raise ValueError(f"{source}: rows of texts have no prompts: use --answers given, or rows with answers")
        encoder = Encoder(assistant.tokenizer, format=format, loss_on="assistant", system=config.system or "")
        encoded = encoder.encode(rows)
        ends = np.cumsum(encoded.lengths)[:-1]
        texts = zip(np.split(encoded.tokens, ends), np.split(encoded.mask > 0, ends), strict=True)
        yield from zip((row.origin for row in rows), map(DraftText._make, texts), strict=True)


def own_texts(
    config: DraftConfig, assistant: Assistant, rows: Sequence[tuple[str, DraftText]], journal: Journal
) -> list[DraftText]:
    """Return the model's own answers to rows, behind what stands before their last answers.

    Args:
        config: of the command.
        assistant: the model.
        rows: texts with their origins.
        journal: keeps answers, by the row's number; those that it has are not written again.

    Raises:
        ValueError: a row without an answer or a prompt, or with a prompt that fills `seq_len`.
    """
    requests = []
    for index, (origin, text) in enumerate(rows):
        begins = np.flatnonzero(text.counted & ~np.roll(text.counted, 1))
        prompt = text.tokens[: begins[-1]] if len(begins) else text.tokens[:0]
        if not len(prompt):
            raise ValueError(f"{origin}: the row has no prompt before an answer: use --answers given, or other rows")
        if (room := config.seq_len - len(prompt)) < 2:
            raise ValueError(
                f"{origin}: the prompt's {len(prompt):,} tokens leave no room for an answer: raise --seq-len"
            )
        limit = min(config.sampling.max_tokens, room)
        requests.append(Request(prompt.tolist(), replace(config.sampling, max_tokens=limit), index))
    weights = assistant.adapter, assistant.frozen
    answers = {n: kept["tokens"] for n in range(len(requests)) if (kept := journal.load(str(n)))}
    asked = [number for number in range(len(requests)) if number not in answers]
    remaining = [requests[number] for number in asked]
    for found in assistant.engine.generate(*weights, remaining, assistant.stops, memory=assistant.memory):
        answers[asked[found.number]] = found.tokens.tolist()
        journal.save(str(asked[found.number]), {"tokens": found.tokens.tolist()})
    texts = list[DraftText]()
    for number, request in enumerate(requests):
        tokens = np.array([*request.prompt, *answers[number]], np.int32)
        texts.append(DraftText(tokens, np.arange(len(tokens)) >= len(request.prompt)))
    return texts


def draft_texts(
    config: DraftConfig, assistant: Assistant, rows: Sequence[tuple[str, DraftText]], journal: Journal
) -> tuple[list[DraftText], list[DraftText]]:
    """Return the texts that a head learns on, and those that are held out; arguments and errors as of `own_texts`.

    Raises:
        ValueError: fewer than two texts in which a token is drafted.
    """
    if config.answers == "own":
        texts = own_texts(config, assistant, rows, journal)
    else:
        texts = [DraftText(text.tokens[: config.seq_len], text.counted[: config.seq_len]) for _, text in rows]
    texts = [text for text in texts if text.counted[_FEWEST - 1 :].any()]
    if len(texts) < 2:
        raise ValueError(f"{len(texts)} of the texts have a token to draft: two are needed, one of them held out")
    held_out = max(round(config.eval_fraction * len(texts)), 1)
    return texts[:-held_out], texts[-held_out:]


class TextPlan(NamedTuple):
    """Rows of texts."""

    seq_len: int
    """Tokens of a row: as many as asked for, or more."""
    packing: PackPlan

    @property
    def rows(self) -> int:
        """Return their number."""
        return self.packing.rows


def pack_texts(texts: Sequence[DraftText], seq_len: int, rng: np.random.Generator | None = None) -> TextPlan:
    """Pack texts into rows of so many tokens or more, shuffled by `rng`."""
    row = seq_len if seq_len <= BLOCK else -(-seq_len // BLOCK) * BLOCK
    return TextPlan(row, plan_packing(np.array([len(text.tokens) for text in texts]), seq_len=row, rng=rng))


def packed_rows(texts: Sequence[DraftText], plan: TextPlan) -> Iterator[Batch]:
    """Yield rows in which tokens of answers count."""
    slots = segment_bucket(plan.packing.max_segments)
    for row in range(plan.rows):
        members = [texts[n] for n in plan.packing.row(row)]
        yield row_of_documents(members, seq_len=plan.seq_len, max_segments=slots)
