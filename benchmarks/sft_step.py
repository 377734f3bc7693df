"""Compare a LoRA step with PyTorch engines on the same weights, adapters and packed batches.

    python benchmarks/sft_step.py --scratch /dev/shm/sft --json benchmarks/results/sft_step.json

Engines are ours, unsloth, peft (transformers + PEFT) and liger (the same with Liger's kernels), each in its own
process. Peers import their packages while the first engine compiles; then one after the other has the GPU. A batch is
one row of documents of 64–1,024 tokens; LoRA has rank 16 on all linear layers, with AdamW. Where ours alone is
measured, it draws its weights itself, and no files hold them. Where a row tries several kinds of checkpointing, a peer
runs all in its process, and the fastest is its result (`tried` keeps the others). Host memory is what an engine's
processes hold and pin as the timed steps end. Results are written as they arrive; `--merge` combines files.
`--gpus` measures several rows side by side, all engines of a row on the same GPU.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryFile
from threading import Condition, Lock, Thread
from typing import Any

import jax
import numpy as np
from gpus import FreeGpus
from inputs import make_adapter, make_description, make_model
from kernel_profile import MATMUL
from measure import provenance, table, uniform_lengths, write_json
from shapes import SHAPES

from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.planner.flops import mean_visible_keys, training_flops_per_token

HERE = Path(__file__).resolve().parent
ENGINES = ("ours", "unsloth", "peft", "liger")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A setting measured with several engines."""

    shape: str
    layers: int | None = None
    """Fewer than the published ones."""
    tokens: int = 16384
    quantize: str = "none"
    matmul: str = "bf16"
    """Number format of our matmuls."""
    fp8_head: bool = False
    """Multiply the output projection in FP8 too."""
    memory_limit: float | None = None
    """Memory limit of ours in GiB, equal to Unsloth's use."""
    peer_memory: bool = False
    """The limit is what Unsloth uses in the same run, before ours."""
    checkpointing: tuple[str, ...] = ("offload",)
    """Kinds of checkpointing that peers try: none, device or offload (Unsloth's; on the device for transformers)."""
    engines: tuple[str, ...] = ("ours", "unsloth")
    """Measured engines."""
    steps: int = 10
    """Timed steps."""
    targets: tuple[str, ...] = ("all-linear",)
    """Linear layers with adapters."""

    @property
    def config(self) -> dict:
        """Return config.json."""
        whole = SHAPES[self.shape]
        cut = {"num_hidden_layers": self.layers, "layer_types": whole.get("layer_types", [])[: self.layers]}
        return whole | {name: value for name, value in cut.items() if self.layers and name in whole}

    @property
    def folder(self) -> str:
        """Return the name of the model's folder."""
        return self.shape + (f"-{self.layers}" if self.layers else "")

    @property
    def adapter(self) -> str:
        """Return the name of the adapter's folder in it."""
        return "-".join(("adapter", *(self.targets if self.targets != ("all-linear",) else ())))


