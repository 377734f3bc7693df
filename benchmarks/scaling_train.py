"""Measure `jaxglue train` with `auto` on each GPU of a host alone and on all of them, in alternation.

    python benchmarks/scaling.py --suite train --json benchmarks/results/scaling_train.json
    python benchmarks/scaling_train.py --rows bf16 fp8 --rounds 2 --budget 200

A row is a model of random weights, drawn on the GPUs, with LoRA on all linear layers and as many packed tokens on each
GPU. Runs on single GPUs are side by side, a process each; the slowest counts, or with --once the only one. Speeds are
medians over a run's log windows, without its first steps. Results are printed and stored as they come.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path
from typing import Any

from compare_checkouts import own_checkout
from gpus import ask_gpu
from measure import table, write_results

HERE = Path(__file__).parent
_PLAN = re.compile(r"predicted ([\d,]+) ms a step, ([\d.]+) GiB")
_WARM = 6
"""First steps that do not count: compilation, the profiler's, and clocks that fall as GPUs warm up."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model and its training on each GPU."""

    shape: str
    tokens: int
    steps: int
    target: float
    """Of all GPUs' tokens/s, as a share of as many times the slowest one's alone; or where none runs alone, of MFU."""
    flags: tuple[str, ...] = ()
    mesh: str = "data"
    layers: int | None = None
    alone: bool = True
    """One GPU runs it, too."""

    def tiny(self) -> "Row":
        """Return the row with a tiny model, to rehearse on CPUs."""
        flags = tuple(flag for flag in self.flags if flag not in ("--matmul", "fp8"))
        return replace(
            self, shape="tiny-qwen3-moe" if self.mesh == "expert" else "tiny", tokens=256, steps=14, flags=flags
        )


_FULL = "--method", "full", "--moments", "8bit"
ROWS = {
    "bf16": Row(shape="llama-3.1-8b", tokens=16384, steps=14, target=0.97),
    "fp8": Row(shape="llama-3.1-8b", tokens=16384, steps=21, target=0.97, flags=("--matmul", "fp8")),
    "small": Row(shape="qwen3-0.6b", tokens=8192, steps=140, target=0.93),
    "dpo": Row(shape="llama-3.1-8b", tokens=16384, steps=14, target=0.97, flags=("--objective", "dpo")),
    "experts": Row(shape="qwen3-30b-a3b", tokens=16384, steps=21, target=0.97, mesh="expert"),
    "70b": Row(
        shape="llama-3.3-70b", tokens=8192, steps=14, target=0.45, flags=("--quantize", "nf4"), mesh="fsdp", alone=False
    ),
    "8b-full": Row(shape="qwen3-8b", tokens=16384, steps=14, target=0.97, flags=_FULL, mesh="fsdp"),
    "14b-full": Row(
        shape="qwen3-14b",
        tokens=16384,
        steps=14,
        target=0.40,
        flags=(*_FULL, "--update-in-backward", "--clip-norm", "0"),
        mesh="fsdp",
        alone=False,
    ),
}
"""The last two train all weights, and export them at the end; one GPU of 139 GiB has room for the first of them."""


