"""Metadata of packed rows, built once per batch on the host and used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

LONG_DOCUMENT = 4096
"""Tokens from which a document counts as long."""
FEW_DOCUMENTS = 4
"""Segment slots of rows with few, long documents."""
UNIT = 64
"""Tokens of a unit of `PackedSegments.units`."""
_ALIGNED = 4
"""Units from which a document begins a unit of its own."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedSegments:
    """Bounds of the segments in packed rows: B rows, T tokens in a row, S segment slots.

    A key `k` is visible to a query `q` when `max(starts[q], q - window + 1) <= k <= q`, and it is not in the gap
    `gap_starts[q] <= k < gap_ends[q]` of a forked segment, where a window counts positions. One scalar load then gives
    a kernel its range of tiles: queries from `m` on need keys from `starts[m]` on, keys before `n` need queries before
    `ends[n - 1]`, or the largest in a tile of forked segments.
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
    long: bool = field(default=False, metadata={"static": True})
    """Most visible pairs are in long documents; decides on attention's kernels."""
    gap_starts: Int[Array, "B T"] | None = None
    """In forked segments (`pack_forks`), the first key that a query does not see; None where no segment forks."""
    gap_ends: Int[Array, "B T"] | None = None
    """The key after the last that it does not see: those before are the other branch's."""
    units: Int[Array, "B 2 2 U"] | None = None
    """First tokens and ends of units, in the orders in which programs start on queries and on keys; see `_units`."""
    copies: "ForkCopies | None" = None
    """Copies of forked segments' beginnings, for operations that follow one continuation (`copy_beginnings`)."""
    split: "RowSplit | None" = None
    """How rows are split over devices; fields of tokens are then in its order, and their values stay a row's."""
    own_keys: Int[Array, "B Q"] | None = None
    """The last key that each query sees, in order: its own key where queries are some of a row's tokens and keys are
    all (`row_split.bounds`; `starts` are then the queries' first keys, and `ends` the queries after the keys' last
    ones, windows included), or a later one, as inside of images. None where each token's is its own."""
    first_queries: Int[Array, "B T"] | None = None
    """The first query that sees each key, where `own_keys` are given."""
    key_positions: Int[Array, "B T"] | None = None
    """Positions of forked segments' keys, where `own_keys` are given."""
    bidirectional: bool = field(default=False, metadata={"static": True})
    """Tokens see their whole segment, or all of a window around them."""

    @property
    def slots(self) -> int:
        """Return S, the segment slots of a row."""
        return self.cu_seqlens.shape[1] - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ForkCopies:
    """Rows of C tokens in which each continuation of forked segments stands behind a copy of its beginning."""

    rows: Int[Array, "B C"]
    """Index of each token in the forked row; T for padding."""
    starts: Int[Array, "B C"]
    """Place of the first token of each token's copy; C for padding."""
    ends: Int[Array, "B C"]
    """Place behind its last; the number of real tokens for padding."""
    places: Int[Array, "B K T"]
    """Places of each of the forked row's tokens: its own, then those of its further copies; C where there is none."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """Rows of T tokens split over N devices, T / N tokens on each, which stay in the row's order (`split_segments`)."""

    rows: Int[Array, "B T"]
    """Row index of each token, device after device; a device has its own T / N."""
    order: Int[Array, "B T"]
    """The same, whole on every device."""
    places: Int[Array, "B T"]
    """Place of each of the row's tokens in `order`."""
    stops: Int[Array, "B T"]
    """`PackedSegments.ends` in the row's order."""
    positions: Int[Array, "B T"] | None
    """`PackedSegments.positions` of forked segments in the row's order."""
    before: Int[Array, "B N T+1"]
    """Each device's tokens before each of the row's, and all of them; a device has its own line."""


def segment_bucket(count: int) -> int:
    """Return the segment slots for `count` segments: the next power of two, so that few shapes are compiled."""
    return 1 << max(count - 1, 0).bit_length()


