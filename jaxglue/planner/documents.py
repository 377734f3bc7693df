"""Documents of a run's micro-batches, from which attention's work is counted."""

import itertools
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxglue.data.packing import plan_packing
from jaxglue.ops.segments import BatchKind, batch_kind, segment_bucket

_SAMPLE = 1024


class MicroBatches(NamedTuple):
    """Micro-batches whose attention runs in the same kernels."""

    share: float
    """Share of all micro-batches."""
    kind: BatchKind
    documents: tuple[tuple[int, ...], ...]
    """Lengths of the documents of such micro-batches, in order."""

    @property
    def batches(self) -> int:
        """Return the number of these micro-batches."""
        return len(self.documents)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths of all their documents."""
        return tuple(itertools.chain(*self.documents))


def sample_lengths(lengths: Int[np.ndarray, " documents"]) -> tuple[int, ...]:
    """Return at most 1,024 lengths in place of all, each the root mean square of similar ones."""
    if len(lengths) <= _SAMPLE:
        return tuple(lengths.tolist())
    parts = np.array_split(np.sort(lengths).astype(float), _SAMPLE)
    return tuple(round(np.sqrt((part**2).mean())) for part in parts)


@lru_cache(maxsize=64)
def sample_micro_batches(lengths: tuple[int, ...], *, seq_len: int, batch_size: int) -> tuple[MicroBatches, ...]:
    """Pack documents of these lengths, cut to a row, into rows; without any, one document fills each row.

    Args:
        lengths: of a sample of documents.
        seq_len: tokens in a row.
        batch_size: rows in a micro-batch.
    """
    documents = np.minimum(lengths or (seq_len,), seq_len)
    documents = np.tile(documents, -(-batch_size * seq_len // int(documents.sum())))  # enough for a micro-batch
    plan = plan_packing(documents, seq_len=seq_len, rng=np.random.default_rng(0))
    rows = [documents[plan.row(row)].tolist() for row in range(plan.rows)]
    batches = [rows[first : first + batch_size] for first in range(0, max(len(rows) - batch_size, 0) + 1, batch_size)]
    slots = segment_bucket(plan.max_segments)
    kinds: dict[BatchKind, list] = {}
    for batch in batches:
        kinds.setdefault(batch_kind(batch, slots), []).append(batch)
    return tuple(
        MicroBatches(
            share=len(members) / len(batches),
            kind=kind,
            documents=tuple(tuple(itertools.chain(*batch)) for batch in members),
        )
        for kind, members in sorted(kinds.items())
    )
