"""Where the GPU's time goes in a profiler trace, such as `scripts/train.py --profile 3` writes, beside its limits.

python benchmarks/kernel_profile.py runs/latest/profile --steps 3

A kernel's limit is the time that its matmuls take at the GPU's rate or its bytes at that of its memory, whichever is
longer; kernels whose FLOPs the program does not tell, such as attention's, are held against their bytes alone.
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
"""FLOP/s and bytes/s that an H200 was measured to reach."""


class Kernel(NamedTuple):
    """All launches of a kernel with the same work."""

    name: str
    shape: str
    """Of its operation's first result."""
    milliseconds: float
    launches: int
    flops: float
    """Of all launches; 0 where the program does not tell."""
    bytes: float


def kernel_times(folder: Path, flops: Mapping[str, float] | None = None) -> list[Kernel]:
    """Kernels and copies on the first GPU in a folder's newest trace, the longest first; no numbers in their names.

    Args:
        folder: what was given to `jax.profiler.trace`.
        flops: of a launch of those kernels, by name, that the program tells nothing of.
    """
    newest = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    gpu = next(plane for plane in ProfileData.from_file(str(newest)).planes if plane.name.startswith("/device:GPU"))
    events = [event for line in gpu.lines if line.name.startswith("Stream") for event in line.events]
    runs: dict[int, list] = defaultdict(list)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of jaxlib's own making
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
    """The driver's copies and fills, and its kernels for them in CUDA graphs."""
    return name.lower().startswith("mem")


def is_copy(kernel: Kernel) -> bool:
    """Whether it is no kernel but a copy or a fill by the driver."""
    return _copies(kernel.name)


def profile_rows(kernels: list[Kernel], *, steps: int = 1, top: int = 25) -> list[dict]:
    """The table's rows, the rest of the kernels added up in the last one; copies, which run beside them, left out."""
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
