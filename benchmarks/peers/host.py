"""Host memory of a measurement, counted the same way for every engine."""

from pathlib import Path


class HostMemory:
    """The machine's memory in use since an engine began, GiB: its own and pinned pages, without the page cache.

    Meant for a machine on which nothing else runs: a process does not know what its driver pins.
    """

    def __init__(self) -> None:
        self._before = _in_use()

    def added(self) -> float:
        """Return what is in use beyond the beginning."""
        return round(_in_use() - self._before, 2)


def _in_use() -> float:
    kib = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, value = line.split(":")
        kib[name] = int(value.split()[0])
    return (kib["MemTotal"] - kib["MemAvailable"]) / 2**20
