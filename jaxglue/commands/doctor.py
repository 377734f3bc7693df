"""Check the machine: `jaxglue doctor` prints a verdict and a remedy for each thing that training needs.

`jaxglue doctor --model FOLDER` checks the files that decide how a model is served instead.
Exits with status 1 if one of them is missing.
"""

import contextlib
import csv
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from jaxglue.commands.configs import DoctorConfig
from jaxglue.terminal.lines import echo

GIB = 2**30
LEAST_DRIVER = (580,)
"""The first driver that runs CUDA 13."""
LEAST_CAPABILITY = (8, 0)
"""Least compute capability of our kernels: Ampere."""
_INSTALL = "pip install --upgrade '.[cuda13]' in the clone of jaxglue"
_LEAST_FREE = 0.8
"""Share of a GPU's memory below which another program is likely to hold some."""
_LEAST_HOST = 8 * GIB
_SLOW = 10.0
"""Seconds for a small program that only a busy or odd machine takes; usual ones take under two."""
_FIELDS = ("driver_version", "name", "compute_cap", "memory.total", "memory.free")


@dataclass(frozen=True, kw_only=True)
class Check:
    """The verdict on one thing, and what to do about it."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """A GPU as nvidia-smi describes it; memory in bytes, 0 where it is the host's."""

    driver: str
    name: str
    capability: tuple[int, ...]
    total: int
    free: int


def main(config: DoctorConfig | None = None) -> None:
    """Print all verdicts on the machine, or on a folder."""
    if config and config.model is not None:
        sys.exit(_print(check_folder(config.model), "the folder would be served otherwise than it was trained"))
    # JAX would reserve most of the GPU, which another run may be using. Read at JAX's first device query.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    gpus = read_gpus()
    missing = "something is missing" if gpus else "without a GPU all commands run on the CPU, training slowly"
    sys.exit(_print(checks(gpus), missing, "everything that training needs is here"))


def _print(found: Iterator[Check], wrong: str, well: str = "") -> bool:
    """Print verdicts and a line for all of them; tell whether one is a failure."""
    failed = False
    for check in found:
        echo(show(check))
        failed |= check.verdict == "fail"
    if text := f"{wrong}: see FAIL above" if failed else well:
        echo(f"\n{text}")
    return failed


def check_folder(folder: Path) -> Iterator[Check]:
    """Yield verdicts on tokenizer, chat template and stop tokens of a model or adapter folder.

    Raises:
        ValueError: a missing folder, or files that cannot be read.
    """
    from jaxglue.hf.adapter import CONFIG, find_base
    from jaxglue.hf.hub import model_path
    from jaxglue.hf.serving_check import inspect

    folder = model_path(folder, weights=False)
    base = find_base(folder, weights=False) if (folder / CONFIG).is_file() else None
    yield from _check_type(folder if base is None else base)
    for subject, found, remedy, breaks in inspect(folder, base):
        yield Check(name=subject, verdict="fail" if breaks else "warn" if remedy else "ok", found=found, remedy=remedy)


def _check_type(folder: Path) -> Iterator[Check]:
    """Yield a verdict on a model type that has no family: which of its parts exist here."""
    from jaxglue.hf.checkpoint import read_config, tensor_names
    from jaxglue.models import config_from_hf
    from jaxglue.models.unknown import known_parts

    raw = read_config(folder)
    try:
        config_from_hf(raw)
    except ValueError as error:
        if "is not supported" not in str(error):
            yield Check(name="model", verdict="fail", found=str(error), remedy="correct config.json")
            return
        text = raw.get("text_config")
        parts = known_parts({**raw, **text} if isinstance(text, dict) else raw, tensor_names(folder))
        exist = ", ".join(parts.exist) or "none that its tensors' names tell"
        others = ", ".join(parts.others) or "none"
        found = f"{str(error).split(': known are', 1)[0]}. Parts that exist: {exist}. Others: {others}"
        remedy = "write a family of parts (docs/adding_a_model.md), and a part for each of the others"
        yield Check(name="model", verdict="fail", found=found, remedy=remedy)


