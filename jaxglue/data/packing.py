"""Packing of documents into rows by online best fit."""

from array import array
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jaxtyping import Int

from jaxglue.data.progress import Advance, ignore, metered
from jaxglue.data.store import TOKEN_BYTES

_BLOCK = 2**16
"""Lengths that are Python's integers at a time, of 36 bytes each."""


@dataclass(frozen=True, kw_only=True)
class PackPlan:
    """Assignment of documents to rows: row `r` holds `documents[bounds[r] : bounds[r + 1]]` in order."""

    documents: Int[np.ndarray, "documents"]
    bounds: Int[np.ndarray, "rows+1"]
    steps: Int[np.ndarray, "steps+1"] | None = None
    """First row of each step, and the number of rows, where steps have a number of documents; else steps have a number
    of rows."""

    @property
    def rows(self) -> int:
        """Return the number of packed rows."""
        return len(self.bounds) - 1

    def row(self, index: int) -> Int[np.ndarray, "documents"]:
        """Return the documents of a row, none of a row past the end."""
        return self.documents[slice(*self.bounds[[index, index + 1]])] if index < self.rows else self.documents[:0]

    @property
    def max_segments(self) -> int:
        """Return the maximum number of documents in a row."""
        return int(np.diff(self.bounds).max(initial=0))

    def step_rows(self, rows_per_step: int) -> Int[np.ndarray, "steps+1"]:
        """Return the first row of each step, and the end of the last one, which may lie past the last row."""
        if self.steps is not None:
            return self.steps
        return np.arange(0, self.rows + rows_per_step, rows_per_step)


def plan_packing(
    lengths: Int[np.ndarray, "documents"],
    *,
    seq_len: int,
    max_segments: int | None = None,
    rng: np.random.Generator | None = None,
    documents_per_step: int | None = None,
    advance: Advance = ignore,
) -> PackPlan:
    """Pack every document once into rows of `seq_len` tokens with at most `max_segments` documents.

    With `rng`, documents are shuffled before packing and rows afterwards. With `documents_per_step`, the documents of
    each step are packed by themselves. `advance` is called with the bytes of the tokens packed so far.

    Raises:
        ValueError: a document is longer than a row.
    """
    if (longest := int(lengths.max(initial=0))) > seq_len:
        raise ValueError(
            f"a document has {longest} tokens, but seq_len={seq_len}: prepare the data with the same seq_len"
        )
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    if documents_per_step is not None:
        return _plan_steps(lengths, order, documents_per_step, seq_len, max_segments, advance)
    rows, count = best_fit(lengths[order], seq_len=seq_len, max_segments=max_segments, advance=advance)
    if rng is not None:
        rows = rng.permutation(count)[rows]
    bounds = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])
    return PackPlan(documents=order[np.argsort(rows, kind="stable")], bounds=bounds)


def _plan_steps(
    lengths: Int[np.ndarray, "documents"],
    order: Int[np.ndarray, "documents"],
    documents_per_step: int,
    seq_len: int,
    max_segments: int | None,
    advance: Advance,
) -> PackPlan:
    """Pack each step's documents, which follow each other in `order`, into rows of their own."""
    steps, counts, rows = [0], [], []
    for first in range(0, len(order), documents_per_step):
        step = lengths[order[first : first + documents_per_step]]
        own, count = best_fit(step, seq_len=seq_len, max_segments=max_segments)
        advance(TOKEN_BYTES * int(step.sum()))
        rows.append(own + steps[-1])
        counts.append(np.bincount(own, minlength=count))
        steps.append(steps[-1] + count)
    bounds = np.concatenate([[0], np.cumsum(np.concatenate([*counts, np.zeros(0, np.int64)]))])
    packed = np.argsort(np.concatenate([*rows, np.zeros(0, np.int64)]), kind="stable")
    return PackPlan(documents=order[packed], bounds=bounds.astype(np.int64), steps=np.array(steps))


def plan_epoch(
    lengths: Int[np.ndarray, "documents"],
    *,
    seq_len: int,
    seed: int,
    epoch: int,
    max_segments: int | None = None,
    documents_per_step: int | None = None,
    advance: Advance = ignore,
) -> PackPlan:
    """Pack an epoch as a function of these arguments alone."""
    return plan_packing(
        lengths,
        seq_len=seq_len,
        rng=np.random.default_rng([seed, epoch]),
        advance=advance,
        max_segments=max_segments,
        documents_per_step=documents_per_step,
    )


def best_fit(
    lengths: Int[np.ndarray, "documents"],
    *,
    seq_len: int,
    max_segments: int | None = None,
    advance: Advance = ignore,
) -> tuple[Int[np.ndarray, "documents"], int]:
    """Assign each document, in order, to the fullest row with room, or to a new one.

    Returns:
        each document's row, and the number of rows.
    """
    capacity = max_segments or len(lengths)
    shortest = int(lengths.min(initial=seq_len))
    rooms: defaultdict[int, list[int]] = defaultdict(list)  # rows by remaining room
    open_rooms = 0  # bit i: `rooms[i]` is non-empty, so the lowest bit ≥ length is the best fit
    rows, sizes = array("q"), array("q")
    blocks = np.split(lengths, range(_BLOCK, len(lengths), _BLOCK))
    sizes_read = (TOKEN_BYTES * int(block.sum()) for block in blocks)
    for length in chain.from_iterable(block.tolist() for block in metered(blocks, sizes_read, advance)):
        if fitting := open_rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rooms[room].pop()
            if not rooms[room]:
                open_rooms ^= 1 << room
        else:
            room, row = seq_len, len(sizes)
            sizes.append(0)
        rows.append(row)
        sizes[row] += 1
        left = room - length
        if left >= shortest and sizes[row] < capacity:
            open_rooms |= 1 << left
            rooms[left].append(row)
    return np.array(rows, np.int64), len(sizes)
