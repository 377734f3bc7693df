"""Cached tokenization of all rows, here or in worker processes, in order."""

import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxglue.data.config import HUB_PREFIX, NO_COLUMNS, Columns, DataConfig, Source
from jaxglue.data.encode import Encoder
from jaxglue.data.files import Row, is_compressed
from jaxglue.data.formats import (
    ANSWER_KEYS,
    MEDIA_COLUMNS,
    PAIR_COLUMNS,
    detect_format,
    detect_preference,
    read_answers,
    read_row,
    row_media,
    unused_columns,
)
from jaxglue.data.images import ImageRules
from jaxglue.data.messages import Chat
from jaxglue.data.progress import Advance, DataProgress, metered
from jaxglue.data.read_rows import UnitEncoder
from jaxglue.data.readers import hub_fingerprint, is_slice, read_rows, row_chunks, source_files
from jaxglue.data.reads import ReadTask
from jaxglue.data.store import Encoded, TokenStore
from jaxglue.data.store_files import content_key, open_or_write, write_store
from jaxglue.files.regular_file import file_digest

_VERSION = 13
"""Increment when the same rows yield different tokens or masks, to invalidate caches; streams under way go on."""
_CHUNK = 512
RowEncoder = Encoder | UnitEncoder
_WORTH_DECODING = 256
"""Number of rows with images above which it does."""
_WORTH_PROCESSES = 64 * _CHUNK
"""Number of rows above which starting processes pays off."""


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """A source's token store with its row format and cache status."""

    source: Source
    store: TokenStore
    format: str
    cached: bool
    digests: list[tuple[str, str]]
    """Path and SHA-256 of every file, in order."""
    damage: str
    """Damage found in the cache, empty if none."""
    unused: list[str]
    """Columns that the format does not use."""


def tokenize(
    source: Source,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    progress: DataProgress,
    *,
    preferences: bool = False,
    columns: Columns = NO_COLUMNS,
    task: ReadTask | None = None,
    images: ImageRules | None = None,
) -> Tokenized:
    """Tokenize a source, or open the cached result; rows of preference data become two documents each.

    Args:
        source: of the rows.
        config: processing.
        tokenizer: of the model.
        progress: shows hashing and tokenizing.
        preferences: the rows have two answers, or one with a label.
        columns: of numbers, read beside the documents.
        task: of rows whose parts are read.
        images: rules of a model that sees.

    Raises:
        ValueError: no rows, an unusable row, naming file and line, or a cache that may not be written.
    """
    digests = _digests(source, progress)
    folder = Path(config.cache_dir) / cache_key(
        digests,
        source,
        tokenizer,
        preferences,
        _VERSION,
        columns,
        config.encoding,
        task.encoding if task else "",
        images,
    )
    fresh = []

    def write() -> None:
        fresh.append(True)
        _write(folder, source, config, tokenizer, progress, preferences, columns, task, images)

    store, damage = open_or_write(folder, write)
    format, unused = store.info["format"], store.info.get("unused")
    if unused is None:  # in the cache of an earlier version
        unused = _unused(islice(read_rows(source), _CHUNK), format, columns, images)
    return Tokenized(
        source=source, store=store, format=format, cached=not fresh, digests=digests, damage=damage, unused=unused
    )


def _write(
    folder: Path,
    source: Source,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    progress: DataProgress,
    preferences: bool,
    columns: Columns,
    task: ReadTask | None,
    images: ImageRules | None,
) -> None:
    rows = read_rows(source)
    head = list(islice(rows, _WORTH_PROCESSES + 1))
    if task:
        reader = read_encoder(head, source, tokenizer, task, images)
        encoder: RowEncoder = reader
        format, unused = reader.format, _unread(head, reader)
    else:
        format = find_format(head, source, detect_preference if preferences else detect_format)
        check_format(format, source, preferences)
        encoder = make_encoder(source, config, tokenizer, format, columns, images)
        unused = _unused(head, format, columns, images)
    worth = len(head) > (_WORTH_PROCESSES if images is None or not _has_images(head) else _WORTH_DECODING)
    workers = config.workers or ((os.cpu_count() or 1) if worth else 1)
    encoded = _encode(encoder, chain(head, rows), workers)
    with progress.stage(f"tokenizing {source}", _size(source)) as advance:
        write_store(folder, _metered(encoded, advance), encoder.columns, format=format, unused=unused)


