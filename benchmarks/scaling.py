"""Measure training steps on 1, 2, 4, 8 GPUs of one host: tokens/s, efficiency, and exposed collectives.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json
    python benchmarks/scaling.py --suite hgx --json benchmarks/results/hgx.json              # all GPUs against targets
    python benchmarks/scaling.py --suite hgx --gpus 4 --json benchmarks/results/hgx_4.json

Every case runs in its own process (benchmarks/scaling_step.py), so that its peak is its own; cases run in parallel
while GPUs are free. A step is loss, gradients and AdamW of a packed row of 16,384 tokens for each GPU.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from measure import table, write_results
from scaling_suite import hgx_cases, verdicts

CASES = (
    "8b-lora:data=1",
    "32b-nf4:data=1",
    "30b-a3b-lora:expert=2",
    "8b-full:fsdp=2",
    "8b-lora:data=2",
    "8b-lora:data=4",
    "8b-full:fsdp=4",
    "30b-a3b-lora:expert=4",
    "32b-lora:fsdp=4",
    "30b-a3b-lora:data=2,expert=2",
    "8b-lora:data=8",
    "8b-full:fsdp=8",
    "30b-a3b-lora:data=4,expert=2",
)
"""Model and mesh, parallel cases first; cases for more GPUs than the host has are skipped."""


@dataclass
class Case:
    """A running case."""

    name: str
    gpus: list[str]
    process: subprocess.Popen
    files: tuple[IO[str], IO[str]]
    """Its standard output and errors."""
    begun: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, name: str, gpus: list[str], args: argparse.Namespace) -> "Case":
        # NCCL's buffers are outside of what JAX preallocates.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9" if len(gpus) == 1 else "0.85"}
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        script = "scaling_kill.py" if name.startswith("kill:") else "scaling_step.py"
        command = [sys.executable, str(Path(__file__).with_name(script)), name, "--steps", str(args.steps)]
        command += ["--no-trace"] if name.partition(":")[0] in args.no_trace else []
        files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when it is over)
        process = subprocess.Popen(command, env=environment, stdout=files[0], stderr=files[1])
        return cls(name, gpus, process, files)

    def is_over(self, limit: float) -> bool:
        if time.monotonic() - self.begun > limit:
            self.process.kill()
            self.process.wait()
        return self.process.poll() is not None

    def result(self) -> dict:
        """Return the last printed line of JSON, with the error if the process failed."""
        for file in self.files:
            file.seek(0)
        printed, errors = (file.read().strip() for file in self.files)
        lines = [line for line in printed.splitlines() if line.startswith("{")]
        row = json.loads(lines[-1]) if lines else {"case": self.name, "gpus": len(self.gpus)}
        if self.process.returncode:
            row["error"] = f"exit {self.process.returncode}: {errors[-600:]}"
        return row


def gpus_of(case: str) -> int:
    """Return the number of GPUs of a case's mesh."""
    return math.prod(map(int, re.findall(r"=(\d+)", case)))


def run_all(cases: list[str], gpus: list[str], args: argparse.Namespace) -> list[dict]:
    """Run every case as soon as enough GPUs are free, in the given order."""
    waiting, running, results, free = list(cases), [], [], list(gpus)
    while waiting or running:
        for name in [name for name in waiting if gpus_of(name) <= len(free)]:
            if (count := gpus_of(name)) <= len(free):
                running.append(Case.start(name, free[:count], args))
                free = free[count:]
                waiting.remove(name)
        for case in [case for case in running if case.is_over(args.limit)]:
            running.remove(case)
            free += case.gpus
            results.append(case.result())
            print(json.dumps(results[-1]), flush=True)
            if args.json:
                save(args.json, results, len(gpus) if args.suite else None)
        time.sleep(0.2)
    return results


def with_efficiency(results: list[dict]) -> list[dict]:
    """Add each GPU's tokens/s relative to the smallest mesh of the same model."""
    first: dict[str, dict] = {}
    for row in sorted((row for row in results if "ms" in row), key=lambda row: row["gpus"]):
        base = first.setdefault(row["case"].partition(":")[0], row)
        rate, base_rate = (r["tokens_per_second"] / r["gpus"] for r in (row, base))
        row["efficiency"] = None if row is base else rate / base_rate
        row["tokens_per_second_per_gpu"] = rate
    return results


def save(path: Path, results: list[dict], gpus: int | None) -> None:
    """Write the rows, and of a suite on `gpus` GPUs the verdicts."""
    rows = with_efficiency(results)
    gpu = next((row["gpu"] for row in results if "gpu" in row), "none")
    write_results(path, {"rows": rows, "targets": verdicts(rows, gpus)} if gpus else rows, gpu=gpu)


def scaling_table(results: list[dict]) -> str:
    """Format the rows of training steps."""
    columns = {
        "tokens/s": ("tokens_per_second", ",.0f"),
        "efficiency": ("efficiency", ".1%"),
        "ms": ("ms", ".1f"),
        "MFU": ("mfu", ".1%"),
        "collectives ms": ("collectives_ms", ".1f"),
        "exposed ms": ("exposed_ms", ".1f"),
        "peak GiB": ("peak_gib", ".1f"),
        "start s": ("start_s", ".0f"),
    }
    lines = [["case", "GPUs", *columns], ["---"] * (2 + len(columns))]
    for row in (row for row in results if "ended_s" not in row):
        values = [format(row[key], spec) if row.get(key) is not None else "–" for key, spec in columns.values()]
        lines.append([row["case"] + (" (failed)" if "error" in row else ""), str(row["gpus"]), *values])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def visible_gpus() -> list[str]:
    """List the GPUs with nvidia-smi: JAX would take their memory in this process."""
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return chosen.split(",")
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    return [str(number) for number, _ in enumerate(listed.splitlines())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", help=f"default: those of these that fit: {' '.join(CASES)}")
    parser.add_argument("--suite", choices=["hgx"], help="cases with targets: see scaling_suite.py")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-trace", nargs="+", default=[], help="models whose steps are too long to trace")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a case")
    parser.add_argument("--gpus", type=int, help="number to use; default: all that nvidia-smi lists")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gpus = visible_gpus()[: args.gpus]
    chosen = hgx_cases(len(gpus)) if args.suite else [case for case in CASES if gpus_of(case) <= len(gpus)]
    cases = args.cases or chosen
    if too_large := [case for case in cases if gpus_of(case) > len(gpus)]:
        parser.error(f"{', '.join(too_large)}: there are {len(gpus)} GPUs")
    results = with_efficiency(run_all(cases, gpus, args))
    print(scaling_table(results))
    if args.suite:
        print("\n" + table(verdicts(results, len(gpus))))


if __name__ == "__main__":
    main()