_ALL = "device", "none", "offload"
"""All kinds of checkpointing: what leaves pinned memory to the process last, so that it counts for itself alone."""
_GRANITE_4 = "q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "shared_mlp.input_linear", "shared_mlp.output_linear"
"""Linear layers that Unsloth adapts: neither experts, nor `out_proj`, whose adapter mamba-ssm's kernel ignores."""
_SMALL: dict[str, Any] = {
    "tokens": 2048,
    "checkpointing": _ALL,
    "engines": ("ours", "unsloth", "liger", "peft"),
    "steps": 16,
}
"""A small batch, which most people train on."""
ROWS = {
    "qwen3-8b": Row(shape="qwen3-8b", memory_limit=18.8),
    "qwen3-8b, memory free": Row(shape="qwen3-8b", checkpointing=_ALL),
    "qwen3-8b FP8, memory free": Row(shape="qwen3-8b", matmul="fp8", engines=("ours",)),
    "qwen3-8b FP8": Row(shape="qwen3-8b", matmul="fp8", memory_limit=18.8, engines=("ours",)),
    "qwen3-0.6b": Row(shape="qwen3-0.6b", tokens=8192, checkpointing=_ALL, engines=ENGINES, steps=16),
    "qwen3-8b NF4": Row(shape="qwen3-8b", quantize="nf4", memory_limit=9.4),
    "qwen3-14b NF4": Row(shape="qwen3-14b", quantize="nf4", memory_limit=14.3),
    "qwen3-14b FP8": Row(shape="qwen3-14b", matmul="fp8", memory_limit=21.5, engines=("ours",)),
    "llama-3.1-8b": Row(shape="llama-3.1-8b", memory_limit=18.5),
    "llama-3.1-8b, memory free": Row(shape="llama-3.1-8b", checkpointing=_ALL, engines=ENGINES),
    "llama-3.1-8b, 2,048 tokens": Row(shape="llama-3.1-8b", **_SMALL),
    "llama-3.1-8b NF4, 2,048 tokens": Row(shape="llama-3.1-8b", quantize="nf4", **_SMALL),
    "qwen3-0.6b, 2,048 tokens": Row(shape="qwen3-0.6b", **_SMALL),
    "llama-3.1-8b FP8": Row(shape="llama-3.1-8b", matmul="fp8", memory_limit=18.5, engines=("ours",)),
    "mistral-7b": Row(shape="mistral-7b", peer_memory=True),
    "qwen2.5-7b": Row(shape="qwen2.5-7b", peer_memory=True),
    "gemma-3-12b": Row(shape="gemma-3-12b", peer_memory=True),
    "gemma-3-12b, 12 layers": Row(shape="gemma-3-12b", layers=12, peer_memory=True),
    "gemma-4-26b-a4b": Row(shape="gemma-4-26b-a4b", engines=("ours",), steps=6),
    "deepseek-v2-lite": Row(shape="deepseek-v2-lite", checkpointing=("device",), engines=("ours", "peft"), steps=6),
    "moonlight-16b-a3b": Row(shape="moonlight-16b-a3b", checkpointing=("device",), engines=("ours", "peft"), steps=6),
    "moonlight-16b-a3b, 9 layers": Row(
        shape="moonlight-16b-a3b", layers=9, checkpointing=("device",), engines=("ours", "peft"), steps=6
    ),
    "glm-4.7-flash": Row(shape="glm-4.7-flash", memory_limit=70.0, engines=("ours",), steps=6),
    "glm-4.7-flash FP8": Row(shape="glm-4.7-flash", matmul="fp8", memory_limit=70.0, engines=("ours",), steps=6),
    "qwen3-30b-a3b": Row(shape="qwen3-30b-a3b", memory_limit=70.0, engines=("ours",), steps=6),
    "qwen3.5-9b": Row(shape="qwen3.5-9b", peer_memory=True),
    "qwen3.5-9b, memory free": Row(shape="qwen3.5-9b", engines=("ours",)),
    "qwen3.5-9b, 12 GiB": Row(shape="qwen3.5-9b", memory_limit=12.0, engines=("ours",)),
    "qwen3.5-27b, 22 GiB": Row(shape="qwen3.5-27b", memory_limit=22.0, engines=("ours",), steps=6),
    "qwen3.5-35b-a3b, 60 GiB": Row(shape="qwen3.5-35b-a3b", memory_limit=60.0, engines=("ours",), steps=6),
    "qwen3.5-35b-a3b FP8": Row(shape="qwen3.5-35b-a3b", matmul="fp8", memory_limit=60.0, engines=("ours",), steps=6),
    "qwen3.5-35b-a3b NF4": Row(shape="qwen3.5-35b-a3b", quantize="nf4", memory_limit=24.0, engines=("ours",), steps=6),
    "granite-4-h-tiny": Row(shape="granite-4-h-tiny", peer_memory=True, targets=_GRANITE_4, checkpointing=_ALL),
    "granite-4-h-tiny, 6 layers": Row(
        shape="granite-4-h-tiny", layers=6, peer_memory=True, targets=_GRANITE_4, checkpointing=_ALL
    ),
    "granite-4-h-tiny, memory free": Row(shape="granite-4-h-tiny", engines=("ours",)),
    "nemotron-3-nano": Row(shape="nemotron-3-nano", memory_limit=75.0, engines=("ours",), steps=6),
    "nemotron-3-nano FP8": Row(shape="nemotron-3-nano", matmul="fp8", memory_limit=75.0, engines=("ours",), steps=6),
    "nemotron-3-nano NF4, 24 GiB": Row(
        shape="nemotron-3-nano", quantize="nf4", memory_limit=24.0, engines=("ours",), steps=6
    ),
    "tiny Granite 4": Row(
        shape="tiny-granite-4", tokens=1024, checkpointing=("none",), engines=("ours", "peft"), targets=_GRANITE_4
    ),
    "tiny Nemotron NF4": Row(shape="tiny-nemotron", tokens=1024, quantize="nf4", engines=("ours",)),
    "qwen3-8b, 2,048 tokens": Row(shape="qwen3-8b", tokens=2048, engines=("ours",), steps=30),
    **{
        f"qwen3-8b, {tokens:,} tokens, served as {kind}": Row(
            shape="qwen3-8b",
            tokens=tokens,
            quantize=f"served_{kind}",
            engines=("ours",),
            steps=10 if tokens > 9999 else 30,
        )
        for tokens in (16384, 2048)
        for kind in ("nvfp4", "nf4", "q4_k_m")
    },
    "lfm2-1.2b": Row(shape="lfm2-1.2b", peer_memory=True),
    "tiny LFM2": Row(shape="tiny-lfm2", tokens=1024, checkpointing=("none",), engines=("ours", "peft")),
    "tiny Qwen3.5": Row(shape="tiny-qwen3.5", tokens=1024, checkpointing=("none",), engines=("ours", "unsloth")),
    "tiny DeepSeek": Row(shape="tiny-deepseek", tokens=1024, checkpointing=("none",), engines=("ours", "peft")),
    "tiny Gemma 3": Row(shape="tiny-gemma-3", tokens=1024, checkpointing=("none",), engines=("ours", "peft")),
    "tiny Gemma 4 with experts": Row(shape="tiny-gemma-4-moe", tokens=1024, checkpointing=("none",), engines=("ours",)),
    "tiny experts NF4": Row(shape="tiny-qwen3-moe", tokens=1024, quantize="nf4", engines=("ours",)),
    "tiny NF4": Row(shape="tiny", tokens=1024, quantize="nf4", checkpointing=("none",), engines=("ours", "peft")),
    "tiny served as nvfp4": Row(shape="tiny", tokens=1024, quantize="served_nvfp4", engines=("ours",)),
    "tiny FP8": Row(shape="tiny", tokens=1024, matmul="fp8", checkpointing=("none",), engines=("ours",)),
    "tiny": Row(shape="tiny", tokens=1024, checkpointing=("device", "none"), engines=ENGINES),
}
ROWS |= {
    name.replace("FP8", "FP8 with its head"): replace(row, fp8_head=True) for name, row in ROWS.items() if "FP8" in name
}