def read_encoder(
    head: Sequence[Row],
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    task: ReadTask,
    images: ImageRules | None = None,
) -> UnitEncoder:
    """Return the encoder of a source's rows, whose parts are read.

    Raises:
        ValueError: no rows, or another format.
    """
    if not head:
        raise ValueError(f"the data set is empty: no rows in {source}")
    if source.format != "auto":
        raise ValueError(f"{source}: format {source.format!r} is for texts and chats: leave it out")
    encoder = task.encoder(tokenizer, source.system)
    encoder.images = images if encoder.sees else None
    return encoder


def _unread(rows: Iterable[Row], encoder: UnitEncoder) -> list[str]:
    """Return the columns with values that an encoder does not read, in order of appearance."""
    found = (key for row in rows for key, value in row.value.items() if value is not None)
    known = encoder.keys | (encoder.optional if encoder.images is not None else set())
    return [key for key in dict.fromkeys(found) if key not in known]


def _unused(rows: Iterable[Row], format: str, columns: Columns, images: ImageRules | None) -> list[str]:
    return [name for name in unused_columns(rows, format, columns) if images is None or name not in MEDIA_COLUMNS]


def _has_images(head: Sequence[Row]) -> bool:
    return any(row_media(row.value) for row in head[:_CHUNK])


def make_encoder(
    source: Source,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    format: str,
    columns: Columns = NO_COLUMNS,
    images: ImageRules | None = None,
) -> Encoder:
    """Return the encoder of a source's rows, which have this format."""
    return Encoder(
        tokenizer,
        format=format,
        loss_on=source.loss_on,
        system=source.system,
        columns=columns,
        **config.encoding,
        images=images,
        remedy=", or use --loss-on all",
    )


class FirstRow(NamedTuple):
    """The first row of the data, to be tokenized anew."""

    origin: str
    chat: Chat | None
    """Its conversation, the preferred one of two; None for texts."""
    encode: Callable[[PreTrainedTokenizerBase], Encoded]


def first_row(
    config: DataConfig, *, preferences: bool, task: ReadTask | None = None, images: ImageRules | None = None
) -> FirstRow:
    """Read the first row of the first source.

    Raises:
        ValueError: as reading the source.
    """
    source = config.sources[0]
    head = list(islice(read_rows(source), 1))
    if task:
        read = partial(read_encoder, head, source, task=task, images=images)
        return FirstRow(head[0].origin, None, lambda tokenizer: read(tokenizer).encode(head))
    format = find_format(head, source, detect_preference if preferences else detect_format)
    (row,) = head
    contents: list[Any] = [read_row(row.value, format, images)] if format not in ANSWER_KEYS else []
    contents += read_answers(row.value, format, images) if format in ANSWER_KEYS else ()
    chat = next((content for content in contents if isinstance(content, Chat)), None)
    if chat and source.system:
        chat = chat.with_system(source.system)

    def encode(tokenizer: PreTrainedTokenizerBase) -> Encoded:
        return make_encoder(source, config, tokenizer, format, images=images).encode([row])

    return FirstRow(row.origin, chat, encode)


def check_format(format: str, source: Source, preferences: bool) -> None:
    """Refuse a format that does not fit the objective."""
    if (format in ANSWER_KEYS) != preferences:
        remedy = (
            f"use one of {', '.join(ANSWER_KEYS)}, or auto"
            if preferences
            else "choose an --objective such as dpo or kto"
        )
        raise ValueError(f"{source}: format {format!r} does not fit the objective: {remedy}")


def find_format(head: Sequence[Row], source: Source, detect: Callable[[Any], str] = detect_format) -> str:
    """Return the source's format, detected from its first row if it is auto.

    Raises:
        ValueError: no rows, or an unknown format.
    """
    if not head:
        raise ValueError(f"the data set is empty: no rows in {source}")
    if source.format not in ("auto", "auto_chat"):
        return source.format
    try:
        found = detect(head[0].value)
    except ValueError as error:
        raise ValueError(f"{head[0].origin}: {error}") from error
    return "alpaca_chat" if (found, source.format) == ("alpaca", "auto_chat") else found


