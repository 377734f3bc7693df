"""Plan ten short trainings on pictures, then run them; write predicted and measured times and memory, row after row.

    python benchmarks/vision_planner.py --plan-for H200 --json plans.json
    python benchmarks/vision_planner.py --plans plans.json --json results.json

The first form needs no GPU: it reads data and models as training does, and chooses a plan for each setting. The second
runs these plans, each in a process of its own that may use the setting's memory; three load and compile side by side,
and the others are stopped while one is timed. A step's time is the median of those after the first epoch, in which a
frozen tower runs.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import jax
import numpy as np
import planner_grid
from measure import provenance, table, write_json
from vision_step import make_data, make_model

import jaxglue
from jaxglue.planner.device_memory import pool_gib
from jaxglue.planner.gpus import GIB, find_gpu
from jaxglue.planner.plan import DoesNotFit
from jaxglue.planner.planner import Planner, embedding_places, fastest_place
from jaxglue.settings.recipe import from_settings
from jaxglue.training.callbacks import Callback, Decision
from jaxglue.training.config import TrainConfig
from jaxglue.training.setup import resolve

_QWEN, _QWEN3, _GEMMA3, _GEMMA4 = "qwen3.5-9b", "qwen3-vl-8b", "gemma-3-12b", "gemma-4-12b"
SETTINGS: list[dict[str, Any]] = [
    {"shape": _QWEN, "layers": 8},
    {"shape": _QWEN, "layers": 8, "memory_limit": 14.0},
    {"shape": _QWEN, "layers": 8, "quantize": "nf4", "memory_limit": 12.0},
    {"shape": _QWEN, "layers": 8, "matmul": "fp8"},
    {"shape": _QWEN, "layers": 4, "seq_len": 8192, "train_vision": "all"},
    {"shape": _QWEN3, "layers": 6},
    {"shape": _QWEN3, "layers": 6, "seq_len": 8192, "train_vision": "projector", "image_features": "off"},
    {"shape": _GEMMA3, "layers": 6, "memory_limit": 16.0},
    {"shape": _GEMMA3, "layers": 6, "quantize": "nf4"},
    {"shape": _GEMMA4, "layers": 6, "matmul": "fp8", "memory_limit": 18.0},
]
TINY: list[dict[str, Any]] = [
    {"shape": "tiny-qwen3.5", "layers": 2, "seq_len": 512},
    {"shape": "tiny-gemma-3", "layers": 2, "seq_len": 1024, "train_vision": "all"},
]
"""To try the script on a CPU."""
PINNED_GIB = 40
"""Host memory that plans may pin."""
_ROWS = 4
"""Rows in an epoch, about."""
_EPOCHS = 4
_RUNS, _SHARE = 3, 0.28
"""Runs side by side, and the share of the GPU's memory that each may use."""
_PATIENCE = 120
"""Seconds that a run waits for another one to be timed."""
_TOKENS = {_GEMMA3: 545, _GEMMA4: 548}
"""Tokens of a document, about, where they are not 1,068."""