def make_batches(path: Path, row: Row, steps: int) -> list[int]:
    """Write tokens [steps, T] and zero-padded document lengths [steps, documents]; return all lengths.

    Token frequencies are skewed, to make the data learnable.
    """
    rng, vocabulary = np.random.default_rng(0), SHAPES[row.shape]["vocab_size"]
    frequency = 1 / np.arange(10, vocabulary + 10)
    tokens = rng.choice(rng.permutation(vocabulary), (steps, row.tokens), p=frequency / frequency.sum())
    lengths = [uniform_lengths(row.tokens, seed=step) for step in range(steps)]
    padded = np.zeros((steps, max(map(len, lengths))), np.int32)
    for step, sizes in enumerate(lengths):
        padded[step, : len(sizes)] = sizes
    np.savez(path, tokens=tokens.astype(np.int32), lengths=padded)
    return [length for sizes in lengths for length in sizes]


class Inputs:
    """Models and batches on disk, made on demand; models made here are deleted after their last row.

    Weights are made only for models that another engine than ours reads.
    """

    def __init__(
        self,
        scratch: Path,
        names: list[str],
        *,
        warm_up: int,
        steps: int | None = None,
        engines: Sequence[str] = ENGINES,
    ):
        self._scratch, self._warm_up, self._steps = scratch, warm_up, steps
        self._shared = {ROWS[name].folder for name in names if {*ROWS[name].engines} & {*engines} - {"ours"}}
        self._rows = Counter(ROWS[name].folder for name in names)
        self._locks: dict[str, Lock] = {folder: Lock() for folder in self._rows}
        self._made: set[str] = set()

    def prepare(self, name: str) -> tuple[dict[str, Path], list[int]]:
        """Return (files by engine flag, lengths of all documents)."""
        row = ROWS[name]
        folder, config = self._scratch / row.folder, row.config
        with self._locks[row.folder]:
            if not folder.exists():
                self._made.add(row.folder)
                (make_model if row.folder in self._shared else make_description)(folder, config)
            if not (folder / row.adapter).exists():
                make_adapter(folder / row.adapter, config, LoraConfig(targets=row.targets))
        batches = self._scratch / f"{name}.npz"
        lengths = make_batches(batches, row, self._warm_up + (self._steps or row.steps))
        return {"model": folder, "adapter": folder / row.adapter, "batches": batches}, lengths

    def done(self, name: str) -> None:
        """Release a measured row's model."""
        folder = ROWS[name].folder
        with self._locks[folder]:
            self._rows[folder] -= 1
            if not self._rows[folder] and folder in self._made:
                shutil.rmtree(self._scratch / folder)


