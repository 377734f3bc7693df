"""Where the GPU's time goes in a profiler trace, such as `scripts/train.py --profile 3` writes.

python benchmarks/kernel_profile.py runs/latest/profile --steps 3
"""

import argparse
import re
from collections import Counter
from pathlib import Path

from jax.profiler import ProfileData

from jaxglue.memory.trace import copy_overlap


def kernel_times(folder: Path) -> tuple[Counter, Counter]:
    """(milliseconds, launches) by kernel name, numbers in the names left out, on the first GPU."""
    newest = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    planes = ProfileData.from_file(str(newest)).planes
    gpu = next(plane for plane in planes if plane.name.startswith("/device:GPU"))
    times, launches = Counter(), Counter()
    for line in gpu.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                name = re.sub(r"[_.]?\d+(?=$|_)", "", event.name)[:70]
                times[name] += event.duration_ns / 1e6
                launches[name] += 1
    return times, launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=1, help="steps in the trace, to divide by")
    parser.add_argument("--top", type=int, default=25)
    args = parser.parse_args()
    times, launches = kernel_times(args.trace)
    whole = copy_overlap(args.trace)
    print(f"GPU busy {whole.busy / args.steps:.2f} of {whole.span / args.steps:.2f} ms a step, ", end="")
    print(f"{sum(launches.values()) / args.steps:,.0f} launches and copies")
    print("| kernel | ms a step | share | launches |\n|---|---|---|---|")
    total = sum(times.values())
    for name, milliseconds in times.most_common(args.top):
        share, count = milliseconds / total, launches[name] / args.steps
        print(f"| {name} | {milliseconds / args.steps:.3f} | {share:.1%} | {count:.0f} |")


if __name__ == "__main__":
    main()
