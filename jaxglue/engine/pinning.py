"""Pinned host memory in the size that is needed, its pages taken by several threads.

JAX allocates a region of its pool and lets CUDA pin it, which takes the pages one after another: 1 to 3 GiB/s. Pages
that are there already are pinned at 20 GiB/s and more.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxglue.engine.transfer import pinned_host

_ROW = 2**20
"""Bytes of a row of the array that `pin` allocates."""
_CHUNK = 2**28
"""Bytes whose pages one thread takes at a time."""
_THREADS = 16
_POPULATE_WRITE = 23
"""Advice of Linux to take a range's pages, whatever is in them (MADV_POPULATE_WRITE)."""
_POLL_SECONDS = 0.002


def pin(size: int) -> None:
    """Take bytes of pinned memory into the pool of JAX at once, in whole MiB: one array that is never written.

    Call it while nothing else runs: CUDA holds the lock of the process's mappings, and whoever waits to add or remove
    one keeps the threads from it, too.
    """
    row = jnp.zeros((1, _ROW), jnp.uint8)
    host = pinned_host(jax.local_devices()[0])
    allocate = jax.jit(partial(_unwritten, size // _ROW), out_shardings=host).lower(row).compile()
    with taking_pages_of_next_mapping(size):
        jax.block_until_ready(allocate(row))


def _unwritten(rows: int, row: jax.Array) -> jax.Array:
    """Return rows in host memory of which one is written; XLA allocates the others without a value."""
    host = jax.memory.Space.Host
    array = jax.device_put(jnp.zeros((rows, row.size), row.dtype), host)
    return jax.lax.dynamic_update_slice(array, jax.device_put(row, host), (0, 0))


@contextlib.contextmanager
def taking_pages_of_next_mapping(size: int) -> Iterator[None]:
    """Take the pages of the first mapping of at least `size` bytes that appears inside, by several threads.

    The threads begin before, as their stacks are mappings.
    """
    found: Future[range] = Future()
    done, count, before, libc = threading.Event(), min(_THREADS, os.cpu_count() or 1), _mappings(), _libc()
    with ThreadPoolExecutor(count + 1) as threads:
        for index in range(count):
            threads.submit(_take_share, libc, found, index * _CHUNK, count * _CHUNK)
        threads.submit(_find_new, found, size, before, done)
        try:
            yield
        finally:
            done.set()


def _find_new(found: Future[range], size: int, before: list[range], done: threading.Event) -> None:
    """Wait for addresses of at least `size` bytes that no mapping covered before."""
    parts: list[range] = []
    try:
        while not parts and not done.wait(_POLL_SECONDS):
            parts = [part for part in _new_parts(before, _mappings()) if len(part) >= size]
    finally:
        found.set_result(parts[0] if parts else range(0))


def _take_share(libc: ctypes.CDLL, found: Future[range], first: int, step: int) -> None:
    """Let the kernel assign memory to every `step`-th chunk of a range of addresses, whatever it holds."""
    for start in found.result()[first::step]:
        libc.madvise(start, min(_CHUNK, found.result().stop - start), _POPULATE_WRITE)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return libc


def _mappings() -> list[range]:
    """Return this process's writable mappings that no file backs, in order of their addresses."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, inode, *_ = line.split()
        if mode.startswith("rw") and inode == "0":
            first, _, last = addresses.partition("-")
            found.append(range(int(first, 16), int(last, 16)))
    return found


def _new_parts(before: Iterable[range], after: Iterable[range]) -> Iterator[range]:
    """Yield the parts of mappings after that no mapping before covers; the kernel joins neighbors."""
    before = list(before)
    for mapping in after:
        start = mapping.start
        for old in before:
            if old.stop > start and old.start < mapping.stop:
                if old.start > start:
                    yield range(start, old.start)
                start = old.stop
        if start < mapping.stop:
            yield range(start, mapping.stop)