def within_window(segments: PackedSegments, window: int | None) -> tuple[PackedSegments, int | None]:
    """Return the metadata of whole rows with `own_keys` as attention's kernels read it, and their window.

    A window cuts the past alone. It is in the bounds, but for forked segments, whose kernels compare positions.
    """
    if segments.gap_starts is not None:
        return replace(segments, key_positions=segments.positions), window
    if window is None:
        return segments, None
    token = jnp.arange(segments.starts.shape[1], dtype=jnp.int32)
    starts, ends = jnp.maximum(segments.starts, token - window + 1), jnp.minimum(segments.ends, token + window)
    return replace(segments, starts=starts, ends=ends), None


def as_kernels_read(segments: PackedSegments, window: int | None) -> tuple[PackedSegments, int | None]:
    """Return the metadata as attention's kernels read it, and the window that they still have to compare."""
    if segments.bidirectional:
        return both_ways(segments, window), None
    if segments.own_keys is not None and segments.split is None:  # else `row_split.bounds` knows whole rows
        return within_window(segments, window)
    return segments, window


class BatchKind(NamedTuple):
    """The static properties of a batch's documents; batches of one kind share programs."""

    long: bool
    """Most visible pairs are in documents of at least `LONG_DOCUMENT` tokens."""
    slots: int
    """Segment slots of a row."""


def batch_kind(lengths: Sequence[Sequence[int]], max_segments: int | None = None) -> BatchKind:
    """Return the kind of rows with these document lengths; rows with few, long documents take few slots.

    Args:
        lengths: of each row's documents; those of all processes that share a batch.
        max_segments: segment slots of other batches, rounded up to a bucket; by default those of the fullest row.
    """
    sizes = np.concatenate([np.asarray(row, np.int64) for row in (*lengths, ())])
    long = bool(2 * (sizes[sizes >= LONG_DOCUMENT] ** 2).sum() > (sizes**2).sum())
    fullest = max(map(len, lengths), default=0)
    slots = segment_bucket(max_segments or fullest)
    return BatchKind(long, min(slots, FEW_DOCUMENTS) if long and fullest <= FEW_DOCUMENTS else slots)


def pack_segments(
    lengths: Sequence[Sequence[int]], *, seq_len: int, max_segments: int | None = None, kind: BatchKind | None = None
) -> PackedSegments:
    """Build the metadata, in numpy, of rows whose documents have these lengths.

    Args:
        lengths: tokens of each document, in order, for each of the B rows.
        seq_len: T; the rest of a row is padding.
        max_segments: segment slots S to reserve, see `batch_kind`.
        kind: of the batch; by default that of these rows.

    Raises:
        ValueError: no row; lengths that are not whole numbers from 1, a row longer than `seq_len`, or a row with more
            than `max_segments` documents.
    """
    rows = [_whole_lengths(b, row) for b, row in enumerate(lengths)]
    if not rows:
        raise ValueError("lengths has no row: give a list of document lengths for each row")
    needed = max((len(row) for row in rows), default=0)
    long, slots = kind or batch_kind(lengths, max_segments)
    if needed > slots:
        raise ValueError(f"max_segments={max_segments}, but a row holds {needed} documents: raise max_segments")
    sizes = np.zeros((len(rows), slots + 1), np.int64)  # the last column is the padding
    for b, row in enumerate(rows):
        _check_row(b, row, seq_len)
        sizes[b, : len(row)] = row
        sizes[b, -1] = seq_len - row.sum()
    bounds = np.cumsum(sizes, axis=1) - sizes  # first token of each segment; of the padding in the last column
    starts, ends, ids = bounds.copy(), bounds + sizes, np.tile(np.arange(1, slots + 2), (len(rows), 1))
    starts[:, -1], ends[:, -1], ids[:, -1] = seq_len, bounds[:, -1], 0

    def per_token(values: np.ndarray) -> np.ndarray:
        return np.repeat(values.astype(np.int32).ravel(), sizes.ravel()).reshape(len(rows), seq_len)

    fields: dict[str, Any] = {"segment_ids": per_token(ids), "starts": per_token(starts), "ends": per_token(ends)}
    positions = np.arange(seq_len) - fields["starts"]
    fields["positions"] = np.where(fields["segment_ids"] > 0, positions, 0).astype(np.int32)
    fields["cu_seqlens"] = bounds.astype(np.int32)
    units: Any = np.array([_units(*row, seq_len) for row in zip(bounds, sizes, strict=True)], np.int32)
    return PackedSegments(**fields, long=long, units=units.reshape(len(rows), 2, 2, -1))


