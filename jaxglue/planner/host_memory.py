"""Free memory of the host, within a container's limit."""

import contextlib
from pathlib import Path

import psutil

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
