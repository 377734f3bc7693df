"""Training runs of benchmarks/gpu_check.py: tiny families, killed runs, and one of a real shape."""

import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from compare_checkouts import ROOT, losses, make_model_folders, own_checkout, weights

SIZES = {"max_position_embeddings": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
SAVE_EVERY = 10
SHARED = {
    "data": "scripts/quickstart/chats.jsonl",
    "seq-len": 128,
    "batch-size": 2,
    "log-every": 1,
    "save-every": SAVE_EVERY,
}
LORA = {"random-weights": True, "learning-rate": 1e-3, "remat": "full"}
FULL = {"method": "full", "random-weights": True, "learning-rate": 1e-3, "remat": "dots"}
CASES: dict[str, dict[str, object]] = {
    "llama-full": {"family": "llama", **FULL},
    "llama": {"family": "llama", **LORA},
    "qwen3_moe": {"family": "qwen3_moe", **LORA},
    "gpt_oss": {"family": "gpt_oss", **LORA},
}
FAULTS = {"family": "llama", **LORA, "remat": "offload", "weights": "host", "quantize": "nf4"}
QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
_PATIENCE = 300.0
"""Longest wait for a step, seconds."""

Flags = Mapping[str, object]


class Runs:
    """Training runs in a scratch folder, with this checkout's jaxglue.

    Args:
        scratch: folder of models, runs, and the cache of compiled programs, which makes later starts short.
        timeout: seconds for one run.
    """

    def __init__(self, scratch: Path, timeout: float = 400.0):
        self._scratch, self._timeout = scratch.resolve(), timeout
        self.compiled = self._scratch / "compiled"
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.compiled), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self.environment = os.environ | own_checkout() | cache | memory
        make_model_folders(self._scratch / "models", {**SIZES, "moe_intermediate_size": 128})
        self._make_real_shape()

    def model(self, family: str) -> Path:
        """Return the folder of a family's model, without weights."""
        return self._scratch / "models" / family

    def folder(self, name: str) -> Path:
        """Return the folder of a run; its `run` holds the output."""
        return self._scratch / "runs" / name

    def train(self, name: str, flags: Flags) -> Path:
        """Train to the end and return the run's folder.

        Raises:
            RuntimeError: the run fails or takes too long, with the end of its output.
        """
        shutil.rmtree(self.folder(name), ignore_errors=True)
        self._finish(self._start(name, flags, resume=False), name)
        return self.folder(name)

    def train_with_kills(self, name: str, flags: Flags, kills: int) -> tuple[Path, int, int]:
        """Train while killing the process with SIGKILL at random steps; return folder, kills and resumes."""
        killed, rng = 0, random.Random(0)
        shutil.rmtree(self.folder(name), ignore_errors=True)
        for step in _spread(rng, SAVE_EVERY + 2, int(str(flags["steps"])) - 2, kills):
            process = self._start(name, flags, resume=self._output(name).exists())
            self._wait_for(process, name, step)
            time.sleep(rng.random() * 0.03)
            process.kill()
            killed += process.wait() != 0
        self._finish(self._start(name, flags, resume=self._output(name).exists()), name)
        resumes = (self.folder(name) / "log.txt").read_text().count("resumed from step")
        return self.folder(name), killed, resumes

    def python(self, *arguments: object) -> str:
        """Run Python with these arguments and return its last line.

        Raises:
            RuntimeError: it fails, with the end of its output.
        """
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=self._timeout, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{(done.stdout + done.stderr)[-3000:]}")
        return (done.stdout.splitlines() or [""])[-1]

    def _output(self, name: str) -> Path:
        return self.folder(name) / "run"

    def command(self, name: str, flags: Flags, *, resume: bool) -> list[str]:
        """Return the command of a run, and make the run's folder."""
        shared = {"model": flags.get("model") or self.model(str(flags["family"])), **SHARED}
        shared |= {"output": self._output(name), "cache-dir": self._scratch / "tokens"}
        shared |= {"compilation-cache": self.compiled / _case(name)} | ({"resume": True} if resume else {})
        command = [sys.executable, "scripts/train.py"]
        for flag, value in {**shared, **flags}.items():
            if flag != "family":
                command += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
        self.folder(name).mkdir(parents=True, exist_ok=True)
        return command

    def _start(self, name: str, flags: Flags, *, resume: bool) -> subprocess.Popen:
        command = self.command(name, flags, resume=resume)
        with (self.folder(name) / "log.txt").open("a" if resume else "w") as log:
            environment = self.environment | {"JAX_COMPILATION_CACHE_DIR": str(self.compiled / _case(name))}
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _finish(self, process: subprocess.Popen, name: str) -> None:
        try:
            status = process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = -1
        if status:
            raise RuntimeError(f"run {name} ended with status {status}:\n{self._log(name)}")

    def _wait_for(self, process: subprocess.Popen, name: str, step: int) -> None:
        """Wait until the run logs a step or ends by itself."""
        deadline = time.monotonic() + _PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            if last_step(self._output(name) / "metrics.jsonl") >= step:
                return
            time.sleep(0.002)
        if process.poll():
            raise RuntimeError(f"run {name} ended with status {process.returncode}:\n{self._log(name)}")

    def _log(self, name: str) -> str:
        return (self.folder(name) / "log.txt").read_text()[-3000:]

    def _make_real_shape(self) -> None:
        folder = self.model("qwen3-0.6b")
        if not folder.exists():
            folder.mkdir(parents=True)
            for path in (ROOT / "scripts/quickstart/model").iterdir():
                (folder / path.name).write_bytes(path.read_bytes())
            config = json.loads((folder / "config.json").read_text()) | QWEN3_06B
            (folder / "config.json").write_text(json.dumps(config))


def _case(name: str) -> str:
    """Name the runs that share programs: two that compile one at a time may tune it to different algorithms."""
    return re.sub(r"-(killed|moved|seed\d+)$", "", name)


def _spread(rng: random.Random, first: int, last: int, count: int) -> list[int]:
    """Draw a number from each of `count` equal parts of a range."""
    part = (last - first) / count
    return [int(first + part * (index + rng.random())) for index in range(count)]


def last_step(metrics: Path) -> int:
    """Return the last step in a metrics file; 0 without one."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 4096))
            lines = file.read().split(b"\n")[1:-1]
        return json.loads(lines[-1])["step"] if lines else 0
    except (OSError, ValueError):
        return 0


def difference(expected: Path, found: Path) -> str:
    """Describe how two runs differ in losses and trained weights; empty if they are equal to the bit."""
    before, after = dict(losses(expected)), dict(losses(found))
    if before.keys() != after.keys():
        return f"{len(after)} of {len(before)} losses"
    if unequal := [step for step in before if before[step] != after[step]]:
        worst = max(abs(before[step] - after[step]) / abs(before[step]) for step in unequal)
        return f"{len(unequal)} losses from step {unequal[0]}, by up to {worst:.1e}"
    return "" if weights(expected) == weights(found) else "the trained weights"


def block_means(folder: Path, size: int = 10) -> list[float]:
    """Return mean losses of each `size` steps."""
    values = [loss for _, loss in losses(folder)]
    return [sum(values[start : start + size]) / size for start in range(0, len(values) - size + 1, size)]


def fastest_steps(folder: Path, count: int = 10) -> float:
    """Return the tokens/s of the fastest consecutive steps: other work on the host slows the rest of a small model."""
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    windows = (speeds[start : start + count] for start in range(max(len(speeds) - count, 0) + 1))
    return max(map(statistics.harmonic_mean, windows))
