"""Selection of units of two answers: common beginnings, truncation, dropping."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxglue.data.answer_dataset import AnswerDataset
from jaxglue.data.answer_task import AnswerTask
from jaxglue.data.config import DataConfig
from jaxglue.data.selection import Selection, overlong_error, row_origin
from jaxglue.data.sources import Source
from jaxglue.data.store import TokenStore


class _Unit(NamedTuple):
    document: int
    prompt: int
    """Tokens of the common beginning, without its last unless answers are scored."""
    sizes: tuple[int, int]
    second: int
    desirable: bool


@dataclass(frozen=True)
class _Bounds:
    """First and last trained tokens of every document of a store; −1 for documents without."""

    firsts: Int[np.ndarray, "documents"]
    lasts: Int[np.ndarray, "documents"]

    @classmethod
    def of(cls, store: TokenStore) -> "_Bounds":
        trained = np.append(np.flatnonzero(store.mask), len(store.mask))
        starts, ends = store.offsets[:-1], store.offsets[1:]
        first, after = np.searchsorted(trained, starts), np.searchsorted(trained, ends)
        some = after > first
        return cls(
            firsts=np.where(some, trained[first] - starts, -1), lasts=np.where(some, trained[after - 1] - starts, -1)
        )


def select_answers(store: TokenStore, config: DataConfig, source: Source, task: AnswerTask) -> Selection:
    """Select the units whose answers have target tokens, fitted into a row.

    A store has two documents for every row of the data: a preferred and another answer, one empty where the row has a
    label. An overlong unit loses the ends of its answers, the longer one's first.

    Raises:
        ValueError: an overlong unit under `overlong='error'`, or no unit left.
    """
    bounds, seq_len = _Bounds.of(store), config.row_tokens
    candidates = list(_labeled(store, bounds) if task.labeled else _pairs(store, bounds, task))
    rows = len(store.lengths) // 2
    units, truncated = [], 0
    for unit in candidates:
        prompts = unit.prompt * (1 if task.shared_prompt else 2)
        overlong = prompts + sum(unit.sizes) > seq_len
        if overlong and config.overlong == "error":
            raise overlong_error(config, row_origin(source, unit.document // 2), prompts + sum(unit.sizes))
        unit = unit._replace(sizes=_fitted(unit.sizes, seq_len - prompts))
        if not _counts(store, unit, task) or (overlong and config.overlong == "drop"):
            continue
        units.append(unit)
        truncated += overlong
    if not units:
        raise ValueError(
            f"{source}: no answer has a target token beside its prompt within seq_len={seq_len} tokens: raise --seq-len"
        )
    expected = len(candidates) if task.labeled else rows
    dataset = _scored(store, units, task, source) if task.scored else _dataset(store, units, task)
    return Selection(dataset=dataset, truncated=truncated, dropped=expected - len(units))


def _pairs(store: TokenStore, bounds: _Bounds, task: AnswerTask) -> Iterator[_Unit]:
    ends = _scored_ends(store, task.padding) if task.scored else bounds.lasts + 1
    for first in range(0, len(store.lengths), 2):
        second = first + 1
        begins = min(bounds.firsts[first], bounds.firsts[second])
        if begins < 1:
            continue
        shared = _common(store, first, second, int(begins))
        if shared:
            sizes = (int(ends[first]) - shared, int(ends[second]) - shared)
            yield _Unit(first, shared - (not task.scored), sizes, int(store.offsets[second]) + shared, True)


def _scored_ends(store: TokenStore, padding: int | None) -> Int[np.ndarray, "documents"]:
    """Return the lengths of documents without padding tokens at their ends."""
    others = np.flatnonzero(np.asarray(store.tokens[:]) != padding)
    before = np.searchsorted(others, store.offsets[1:])
    lasts = np.append(others, -1)[before - 1]
    return np.maximum(lasts + 1 - store.offsets[:-1], 0)


def _labeled(store: TokenStore, bounds: _Bounds) -> Iterator[_Unit]:
    """Yield every answer beside the previous row's, under its own prompt."""
    documents = np.flatnonzero(bounds.firsts > 0)
    for other, document in zip(np.roll(documents, 1), documents, strict=True):
        shared = int(bounds.firsts[document])
        sizes = (
            int(bounds.lasts[document]) + 1 - shared,
            int(bounds.lasts[other] + 1 - bounds.firsts[other]),
        )
        second = int(store.offsets[other] + bounds.firsts[other])
        yield _Unit(int(document), shared - 1, sizes, second, bool(document % 2 == 0))


def _common(store: TokenStore, first: int, second: int, limit: int) -> int:
    """Return the tokens, up to `limit`, with which two documents both begin."""
    a, b = (store.tokens[start : start + limit] for start in store.offsets[[first, second]])
    differing = np.flatnonzero(a != b)
    return int(differing[0]) if len(differing) else limit


def _counts(store: TokenStore, unit: _Unit, task: AnswerTask) -> bool:
    """Tell whether both answers have target tokens, or a last token to score."""
    if task.scored:
        return min(unit.sizes) > 0
    starts = store.offsets[unit.document] + unit.prompt + 1, unit.second
    return all(_counted(store, start, size) for start, size in zip(starts, unit.sizes, strict=True))


def _counted(store: TokenStore, start: int, size: int) -> int:
    return int(store.mask[np.arange(start, start + max(size, 0))].sum())


def _fitted(sizes: tuple[int, int], room: int) -> tuple[int, int]:
    """Shorten two sizes to a sum of `room`, the longer one first."""
    first, second = sizes
    if first + second <= room:
        return sizes
    half = room // 2
    first = min(first, max(half, room - second))
    return first, min(second, room - first)


def _dataset(store: TokenStore, units: list[_Unit], task: AnswerTask) -> AnswerDataset:
    prompts, sizes = np.array([u.prompt for u in units]), np.array([u.sizes for u in units])
    documents = np.array([u.document for u in units])
    answers = store.offsets[documents] + prompts + 1
    counted = [0 if task.scored else _counted(store, *part) for part in zip(answers, sizes[:, 0], strict=True)]
    return AnswerDataset(
        store=store,
        documents=documents,
        lengths=prompts * (1 if task.shared_prompt else 2) + sizes.sum(1),
        targets=np.ones(len(units), np.int64),
        task=task,
        prompts=prompts,
        sizes=sizes,
        seconds=np.array([u.second for u in units]),
        desirable=np.array([u.desirable for u in units]),
        first_tokens=np.array(counted) + (prompts if task.prompt_loss else 0),
    )


def _scored(store: TokenStore, units: list[_Unit], task: AnswerTask, source: Source) -> AnswerDataset:
    """Return the data set with the margins of its rows, 0 where a row gives none.

    Raises:
        ValueError: a margin that is not a number.
    """
    dataset = _dataset(store, units, task)
    margins = np.zeros(len(units), np.float32) if store.margins is None else store.margins[dataset.rows]
    if len(bad := np.flatnonzero(~np.isfinite(margins))):
        origin = row_origin(source, int(dataset.rows[bad[0]]))
        raise ValueError(f"{origin}: 'margin' must be a finite number: mend it, or leave out the column")
    return replace(dataset, margins=margins)