@dataclass
class Running:
    """A run of `jaxglue train` under way."""

    row: str
    gpus: list[str]
    folder: Path
    process: subprocess.Popen
    begun: float

    @classmethod
    def start(cls, name: str, row: Row, gpus: list[str], files: "Files", args: argparse.Namespace) -> "Running":
        """Start a run on some GPUs."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-{len(gpus)}-", dir=args.scratch))
        log_every = max(row.steps // 7, 1)
        command = [
            *(sys.executable, "-m", "jaxglue", "train", "--random-weights"),
            *("--model", str(files.model(row)), "--data", str(files.data(row))),
            *("--seq-len", str(row.tokens), "--batch-size", str(len(gpus)), "--steps", str(row.steps)),
            *("--mesh", f"{row.mesh}={len(gpus)}", "--log-every", str(log_every), "--log-to", "none"),
            *("--output", str(folder / "run"), "--compilation-cache", str(args.scratch / "cache")),
            *row.flags,
            *(("--profile", "2") if args.profile else ()),
            *args.flags,
        ]
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "COLUMNS": "2000"}
        if args.tiny:
            variables = {
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(len(gpus)),
                "NPROC": "32",
                "COLUMNS": "2000",
            }
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command, env=os.environ | own_checkout() | variables, stdout=log, stderr=log, start_new_session=True
            )
        return cls(name, gpus, folder, process, time.monotonic())

    def kill(self) -> None:
        """Kill the run's processes, which would hold their GPUs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def result(self, used: dict[str, float]) -> dict[str, Any]:
        """Return the run's output and log."""
        log = (self.folder / "log").read_text(errors="replace")
        found: dict[str, Any] = {"row": self.row, "gpus": len(self.gpus), "on": ",".join(self.gpus)}
        found["seconds"] = round(time.monotonic() - self.begun, 1)
        if plan := _PLAN.search(log):
            found |= {"planned_ms": float(plan[1].replace(",", "")), "planned_gib": float(plan[2])}
        if chosen := re.search(r"^.*predicted [\d,]+ ms a step.*$", log, re.MULTILINE):
            found["plan"] = " ".join(chosen[0].split()).strip("│ ")[:300]
        if started := re.search(r"start-up took (.*)$", log, re.MULTILINE):
            found["start"] = started[1].strip()[:160]
        lines = []
        with contextlib.suppress(OSError):
            lines = [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]
        windows = [
            line["tokens_per_second"] for line in lines if line.get("step", 0) > _WARM and "tokens_per_second" in line
        ]
        mfu = [line["mfu"] for line in lines if line.get("step", 0) > _WARM and line.get("mfu")]
        if mfu:
            found["mfu"] = statistics.median(mfu)
        if windows:
            found |= {"tokens_per_second": statistics.median(windows), "windows": [round(each) for each in windows]}
        losses = [line["loss"] for line in lines if "loss" in line]
        if losses:
            found |= {"first_loss": losses[0], "last_loss": losses[-1]}
        with contextlib.suppress(OSError, ValueError):
            summary = json.loads((self.folder / "run/summary.json").read_text())
            found["peak_gib"] = summary["peak_memory_gb"] * 1e9 / 2**30
        found["used_gib"] = max((used.get(gpu, 0.0) for gpu in self.gpus), default=0.0)
        if self.process.returncode:
            found["error"] = f"exit {self.process.returncode}: {log.strip()[-600:]}"
        return found


