"""Concurrent measurements, each in processes that see one GPU; what nvidia-smi says of GPUs that JAX leaves alone."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue


def ask_gpu(field: str) -> str | None:
    """Return a field of the first GPU by nvidia-smi, such as `name` or `memory.used` in MiB; None without a GPU."""
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(query, text=True).splitlines()[0]
    return None


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