def start(
    engine: str,
    name: str,
    row: Row,
    files: dict[str, Path],
    gpu: dict[str, str],
    args: argparse.Namespace,
    limit: float,
) -> "Engine":
    """Start an engine's process, which waits: a peer before it loads the model, ours before the timed steps."""
    further, environment = ["--wait"], os.environ | gpu
    flags = {**files, "quantize": row.quantize, "warm-up": args.warm_up, "learning-rate": args.learning_rate}
    if engine == "ours":
        command = [sys.executable, str(HERE / "sft_ours.py")]
        further += [*["--fp8-head"] * row.fp8_head, *args.ours_flags]
        flags["matmul"] = row.matmul
        if row.memory_limit:
            tied = row.config.get("tie_word_embeddings", False)
            flags |= {"memory-limit": row.memory_limit, "embeddings": "device" if tied else "host"}
        flags |= {"trace": args.traces / name.replace(" ", "-").replace(",", "")} if args.traces else {}
        environment = {
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "100",
        } | environment
    else:
        command = [args.peers_python, str(HERE / "peers" / "train.py"), "--engine", engine]
        further += ["--checkpointing", *row.checkpointing]
        flags |= {"stacks-every": args.stacks} if args.stacks else {}
        environment.pop("PYTHONPATH", None)
        environment |= {"PYTHONPATH": str(args.peers_path)} if args.peers_path else {}
    command += [str(part) for flag, value in flags.items() for part in (f"--{flag}", value)] + further
    log = args.logs and args.logs / f"{name.replace(' ', '-').replace(',', '')}-{engine}.txt"
    return Engine(command, environment, limit, log)


class Engine:
    """A process that prints JSON lines, which are shown as they come; a log file gets all else that it prints.

    The processes that it starts end with it.
    """

    def __init__(self, command: list[str], environment: dict[str, str], limit: float, log_file: Path | None = None):
        self._keeps_log = log_file is not None
        self._log = open(log_file, "w+", encoding="utf-8") if log_file else TemporaryFile("w+")  # noqa: SIM115 (closed at the end)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = subprocess.Popen(command, **pipes, text=True, env=environment, start_new_session=True)
        self._told, self._other = dict[str, Any](), list[str]()
        self._news = Condition()
        self._reader = Thread(target=self._read)
        self.allow(limit)
        self._reader.start()

    def allow(self, seconds: float) -> None:
        """Let it take so many seconds from now on."""
        self._begun, self._limit = time.perf_counter(), seconds

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith("{"):
                with self._news:
                    self._told.update(json.loads(line))
                    self._news.notify_all()
                print(f"{time.perf_counter() - self._begun:.0f} s: {line[:200].rstrip()}", flush=True)
            else:
                self._other.append(line)
        with self._news:
            self._told["ended"] = True
            self._news.notify_all()

    def until(self, key: str) -> None:
        """Wait for a line that has a key, or the end of the process or its time."""
        with self._news:
            self._news.wait_for(lambda: self._told.keys() & {key, "ended"}, self._left())

    def go_on(self) -> None:
        """Let it go on where it waits."""
        with suppress(BrokenPipeError):  # it ended
            self._process.stdin.write("\n")
            self._process.stdin.close()

    def result(self) -> dict:
        """Return what its lines told, with `error` if it failed afterwards or did not end in time."""
        try:
            status = self._process.wait(self._left())
        except subprocess.TimeoutExpired:
            status = None
        self.kill()
        error = {}
        if status != 0:
            self._log.seek(0)
            text = self._log.read().strip()
            print(text[-3000:], file=sys.stderr)
            last = text.splitlines()[-1] if text else f"status {status}"
            error = {"error": f"timed out after {self._limit:.0f} s" if status is None else last}
        if self._keeps_log:
            self._log.seek(0, os.SEEK_END)
            self._log.writelines(self._other)
        self._log.close()
        told = {name: value for name, value in self._told.items() if name not in ("warm", "ended")}
        return told | error | {"process_s": round(time.perf_counter() - self._begun, 1)}

    def _left(self) -> float:
        return max(0.0, self._begun + self._limit - time.perf_counter())

    def kill(self) -> None:
        """End the process with all that it started: compile workers hold its output open."""
        if self._process.stdout.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()


