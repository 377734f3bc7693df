"""Host memory of a measurement, counted the same way for every engine."""

import contextlib
import os
from collections import defaultdict
from pathlib import Path


class HostMemory:
    """Memory in use since an engine's process began, GiB: its own, its children's, and pinned, without the page cache.

    A process does not know what its driver pins, so this is the machine's memory in use, without what other processes
    hold and files in /dev/shm. Meant for a machine on which nothing else pins memory meanwhile.
    """

    def __init__(self) -> None:
        own, in_use = _measure()
        self._before = in_use - own

    def added(self) -> float:
        """Return what is in use beyond the beginning."""
        return round(_measure()[1] - self._before, 2)


def _measure(proc: Path = Path("/proc"), shm: Path = Path("/dev/shm")) -> tuple[float, float]:
    """Return the GiB of pages that this process and its children hold, and what is in use without others' pages."""
    machine, files = _fields(proc / "meminfo"), os.statvfs(shm)
    held, children = {}, defaultdict(list)
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError, KeyError):  # it ended meanwhile; the kernel's own hold nothing
            fields = _fields(process / "status")
            held[int(process.name)] = int(fields["RssAnon" if "RssAnon" in fields else "VmRSS"]) / 2**20
            children[int(fields["PPid"])].append(int(process.name))
    tree = [os.getpid()]
    for process in tree:
        tree += children[process]
    own = sum(held[process] for process in tree)
    in_use = (int(machine["MemTotal"]) - int(machine["MemAvailable"])) / 2**20
    return own, in_use - (sum(held.values()) - own) - (files.f_blocks - files.f_bfree) * files.f_frsize / 2**30


def _fields(file: Path) -> dict[str, str]:
    """Return the first word of each field."""
    lines = (line.partition(":") for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    return {name: value.split()[0] for name, _, value in lines if value.strip()}