class Files:
    """Models and data, made once in parallel."""

    def __init__(self, scratch: Path):
        self._scratch = scratch

    def model(self, row: Row) -> Path:
        """Return the folder of a row's model."""
        return self._scratch / (row.shape if row.layers is None else f"{row.shape}-{row.layers}")

    def data(self, row: Row) -> Path:
        """Return the file of a row's texts or pairs."""
        return self._scratch / ("pairs.jsonl" if "dpo" in row.flags else "chats.jsonl")

    def make(self, rows: list[Row], count: int) -> None:
        """Write the missing models, a process for each."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        makers = []
        for row in rows:
            if not self.model(row).exists() and not any(str(self.model(row)) in maker.args for maker in makers):
                command = [sys.executable, str(HERE / "inputs.py"), "--no-weights", "--shape", row.shape]
                command += ["--output", str(self.model(row)), *(["--layers", str(row.layers)] if row.layers else [])]
                command += ["--chats", str(count)] if not makers else []
                makers.append(subprocess.Popen(command, env=os.environ | own_checkout() | {"JAX_PLATFORMS": "cpu"}))
        for maker in makers:
            if maker.wait():
                raise SystemExit(f"{maker.args}: failed")
        pairs = self._scratch / "pairs.jsonl"
        if any("dpo" in row.flags for row in rows) and not pairs.exists():
            chats = [json.loads(line)["messages"] for line in (self._scratch / "chats.jsonl").read_text().splitlines()]
            with pairs.open("w") as file:
                for one, other in zip(chats[::2], chats[1::2], strict=False):
                    pair = {"prompt": one[:1], "chosen": one[1:2], "rejected": other[1:2]}
                    file.write(json.dumps(pair) + "\n")


class Watch:
    """Context that notes each GPU's memory in use, clock and power while runs go on."""

    def __init__(self) -> None:
        self.used: dict[str, float] = {}
        self._readings: dict[str, list[tuple[float, float]]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def loaded(self) -> dict[str, str]:
        """Return each GPU's mean clock and power while it drew most of its power."""
        means = {}
        for gpu, readings in self._readings.items():
            busy = [reading for reading in readings if reading[1] > 450]
            if busy:
                clock, power = (statistics.mean(values) for values in zip(*busy, strict=True))
                means[gpu] = f"{clock:.0f} MHz, {power:.0f} W"
        return means

    def _look(self) -> None:
        query = ["nvidia-smi", "--query-gpu=index,memory.used,clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        while not self._over.wait(1.0):
            try:
                printed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):
                return
            for line in printed.splitlines():
                with contextlib.suppress(ValueError):
                    gpu, used, clock, power = line.split(", ")
                    self.used[gpu] = max(self.used.get(gpu, 0.0), float(used) / 1024)
                    self._readings.setdefault(gpu, []).append((float(clock), float(power)))


def describe_trace(folder: Path) -> list[str]:
    """Return lines about a trace: each GPU's time in kernels, in exchanges, and idle, and between which kernels."""
    from traces import exposure, gpu_events

    lines = []
    for number, events in enumerate(gpu_events(folder)):
        kernels = sorted((span, name) for name, span in events if not name.startswith("Mem"))
        if not kernels:
            continue
        found, first, last = exposure(events), kernels[0][0][0], max(span[1] for span, _ in kernels)
        gaps, end, before = [], kernels[0][0][1], kernels[0][1]
        for (start, stop), name in kernels:
            if start > end:
                gaps.append((start - end, before[:30], name[:30], start - first))
            if stop > end:
                end, before = stop, name
        long = [gap for gap in sorted(gaps, reverse=True) if gap[0] > 0.05]
        lines.append(
            f"GPU {number}: {last - first:.1f} ms, kernels {found.busy:.1f}, exchanges {found.collectives:.1f} "
            f"(exposed {found.exposed:.1f}), idle {sum(gap[0] for gap in gaps):.1f} in {len(gaps)} gaps, "
            f"over 50 µs {sum(gap[0] for gap in long):.1f} in {len(long)}"
        )
        lines += [f"   {gap[0]:.2f} ms at {gap[3]:.1f} between {gap[1]} and {gap[2]}" for gap in long[:5]]
        exchanges = sorted(
            ((span[1] - span[0], span[0] - first, name[:50]) for name, span in events if "nccl" in name.lower()),
            reverse=True,
        )
        lines += [f"   {took:.2f} ms at {at:.1f} {name}" for took, at, name in exchanges[:4]]
    return lines


def measure(args: argparse.Namespace, gpus: list[str], rows: dict[str, Row]) -> list[dict[str, Any]]:
    """Run the rows, and print and store each result; return all."""
    results: list[dict[str, Any]] = []
    files, end = Files(args.scratch), time.monotonic() + args.budget
    files.make(list(rows.values()), args.chats)
    print(f"inputs after {args.budget - (end - time.monotonic()):.0f} s", flush=True)
    for number, turn in enumerate(turns(rows, gpus, args)):
        if time.monotonic() > end - args.least:
            print(f"{', '.join(dict(turn))} on {len(turn[0][1])} GPUs: no time is left", flush=True)
            continue
        with Watch() as watch:
            runs = [Running.start(name, rows[name], group, files, args) for name, group in turn]
            while any(run.process.poll() is None for run in runs) and time.monotonic() < end:
                time.sleep(0.2)
            for run in runs:
                if run.process.poll() is None:
                    run.kill()
        for run in runs:
            found = {"turn": number, **run.result(watch.used), "clocks": watch.loaded()}
            if (rate := found.get("tokens_per_second")) is not None:
                found["ms"] = len(run.gpus) * rows[run.row].tokens / rate * 1e3
            results.append(found)
            print(short(found), flush=True)
            if args.profile and (len(run.gpus) > 1 or run.gpus == gpus[:1]):
                with contextlib.suppress(ValueError, OSError):
                    print("\n".join(describe_trace(run.folder / "run/profile")), flush=True)
        found_verdicts = verdicts(results, rows, len(gpus))
        if args.json:
            write_results(args.json, {"rows": results, "targets": found_verdicts}, gpu=ask_gpu("name") or "none")
        print(tables(found_verdicts), flush=True)
    return results


def turns(rows: dict[str, Row], gpus: list[str], args: argparse.Namespace) -> Iterator[list[tuple[str, list[str]]]]:
    """Yield what runs side by side, each a row and its GPUs: a row alone on every GPU, then on all, in each round.

    With `--once`, rows run alone once, a different one on each GPU, and then each on all.
    """
    for _ in range(args.rounds):
        for names in batched(rows, len(gpus) if args.once else 1):
            alone = [name for name in names if rows[name].alone]
            if alone:
                yield [(name, [gpu]) for name, gpu in zip(alone * (1 if args.once else len(gpus)), gpus, strict=False)]
            for name in names:
                yield [(name, gpus)]


def short(found: dict[str, Any]) -> str:
    """Return a result in a line."""
    parts = [f"{found['row']} on {found['on']}, turn {found['turn']}:"]
    if "tokens_per_second" in found:
        parts.append(f"{found['tokens_per_second']:,.0f} tokens/s, {found['ms']:.1f} ms, MFU {found.get('mfu', 0):.1%}")
    if "planned_ms" in found:
        parts.append(f"(planned {found['planned_ms']:.0f} ms, {found['planned_gib']:.1f} GiB)")
    parts.append(f"peak {found.get('peak_gib', 0):.1f}, process {found['used_gib']:.1f} GiB; {found['clocks']}")
    parts.append(f"losses {found.get('first_loss', 0):.5f} to {found.get('last_loss', 0):.5f}; {found['seconds']} s")
    parts += [found.get("start", ""), found.get("plan", "")[:110], found.get("error", "")[-400:]]
    return " ".join(filter(None, parts))


def verdicts(results: list[dict[str, Any]], rows: dict[str, Row], gpus: int) -> list[dict[str, Any]]:
    """Return for each row the speeds, and that of all GPUs as a share of as many times the slowest one's alone."""
    found = []
    for name, row in rows.items():
        rates = [
            (each["gpus"], each["on"], each["tokens_per_second"])
            for each in results
            if each["row"] == name and "tokens_per_second" in each
        ]
        alone: dict[str, list[float]] = {}
        for count, on, rate in rates:
            if count == 1:
                alone.setdefault(on, []).append(rate)
        together = [rate for count, _, rate in rates if count == gpus and count > 1]
        if not together or (row.alone and not alone):
            continue
        if not row.alone:
            mfu = statistics.mean([each.get("mfu", 0.0) for each in results if each["row"] == name])
            shown = {f"{gpus} GPUs": f"{statistics.mean(together):,.0f}", "MFU": f"{mfu:.1%}"}
            found.append({"row": name, **shown, "target": f"≥ {row.target:.1%}", "met": _met(mfu, row)})
            continue
        slowest, all_ = min(map(statistics.mean, alone.values())), statistics.mean(together)
        share = all_ / gpus / slowest
        found.append(
            {
                "row": name,
                "one GPU, tokens/s": ", ".join(f"{statistics.mean(each):,.0f}" for each in alone.values()),
                f"{gpus} GPUs": f"{all_:,.0f}",
                "of the slowest": f"{share:.1%}",
                "target": f"≥ {row.target:.1%}",
                "met": _met(share, row),
            }
        )
    return found


def tables(verdicts: list[dict[str, Any]]) -> str:
    """Return the verdicts as tables, one for each kind."""
    kinds = dict.fromkeys(tuple(verdict) for verdict in verdicts)
    return "\n\n".join(table([verdict for verdict in verdicts if tuple(verdict) == kind]) for kind in kinds)


def _met(value: float, row: Row) -> str:
    return "yes" if value >= row.target else "no"


def visible_gpus() -> list[str]:
    """List the GPUs with nvidia-smi: JAX would take their memory in this process."""
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return chosen.split(",")
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    return [str(number) for number, _ in enumerate(listed.splitlines())]


def main(flags: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=2, help="alternations of single GPUs and all")
    parser.add_argument("--once", action="store_true", help="run each row alone on one GPU, other rows beside it")
    parser.add_argument("--gpus", type=int, help="number to use; default: all that nvidia-smi lists")
    parser.add_argument(
        "--scratch", type=Path, default=Path("/dev/shm/scaling"), help="where descriptions of models and data go"
    )
    parser.add_argument("--chats", type=int, default=4000)
    parser.add_argument("--profile", action="store_true", help="trace two steps of the runs on all GPUs")
    parser.add_argument("--budget", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--least", type=float, default=25, help="seconds that must be left to begin a run")
    parser.add_argument("--tiny", action="store_true", help="tiny models on CPUs, to rehearse")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="further flags of `jaxglue train`, after --")
    args = parser.parse_args(flags)
    gpus = [str(number) for number in range(args.gpus or 2)] if args.tiny else visible_gpus()[: args.gpus]
    rows = {name: ROWS[name].tiny() if args.tiny else ROWS[name] for name in args.rows}
    measure(args, gpus, rows)


if __name__ == "__main__":
    main()
