"""Pinned host memory in the size that is needed, its pages taken by several threads.

JAX allocates a region of its pool and lets CUDA pin it, which takes the pages one after another: 1 to 3 GiB/s. Pages
that are there already are pinned at 20 GiB/s and more.
"""

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

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
    """Take bytes of pinned memory into the pool of JAX at once, in whole MiB: one array that is never written."""
    row = jnp.zeros((1, _ROW), jnp.uint8)
    host = pinned_host(jax.local_devices()[0])
    allocate = jax.jit(partial(_unwritten, size // _ROW), out_shardings=host).lower(row).compile()
    done = threading.Event()
    with ThreadPoolExecutor(1) as helper:
        helper.submit(_take_new_pages, size, _mappings(), done)
        try:
            jax.block_until_ready(allocate(row))
        finally:
            done.set()


def _unwritten(rows: int, row: jax.Array) -> jax.Array:
    """Return rows in host memory of which one is written; XLA allocates the others without a value."""
    host = jax.memory.Space.Host
    array = jax.device_put(jnp.zeros((rows, row.size), row.dtype), host)
    return jax.lax.dynamic_update_slice(array, jax.device_put(row, host), (0, 0))


def _take_new_pages(size: int, before: list[range], done: threading.Event) -> None:
    """Wait for a mapping of at least `size` bytes that was not there before; take its pages with several threads."""
    while not done.wait(_POLL_SECONDS):
        for part in _new_parts(before, _mappings()):
            if len(part) >= size:
                take_pages(part)
                return


def take_pages(addresses: range) -> None:
    """Let the kernel assign memory to a range of addresses, whatever it holds, by several threads."""
    chunks = [addresses[first : first + _CHUNK] for first in range(0, len(addresses), _CHUNK)]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(lambda chunk: _libc().madvise(chunk.start, len(chunk), _POPULATE_WRITE), chunks))


@cache
def _libc() -> Any:
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