def checks(gpus: list[GpuReport]) -> Iterator[Check]:
    """Yield all verdicts, each as soon as it is known."""
    yield check_python()
    yield check_driver(gpus)
    yield check_cuda()
    yield from map(check_gpu, gpus)
    yield _guarded("JAX", check_jax, bool(gpus))
    yield _guarded("XLA", check_xla, bool(gpus))
    yield _guarded("Triton", check_triton, bool(gpus))
    yield from (check_gpu_memory(gpu) for gpu in gpus if gpu.total)
    yield check_host_memory(psutil.virtual_memory().available, psutil.virtual_memory().total)


def read_gpus() -> list[GpuReport]:
    """Return the GPUs that nvidia-smi lists, none without a driver that answers."""
    if not (program := shutil.which("nvidia-smi")):
        return []
    query = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return [] if done.returncode else [parse_gpu(row) for row in csv.reader(done.stdout.splitlines())]


def parse_gpu(row: Sequence[str]) -> GpuReport:
    """Return the GPU of a line of nvidia-smi: `_FIELDS`, memory in MiB."""
    driver, name, capability, *memory = (cell.strip() for cell in row)
    total, free = (int(cell) * 2**20 if cell.isdecimal() else 0 for cell in memory)
    return GpuReport(driver=driver, name=name, capability=_version(capability), total=total, free=free)


def check_python() -> Check:
    """Check the platform."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() == "Linux":
        return Check(name="Python", verdict="ok", found=found)
    return Check(name="Python", verdict="fail", found=found, remedy="use Linux, or WSL 2 on Windows")


def check_driver(gpus: Sequence[GpuReport]) -> Check:
    """Check that a driver answers and is new enough for CUDA 13."""
    needed = f"install NVIDIA driver {LEAST_DRIVER[0]} or newer; nvidia-smi must list the GPU"
    if not gpus:
        return Check(name="driver", verdict="fail", found="nvidia-smi lists no GPU", remedy=needed)
    if _version(gpus[0].driver) < LEAST_DRIVER:
        return Check(name="driver", verdict="fail", found=f"{gpus[0].driver}, too old for CUDA 13", remedy=needed)
    return Check(name="driver", verdict="ok", found=gpus[0].driver)


def check_cuda() -> Check:
    """Check that JAX's plugin for CUDA 13 is installed, in JAX's version."""
    plugin, jax = _installed("jax-cuda13-plugin"), _installed("jax")
    if plugin is None:
        other = " (but one for CUDA 12)" if _installed("jax-cuda12-plugin") else ""
        return Check(name="CUDA", verdict="fail", found=f"no jax-cuda13-plugin{other}", remedy=_INSTALL)
    if plugin != jax:
        found = f"jax-cuda13-plugin {plugin} with JAX {jax}: the versions must be equal"
        return Check(name="CUDA", verdict="fail", found=found, remedy=_INSTALL)
    return Check(name="CUDA", verdict="ok", found=f"13, in jax-cuda13-plugin {plugin}")


def check_gpu(gpu: GpuReport) -> Check:
    """Check that our kernels run on a GPU."""
    found = f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}"
    if gpu.capability >= LEAST_CAPABILITY:
        return Check(name="GPU", verdict="ok", found=found)
    least = ".".join(map(str, LEAST_CAPABILITY))
    remedy = f"take a GPU of compute capability {least} or newer (Ampere); on this one the slower references run"
    return Check(name="GPU", verdict="warn", found=found, remedy=remedy)


def check_jax(expect_gpu: bool) -> Check:
    """Check that JAX finds the GPUs and multiplies on one."""
    import jax
    import jax.numpy as jnp

    devices = jax.devices()
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    found = f"{jax.__version__} with {len(devices)} × {kinds}"
    if devices[0].platform == "cpu":
        chosen = os.environ.get("JAX_PLATFORMS")
        remedy = f"unset JAX_PLATFORMS, which is {chosen}" if expect_gpu and chosen else "mend what is above first"
        return Check(name="JAX", verdict="fail", found=f"{found}: it finds no GPU", remedy=remedy)
    ones = jnp.ones((256, 256), jnp.bfloat16)
    assert float((ones @ ones)[0, 0]) == 256
    return Check(name="JAX", verdict="ok", found=found)


def check_xla(_: bool, clock: Callable[[], float] = time.perf_counter) -> Check:
    """Time the compilation of a small program, which nothing keeps."""
    import jax
    import jax.numpy as jnp

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.tanh(x @ w) @ w.T).sum()

    x = jnp.ones((64, 256), jnp.bfloat16)
    traced = jax.jit(jax.grad(step, argnums=1)).trace(x, jnp.ones((256, 256), jnp.bfloat16))
    with _without_cache():
        begun = clock()
        traced.lower().compile()
        return check_speed("XLA", "a small program compiles", clock() - begun, os.getloadavg()[0])


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Have JAX compile a program that an earlier process may have kept."""
    import jax

    kept = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)