class Measurements:
    """Results of all rows in order, written as they arrive."""

    def __init__(self, args: argparse.Namespace):
        self._args, self._lock, self._end = args, Lock(), time.monotonic() + args.budget
        self._inputs = Inputs(args.scratch, args.rows, warm_up=args.warm_up, steps=args.steps, engines=args.engines)
        self._gpus = FreeGpus(args.gpus)
        self._results: dict[str, list[dict]] = {name: [] for name in args.rows}

    @property
    def results(self) -> list[dict]:
        return [result for results in self._results.values() for result in results]

    def measure(self, name: str) -> None:
        """Measure all engines of a row, one after the other on one GPU."""
        with self._gpus.one() as gpu:
            row, config = ROWS[name], config_from_hf(ROWS[name].config)
            files, lengths = self._inputs.prepare(name)
            visible = mean_visible_keys(np.array(lengths))
            flops = row.tokens * training_flops_per_token(config, visible_keys=visible, weight_gradients=False)
            row = replace(row, memory_limit=self._args.memory_limit) if self._args.memory_limit else row
            engines = [engine for engine in row.engines if engine in self._args.engines]
            engines = engines[::-1] if row.peer_memory else engines
            begun: dict[str, Engine] = {}

            def begin(engine: str, limit: float) -> Engine:
                begun[engine] = start(engine, name, row, files, gpu, self._args, limit)
                return begun[engine]

            try:
                for engine in engines:
                    if (left := self._end - time.monotonic()) <= 0:
                        print(f"{name}, {engine}: not begun within {self._args.budget:.0f} s", flush=True)
                        continue
                    limit = min(self._args.limit, left)
                    process = begun[engine] if engine in begun else begin(engine, limit)
                    process.allow(limit)
                    process.until("seconds" if engine == "ours" else "imported_s")
                    for each in engines:  # peers import while this one compiles; ours must know its memory limit
                        if each not in begun and each != "ours":
                            begin(each, limit)
                    for each, other in begun.items():
                        other.until("warm" if each == "ours" else "imported_s")
                    process.go_on()
                    result = process.result()
                    self._add(
                        {"row": name, "engine": engine, **asdict(row), "flops": flops, **measured_now(), **result}
                    )
                    if row.peer_memory and engine == "unsloth" and "peak_gib" in result:
                        row = replace(row, memory_limit=round(result["peak_gib"], 2))
            finally:
                for process in begun.values():
                    process.kill()
            self._inputs.done(name)

    def _add(self, result: dict) -> None:
        with self._lock:
            self._results[result["row"]].append(result)
            shown = {key: value for key, value in result.items() if key not in ("ms_all", "losses", "profile")}
            print(json.dumps(shown), flush=True)
            if self._args.json:
                write(self._args.json, self.results)


YARDSTICK = "qwen3-30b-a3b"
"""Row whose FLOPs per second those of other mixtures are compared with."""


_COLUMNS = "ms", "tokens/s", "peak GiB", "host GiB", "checkpointing", "kernels", "of the limit"


def checkpointing(result: dict) -> str:
    """Return a peer's fastest kind of checkpointing, and what the others that it tried took."""
    others = [each for each in result.get("tried", ()) if each["checkpointing"] != result["checkpointing"]]
    told = [f"{each['checkpointing']} " + (f"{each['ms']:,.1f} ms" if "ms" in each else "failed") for each in others]
    return result["checkpointing"] + (f" ({', '.join(told)})" if told else "") if "tried" in result else "-"