def _encode(encoder: RowEncoder, rows: Iterable[Row], workers: int) -> Iterator[tuple[Encoded, float]]:
    """Yield documents and the bytes of their rows."""
    jobs = ((chunk, sum(row.size for row in chunk)) for chunk in row_chunks(rows, _CHUNK))
    return encode_here(encoder, jobs) if workers == 1 else encode_in_processes(encoder, jobs, workers)


def _metered(chunks: Iterable[tuple[Encoded, float]], advance: Advance) -> Iterator[Encoded]:
    done = 0.0
    for chunk, size in chunks:
        done += size
        advance(done)
        yield chunk


def cache_key(
    digests: list[tuple[str, str]],
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    preferences: bool,
    version: int,
    columns: Columns = NO_COLUMNS,
    encoding: Mapping[str, Any] = MappingProxyType({}),
    reads: str = "",
    images: ImageRules | None = None,
) -> str:
    """Return a name for the tokens of a source, from its files' digests and all that tokens depend on."""
    files = [["".join(Path(name).suffixes[-2:]), digest] for name, digest in digests]
    settings = [source.split, source.format, source.loss_on, source.system, source.columns]
    model = [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map]
    further = {**columns}.items() - (PAIR_COLUMNS.items() if preferences else {}.items())
    rows: list[Any] = [*(["preferences 2"] if preferences else []), *([sorted(further)] if further else [])]
    rows += ["slice"] if is_slice(source.split) else []
    rows += [source.rows, source.prompt, source.completion] if source.rows or source.prompt else []
    rows += [sorted(encoding.items())] if encoding else []
    rows += [reads] if reads else []
    rows += [["images", images.processor.key, str(images.folder)]] if images else []
    return content_key(version, files, *settings, *model, *rows)


def _digests(source: Source, progress: DataProgress) -> list[tuple[str, str]]:
    if source.name.startswith(HUB_PREFIX):
        return [(source.name, hub_fingerprint(source))]
    files = source_files(source)
    sizes = [path.stat().st_size for path in files]
    with progress.stage(f"hashing {source}", sum(sizes) or None) as advance:
        return [(str(path), file_digest(path)) for path in metered(files, sizes, advance)]


def _size(source: Source) -> int | None:
    """Return the bytes of a source; None where they are only known when read."""
    files = [] if source.name.startswith(HUB_PREFIX) else source_files(source)
    return None if any(map(is_compressed, files)) else sum(path.stat().st_size for path in files) or None


def encode_here[Tag](encoder: RowEncoder, jobs: Iterable[tuple[Sequence[Row], Tag]]) -> Iterator[tuple[Encoded, Tag]]:
    """Yield the documents of each chunk of rows with the chunk's tag."""
    return ((encoder.encode(chunk), tag) for chunk, tag in jobs)


def encode_in_processes[Tag](
    encoder: RowEncoder, jobs: Iterable[tuple[Sequence[Row], Tag]], workers: int
) -> Iterator[tuple[Encoded, Tag]]:
    """Yield the documents of each chunk of rows with the chunk's tag, tokenized by as many processes.

    Raises:
        ValueError: an unusable row, or a killed process.
    """
    context = multiprocessing.get_context("spawn")  # forking with JAX's threads may hang
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_install, initargs=(encoder,)) as pool:
        submitted = ((_submit(pool, chunk), tag) for chunk, tag in jobs)
        pending = deque(islice(submitted, 2 * workers))
        while pending:
            job, tag = pending.popleft()
            try:
                result = job.result()
                pending.extend(islice(submitted, 1))
            except BrokenProcessPool as error:
                raise ValueError("a tokenizing process was killed, as for want of memory: lower --workers") from error
            yield result, tag


_main_hidden = threading.Lock()


def _submit(pool: ProcessPoolExecutor, chunk: Sequence[Row]) -> "Future[Encoded]":
    with _without_main():  # a process that the chunk needs starts here
        return pool.submit(_encode_chunk, chunk)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the caller's script, which each spawned process would run again unless it asks for `__main__`."""
    with _main_hidden:
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


_encoder: RowEncoder
"""Encoder of a worker process, set by `_install`."""


def _install(encoder: RowEncoder) -> None:
    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel already
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process with its parent, even when that is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode_chunk(rows: Sequence[Row]) -> Encoded:
    return _encoder.encode(rows)
