"""Measure planned settings on one GPU: some compile side by side, and are stopped while one of them is timed.

Each setting has its own process, so that its peak memory is its own too, and as much of the GPU as its plan may use.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import step

from jaxglue.engine.residency import DEVICE
from jaxglue.planner.device_memory import take_fitting_blocks
from jaxglue.planner.gpus import Gpu, find_gpu
from jaxglue.planner.plan import MARGIN
from jaxglue.planner.rates import host_dispatch, measure_dispatch

PINNED_GIB = 40
"""Host memory that plans may pin."""
_SIDE_BY_SIDE = 9
_CONTEXT_GIB = 1.0
"""Memory of a process beside JAX's pool."""
_ROOM = 1 / (1 - MARGIN)
"""Memory of settings without a limit of their own, in units of the planned: plans leave as much free."""
_PATIENCE = 110
"""Most seconds for a setting."""
_TIMED_MS = 900.0
"""Duration of the timed steps."""
_READY = "ready"


@dataclass(eq=False)
class _Run:
    """A setting in its own process."""

    setting: dict
    gib: float
    """Size of JAX's pool."""
    process: Any
    pipe: Any
    begun: float = field(default_factory=time.monotonic)

    def message(self, timeout: float) -> Any:
        """Return the next message; an error where the process ended or takes too long."""
        try:
            if self.pipe.poll(timeout):
                return self.pipe.recv()
        except EOFError:
            self.process.join(5)
            return {"error": f"ended with exit status {self.process.exitcode}"}
        return {"error": f"no result within {_PATIENCE} s"}

    @property
    def patience(self) -> float:
        """Return the seconds that are left."""
        return max(self.begun + _PATIENCE - time.monotonic(), 0)

    def end(self, found: dict) -> dict:
        """Return the setting's row of results."""
        self.process.kill()
        self.process.join()
        found.pop("setting", None)
        return self.setting | {name: round(v, 4) if isinstance(v, float) else v for name, v in found.items()}


def device() -> tuple[Gpu, float]:
    """Return the first visible GPU and its GiB of memory, from nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", f"--id={visible}", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    name, mib = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return find_gpu(name), float(mib) / 1024


def measure_all(plans: list[dict], total: float, deadline: float) -> Iterator[dict]:
    """Yield results as they end; settings begin in order where there is room, none after the deadline (`monotonic`).

    Args:
        plans: settings with flags and predictions.
        total: GiB of the GPU.
        deadline: seconds.
    """
    waiting = list(plans)
    running: list[_Run] = []
    take_fitting_blocks(os.environ)
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["grid_runs"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    with tempfile.TemporaryDirectory() as programs:
        try:
            while running or (waiting and time.monotonic() < deadline):
                plan = _next(waiting, running, total) if time.monotonic() < deadline else None
                if plan is not None:
                    waiting.remove(plan)
                    running.append(_start(context, plan, total, programs))
                else:
                    yield from _answers(running)
        finally:
            for run in running:
                run.process.kill()


def _next(waiting: list[dict], running: list[_Run], total: float) -> dict | None:
    """Return the first plan for which there is room."""
    free = total - 1 - sum(run.gib + _CONTEXT_GIB for run in running)
    fits = (plan for plan in waiting if not running or pool_gib(plan, total) + _CONTEXT_GIB <= free)
    return next(fits, None) if len(running) < _SIDE_BY_SIDE else None


def arguments(setting: dict):
    """Return the flags of benchmarks/step.py for a setting, as planned if it is."""
    expected = setting.get("predicted_ms", 1e3)
    flags = {
        "shape": setting["shape"],
        "layers": setting["layers"],
        "tokens": setting["tokens"],
        "method": setting["method"],
        "quantize": setting["quantize"],
        "remat": setting.get("run", setting["remat"]),
        "weights": setting.get("weights", DEVICE),
        "attention": setting.get("attention", "auto"),
        "layers-per-program": setting.get("layers_per_program", 1),
        "steps": int(np.clip(_TIMED_MS / expected, 2, 60)),
        "expected-ms": expected,
        **{name: setting[name] for name in ("tile", "embeddings", "log-normal") if name in setting},
    }
    texts = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return step.arguments().parse_args([*texts, "--trace", "--kernels", "--documents", *map(str, setting["documents"])])


def pool_gib(plan: dict, total: float) -> float:
    """Return the size of JAX's pool: the plan's limit, or somewhat more than the prediction."""
    return plan.get("gib", min(_ROOM * plan["predicted_gib"] + 0.5, 0.9 * total))


def _start(context, plan: dict, total: float, programs: str) -> _Run:
    gib = pool_gib(plan, total)
    environment = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{gib / total:.4f}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(PINNED_GIB + 8),
    }
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(plan, environment, programs, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Run(plan, gib, process, ours)


def _measure(plan: dict, environment: dict[str, str], programs: str, pipe) -> None:
    """Measure a setting in this process; send word before it is timed, and wait for an answer.

    A host's speed changes by half within minutes, so the process takes the rates itself, before and after its steps.
    """
    os.environ.update(environment)
    jax.config.update("jax_compilation_cache_dir", programs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    def ready() -> None:
        pipe.send(_READY)
        pipe.recv()
        host_dispatch()  # measured here, while the others stand still; kept for the row

    try:
        found = step.measure(arguments(plan), ready)
        again = measure_dispatch(jax.local_devices()[0])
        lower = (min(rates) for rates in zip(host_dispatch(), again, strict=True))  # others only lengthen calls
        pipe.send(found | {"dispatch_us": [round(1e6 * rate, 2) for rate in lower]})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {str(error)[:200]}"})


def _answers(running: list[_Run]) -> Iterator[dict]:
    """Wait for a message, time those that are ready, and yield the rows of those that ended."""
    pipes = multiprocessing.connection.wait([run.pipe for run in running], timeout=1)
    for run in list(running):
        if run.pipe not in pipes and run.patience:
            continue
        found = run.message(0)
        if found == _READY:
            found = _timed(run, [other for other in running if other is not run])
        running.remove(run)
        yield run.end(found)


def _timed(run: _Run, others: list[_Run]) -> dict:
    """Let a process go on while the others stand still, and return its result."""
    begun = time.monotonic()
    _signal(others, signal.SIGSTOP)
    try:
        run.pipe.send(None)
        return run.message(run.patience)
    except BrokenPipeError:
        return run.message(0)
    finally:
        _signal(others, signal.SIGCONT)
        for other in others:
            other.begun += time.monotonic() - begun


def _signal(runs: list[_Run], number: int) -> None:
    for run in runs:
        if run.process.is_alive():
            os.kill(run.process.pid, number)
