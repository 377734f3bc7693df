"""Time whole training steps of bf16, FP8 and NF4 weights within memory limits, in turns with a peer on one GPU.

    python benchmarks/alternate.py --shape qwen3-8b --settings bf16@18.8 'FP8 with its head@18.8' \
        --peer unsloth --peers-path DIR --scratch /dev/shm/alternate --json benchmarks/results/fp8_alternate.json

All settings stay loaded, ours in this process with random weights, the peer in its own; a turn is some steps with AdamW
while the others wait. A setting of another shape than the peer's (SHAPE:LABEL@GIB) takes its turns by itself, while the
peer loads. Peaks are a setting's own where they ascend, so name the leanest first. Results are written as they arrive.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread

import jax
from fp8 import FORMATS
from inputs import make_adapter
from kernel_profile import is_copy, kernel_times, profile_rows
from measure import table, write_results
from sft_ours import Run, document_lengths, read_batches
from sft_step import ENGINES, HERE, Row, make_batches
from shapes import SHAPES
from step import memory, parameters

from jaxglue.engine.policy import AUTO
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.planner.gpus import GIB
from jaxglue.planner.planner import Planner
from jaxglue.planner.rates import device_gpu
from jaxglue.planner.workload import Workload

FORMATS = {**FORMATS, "NF4": ("nf4", False)}
LEARNING_RATE = 1e-4


def parse_setting(setting: str, args: argparse.Namespace) -> tuple[str, str, str]:
    """Return (shape, label, limit in GiB or nothing)."""
    name, _, limit = setting.partition("@")
    shape, _, label = name.rpartition(":")
    return shape or args.shape, label, limit


class Ours:
    """A setting of ours with random weights, planned for a memory limit, and its facts."""

    def __init__(self, setting: str, args: argparse.Namespace):
        (self.shape, label, limit), args.batches = parse_setting(setting, args), args.scratch / "batches.npz"
        make_batches(args.batches, Row(shape=self.shape, tokens=args.tokens), 3)
        self._batches = read_batches(args.batches)
        storage, fp8_head = FORMATS[label]
        config = config_from_hf(SHAPES[self.shape]).quantized(storage, fp8_head=fp8_head)
        host_embeddings = bool(limit) and not config.tie_word_embeddings
        work = Workload(
            config=config,
            batch_size=1,
            seq_len=args.tokens,
            lora=LoraConfig(),
            document_lengths=document_lengths(self._batches),
            host_embeddings=host_embeddings,
        )
        begun, device = time.perf_counter(), jax.devices()[0]
        before, earlier = memory(device, "bytes_in_use"), memory(device, "peak_bytes_in_use")
        plan = None
        if device.platform != "cpu":
            planner = Planner(work, device_gpu(device).limited(float(limit) if limit else None))
            plan = planner.choose(host_memory=args.pinned_gib * GIB, weights=AUTO)
        planned = time.perf_counter()
        parts = parameters(work, plan and plan.weights, "host" if host_embeddings else "device")
        filled = time.perf_counter()
        self._run = Run(parts, config, plan, steps=1000, learning_rate=LEARNING_RATE)
        del parts
        self.facts = {"loss": float(self._run.step(self._batches[0])[0])}
        first = time.perf_counter()
        self.turn(1)
        peak = memory(device, "peak_bytes_in_use")  # of the process: its own only if no earlier one was higher
        self.facts |= {"peak_gib": peak - before, "peak_is_own": peak > earlier}
        self.facts |= {"plan_s": planned - begun, "weights_s": filled - planned}
        self.facts |= {"first_step_s": first - filled, "shape": self.shape}
        if plan:
            self.facts |= {"plan": str(plan), "planned_ms": plan.seconds * 1e3}
            self.facts["planned_gib"] = plan.device_bytes / GIB

    def turn(self, steps: int) -> float:
        """Return the milliseconds of a step in a run of some."""
        jax.block_until_ready(self._run.step(self._batches[0]))
        begun = time.perf_counter()
        for number in range(steps):
            result = self._run.step(self._batches[number % len(self._batches)])
        jax.block_until_ready((result, self._run.trainable))
        return (time.perf_counter() - begun) / steps * 1e3

    def profile(self) -> dict:
        """Return the milliseconds of a step's kernels, and a row for each of the longest."""
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready((self._run.step(self._batches[0]), self._run.trainable))
            kernels = kernel_times(Path(folder))
        busy = sum(kernel.milliseconds for kernel in kernels if not is_copy(kernel))
        return {"kernel_ms": busy, "profile": profile_rows(kernels, top=40)}


