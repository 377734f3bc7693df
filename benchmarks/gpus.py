"""Concurrent measurements, each in processes that see one GPU; what nvidia-smi says of GPUs that JAX leaves alone."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue


def ask_gpu(field: str) -> str | None:
    """Return a field of this process's first GPU by nvidia-smi, such as `name` or `memory.used` in MiB; None without.

    nvidia-smi itself lists all GPUs, whichever of them CUDA_VISIBLE_DEVICES names.
    """
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    query += ["--id", chosen] if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
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