def settings_of(setting: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings of a training, for which model and data are written."""
    rows = setting.get("seq_len", 16_384)
    tiny = setting["shape"].startswith("tiny")
    documents = 8 if tiny else round(0.99 * _ROWS * rows / _TOKENS.get(setting["shape"], 1068))
    size = {"largest": 192, "most_words": 64} if tiny else {"largest": 1344}
    others = {name: value for name, value in setting.items() if name not in ("shape", "layers", "seq_len")}
    return {
        "model": str(make_model(folder / "model", setting["shape"], setting["layers"])),
        "random_weights": True,
        "dtype": "float32" if tiny else "bfloat16",
        "data": [str(make_data(folder / "data", documents, **size))],
        "seq_len": rows,
        "epochs": 100,
        "log_every": 1,
        "eval_every": 100_000,
        "output": str(folder / "run"),
        "overwrite": True,
        "cache_dir": str(folder / "cache"),
        **others,
    }


def planned(setting: dict[str, Any], gpu: str) -> dict[str, Any]:
    """Return the setting with its plan: what to run, and predicted time and memory; `refused` where nothing fits."""
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(setting, Path(folder))
        settings.pop("memory_limit", None)
        workload = resolve(from_settings(TrainConfig, settings)).workload
    limited = find_gpu(gpu).limited(pool_gib(setting.get("memory_limit")))
    try:
        planner, plan = fastest_place(
            embedding_places(workload, "auto"),
            lambda placed: planned_on(Planner(placed, limited)),
        )
    except DoesNotFit as error:
        return {**setting, "gpu": gpu, "refused": str(error)[:160]}
    host = "host" if planner.workload.host_embeddings else "device"
    predicted = planner_grid.prediction(planner, plan) | {"predicted_ms": round(1e3 * plan.seconds, 2)}
    return {**setting, "gpu": gpu, "embeddings": host, **predicted}


def planned_on(planner: Planner) -> tuple[Planner, Any]:
    """Return a planner and its plan."""
    return planner, planner.resolve("auto", weights="auto", host_memory=PINNED_GIB * GIB)


class Clock(Callback):
    """Notes when steps are seen to be done, while others stand still; ends a run after its epochs.

    Args:
        turn: held by the run that is timed.
        others: numbers of the processes with runs, 0 for none.
    """

    def __init__(self, turn: Any, others: Any):
        self._turn, self._others, self._is_timed = turn, others, False
        self.seconds: list[float] = []

    def on_step(self, step: int, values: Any) -> Decision:
        """Note the time of a step after the first epoch; stop after the last."""
        if self._is_timed:
            self.seconds.append(time.perf_counter())
        elif values.get("epoch", 0) >= 1:
            self._is_timed = self._turn.acquire(timeout=_PATIENCE)
            signal_all(self._others, signal.SIGSTOP)
        return "stop" if values.get("epoch", 0) >= _EPOCHS else None

    def end(self) -> None:
        """Let others go on."""
        signal_all(self._others, signal.SIGCONT)
        if self._is_timed:
            self._turn.release()
            self._is_timed = False


def signal_all(processes: Any, number: int) -> None:
    """Send a signal to all processes but this one."""
    for process in processes:
        if process not in (0, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process, number)


def measured_apart(row: dict[str, Any], free: Any, turn: Any, processes: Any) -> dict[str, Any]:
    """Run a planned setting in a process of its own, whose number is in `processes` meanwhile; return its row."""
    context, place = get_context("spawn"), free.get()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(row, turn, processes, sender))
    process.start()
    sender.close()
    processes[place] = process.pid or 0
    try:
        found = receiver.recv()
    except EOFError:
        process.join()
        found = row | {"error": f"ended with exit status {process.exitcode}"}
    processes[place] = 0
    process.join()
    signal_all(processes, signal.SIGCONT)
    free.put(place)
    return found


def measure(row: dict[str, Any], turn: Any, processes: Any, sender: Any) -> None:
    """Send a planned setting with its measurements in this process."""
    clock = Clock(turn, processes)
    try:
        found = measured(row, clock)
    finally:
        clock.end()
    sender.send(found)


def measured(row: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Run a planned setting in this process; return it with its measurements."""
    names = "shape", "layers", "seq_len", "train_vision", "quantize", "matmul", "memory_limit", "image_features"
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = settings_of({name: row[name] for name in names if name in row}, Path(folder))
            plan = {"remat": row["run"], "weights": row["weights"], "embeddings": row["embeddings"]}
            plan |= {"layers_per_program": row["layers_per_program"], "attention": row["attention"]}
            plan |= {"tile": row["tile"]} if "tile" in row else {}
            plan |= {"compilation_cache": f"{folder}/programs"}  # of one that they share, runs wait for each other
            summary = jaxglue.train(**settings, **plan, callbacks=[clock])
            clock.end()
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    assert summary is not None
    seconds = np.diff(clock.seconds)[1:]
    found = {"ms": round(1e3 * median(seconds), 2), "peak_gib": round(summary.peak_memory_gb * 1e9 / GIB, 3)}
    return row | found | {"ms_all": [round(1e3 * each, 1) for each in seconds], "gpu": jax.devices()[0].device_kind}


def main() -> None:
    """Plan, or measure what was planned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan-for", metavar="GPU", help="only plan")
    parser.add_argument("--plans", type=Path, help="planned settings, to measure")
    parser.add_argument("--settings", type=int, nargs="*", help="their numbers in the file, from 0; by default all")
    parser.add_argument("--tiny", action="store_true", help="two tiny settings")
    parser.add_argument("--seconds", type=float, default=240, help="begin no setting after this time")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    begun, results = time.monotonic(), list[dict[str, Any]]()

    def add(row: dict[str, Any]) -> None:
        results.append(row)
        print(json.dumps(row), flush=True)
        write_json(args.json, provenance(row["gpu"]) | {"results": results})

    if args.plan_for:
        settings = TINY if args.tiny else SETTINGS
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            for row in pool.map(planned, settings, [args.plan_for] * len(settings)):
                add(row)
        return
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(_SHARE)
    context, free, processes = get_context("spawn"), SimpleQueue[int](), get_context("spawn").Array("i", _RUNS)
    turn = context.Lock()
    for place in range(len(processes)):
        free.put(place)

    def run(row: dict[str, Any]) -> dict[str, Any]:
        is_late = time.monotonic() - begun > args.seconds
        return row if "refused" in row or is_late else measured_apart(row, free, turn, processes)

    with ThreadPoolExecutor(len(processes)) as threads:
        rows = json.loads(args.plans.read_text())["results"]
        chosen = rows if args.settings is None else [rows[number] for number in args.settings]
        for each in as_completed([threads.submit(run, row) for row in chosen]):
            add(each.result())
    print(table([shown(row) for row in results]))
    for name, value in planner_grid.summary(results).items():
        print(f"{name}: {value}")


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a setting's row of the printed table."""
    names = {"model": f"{row['shape']}, {row['layers']} layers", "tokens": row.get("seq_len", 16_384)}
    names |= {"method": row.get("quantize", row.get("matmul", "lora")), "tower": row.get("train_vision", "none")}
    if "ms" not in row:
        return names | {"ms": row.get("refused", row.get("error", "–"))[:60], "GiB": "–"}
    return names | {
        "ms": planner_grid.beside(row["predicted_ms"], row["ms"]),
        "GiB": planner_grid.beside(row["predicted_gib"], row["peak_gib"]),
    }


if __name__ == "__main__":
    main()
