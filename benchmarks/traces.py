"""Read from a profiler trace how much of host copies and of collectives is hidden under computation."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

Span = tuple[float, float]


class CopyOverlap(NamedTuple):
    """Milliseconds on one GPU."""

    to_host: float
    """Device-to-host copies."""
    to_device: float
    """Host-to-device copies."""
    hidden: float
    """Milliseconds of copies in both directions while kernels run."""
    busy: float
    """While any kernel runs."""
    span: float
    """From the first kernel's start to the last one's end."""

    @property
    def hidden_share(self) -> float:
        """Share of the copies' time that is hidden, 0–1; 1 without copies."""
        copies = self.to_host + self.to_device
        return self.hidden / copies if copies else 1.0


class CollectiveOverlap(NamedTuple):
    """Milliseconds, mean over the GPUs."""

    collectives: float
    """While collectives run, waiting for slower GPUs included."""
    exposed: float
    """Milliseconds of these while no other kernel runs."""
    busy: float
    """While any kernel runs."""


def copy_overlap(folder: str | Path, *, shortest: float = 0.05) -> CopyOverlap:
    """Read the newest trace of `jax.profiler.trace(folder)`, without copies shorter than `shortest` ms.

    Raises:
        ValueError: the folder holds no trace, or one without a GPU.
    """
    events = gpu_events(folder)[0]
    kernels = [span for name, span in events if not name.startswith("Mem")]
    to_host, to_device = (
        [(start, end) for name, (start, end) in events if name == kind and end - start >= shortest]
        for kind in ("MemcpyD2H", "MemcpyH2D")
    )
    return overlap(to_host, to_device, kernels)


def collective_overlap(folder: str | Path) -> CollectiveOverlap:
    """Read the newest trace of `jax.profiler.trace(folder)`; raise ValueError as `copy_overlap` does."""
    gpus = [exposure(events) for events in gpu_events(folder)]
    return CollectiveOverlap(*(sum(values) / len(gpus) for values in zip(*gpus, strict=True)))


def kernel_milliseconds(folder: str | Path) -> dict[str, float]:
    """Return the time of all kernels and copies of a name on the first GPU, the longest first."""
    spent: dict[str, float] = {}
    for name, (start, end) in gpu_events(folder)[0]:
        spent[name] = spent.get(name, 0.0) + end - start
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def exposure(events: list[tuple[str, Span]]) -> CollectiveOverlap:
    """Compute `collective_overlap` of one GPU from its kernels' and copies' names, starts and ends (ms)."""
    collectives = _union(span for name, span in events if _is_collective(name))
    others = _union(span for name, span in events if not (_is_collective(name) or name.startswith("Mem")))
    total, hidden = _total(collectives), _intersection(collectives, others)
    return CollectiveOverlap(collectives=total, exposed=total - hidden, busy=_total(others) + total - hidden)


def _is_collective(name: str) -> bool:
    """Return whether a kernel or copy is between GPUs: NCCL's, XLA's own, or a copy from peer to peer."""
    plain = name.lower().replace("-", "").replace("_", "")
    return plain.startswith(("nccl", "memcpyp2p", "allreduce", "allgather", "reducescatter", "alltoall"))


def gpu_events(folder: str | Path) -> list[list[tuple[str, Span]]]:
    """Return for each GPU the name, start and end (ms) of every kernel and copy."""
    files = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ValueError(f"{folder}: no profiler trace (*.xplane.pb); record one with jax.profiler.trace")
    data = ProfileData.from_file(str(files[-1]))
    planes = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
    if not planes:
        raise ValueError(f"{files[-1]}: no GPU in the trace; record it on one")
    return [
        [
            (event.name, (event.start_ns / 1e6, (event.start_ns + event.duration_ns) / 1e6))
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
        for plane in planes
    ]


def overlap(to_host: list[Span], to_device: list[Span], kernels: list[Span]) -> CopyOverlap:
    """Compute `copy_overlap` from the start and end (ms) of every copy and kernel."""
    running = _union(kernels)
    return CopyOverlap(
        to_host=_total(to_host),
        to_device=_total(to_device),
        hidden=sum(_intersection(running, copies) for copies in (_union(to_host), _union(to_device))),
        busy=_total(running),
        span=running[-1][1] - running[0][0] if running else 0.0,
    )


def _union(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _intersection(left: list[Span], right: list[Span]) -> float:
    """Return the total overlap of two sorted lists of disjoint spans."""
    total, j = 0.0, 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            total += min(end, right[k][1]) - max(start, right[k][0])
            k += 1
    return total


def _total(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)
