"""Cached, parallel tokenization of all rows."""

import hashlib
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import batched, chain, islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.data.config import DataConfig
from jaxglue.data.encode import Encoded, Encoder
from jaxglue.data.formats import detect_format
from jaxglue.data.readers import HUB_PREFIX, Row, data_files, read_rows
from jaxglue.data.store import TokenStore, open_store, write_store

Progress = Callable[[int], None]
"""Callback with the number of rows tokenized so far."""

_VERSION = 1
"""Increment when the same rows yield different tokens or masks, to invalidate caches."""
_CHUNK = 512
_WORTH_PROCESSES = 64 * _CHUNK
"""Number of rows above which starting processes pays off."""


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """A token store with its row format and cache status."""

    store: TokenStore
    format: str
    cached: bool


def tokenize(
    sources: tuple[str, ...], config: DataConfig, tokenizer: PreTrainedTokenizerBase, progress: Progress | None = None
) -> Tokenized:
    """Tokenize the sources, or open the cached result.

    Raises:
        ValueError: no rows, or an unusable row, naming file and line.
    """
    folder = Path(config.cache_dir) / _cache_key(sources, config, tokenizer)
    cached = (folder / "info.json").is_file()
    if not cached:
        rows = read_rows(sources, split=config.split)
        head = list(islice(rows, _WORTH_PROCESSES + 1))
        format = _find_format(head, config.format, sources)
        encoder = Encoder(tokenizer, format=format, loss_on=config.loss_on)
        workers = config.workers or ((os.cpu_count() or 1) if len(head) > _WORTH_PROCESSES else 1)
        encoded = _encode(encoder, chain(head, rows), workers)
        write_store(folder, _counted(encoded, progress), format=format)
    store = open_store(folder)
    return Tokenized(store=store, format=store.info["format"], cached=cached)


def _find_format(head: list[Row], format: str, sources: tuple[str, ...]) -> str:
    if not head:
        raise ValueError(f"the data set is empty: no rows in {', '.join(sources)}")
    if format != "auto":
        return format
    try:
        return detect_format(head[0].value)
    except ValueError as error:
        raise ValueError(f"{head[0].origin}: {error}") from error


def _encode(encoder: Encoder, rows: Iterable[Row], workers: int) -> Iterator[Encoded]:
    chunks = batched(rows, _CHUNK)
    if workers == 1:
        yield from map(encoder.encode, chunks)
        return
    context = multiprocessing.get_context("spawn")  # forking with JAX's threads may hang
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_install, initargs=(encoder,)) as pool:
        pending = deque(pool.submit(_encode_chunk, chunk) for chunk in islice(chunks, 2 * workers))
        while pending:
            result = pending.popleft().result()
            pending.extend(pool.submit(_encode_chunk, chunk) for chunk in islice(chunks, 1))
            yield result


_encoder: Encoder
"""Encoder of a worker process, set by `_install`."""


def _install(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder


def _encode_chunk(rows: tuple[Row, ...]) -> Encoded:
    return _encoder.encode(rows)


def _counted(chunks: Iterable[Encoded], progress: Progress | None) -> Iterator[Encoded]:
    done = 0
    for chunk in chunks:
        done += len(chunk.lengths)
        if progress:
            progress(done)
        yield chunk


def _cache_key(sources: tuple[str, ...], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    backend = hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode(), digest_size=16).hexdigest()
    parts: list[Any] = [_VERSION, [_signature(source) for source in sources], config.split, config.format]
    parts += [config.loss_on, backend, tokenizer.chat_template, tokenizer.special_tokens_map]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _signature(source: str) -> list[Any]:
    """Return the files' names, sizes and modification times; for a hub data set, its name."""
    if source.startswith(HUB_PREFIX):
        return [source]
    stats = [(str(path.resolve()), path.stat()) for path in data_files(source)]
    return [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