def check_speed(name: str, what: str, seconds: float, load: float) -> Check:
    """Judge the time of a compilation.

    Args:
        name: of the check.
        what: was compiled, and how else it went.
        seconds: that it took.
        load: processes that wanted to run at the time, on average.
    """
    found, cores = f"{what} in {seconds:.1f} s", len(os.sched_getaffinity(0))
    if seconds <= _SLOW:
        return Check(name=name, verdict="ok", found=found)
    busy = f"{load:.0f} processes share {cores} cores: end some; " if load > cores else ""
    remedy = (
        f"{busy}leave --compilation-cache on a local disk: what it keeps is compiled once, by whichever run is first"
    )
    return Check(name=name, verdict="warn", found=found, remedy=remedy)


def check_triton(expect_gpu: bool) -> Check:
    """Check that a Triton kernel of ours is right, and time its compilation with the first run."""
    versions = [f"{name} {version}" for name in ("triton", "jax-triton") if (version := _installed(name))]
    if len(versions) < 2:
        found = f"{' and '.join(versions) or 'neither triton nor jax-triton'} installed"
        return Check(name="Triton", verdict="fail", found=found, remedy=_INSTALL)
    if not expect_gpu:
        found = f"{', '.join(versions)}; no kernel can run without a GPU"
        return Check(name="Triton", verdict="warn", found=found, remedy="mend what is above first")
    import jax
    import jax.numpy as jnp

    from jaxglue.ops.norm_rope import rms_norm, stream_norm

    x, weight = jax.random.normal(jax.random.key(0), (64, 256), jnp.bfloat16), jnp.ones(256)
    expected = jax.block_until_ready(rms_norm(x, weight, 1e-6))
    with _without_cache():
        begun = time.perf_counter()
        found = jax.block_until_ready(stream_norm(x, weight, 1e-6, backend="triton")[1])
        seconds = time.perf_counter() - begun
    difference = float(abs(found - expected).max())
    assert difference < 0.1, f"a kernel's result differs by {difference}"
    return check_speed("Triton", f"{', '.join(versions)}; a kernel is right, compiled", seconds, os.getloadavg()[0])


def check_gpu_memory(gpu: GpuReport) -> Check:
    """Check that no other program holds much of a GPU's memory."""
    found = f"{gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free on {gpu.name}"
    if gpu.free >= _LEAST_FREE * gpu.total:
        return Check(name="GPU memory", verdict="ok", found=found)
    remedy = "other programs hold the rest: nvidia-smi lists them; end them, or give --memory-limit"
    return Check(name="GPU memory", verdict="warn", found=found, remedy=remedy)


def check_host_memory(free: int, total: int) -> Check:
    """Check that the host can hold a GPU's offloaded values."""
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free >= _LEAST_HOST:
        return Check(name="host memory", verdict="ok", found=found)
    remedy = "offload has little room: prefer --remat full, or end other programs"
    return Check(name="host memory", verdict="warn", found=found, remedy=remedy)


def show(check: Check) -> str:
    """Return a verdict's lines, at most 80 columns wide."""
    mark = {"ok": "ok", "warn": "warn", "fail": "FAIL"}[check.verdict]
    lines = textwrap.wrap(f"{mark:<4}  {check.name:<11}  {check.found}", 80, subsequent_indent=" " * 19)
    remedy = f"→ {check.remedy}" if check.remedy and check.verdict != "ok" else ""
    return "\n".join([*lines, *textwrap.wrap(remedy, 80, initial_indent=" " * 19, subsequent_indent=" " * 21)])


def _guarded(name: str, check: Callable[[bool], Check], expect_gpu: bool) -> Check:
    """Return the verdict of a check that runs the GPU; what goes wrong there is its result."""
    try:
        return check(expect_gpu)
    except Exception as error:
        found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return Check(name=name, verdict="fail", found=found, remedy=f"mend what is above, then {_INSTALL}")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())
