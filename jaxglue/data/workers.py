"""Tokenizing of chunks of rows, here or in worker processes, in order."""

import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import wait
from types import ModuleType

from jaxglue.data.encode import Encoded, Encoder
from jaxglue.data.files import Row


def encode_here[Tag](encoder: Encoder, jobs: Iterable[tuple[Sequence[Row], Tag]]) -> Iterator[tuple[Encoded, Tag]]:
    """Yield the documents of each chunk of rows with the chunk's tag."""
    return ((encoder.encode(chunk), tag) for chunk, tag in jobs)


def encode_in_processes[Tag](
    encoder: Encoder, jobs: Iterable[tuple[Sequence[Row], Tag]], workers: int
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


_encoder: Encoder
"""Encoder of a worker process, set by `_install`."""


def _install(encoder: Encoder) -> None:
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