def summary(results: list[dict]) -> list[dict]:
    """Return the table's rows; shares of the limit exclude recomputation.

    Of mixtures measured by ours beside `YARDSTICK`, the FLOPs per second are compared with its: their speed at equal
    active FLOPs.
    """
    rows = []
    rates = {r["row"]: r["flops"] / r["ms"] for r in results if r["engine"] == "ours" and "ms" in r}
    for result in results:
        row = {"row": result["row"], "engine": result["engine"]}
        if "ms" not in result:
            rows.append(row | dict.fromkeys(_COLUMNS, "failed"))
            continue
        share = result["flops"] / (result["ms"] / 1e3) / MATMUL
        rows.append(
            row
            | {
                "ms": f"{result['ms']:,.1f}",
                "tokens/s": f"{result['tokens'] / result['ms'] * 1e3:,.0f}",
                "peak GiB": f"{result['peak_gib']:.1f}" if "peak_gib" in result else "-",
                "host GiB": f"{result['host_gib']:.1f}" if "host_gib" in result else "-",
                "checkpointing": checkpointing(result),
                "kernels": f"{result['kernels']:,}" if "kernels" in result else "-",
                "of the limit": f"{share:.0%}" if "kernels" in result else "-",
            }
        )
    for row in rows if YARDSTICK in rates else ():
        is_mixture = config_from_hf(ROWS[row["row"]].config).moe is not None
        rate = rates.get(row["row"]) if row["engine"] == "ours" and is_mixture else None
        row[f"FLOP/s beside {YARDSTICK}"] = f"{rate / rates[YARDSTICK]:.2f}" if rate else "-"
    return rows


def loss_differences(results: list[dict]) -> list[dict]:
    """Compare the losses of the same steps between every two engines of a row."""
    rows = []
    for name in dict.fromkeys(result["row"] for result in results):
        losses = {r["engine"]: np.array(r["losses"]) for r in results if r["row"] == name and "losses" in r}
        for (left, ours), (right, theirs) in combinations(losses.items(), 2):
            apart = np.abs(ours - theirs) / theirs
            rows.append(
                {
                    "row": name,
                    "engines": f"{left}, {right}",
                    "steps": len(apart),
                    "first → last loss": f"{ours[0]:.4f} → {ours[-1]:.4f}",
                    "largest relative difference": f"{apart.max():.1e}",
                    "mean": f"{apart.mean():.1e}",
                }
            )
    return rows


def merge(path: Path, files: list[Path]) -> list[dict]:
    """Merge results of several files, preferring later files for the same row and engine."""
    contents = [json.loads(file.read_text()) for file in files]
    merged = {(result["row"], result["engine"]): result for content in contents for result in content["results"]}
    results = sorted(merged.values(), key=lambda r: (list(ROWS).index(r["row"]), ENGINES.index(r["engine"])))
    write(path, results)
    return results


def measured_now() -> dict:
    """Return a row's own provenance; its engine tells GPU and versions."""
    return {key: value for key, value in provenance("").items() if key not in ("gpu", "versions")}


def write(path: Path, results: list[dict]) -> None:
    """Write all results so far atomically, with the provenance of the newest row."""
    newest = max(results, key=lambda result: (result["date"], "gpu" in result, result["engine"] == "ours"))
    info = {key: newest.get(key) for key in ("gpu", "date", "commit", "versions", "command", "host_memory_gib")}
    write_json(path, info | {"losses": loss_differences(results), "results": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=[name for name in ROWS if "tiny" not in name])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--scratch", type=Path, default=Path("runs/sft_step"), help="where weights go: best in memory")
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--steps", type=int, help="timed steps, by default as many as the row says")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--memory-limit", type=float, help="of ours, GiB, in place of the rows'")
    parser.add_argument("--gpus", type=int, default=1, help="rows measured side by side")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--peers-path", type=Path)
    parser.add_argument("--traces", type=Path, help="where to keep a profile of a step of ours, a folder per row")
    parser.add_argument("--logs", type=Path, help="folder for what engines print beside results")
    parser.add_argument("--stacks", type=float, help="seconds after which a peer prints where it is, again and again")
    parser.add_argument("--limit", type=float, default=600, help="seconds that an engine may take for a row")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all engines of all rows")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing: put these files' results into --json")
    parser.add_argument("ours_flags", nargs="*", help="further flags for sft_ours.py, after --")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # leave the GPU to the engines
    if args.merge:
        results = merge(args.json, args.merge)
    else:
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
        measurements = Measurements(args)
        with ThreadPoolExecutor(args.gpus) as pool:
            list(pool.map(measurements.measure, args.rows))
        results = measurements.results
    print(table(summary(results)))
    if differences := loss_differences(results):
        print(table(differences))


if __name__ == "__main__":
    main()
