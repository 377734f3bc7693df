"""Concurrent measurements, each in processes that see one GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue


class FreeGpus:
    """Pool of GPUs for measurements."""

    def __init__(self, count: int):
        self._count, self._free = count, SimpleQueue[int]()
        for gpu in range(count):
            self._free.put(gpu)

    @contextmanager
    def one(self) -> Iterator[dict[str, str]]:
        """Wait for a GPU and yield the environment variables that select it."""
        gpu = self._free.get()
        try:
            yield {"CUDA_VISIBLE_DEVICES": str(gpu)} if self._count > 1 else {}
        finally:
            self._free.put(gpu)
