"""Memory of the host: free within a container's limit, and how much of it may be pinned."""

import contextlib
from collections.abc import MutableMapping
from pathlib import Path

import psutil

from jaxglue.planner.gpus import GIB

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable with the most GiB of host memory that JAX pins."""
DEFAULT_PINNED_GIB = 64
"""The same where it is not set."""
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Files of a container's memory limit, its use, and the use's parts, of version 2 and 1."""


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of host memory that this process may still take, within its container's limit."""
    free = psutil.virtual_memory().available
    for names in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            limit, used, parts = ((cgroup / name).read_text() for name in names)
            cached = (line.split()[1] for line in parts.splitlines() if line.startswith(("active_file ", "inactive_f")))
            free = min(free, int(limit) - int(used) + sum(map(int, cached)))
    return free


def pinned_memory(available: float, limit_gib: str | None = None) -> float:
    """Return the bytes of host memory that may be pinned.

    Args:
        available: bytes of host memory that no process uses; a tenth is left free.
        limit_gib: value of `HOST_LIMIT`, None where it is not set.
    """
    return min(0.9 * available, float(limit_gib or DEFAULT_PINNED_GIB) * GIB)


def raise_pinned_limit(environ: MutableMapping[str, str]) -> None:
    """Let JAX, before it starts, pin nine tenths of the free host memory where that is more than its default."""
    free = int(0.9 * available_memory() / GIB)
    if free > DEFAULT_PINNED_GIB:
        environ.setdefault(HOST_LIMIT, str(free))
