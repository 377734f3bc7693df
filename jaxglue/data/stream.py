"""Streams of data larger than memory and disk, tokenized in windows while training runs, and their iterator."""

import hashlib
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple, TypedDict

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxglue.data.config import HUB_PREFIX, DataConfig, Source
from jaxglue.data.dataset import Selection, TokenDataset, join_selections, overlong_error, select_documents
from jaxglue.data.formats import unused_columns
from jaxglue.data.images import ImageRules
from jaxglue.data.iterator import ProcessShare, See, Step, Steps, StepSizes, check_batch, check_run, read_ahead, seen
from jaxglue.data.mixing import plan_dataset_epoch
from jaxglue.data.readers import data_files, hub_fingerprint, row_chunks, source_parts
from jaxglue.data.store import Encoded, TokenStore, sum_findings
from jaxglue.data.store_files import content_key
from jaxglue.data.tokenize import cache_key, check_format, encode_in_processes, find_format, make_encoder
from jaxglue.ops.segments import segment_bucket
from jaxglue.vision.records import ImageRecords
from jaxglue.vision.rows import RowImages

_VERSION = 4
"""Increment when streams under way cannot go on with the present tokens of their rows."""
_CHUNK = 64
"""Rows tokenized together; windows end between chunks."""
_ENDS = 2**20
"""Bytes at either end of a file that identify it."""


class Position(NamedTuple):
    """Place in a source from which rows are read on."""

    passes: int = 0
    file: int = 0
    rows: int = 0
    """Rows of the file before the place."""
    tokens: int = 0
    """Tokens before the place, over all passes."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Documents that are shuffled and packed together."""

    index: int
    start: tuple[Position, ...]
    """Position of each source before the window's first row."""
    end: tuple[Position, ...]
    selection: Selection
    rows: int

    @property
    def dataset(self) -> TokenDataset:
        """Return the documents."""
        return self.selection.dataset


