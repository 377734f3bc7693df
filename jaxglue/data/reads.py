"""Data sets of units whose parts are read: their selection, and packed batches in which a beginning stands once."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from jaxtyping import Float32, Int, UInt64
from transformers import PreTrainedTokenizerBase

from jaxglue.data.batch import Batch, Reads
from jaxglue.data.config import DataConfig, Source
from jaxglue.data.dataset import Selection, TokenDataset, overlong_error, row_origin
from jaxglue.data.images import DocumentPart, ImageReader, ImageRules
from jaxglue.data.packing import PackPlan
from jaxglue.data.questions import TYPES, Labels
from jaxglue.data.read_rows import COLUMNS, UnitEncoder
from jaxglue.data.store import TokenStore
from jaxglue.ops.segments import BatchKind, PackedSegments, copy_beginnings, pack_forks, pack_segments, segment_bucket
from jaxglue.vision.rows import PlacedImage


@dataclass(frozen=True, kw_only=True)
class ReadTask:
    """Treatment of rows of parts; a subclass names their encoder and what batches hold of them."""

    shared_prompt: bool = True
    """Rows of tokens hold a unit's beginning once."""
    copies: bool = False
    """Such rows say where operations that follow one continuation find copies of beginnings."""
    whole_texts: bool = False
    """All tokens of a part are read, not its last alone."""
    bidirectional: bool = False
    """Tokens see those after them, too."""
    stays_whole: bool = False
    """A unit's parts are compared with each other, so that none is left out or apart."""
    permutes_options: bool = False
    """In training, options of choices come in another order each time."""

    def encoder(self, tokenizer: PreTrainedTokenizerBase, system: str) -> UnitEncoder:
        """Return the tokenizer of the rows."""
        raise NotImplementedError

    @property
    def encoding(self) -> str:
        """Return the settings on which the rows' tokens depend."""
        raise NotImplementedError

    def adopt(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Change a tokenizer, which is saved with the model, as the rows need it."""

    def labels(self, tokenizer: PreTrainedTokenizerBase, system: str) -> Labels | None:
        """Return the tokens that answer questions, where parts are such."""
        return None

    def targets(self, counts: Int[np.ndarray, "units"]) -> Int[np.ndarray, "units"]:
        """Return the number by which each unit counts in the mean of losses, by default its parts."""
        return counts

    def values(self, dataset: "ReadDataset", parts: "Slots") -> dict[str, np.ndarray]:
        """Return what an objective reads of a batch's parts, by name: arrays [B, A, …], or [B, …] of rows."""
        return {}


class Slots(NamedTuple):
    """The parts of a batch in their slots."""

    parts: Int[np.ndarray, "B A"]
    """Indices in the table of parts; −1 for unused slots."""
    units: Int[np.ndarray, "B A"]
    """Indices of units; −1 for unused slots."""
    orders: Mapping[int, Int[np.ndarray, "options"]]
    """Permutations of options by part, where they are permuted."""
    step: Int[np.ndarray, "units"]
    """The units of the whole step."""


@dataclass(frozen=True, kw_only=True)
class PartTable:
    """The parts of a store's rows."""

    starts: Int[np.ndarray, "parts"]
    """Index of each part's first token in the store."""
    sizes: Int[np.ndarray, "parts"]
    kinds: Int[np.ndarray, "parts"]
    intros: Int[np.ndarray, "parts"]
    """Tokens before its options' lines."""
    options: Int[np.ndarray, "parts"]
    firsts: Int[np.ndarray, "parts"]
    """Index of its first option."""
    gold: Float32[np.ndarray, "options"]
    label_sizes: Int[np.ndarray, "options"]
    text_sizes: Int[np.ndarray, "options"]

    @classmethod
    def of(cls, store: TokenStore) -> tuple["PartTable", Int[np.ndarray, "rows"], Int[np.ndarray, "rows"]]:
        """Return the parts of a store, and for each row its tokens before them and their number."""
        named = {name: store.columns[name] for name in COLUMNS}
        prefix, counts, sizes, intros, kinds, options, labels, texts = (
            named[name].astype(np.int64)
            for name in ("prefix", "parts", "size", "intro", "kind", "options", "label_size", "text_size")
        )
        owners = np.repeat(np.arange(len(counts)), counts)
        before = np.cumsum(sizes) - sizes
        first = (np.cumsum(counts) - counts).clip(max=max(len(before) - 1, 0))
        starts = store.offsets[owners] + prefix[owners] + before - before[first][owners]
        table = cls(
            starts=starts,
            sizes=sizes,
            kinds=kinds,
            intros=intros,
            options=options,
            firsts=np.cumsum(options) - options,
            gold=named["gold"],
            label_sizes=labels,
            text_sizes=texts,
        )
        return table, prefix, counts

    def joined(self, others: Sequence["PartTable"], tokens: Sequence[int]) -> "PartTable":
        """Return the concatenation with other tables, whose stores follow stores of so many tokens."""
        tables, starts = [self, *others], np.cumsum([0, *tokens])
        firsts = np.cumsum([0, *(len(table.gold) for table in tables)])
        names = ("sizes", "kinds", "intros", "options", "gold", "label_sizes", "text_sizes")
        return PartTable(
            starts=np.concatenate([table.starts + at for table, at in zip(tables, starts, strict=False)]),
            firsts=np.concatenate([table.firsts + at for table, at in zip(tables, firsts, strict=False)]),
            **{name: np.concatenate([getattr(table, name) for table in tables]) for name in names},
        )

    def gold_of(self, part: int) -> Float32[np.ndarray, "options"]:
        """Return the gold of a part's options."""
        return self.gold[self.firsts[part] : self.firsts[part] + self.options[part]]

    def permuted(self, part: int, order: Int[np.ndarray, "options"]) -> Int[np.ndarray, "tokens"]:
        """Return the store indices of a part's tokens with the texts of its options in another order."""
        own = slice(self.firsts[part], self.firsts[part] + self.options[part])
        labels, texts, start = self.label_sizes[own], self.text_sizes[own], self.starts[part]
        lines = start + self.intros[part] + np.cumsum(labels + texts) - labels - texts
        pieces = [np.arange(start, start + self.intros[part])]
        for place, option in enumerate(order):
            pieces.append(np.arange(lines[place], lines[place] + labels[place]))
            text = lines[option] + labels[option]
            pieces.append(np.arange(text, text + texts[option]))
        end = start + self.intros[part] + (labels + texts).sum()
        return np.concatenate([*pieces, np.arange(end, start + self.sizes[part])])


@dataclass(frozen=True, kw_only=True)
class ReadDataset(TokenDataset):
    """Units of a beginning and parts after it, each of which is read by itself; `lengths` are a unit's in a row."""

    task: ReadTask
    table: PartTable
    prefixes: Int[np.ndarray, "units"]
    """Tokens of each unit's beginning that stand in a row."""
    firsts: Int[np.ndarray, "units"]
    """Index of its first part."""
    counts: Int[np.ndarray, "units"]
    """Its parts."""
    labels: Labels | None = None
    """Tokens that answer questions, where parts are such."""
    permuted: bool = False
    """Options of choices come in another order in each batch."""
    slot_tokens: int | None = None
    """Tokens of a row for each of which it has a slot at least: rows of any units then have few shapes."""

    PER_DOCUMENT: ClassVar[tuple[str, ...]] = (*TokenDataset.PER_DOCUMENT, "prefixes", "firsts", "counts")

    @cached_property
    def fingerprint(self) -> str:
        """Hash tokens, gold, selection and layout."""
        digest = hashlib.blake2b(self._tokens_digest.hexdigest().encode(), digest_size=16)
        digest.update(f"{self.task} {self.permuted}".encode())
        for values in (self.prefixes, self.firsts, self.counts, self.table.gold, self.table.sizes):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    def segments_of(self, documents: Int[np.ndarray, "units"]) -> Int[np.ndarray, "units"]:
        """Return the segments of units: one of a shared beginning, or one for each part."""
        return np.ones_like(documents) if self.task.shared_prompt else self.counts[documents]

    @property
    def document_lengths(self) -> Int[np.ndarray, "lengths"]:
        """Return the lengths of beginnings with a part: attention's work, whether or not beginnings are shared."""
        return np.repeat(self.prefixes, self.counts) + self.table.sizes[self.parts_of(np.arange(len(self)))[1]]

    @property
    def whole_lengths(self) -> Int[np.ndarray, "units"]:
        """Return the tokens of the rows that the units come from."""
        return self.store.lengths[self.documents]

    def indices(self, document: int) -> Int[np.ndarray, "tokens"]:
        """Return the store indices of a beginning and its parts."""
        start = self.store.offsets[self.documents[document]]
        parts = range(self.firsts[document], self.firsts[document] + self.counts[document])
        spans = [np.arange(self.table.starts[part], self.table.starts[part] + self.table.sizes[part]) for part in parts]
        return np.concatenate([np.arange(start, start + self.prefixes[document]), *spans])

    def joined(self, others: "Sequence[TokenDataset]") -> dict[str, Any]:
        """Return the fields of the concatenation with data sets of further sources."""
        parts: list[Any] = [self, *others]
        sizes = [len(part.store.tokens) for part in parts]
        before = np.cumsum([0, *(len(part.table.sizes) for part in parts)])
        fields = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("prefixes", "counts")}
        firsts = np.concatenate([part.firsts + first for part, first in zip(parts, before, strict=False)])
        table = self.table.joined([part.table for part in parts[1:]], sizes)
        return super().joined(others) | fields | {"firsts": firsts, "table": table}

    def with_permuted_options(self) -> Self:
        """Return the units with options of choices in another order in each batch."""
        return replace(self, permuted=True)

    @cached_property
    def text_ids(self) -> Int[np.ndarray, "parts"]:
        """Return a number for each part, which parts of the same tokens and images share."""
        digests, images = _digests(self.store, self.table), self.store.images
        if images is not None and self.reader is not None:
            owners, places = self._image_owners
            own = owners >= 0
            for column, words in enumerate(images.digests[own].view(np.uint64).T):
                np.add.at(digests[:, column], owners[own], _mixed(words + places[own]))
        return np.unique(digests, axis=0, return_inverse=True)[1].astype(np.int32)

    @cached_property
    def _image_owners(self) -> tuple[Int[np.ndarray, "images"], UInt64[np.ndarray, "images"]]:
        """Return the part of each image of the store, −1 for one of a beginning, and its first token there."""
        assert self.reader is not None and self.store.images is not None
        firsts = list[int]()
        for document in np.unique(self.store.images.owners).tolist():
            tokens = self.reader.tokens(document, int(self.store.lengths[document]))
            firsts += [self.store.offsets[document] + first for first, _ in self.reader.placed(document, tokens)]
        places = np.array(firsts)
        parts = np.maximum(np.searchsorted(self.table.starts, places, side="right") - 1, 0)
        apart = places - self.table.starts[parts]
        inside = (apart >= 0) & (apart < self.table.sizes[parts])
        return np.where(inside, parts, -1), apart.astype(np.uint64)

    @property
    def most_parts(self) -> int:
        """Return the parts of the unit that has most."""
        return int(self.counts.max())

    @property
    def most_options(self) -> int:
        """Return the options of the part that has most."""
        return int(self.table.options.max(initial=1))

    def slots(self, seq_len: int) -> int:
        """Return slots for the parts of any row of so many tokens, a power of two."""
        if seq_len not in self._slots:
            least = seq_len // self.slot_tokens if self.slot_tokens else 1
            self._slots[seq_len] = max(self._count_slots(seq_len), segment_bucket(least))
        return self._slots[seq_len]

    @cached_property
    def _slots(self) -> dict[int, int]:
        return {}

    def _count_slots(self, seq_len: int) -> int:
        """Return the slots of a row that is filled with the units of most parts for their tokens."""
        dense = np.argsort(-self.counts / self.lengths, kind="stable")
        counts, lengths = self.counts[dense], self.lengths[dense]
        if set(self.passes) != {1.0}:  # a unit may come twice
            return segment_bucket(int(seq_len * counts[0] / lengths[0]))
        fit = int(np.searchsorted(np.cumsum(lengths), seq_len, side="right"))
        most = counts[:fit].sum() + (counts[fit] if fit < len(counts) else 0)
        return segment_bucket(int(most))

    def build_batch(
        self,
        plan: PackPlan,
        rows: Int[np.ndarray, "B"],
        step: Int[np.ndarray, "documents"],
        *,
        seq_len: int,
        max_segments: int,
        kind: BatchKind | None = None,
    ) -> Batch:
        """Build the batch of these rows of the plan, with a slot for each part; see `TokenDataset.build_batch`."""
        members, slots = [plan.row(row) for row in rows], self.slots(seq_len)
        shape = len(members), slots
        parts, units = np.full((2, *shape), -1, np.int32)
        for row, own in enumerate(members):
            owners, found = self.parts_of(own)
            parts[row, : len(found)], units[row, : len(found)] = found, owners
        orders = self._orders(parts[parts >= 0], step) if self.permuted else {}
        tokens, owners, lasts = np.zeros((3, len(members), seq_len), np.int32)
        owners += slots
        for row, own in enumerate(members):
            self._fill(own, orders, slots, tokens[row], owners[row], lasts[row])
        if not self.task.whole_texts:
            owners = np.where(lasts > 0, owners, slots)
        counts = np.stack([np.bincount(row, minlength=slots + 1)[:slots] for row in owners])
        numbers = np.where(parts >= 0, parts - self.firsts[np.maximum(units, 0)], -1)
        values = self.task.values(self, Slots(parts, units, orders, step))
        reads = Reads(
            owners=owners,  # type: ignore[arg-type]
            counts=counts.astype(np.float32),  # type: ignore[arg-type]
            units=units,  # type: ignore[arg-type]
            parts=numbers.astype(np.int32),  # type: ignore[arg-type]
            values=values,  # type: ignore[arg-type]
        )
        images = None
        if self.reader is not None:
            seen = [[part for unit in own for part in self._document_parts(int(unit))] for own in members]
            images = self.reader.rows(tokens, seen, self.most_features(members))
        arrays: dict[str, Any] = {"tokens": tokens, "targets": tokens, "loss_weights": (lasts > 0).astype(np.float32)}
        segments = self._segments(members, seq_len, max_segments, slots)
        return Batch(**arrays, segments=segments, reads=reads, images=images)

    def _document_parts(self, unit: int) -> Iterator[DocumentPart]:
        """Yield the parts of a unit as they are in a row, with the images of each and of the beginning."""
        assert self.reader is not None
        document, prefix, first = int(self.documents[unit]), int(self.prefixes[unit]), self.firsts[unit]
        placed = self.reader.placed(document, self.reader.tokens(document, int(self.store.lengths[document])))
        before = [each for each in placed if each.first < prefix]
        if self.task.shared_prompt:
            yield DocumentPart(0, prefix, before)
        for part in range(first, first + self.counts[unit]):
            size, start = int(self.table.sizes[part]), int(self.table.starts[part] - self.store.offsets[document])
            own = [PlacedImage(at - start + prefix, image) for at, image in placed if start <= at < start + size]
            begin = prefix if self.task.shared_prompt else 0
            yield DocumentPart(begin, prefix + size, [*before, *own])

    def most_features(self, members: Sequence[Int[np.ndarray, "units"]]) -> int:
        """See `TokenDataset.most_features`; each part may have a copy of its beginning."""
        copied = not self.task.shared_prompt and self.prefixes.any()
        return super().most_features(members) * (self.most_parts if copied else 1)

    def parts_of(self, units: Int[np.ndarray, "units"]) -> tuple[Int[np.ndarray, "parts"], Int[np.ndarray, "parts"]]:
        """Return the unit of each part of units, and these parts."""
        counts = self.counts[units]
        before = np.cumsum(counts) - counts
        return np.repeat(units, counts), np.repeat(self.firsts[units] - before, counts) + np.arange(counts.sum())

    def _orders(self, parts: Int[np.ndarray, "parts"], step: Int[np.ndarray, "units"]) -> dict[int, np.ndarray]:
        """Return the orders of the options of choices, as a function of the step's units."""
        seed = hashlib.blake2b(np.ascontiguousarray(step, np.int64).data, digest_size=8).digest()
        begin = int.from_bytes(seed)
        choices = parts[self.table.kinds[parts] == TYPES.index("choice")]
        return {
            int(part): np.random.default_rng([begin, part]).permutation(self.table.options[part]) for part in choices
        }

    def _fill(self, units: np.ndarray, orders: Mapping[int, np.ndarray], slots: int, *arrays: np.ndarray) -> None:
        """Write a row's tokens, the slots of parts' tokens, and 1 at their last ones."""
        tokens, owners, lasts = arrays
        own, parts = self.parts_of(units)
        first = np.append(True, own[1:] != own[:-1])[: len(own)]
        repeats = first if self.task.shared_prompt else np.ones_like(first)
        # A part with the beginning before it is two pieces; one without is one piece after an empty one.
        prefixes = np.where(repeats, self.prefixes[own], 0)
        starts = np.stack([self.store.offsets[self.documents[own]], self.table.starts[parts]], 1).ravel()
        sizes = np.stack([prefixes, self.table.sizes[parts]], 1).ravel()
        slot = np.stack([np.full(len(parts), slots), np.arange(len(parts))], 1).ravel()
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        source = np.repeat(starts - (ends - sizes), sizes) + np.arange(total)
        for part in orders.keys() & set(parts.tolist()):
            for at in np.flatnonzero(parts == part):
                source[ends[2 * at + 1] - self.table.sizes[part] : ends[2 * at + 1]] = self.table.permuted(
                    part, orders[part]
                )
        tokens[:total] = self.store.tokens[source]
        owners[:total] = np.repeat(slot, sizes)
        lasts[ends[1::2] - 1] = 1

    def _segments(self, members: list[np.ndarray], seq_len: int, max_segments: int, slots: int) -> PackedSegments:
        sizes = [
            [
                (int(self.prefixes[unit]), *self.table.sizes[self.firsts[unit] : self.firsts[unit] + self.counts[unit]])
                for unit in units
            ]
            for units in members
        ]
        if self.task.shared_prompt:
            forks = pack_forks(sizes, seq_len=seq_len, max_segments=max_segments)
            return copy_beginnings(forks) if self.task.copies else forks
        lengths = [[prefix + size for prefix, *parts in units for size in parts] for units in sizes]
        packed = pack_segments(lengths, seq_len=seq_len, kind=BatchKind(False, slots))
        return replace(packed, bidirectional=True) if self.task.bidirectional else packed


