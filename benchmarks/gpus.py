"""Measurements side by side: each in processes of its own, which see one GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue


class FreeGpus:
    """The GPUs that measurements take turns on."""

    def __init__(self, count: int):
        self._count, self._free = count, SimpleQueue[int]()
        for gpu in range(count):
            self._free.put(gpu)

    @contextmanager
    def one(self) -> Iterator[dict[str, str]]:
        """Waits for a GPU; what a process's environment says about it, nothing where there is no choice."""
        gpu = self._free.get()
        try:
            yield {"CUDA_VISIBLE_DEVICES": str(gpu)} if self._count > 1 else {}
        finally:
            self._free.put(gpu)