class TokenStream:
    """Endless windows of documents of all sources, a function of files, settings and window number.

    Every source is read in order, again and again; up to the end of every window it has given its share of the tokens.
    A window ends early once it holds a pass over every source.

    Args:
        config: data sources and processing.
        tokenizer: of the model.
        check: raises for a store of unusable tokens.
        encode: tokenizes chunks of rows; by default in `config.workers` processes, or one.
        images: rules for the images of each source's rows; None for a model that sees none.

    Raises:
        ValueError: a source that is missing, empty or of an unknown format.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        check: Callable[[TokenStore], None] = lambda store: None,
        encode: Callable[..., Iterator[tuple[Encoded, Any]]] | None = None,
        images: Sequence[ImageRules] | None = None,
    ):
        self.config, self._check = config, check
        encode = encode or partial(encode_in_processes, workers=config.workers or 1)
        self.images: Sequence[ImageRules | None] = images or [None] * len(config.sources)
        """Rules for the images of each source."""
        pairs = [*zip(config.sources, self.images, strict=True)]
        self._readers = [_Reader(source, config, tokenizer, encode, rules) for source, rules in pairs]
        self.formats = tuple(reader.format for reader in self._readers)
        """Row format of each source."""
        self.unused = tuple(reader.unused for reader in self._readers)
        """Columns of each source that its format does not use."""
        keys = [
            cache_key(_file_ends(source), source, tokenizer, False, _VERSION, encoding=config.encoding, images=rules)
            for source, rules in pairs
        ]
        shares = [source.share for source in config.sources]
        own = [source.overlong for source in config.sources]
        treatments = [own] if any(own) else []
        self.fingerprint = content_key(
            *(keys, shares, config.row_tokens, config.overlong, config.stream_tokens), *treatments
        )
        """Hash of the files' sizes and ends, the tokenizer and the settings."""

    def windows(
        self, index: int = 0, start: Sequence[Position] = (), stopped: Callable[[], bool] = lambda: False
    ) -> Generator[Window]:
        """Yield windows from number `index` on, which begins at the positions `start`, until `stopped`.

        Raises:
            ValueError: an unusable row, with its origin.
        """
        places = tuple(start) or (Position(),) * len(self._readers)
        with ExitStack() as opened:
            pairs = zip(self._readers, places, strict=True)
            chunks = [opened.enter_context(closing(reader.chunks(place))) for reader, place in pairs]
            while (parts := self._read(places, chunks, stopped)) is not None:
                ends = tuple(part[-1].end if part else place for part, place in zip(parts, places, strict=True))
                yield self._window(index, places, ends, parts)
                index, places = index + 1, ends

    def _read(
        self, start: Sequence[Position], chunks: "Sequence[Iterator[_Chunk]]", stopped: Callable[[], bool]
    ) -> "list[list[_Chunk]] | None":
        """Return the chunks of a window by source, always read from the source farthest behind; None once stopped."""
        places, parts = list(start), [list[_Chunk]() for _ in start]

        def done(source: int) -> float:
            return places[source].tokens / (self._readers[source].source.share or 1)

        behind = min(range(len(places)), key=done)
        goal = done(behind) + self.config.stream_tokens
        while done(behind) < goal and not all(
            now.passes > then.passes for now, then in zip(places, start, strict=True)
        ):
            if stopped():
                return None
            parts[behind].append(next(chunks[behind]))
            places[behind] = parts[behind][-1].end
            behind = min(range(len(places)), key=done)
        return parts

    def _window(self, index: int, start: Any, end: Any, parts: "list[list[_Chunk]]") -> Window:
        stores = [_join([chunk.encoded for chunk in part]) for part in parts if part]
        for store in stores:
            self._check(store)
        readers = [reader for reader, part in zip(self._readers, parts, strict=True) if part]
        selections = [
            select_documents(store, self.config, reader.source, images=reader.images)
            for store, reader in zip(stores, readers, strict=True)
        ]
        selection = join_selections(selections)
        rows = sum(len(store.lengths) for store in stores)
        return Window(index=index, start=start, end=end, selection=selection, rows=rows)


class _Chunk(NamedTuple):
    end: Position
    encoded: Encoded


class _Reader:
    """Reader and tokenizer of a source, pass after pass."""

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        encode: Callable,
        images: ImageRules | None,
    ):
        self.source, self.images, self._config, self._encode = source, images, config, encode
        head = [*islice(chain.from_iterable(part() for part in source_parts(source)), _CHUNK)]
        self.format = find_format(head, source)
        self.unused = unused_columns(head, self.format)
        check_format(self.format, source, False)
        self._encoder = make_encoder(source, config, tokenizer, self.format, images=images)

    def chunks(self, place: Position) -> Generator[_Chunk]:
        """Yield tokenized chunks of rows from a place on."""
        tokens, seq_len = place.tokens, self._config.row_tokens
        for encoded, end in self._encode(self._encoder, self._jobs(place)):
            treatment = self._config.overlong_of(self.source)
            if treatment == "error" and (encoded.lengths > seq_len).any():
                raise self._overlong(encoded, end)
            splits = treatment == "split"
            tokens += int(np.clip(encoded.lengths, 1, None if splits else seq_len).sum())
            kept = encoded if splits else _cut(encoded, seq_len + 1)  # one more tells who is too long
            yield _Chunk(end._replace(tokens=tokens), kept)

    def _jobs(self, place: Position) -> Iterator[tuple[tuple, Position]]:
        """Yield chunks of rows and the places behind them."""
        passes, first, skip, _ = place
        while True:
            whole, empty = first == skip == 0, True
            for file, part in enumerate(source_parts(self.source)[first:], first):
                rows = skip
                for chunk in row_chunks(part(skip), _CHUNK):
                    rows, empty = rows + len(chunk), False
                    yield chunk, Position(passes, file, rows)
                skip = 0
            if whole and empty:
                raise ValueError(f"{self.source} has no rows left: its files changed while they were read")
            passes, first = passes + 1, 0

    def _overlong(self, encoded: Encoded, end: Position) -> ValueError:
        row = int(np.flatnonzero(encoded.lengths > self._config.row_tokens)[0])
        rows = source_parts(self.source)[end.file](end.rows - len(encoded.lengths) + row)
        return overlong_error(self._config, next(rows).origin, int(encoded.lengths[row]))


