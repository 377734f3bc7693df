"""Train with one process a GPU, kill one with SIGKILL, and resume on all and on half of the GPUs.

    python benchmarks/scaling_kill.py kill:data=4

Prints a line of JSON: seconds until every other process named the dead one and ended, and how the losses of both
resumed runs differ from those of an undisturbed one. A tiny Llama in float32, not tf32; without GPUs on CPUs.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from check_runs import LORA, ROOT, Runs, difference, last_step
from compare_checkouts import losses
from scaling import gpus_of, visible_gpus

STEPS, KILL_AT = 60, 25
_PATIENCE = 300.0
"""Longest wait for a run to reach a step or to end, seconds."""


class ProcessesPerGpu:
    """Runs of one process a GPU.

    Args:
        runs: where they write.
        rows: rows of a batch, over all processes.
        gpus: numbers of the GPUs; empty on a host without.
    """

    def __init__(self, runs: Runs, rows: int, gpus: list[str]):
        self._runs, self._rows, self._gpus = runs, rows, gpus
        self._started: list[subprocess.Popen] = []

    def start(self, name: str, count: int, *, resume: bool = False) -> list[subprocess.Popen]:
        """Start a run in `count` processes."""
        flags = {"family": "llama", **LORA, "dtype": "float32", "batch-size": self._rows, "steps": STEPS}
        command = self._runs.command(name, flags | {"mesh": f"data={count}"}, resume=resume)
        command += ["--coordinator", f"127.0.0.1:{_free_port()}", "--num-processes", str(count)]
        started = [self._start_one(name, [*command, "--process-id", str(index)], index) for index in range(count)]
        self._started += started
        return started

    def _start_one(self, name: str, command: list[str], index: int) -> subprocess.Popen:
        own = {"CUDA_VISIBLE_DEVICES": self._gpus[index]} if self._gpus else {"JAX_NUM_CPU_DEVICES": "1"}
        own["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
        with self.log(name, index).open("a") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=self._runs.environment | own, stdout=log, stderr=subprocess.STDOUT
            )

    def stop(self) -> None:
        """Kill all processes that still run."""
        for process in self._started:
            process.kill()

    def log(self, name: str, index: int) -> Path:
        """Return the file of a process's output."""
        return self._runs.folder(name) / f"log{index}.txt"

    def train(self, name: str, count: int, *, resume: bool = False) -> Path:
        """Train to the end and return the run's folder.

        Raises:
            RuntimeError: a process fails, with the end of its output.
        """
        processes = self.start(name, count, resume=resume)
        for index, process in enumerate(processes):
            if status := process.wait(_PATIENCE):
                raise RuntimeError(
                    f"{name}: process {index} ended with {status}: {self.log(name, index).read_text()[-600:]}"
                )
        return self._runs.folder(name)

    def kill_one(self, name: str, count: int) -> tuple[float, int]:
        """Kill the last process; return the seconds until the others ended, and how many of them named it."""
        processes = self.start(name, count)
        while last_step(self._runs.folder(name) / "run/metrics.jsonl") < KILL_AT:
            if any(process.poll() is not None for process in processes):
                raise RuntimeError(f"{name} ended before step {KILL_AT}: {self.log(name, 0).read_text()[-600:]}")
            time.sleep(0.01)
        processes[-1].kill()
        begun = time.monotonic()
        for process in processes:
            process.wait(_PATIENCE)
        ended = time.monotonic() - begun
        logs = [self.log(name, index).read_text() for index in range(count - 1)]
        return ended, sum(f"process {count - 1} on " in log and "died" in log for log in logs)


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def measure(case: str, gpus: list[str], scratch: Path) -> Iterator[dict]:
    """Yield the case's row once the others have named the dead process, and again with the resumed runs' losses."""
    count = gpus_of(case)
    runs = Runs(scratch)
    group = ProcessesPerGpu(runs, count, gpus)
    try:
        # First and alone: runs that share its programs and compile at once may tune them to different algorithms.
        seconds, named = group.kill_one("all-killed", count)
        row = {"case": case, "gpus": count, "ended_s": seconds, "named_by": named}
        yield row
        for name in ("all-moved", "half"):
            shutil.copytree(runs.folder("all-killed"), runs.folder(name))
        with ThreadPoolExecutor() as pool:
            undisturbed = pool.submit(group.train, "all", count)
            resumed = [pool.submit(group.train, "all-moved", count, resume=True)]
            resumed += [pool.submit(group.train, "half", count // 2, resume=True)]
            expected, on_all, on_half = (future.result() for future in (undisturbed, *resumed))
    finally:
        group.stop()
    resumed_on_all = difference(expected, on_all) or "equal"
    yield row | {"resumed_on_all": resumed_on_all, "resumed_on_half": largest_difference(expected, on_half)}


def largest_difference(expected: Path, found: Path) -> float:
    """Return the largest relative difference of any step's loss; infinity where steps are missing."""
    before, after = dict(losses(expected)), dict(losses(found))
    if before.keys() != after.keys():
        return float("inf")
    return max(abs(after[step] / value - 1) for step, value in before.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", help="kill, a colon, and the mesh, such as data=4")
    args, _ = parser.parse_known_args()
    gpus = [] if os.environ.get("JAX_PLATFORMS") == "cpu" else visible_gpus()
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(args.case, gpus, Path(folder)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