_DIGESTED = 2**22
"""Tokens that are digested at a time."""


def _digests(store: TokenStore, table: PartTable) -> UInt64[np.ndarray, "parts 2"]:
    """Return two digests of each part's tokens, sums of mixed tokens and places."""
    found = np.zeros((len(table.sizes), 2), np.uint64)
    cuts = np.unique(np.searchsorted(np.cumsum(table.sizes), np.arange(0, table.sizes.sum() + 1, _DIGESTED)))
    for first, last in pairwise([*cuts[cuts < len(found)], len(found)]):
        sizes = table.sizes[first:last]
        before = np.cumsum(sizes) - sizes
        places = np.arange(sizes.sum()) - np.repeat(before, sizes)
        tokens = store.tokens[np.repeat(table.starts[first:last], sizes) + places].astype(np.uint64)
        for column in range(2):
            mixed = _mixed(tokens + _mixed(places.astype(np.uint64) + np.uint64(column << 40)))
            found[first:last, column] = np.add.reduceat(mixed, before) + sizes.astype(np.uint64)
    return found


def _mixed(x: UInt64[np.ndarray, "N"]) -> UInt64[np.ndarray, "N"]:
    """Return SplitMix64's finalizer of each value."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def select_reads(
    store: TokenStore,
    config: DataConfig,
    source: Source,
    task: ReadTask,
    labels: Labels | None = None,
    images: ImageRules | None = None,
) -> Selection:
    """Select the units, fitted into rows of tokens.

    Parts that do not fit beside each other become units of their own, where each is read by itself; a beginning that
    leaves no room for a part loses its end.

    Raises:
        ValueError: an overlong row under `overlong='error'`, or no unit left.
    """
    table, prefixes, counts = PartTable.of(store)
    firsts, room = np.cumsum(counts) - counts, config.row_tokens
    units: list[tuple[int, int, int, int]] = []  # row, tokens of the beginning, first part, parts
    truncated, dropped = int(store.columns["cut"].sum()), 0
    seeing = set() if images is None or store.images is None else set(store.images.owners.tolist())
    repeats = 0 if task.shared_prompt else 1
    for row, (prefix, first, count) in enumerate(zip(prefixes.tolist(), firsts.tolist(), counts.tolist(), strict=True)):
        sizes = table.sizes[first : first + count]
        if prefix * (1 + repeats * (count - 1)) + sizes.sum() <= room:
            units.append((row, prefix, first, count))
            continue
        longest = int(sizes.max())
        fits, sees = prefix + longest <= room, row in seeing
        if not fits and config.overlong == "error":
            raise overlong_error(config, row_origin(source, row), prefix + longest)
        if task.stays_whole and config.overlong != "drop":
            raise overlong_error(config, row_origin(source, row), prefix + int(sizes.sum()))
        cut = not fits and (config.overlong == "drop" or sees)  # images are not cut
        if cut or task.stays_whole or longest >= room:
            dropped += 1
            continue
        truncated += not fits
        prefix = min(prefix, room - longest)
        units += [(row, prefix, *span) for span in _spans(sizes.tolist(), prefix, room, repeats, first)]
    if not units:
        raise ValueError(f"{source}: no row fits into seq_len={room} tokens: raise --seq-len")
    rows, kept, begins, numbers = np.array(units, np.int64).T
    ends = np.cumsum(table.sizes)
    spans = ends[begins + numbers - 1] - ends[begins] + table.sizes[begins]
    dataset = ReadDataset(
        store=store,
        documents=rows,
        lengths=kept * np.where(repeats, numbers, 1) + spans,
        targets=task.targets(numbers),
        task=task,
        table=table,
        prefixes=kept,
        firsts=begins,
        counts=numbers,
        labels=labels,
        reader=ImageReader(rules=images, store=store) if images is not None and store.images is not None else None,
    )
    return Selection(dataset=dataset, truncated=truncated, dropped=dropped)


def _spans(sizes: list[int], prefix: int, room: int, repeats: int, first: int) -> list[tuple[int, int]]:
    """Return (first part, parts) of the units into which a row's parts are divided."""
    found, begin, used = [], 0, prefix
    for index, size in enumerate(sizes):
        cost = size + (prefix if repeats and index > begin else 0)
        if used + cost > room:
            found.append((first + begin, index - begin))
            begin, used, cost = index, prefix, size
        used += cost
    return [*found, (first + begin, len(sizes) - begin)]