def _cut(encoded: Encoded, most: int) -> Encoded:
    """Cut documents to `most` tokens, so that a window's memory is bounded."""
    if (encoded.lengths <= most).all():
        return encoded
    ends = np.cumsum(encoded.lengths)
    positions = np.arange(len(encoded.tokens)) - np.repeat(ends - encoded.lengths, encoded.lengths)
    kept = positions < most
    lengths = np.minimum(encoded.lengths, most)
    return encoded._replace(tokens=encoded.tokens[kept], mask=encoded.mask[kept], lengths=lengths)


def _join(chunks: Sequence[Encoded]) -> TokenStore:
    lengths = np.concatenate([chunk.lengths for chunk in chunks])
    tokens = np.concatenate([chunk.tokens for chunk in chunks])
    return TokenStore(
        tokens=tokens,
        mask=np.concatenate([chunk.mask for chunk in chunks]),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        images=_join_images(chunks),
        info={
            "digest": "",
            "max_token": int(tokens.max(initial=-1)),
            "findings": sum_findings(chunk.findings for chunk in chunks),
        },
    )


def _join_images(chunks: Sequence[Encoded]) -> ImageRecords | None:
    parts = [chunk.images or ImageRecords.of([]) for chunk in chunks]
    return ImageRecords.joined(parts, [len(chunk.lengths) for chunk in chunks]) if any(map(len, parts)) else None


def _file_ends(source: Source) -> list[tuple[str, str]]:
    """Return a digest of each file's size and ends: whole files would take minutes to read."""
    if source.name.startswith(HUB_PREFIX):
        return [(source.name, hub_fingerprint(source))]
    return [(str(path), _digest_ends(path)) for path in data_files(source.name)]


def _digest_ends(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_ENDS)
        file.seek(max(0, size - _ENDS))
        return hashlib.sha256(b"%d:%b%b" % (size, head, file.read())).hexdigest()


class WindowPlace(TypedDict):
    """A window's number, and the positions of the sources before it, as JSON."""

    index: int
    start: list[list[int]]


class StreamState(TypedDict):
    """The window, the next step in it, and the settings that the order of data depends on, as JSON."""

    window: WindowPlace
    steps: dict[str, Any]
    """Grain's position in the window."""
    run: dict[str, Any]


