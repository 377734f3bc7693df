"""Break down a profiler trace (`scripts/train.py --profile 3`) by kernel, with each kernel's limit.

python benchmarks/kernel_profile.py runs/latest/profile --steps 3

A kernel's limit is the longer of its FLOPs at the matmul rate and its bytes at the memory rate; kernels of unknown
FLOPs, such as attention's, count bytes alone.
"""

import argparse
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData
from measure import table
from programs import UNKNOWN, Work, read_programs
from traces import copy_overlap

MATMUL, COPY = 790e12, 4.3e12
"""Measured FLOP/s and bytes/s of an H200."""


class Kernel(NamedTuple):
    """Launches of a kernel with equal work."""

    name: str
    shape: str
    """Shape of the operation's first result."""
    milliseconds: float
    launches: int
    flops: float
    """FLOPs of all launches; 0 if unknown."""
    bytes: float


def kernel_times(folder: Path, flops: Mapping[str, float] | None = None) -> list[Kernel]:
    """Return kernels and copies of a folder's newest trace on the first GPU, longest first, without name suffixes.

    Args:
        folder: of `jax.profiler.trace`.
        flops: per launch by kernel name, where the program lacks them.
    """
    newest = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    gpu = next(plane for plane in ProfileData.from_file(str(newest)).planes if plane.name.startswith("/device:GPU"))
    events = [event for line in gpu.lines if line.name.startswith("Stream") for event in line.events]
    runs: dict[int, list] = defaultdict(list)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # from jaxlib itself
        for event in sorted(events, key=lambda event: event.start_ns):
            runs[-1 if _copies(event.name) else int(dict(event.stats).get("program_id", -1))].append(event)
    programs, spent = read_programs(newest), defaultdict[tuple[str, Work], list[float]](list)
    for number, ran in runs.items():
        names = [event.name for event in ran]
        work = programs[number].work(names) if number in programs else [UNKNOWN] * len(ran)
        for event, each in zip(ran, work, strict=True):
            name = re.sub(r"[_.]?\d+(?=$|_)", "", event.name)
            spent[name, each._replace(flops=(flops or {}).get(name, each.flops))].append(event.duration_ns / 1e6)
    kernels = [
        Kernel(name, each.shape, sum(times), len(times), each.flops * len(times), each.bytes * len(times))
        for (name, each), times in spent.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.milliseconds)


def _copies(name: str) -> bool:
    """Return whether a name is a driver copy or fill, or its kernel in a CUDA graph."""
    return name.lower().startswith("mem")


def is_copy(kernel: Kernel) -> bool:
    """Return whether a kernel is a driver copy or fill."""
    return _copies(kernel.name)


def profile_rows(kernels: list[Kernel], *, steps: int = 1, top: int = 25) -> list[dict]:
    """Return the table's rows without copies; the last row sums the remaining kernels."""
    kernels = [kernel for kernel in kernels if not is_copy(kernel)]
    total = sum(kernel.milliseconds for kernel in kernels)
    rest = kernels[top:]
    if rest:
        sums = [sum(values) for values in zip(*(kernel[2:] for kernel in rest), strict=True)]
        kernels = [*kernels[:top], Kernel(f"{len(rest)} others", "", sums[0], int(sums[1]), 0.0, 0.0)]
    return [_row(kernel, total, steps) for kernel in kernels]


def _row(kernel: Kernel, total: float, steps: int) -> dict:
    seconds = kernel.milliseconds / 1e3
    matmul, copy = kernel.flops / MATMUL, kernel.bytes / COPY
    bound = (
        f"{kernel.flops / seconds / 1e12:.0f} TFLOP/s" if matmul > copy else f"{kernel.bytes / seconds / 1e9:,.0f} GB/s"
    )
    known = kernel.bytes > 0
    return {
        "kernel": kernel.name[:60],
        "result": kernel.shape,
        "ms a step": f"{kernel.milliseconds / steps:.3f}",
        "share": f"{kernel.milliseconds / total:.1%}",
        "launches": f"{kernel.launches / steps:.0f}",
        "rate": bound if known else "-",
        "of the limit": f"{max(matmul, copy) / seconds:.0%}" if known else "-",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=1, help="steps in the trace, to divide by")
    parser.add_argument("--top", type=int, default=25)
    args = parser.parse_args()
    kernels = kernel_times(args.trace)
    whole = copy_overlap(args.trace)
    print(f"GPU busy {whole.busy / args.steps:.2f} of {whole.span / args.steps:.2f} ms a step, ", end="")
    print(f"{sum(kernel.launches for kernel in kernels) / args.steps:,.0f} launches and copies")
    print(table(profile_rows(kernels, steps=args.steps, top=args.top)))


if __name__ == "__main__":
    main()