def _whole_lengths(b: int, row: Sequence[int]) -> Int[np.ndarray, "N"]:
    lengths = np.asarray(row)
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise ValueError(f"row {b}: expected a list of document lengths, whole numbers of tokens, got {row!r:.100}")
    return lengths.astype(np.int64)


def _units(bounds: Int[np.ndarray, "S+1"], sizes: Int[np.ndarray, "S+1"], T: int) -> Int[np.ndarray, "2 2 U"]:
    """Return (first tokens, ends) of a row's units, in the order of their queries and of their keys.

    A document of at least four units begins one, and shorter ones after it share its last. Longer documents come first,
    and in each its last queries and its first keys, for they have most work: the last programs on a GPU are short then.
    Unused units begin and end at T.
    """
    large = np.flatnonzero(sizes[:-1] >= _ALIGNED * UNIT)
    begins = np.union1d([0], bounds[large])
    longest = np.zeros_like(begins)
    longest[np.searchsorted(begins, bounds[large])] = sizes[large]
    order = np.argsort(-longest, kind="stable")
    begins, ends = begins[order], np.append(begins[1:], T)[order]
    counts = -((begins - ends) // UNIT)
    count, before = counts.sum(), np.cumsum(counts) - counts
    begins, ends, counts, before = (np.repeat(x, counts) for x in (begins, ends, counts, before))
    rank = np.arange(count) - before
    units = np.full((2, 2, -(-T // UNIT) + T // (_ALIGNED * UNIT)), T)
    for part, number in zip(units, (counts - 1 - rank, rank), strict=True):
        first = begins + number * UNIT
        part[:, :count] = first, np.minimum(first + UNIT, ends)
    return units


Fork = Sequence[int]
"""Tokens of a common beginning, and of each of its continuations."""


def aligned(tokens: int, tile: int) -> int:
    """Return the tokens that a part takes where each begins at a multiple of a tile's tokens."""
    return -(-tokens // tile) * tile


def pack_forks(
    rows: Sequence[Sequence[Fork]], *, seq_len: int, max_segments: int | None = None, tile: int = 1
) -> PackedSegments:
    """Build the metadata, in numpy, of rows whose segments have several continuations of one beginning.

    Continuations see the beginning, at the same positions after it, and not each other. A beginning's `ends` are the
    segment's, a continuation's its own.

    Args:
        rows: segments of each row, in order, laid out as beginning, first, second, …; a part may have no token.
        seq_len, max_segments: of `pack_segments`.
        tile: tokens at whose multiples all parts begin; those between a part and the next belong to it, and no other
            token sees them.

    Raises:
        ValueError: as `pack_segments`.
    """
    lengths = [[sum(aligned(size, tile) for size in fork) for fork in row] for row in rows]
    slots = segment_bucket(max_segments or max(map(len, rows), default=0))
    packed = pack_segments(lengths, seq_len=seq_len, kind=BatchKind(False, slots))
    ends, positions = np.array(packed.ends), np.array(packed.positions)
    gap_starts, gap_ends = np.zeros((2, *ends.shape), np.int32)
    for b, row in enumerate(rows):
        for start, (shared, *continuations) in zip(np.asarray(packed.cu_seqlens)[b], row, strict=False):
            fork, begin = start + shared, start + aligned(shared, tile)
            for size in (aligned(size, tile) for size in continuations):
                tokens = slice(begin, begin + size)
                ends[b, tokens] = begin + size
                positions[b, tokens] -= begin - fork
                if begin > fork:
                    gap_starts[b, tokens], gap_ends[b, tokens] = fork, begin
                begin += size
    gap_ends[np.asarray(packed.segment_ids) == 0] = seq_len
    fields: dict[str, Any] = {"ends": ends, "positions": positions, "gap_starts": gap_starts, "gap_ends": gap_ends}
    return replace(packed, **fields)


def both_ways(segments: PackedSegments, window: int | None) -> PackedSegments:
    """Return the bounds of whole segments whose tokens see those after them, too, as those of queries with own keys.

    A window of w tokens reaches w // 2 to each side.
    """
    assert segments.gap_starts is None and segments.split is None
    starts, ends = segments.starts, segments.ends
    first, own = starts, ends - 1  # padding begins at T, so that it sees nothing
    if window is not None:
        at, reach = jnp.arange(starts.shape[1], dtype=jnp.int32), window // 2
        real = segments.segment_ids > 0
        starts = jnp.where(real, jnp.maximum(starts, at - reach), starts)
        own, ends = (jnp.where(real, jnp.minimum(end, at + reach + more), end) for end, more in ((own, 0), (ends, 1)))
        first = starts
    return replace(segments, starts=starts, ends=ends, own_keys=own, first_queries=first, bidirectional=False)


_WIDTHS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
"""Tokens of rows of copies, in those of forked rows: few, since each is compiled."""


def copy_beginnings(segments: PackedSegments) -> PackedSegments:
    """Return the segments with `copies`, in numpy; without forks, as they are."""
    if segments.gap_starts is None or segments.gap_ends is None:
        return segments
    lines = [
        _copied(starts, gap_starts, gap_ends)
        for starts, gap_starts, gap_ends in zip(
            np.asarray(segments.cu_seqlens), np.asarray(segments.gap_starts), np.asarray(segments.gap_ends), strict=True
        )
    ]
    (B, T), needed = segments.segment_ids.shape, max(sum(map(len, line)) for line in lines)
    C = next(int(T * width) for width in _WIDTHS if T * width >= needed)
    rows, starts, ends = np.full((B, C), T), np.full((B, C), C), np.zeros((B, C), np.int64)
    counts = np.zeros((B, T), np.int64)
    for b, line in enumerate(lines):
        begin = 0
        for tokens in line:
            end = begin + len(tokens)
            rows[b, begin:end], starts[b, begin:end], ends[b, begin:end] = tokens, begin, end
            begin = end
        ends[b, begin:] = begin
        counts[b] = np.bincount(rows[b, :begin], minlength=T)
    places = np.full((B, segment_bucket(max(int(counts.max()), 1)), T), C)
    for b in range(B):
        order = np.argsort(rows[b], kind="stable")[: counts[b].sum()]  # T, of columns without a token, comes last
        tokens = rows[b, order]
        places[b, np.arange(len(order)) - (np.cumsum(counts[b]) - counts[b])[tokens], tokens] = order
    fields = {"rows": rows, "starts": starts, "ends": ends, "places": places}
    return replace(segments, copies=ForkCopies(**{name: x.astype(np.int32) for name, x in fields.items()}))  # type: ignore[arg-type]


def _copied(bounds: np.ndarray, gap_starts: np.ndarray, gap_ends: np.ndarray) -> list[np.ndarray]:
    """Return a row's documents as the indices of their tokens: a segment's first continuation follows its beginning."""
    token_ranges: list[np.ndarray] = []
    for start, stop in pairwise(bounds):
        if start == stop:
            continue
        tokens = np.arange(start, stop)
        later = tokens[gap_ends[start:stop] > gap_starts[start:stop]]
        begins = np.unique(gap_ends[later])  # of further continuations
        token_ranges.append(np.arange(start, begins[0] if len(begins) else stop))
        for begin, end in pairwise([*begins, stop]):
            token_ranges.append(np.concatenate([np.arange(start, gap_starts[begin]), np.arange(begin, end)]))
    return token_ranges


def _check_row(b: int, row: np.ndarray, seq_len: int) -> None:
    if (row < 1).any() or row.sum() > seq_len:
        raise ValueError(f"row {b}: document lengths {row.tolist()} must be positive and add up to at most {seq_len}")