class StreamIterator(Iterator[Step]):
    """Endless iterator over optimizer steps of a stream; each window is shuffled and packed by itself.

    Empty rows complete a window's last step. The next window is tokenized while one is trained on.

    Args:
        stream: of windows.
        first: the stream's first window.
        steps: of the run, for which no epoch is known.
        batch_size: B, rows in a micro-batch over all processes.
        gradient_accumulation_steps: micro-batches in a step.
        process_index, process_count: select this process's rows; batches and state do not depend on their number.

    Raises:
        ValueError: a size below 1, or a batch size not divisible by the processes.
    """

    def __init__(
        self,
        stream: TokenStream,
        first: Window,
        *,
        steps: int,
        batch_size: int,
        gradient_accumulation_steps: int = 1,
        process_index: int = 0,
        process_count: int = 1,
    ):
        self._sizes = StepSizes(batch_size=batch_size, gradient_accumulation_steps=gradient_accumulation_steps)
        check_batch(process_count=process_count, **self._sizes)
        self._share = ProcessShare(process_index=process_index, process_count=process_count)
        self._stream, self._seq_len, self._seed = stream, stream.config.row_tokens, stream.config.seed
        self.total_steps = self.steps_per_epoch = steps
        """Optimizer steps of the run."""
        self.max_segments = segment_bucket(self._plan(first, None).max_segments)
        """Segment slots S of every batch."""
        self.see: See = RowImages.with_patches
        """See `BatchIterator.see`."""
        self._kept: list[Container[tuple]] = [] if first.dataset.reader is None else first.dataset.reader.kept
        self._sees = first.dataset.reader is not None
        self._stop = Event()
        self._windows = stream.windows(1, first.end, self._stop.is_set)
        self._next: Future[Window] | None
        self._start(first)

    @property
    def dataset(self) -> TokenDataset:
        """Return the present window's documents."""
        return self._window.dataset

    def __iter__(self) -> "StreamIterator":
        return self

    def __next__(self) -> Step:
        if self._next is None:
            self._next = _in_background(self._windows)
        try:
            return seen(next(self._steps), self.see)
        except StopIteration:
            self._steps.close()
            self._start(self._next.result())
            return next(self)

    def get_state(self) -> StreamState:
        """Return a JSON-able state."""
        window: WindowPlace = {"index": self._window.index, "start": [list(place) for place in self._window.start]}
        return {"window": window, "steps": self._steps.get_state(), "run": self._run()}

    def set_state(self, state: StreamState) -> None:
        """Continue from a state of `get_state`; its window is read and tokenized again.

        Raises:
            ValueError: data, seed or sizes differ from the state's, by name.
        """
        check_run(state["run"], self._run())
        self.close()
        window = state["window"]
        self._stop = Event()
        places = [Position(*place) for place in window["start"]]
        self._windows = self._stream.windows(window["index"], places, self._stop.is_set)
        self._start(next(self._windows))
        self._steps.set_state(state["steps"])

    def close(self) -> None:
        """Stop reading, after the rows that are being tokenized."""
        self._stop.set()
        self._steps.close()
        if self._next:
            self._next.exception()
        self._windows.close()

    def _run(self) -> dict[str, Any]:
        fixed = {"data": self._stream.fingerprint, "seed": self._seed, "seq_len": self._seq_len}
        return {**fixed, **self._sizes, "max_segments": self.max_segments}

    def _plan(self, window: Window, max_segments: int | None) -> Any:
        return plan_dataset_epoch(
            window.dataset, seq_len=self._seq_len, seed=self._seed, epoch=window.index, max_segments=max_segments
        )

    def _start(self, window: Window) -> None:
        """Begin a window; its first step starts the tokenizing of the next."""
        self._window, self._next = window, None
        if window.dataset.reader is not None:
            if not self._sees:
                raise ValueError(
                    f"--streaming: window {window.index + 1} has images and the first had none, for which the vision "
                    "tower is not loaded: begin the data with a row that has one, or raise --stream-tokens"
                )
            window = replace(window, selection=_keeping(window.selection, self._kept))
            self._window = window
        self._steps = read_ahead(
            Steps(
                dataset=window.dataset,
                plan=self._plan(window, self.max_segments),
                seq_len=self._seq_len,
                max_segments=self.max_segments,
                **self._sizes,
                **self._share,
            )
        )


def _keeping(selection: Selection, kept: list[Container[tuple]]) -> Selection:
    """Return a selection whose reader knows the features that those before it know."""
    reader = selection.dataset.reader
    assert reader is not None
    return replace(selection, dataset=replace(selection.dataset, reader=replace(reader, kept=kept)))


def _in_background(windows: Iterator[Window]) -> Future[Window]:
    """Return the next window of a generator that a daemon thread runs, so that the process may end meanwhile."""
    future: Future[Window] = Future()

    def run() -> None:
        try:
            future.set_result(next(windows))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="stream", daemon=True).start()
    return future