class Peer:
    """A PyTorch engine's process, which loads while ours do, and steps when told so."""

    def __init__(self, args: argparse.Namespace):
        self.facts: dict = {}
        self._args, self._log = args, args.scratch / "peer.log"
        self._process: subprocess.Popen[str] | None = None
        self._start = Thread(target=self._load, daemon=True)
        self._start.start()

    def _load(self) -> None:
        args, folder = self._args, self._args.scratch / self._args.shape
        batches = args.scratch / "peer_batches.npz"
        make_batches(batches, Row(shape=args.shape, tokens=args.tokens), 3)
        make_adapter(args.scratch / "adapter", SHAPES[args.shape], LoraConfig())
        maker = [sys.executable, str(HERE / "inputs.py"), "--shape", args.shape, "--output", str(folder)]
        command = [
            args.peers_python,
            "-X",
            "faulthandler",
            str(HERE / "peers" / "train.py"),
            "--engine",
            args.peer,
            "--turns",
        ]
        flags = {"model": folder, "adapter": args.scratch / "adapter", "batches": batches, "warm-up": 2}
        flags |= {"quantize": args.peer_quantize, "checkpointing": "offload", "learning-rate": LEARNING_RATE}
        command += [str(part) for flag, value in flags.items() for part in (f"--{flag}", value)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"PYTHONPATH": str(args.peers_path)} if args.peers_path else {}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self._log.open("w") as log:
            if not folder.exists():
                subprocess.run(maker, check=True, stderr=log)
            self._process = subprocess.Popen(command, **pipes, stderr=log, text=True, env=environment)
        self.facts = self._read()

    def is_ready(self) -> bool:
        """Wait until it has warmed up; print why not if it ended."""
        self._start.join()
        if not self.facts:
            status = self._process and self._process.wait()
            print(f"{self._args.peer} ended with {status}: {self._log.read_text()[-2000:]}", flush=True)
        return bool(self.facts)

    def turn(self, steps: int) -> float:
        """Return the milliseconds of a step in a run of some."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        result = self._read()
        self.facts["peak_gib"] = result.get("peak_gib")
        return result["ms"]

    def _read(self) -> dict:
        """Return the next JSON line, empty at the end of output."""
        assert self._process is not None and self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        return json.loads(next((line for line in lines if line.startswith("{")), "{}"))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()


def take_turns(engines: dict[str, Ours | Peer], args: argparse.Namespace, earlier: list[dict]) -> list[dict]:
    """Return each engine's facts and the times of its turns, written and printed after every round."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        for name, engine in engines.items():
            times[name].append(engine.turn(args.steps))
        rows = [
            {
                "setting": name,
                "tokens": args.tokens,
                "ms": statistics.median(times[name]),
                "ms_all": times[name],
                **engine.facts,
            }
            for name, engine in engines.items()
        ]
        shown = ("setting", "ms", "peak_gib", "planned_ms", "planned_gib")
        print(table([{key: row.get(key, "-") for key in shown} for row in rows]), flush=True)
        if args.json:
            write_results(args.json, earlier + rows)
    if args.profile:
        for row, engine in zip(rows, engines.values(), strict=True):
            row |= engine.profile() if isinstance(engine, Ours) else {}
        if args.json:
            write_results(args.json, earlier + rows)
    return rows


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument(
        "--settings", nargs="+", required=True, help=f"[SHAPE:]LABEL[@GIB], a LABEL of {', '.join(FORMATS)}"
    )
    parser.add_argument("--peer", choices=ENGINES[1:], help="take turns with this engine too")
    parser.add_argument("--peer-quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--peers-path", type=Path)
    parser.add_argument("--scratch", type=Path, default=Path("runs/alternate"), help="for weights: best in memory")
    parser.add_argument("--pinned-gib", type=float, default=30.0, help="host memory that a setting may pin")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--profile", action="store_true", help="write the longest kernels of each of our settings")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    args = arguments().parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    folder = args.scratch / args.shape
    made, peer = not folder.exists(), Peer(args) if args.peer else None
    try:
        engines: dict[str, Ours | Peer] = {}
        rows: list[dict] = []
        for setting in args.settings:
            ours = Ours(setting, args)
            print(json.dumps({"setting": setting, **ours.facts}), flush=True)
            if ours.shape == args.shape:
                engines[setting] = ours
            else:
                rows += take_turns({setting: ours}, args, rows)
            del ours
            gc.collect()
        if peer is not None and peer.is_ready():
            engines[args.peer] = peer
        take_turns(engines, args, rows)
    finally:
        if peer is not None:
            peer.close()
        if made:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
