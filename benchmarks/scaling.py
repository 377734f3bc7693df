"""Measure training steps on 1, 2, 4, 8 GPUs of one host: tokens/s, efficiency, and exposed collectives.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json
    python benchmarks/scaling.py --suite hgx --json benchmarks/results/hgx.json              # all GPUs against targets
    python benchmarks/scaling.py --suite hgx --gpus 4 --json benchmarks/results/hgx_4.json
    python benchmarks/scaling.py --suite hgx --gpus 4 --tiny                                 # a rehearsal on CPUs
    python benchmarks/scaling.py --suite train --rows bf16 small                             # scaling_train.py

Every case runs in its own process (benchmarks/scaling_step.py), so that its peak is its own; cases run in parallel
while GPUs are free. A step is loss, gradients and AdamW of a packed row of 16,384 tokens for each GPU. Results are
printed and stored as they come; a case that fails or takes too long leaves the others as they are.
"""

import argparse
import contextlib
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

import psutil
import scaling_train
from compare_checkouts import own_checkout
from measure import table, write_results
from scaling_suite import hgx_cases, is_shortened, verdicts

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
    seconds: float
    """Time after which it is killed."""
    begun: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, name: str, gpus: list[str], args: argparse.Namespace, seconds: float) -> "Case":
        """Start a case that may take `seconds`."""
        files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when it is over)
        environment = os.environ | own_checkout() | environment_of(gpus, args)
        process = subprocess.Popen(command_of(name, args), env=environment, stdout=files[0], stderr=files[1])
        return cls(name, gpus, process, files, seconds)

    def is_over(self) -> bool:
        """Return whether the case has ended; kill it once its time is over."""
        if self.process.poll() is None and time.monotonic() - self.begun > self.seconds:
            self.kill()
        return self.process.poll() is not None

    def kill(self) -> None:
        """Kill the process and those that it has started, which would hold their GPUs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for each in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self.process.wait()

    def result(self) -> dict:
        """Return the last whole line of JSON, with the error if the process failed."""
        for file in self.files:
            file.seek(0)
        printed, errors = (file.read().strip() for file in self.files)
        took = time.monotonic() - self.begun
        row = {"case": self.name, "gpus": len(self.gpus)} | last_row(printed) | {"seconds": round(took)}
        if status := self.process.returncode:
            late = f", killed after {self.seconds:.0f} s" if took > self.seconds else ""
            lines = [line for line in errors.splitlines() if not line.lstrip().startswith("@ ")]  # the stack
            row["error"] = f"exit {status}{late}: " + "\n".join(lines)[-600:]
        return row


def environment_of(gpus: list[str], args: argparse.Namespace) -> dict[str, str]:
    """Return a case's own variables: its GPUs, or as many CPU devices."""
    if args.tiny:  # a device that waits for another holds one of XLA's NPROC threads
        return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(len(gpus)), "NPROC": "32"}
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def command_of(name: str, args: argparse.Namespace) -> list[str]:
    """Return the command of a case."""
    if name.startswith("kill:"):
        return [sys.executable, str(Path(__file__).with_name("scaling_kill.py")), name]
    command = [sys.executable, str(Path(__file__).with_name("scaling_step.py")), name]
    model, most = name.partition(":")[0], dict(each.split("=") for each in args.layers)
    command += ["--steps", str(args.steps)] if args.steps else []
    command += ["--layers", most[model]] if model in most else []
    command += ["--tiny"] if args.tiny else []
    return command + (["--no-trace"] if model in args.no_trace else [])


def last_row(printed: str) -> dict:
    """Return the last line that is a whole JSON object; nothing without one."""
    for line in reversed(printed.splitlines()):
        with contextlib.suppress(ValueError):
            if line.startswith("{"):
                return json.loads(line)
    return {}


def gpus_of(case: str) -> int:
    """Return the number of GPUs of a case's mesh."""
    return math.prod(map(int, re.findall(r"=(\d+)", case)))


def run_all(cases: list[str], gpus: list[str], args: argparse.Namespace) -> list[dict]:
    """Run every case as soon as enough GPUs are free, in the given order, until `--budget` is spent."""
    waiting, results, free, end = list(cases), [], list(gpus), time.monotonic() + args.budget
    running: list[Case] = []

    def add(row: dict) -> None:
        results.append(row)
        print(json.dumps(row), flush=True)
        if args.json:
            save(args.json, results, len(gpus) if args.suite else None)

    try:
        while waiting or running:
            left = end - time.monotonic()
            while waiting and left <= 0:
                name = waiting.pop(0)
                add({"case": name, "gpus": gpus_of(name), "not_run": f"not begun within {args.budget:.0f} s"})
            for name in list(waiting):
                if (count := gpus_of(name)) <= len(free):
                    running.append(Case.start(name, free[:count], args, min(args.limit, left)))
                    free = free[count:]
                    waiting.remove(name)
            for case in [case for case in running if case.is_over()]:
                running.remove(case)
                free += case.gpus
                add(case.result())
            time.sleep(0.1)
    finally:
        for case in running:
            case.kill()
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
        layers = f" ({row['layers']} of {row['of_layers']} layers)" if is_shortened(row) else ""
        outcome = " (failed)" if "error" in row else " (not run)" if "not_run" in row else ""
        lines.append([row["case"] + layers + outcome, str(row["gpus"]), *values])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def visible_gpus() -> list[str]:
    """List the GPUs with nvidia-smi: JAX would take their memory in this process."""
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return chosen.split(",")
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    return [str(number) for number, _ in enumerate(listed.splitlines())]


def main() -> None:
    if sys.argv[1:3] == ["--suite", "train"]:
        scaling_train.main(sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", help=f"default: those of these that fit: {' '.join(CASES)}")
    parser.add_argument(
        "--suite", choices=["hgx"], help="cases with targets: see scaling_suite.py; train: scaling_train.py"
    )
    parser.add_argument("--steps", type=int, help="timed steps of a case; default 6, of the longest models 3")
    parser.add_argument("--layers", nargs="+", default=[], help="most layers of models, as 70b-lora=16; by default all")
    parser.add_argument("--tiny", action="store_true", help="tiny models on CPUs, to rehearse")
    parser.add_argument("--no-trace", nargs="+", default=[], help="models whose steps are too long to trace")
    parser.add_argument("--limit", type=float, default=200, help="seconds for a case")
    parser.add_argument("--budget", type=float, help="seconds for all cases; default 530 for a suite")
    parser.add_argument("--gpus", type=int, help="number to use; default: all that nvidia-smi lists")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gpus = [str(number) for number in range(args.gpus or 4)] if args.tiny else visible_gpus()[: args.gpus]
    if args.suite and len(gpus) < 2:
        parser.error(f"--suite compares several GPUs with one: there is {len(gpus)}")
    if args.budget is None:
        args.budget = 530 if args.suite else math.inf
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
