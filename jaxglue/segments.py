"""Packed-sequence metadata: built once per batch on the host, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedSegments:
    """Which tokens of a packed row belong together: B rows, T tokens in a row, S segment slots.

    A key `k` is visible to a query `q` when `max(starts[q], q - window + 1) <= k <= q`. So one scalar load gives a
    kernel the range of its tiles: queries from `m` on need keys from `starts[m]` on, keys before `n` need queries
    before `ends[n - 1]`.
    """

    segment_ids: Int[Array, "B T"]
    """1, 2, … within each row; 0 for padding, which is always at the end of a row."""
    positions: Int[Array, "B T"]
    """Position of the token inside its segment; 0 for padding."""
    starts: Int[Array, "B T"]
    """Row index of the first token of this token's segment; T for padding, so that padding sees nothing."""
    ends: Int[Array, "B T"]
    """Row index one past the last token of this token's segment; the number of real tokens in the row for padding."""
    cu_seqlens: Int[Array, "B S+1"]
    """Segment boundaries; unused slots repeat the number of real tokens in the row."""


def segment_bucket(count: int) -> int:
    """The number of segment slots for `count` segments: the next power of two, so that few shapes are compiled."""
    return 1 << max(count - 1, 0).bit_length()


def pack_segments(lengths: Sequence[Sequence[int]], *, seq_len: int, max_segments: int | None = None) -> PackedSegments:
    """Metadata in numpy for rows whose documents have these lengths, in order.

    Args:
        lengths: for each of the B rows the lengths, in tokens, of its documents.
        seq_len: T; what the documents leave over is padding.
        max_segments: segment slots S to reserve (rounded up to a bucket); by default as many as the fullest row needs.

    Raises:
        ValueError: a length below 1, a row longer than `seq_len`, or a row with more than `max_segments` documents.
    """
    needed = max((len(row) for row in lengths), default=0)
    slots = segment_bucket(max_segments or needed)
    if needed > slots:
        raise ValueError(f"max_segments={max_segments}, but a row holds {needed} documents: raise max_segments")
    shape = (len(lengths), seq_len)
    segment_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    starts, ends = np.full(shape, seq_len, np.int32), np.zeros(shape, np.int32)
    cu_seqlens = np.zeros((len(lengths), slots + 1), np.int32)
    for b, row in enumerate(lengths):
        sizes = np.asarray(row, np.int32)
        total = int(sizes.sum())
        if total > seq_len or (sizes < 1).any():
            raise ValueError(f"row {b}: document lengths {list(row)} must be positive and add up to at most {seq_len}")
        bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        segment_ids[b, :total] = np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)
        starts[b, :total] = np.repeat(bounds[:-1], sizes)
        ends[b, :total] = np.repeat(bounds[1:], sizes)
        ends[b, total:] = total
        positions[b, :total] = np.arange(total, dtype=np.int32) - starts[b, :total]
        cu_seqlens[b, : len(bounds)] = bounds
        cu_seqlens[b, len(bounds) :] = total
    return PackedSegments(segment_ids=segment_ids, positions=positions, starts=starts, ends=ends, cu_seqlens=cu_seqlens)
