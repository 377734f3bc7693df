"""Timing on a GPU, and result files with their provenance."""

import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import distributions, version
from pathlib import Path

import jax
import numpy as np
from peers import record
from peers.record import write_json

from jaxglue.ops.backend import UNTRIED

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "nvidia-cudnn-cu13")


def take_untried(names: Sequence[str] | None) -> None:
    """Take these kernels that no GPU has run, too: all of them where none is named, none for None."""
    if names is not None:
        UNTRIED.difference_update(names or [*UNTRIED])


def milliseconds(function, *arguments, budget: float = 50.0, repeats: int = 7) -> float:
    """Return the median time of a call, dispatched back to back within `budget` ms after a warm-up."""
    jax.block_until_ready(function(*arguments))
    calls = int(min(max(budget / _round(function, arguments, 2), 1), 50))
    return statistics.median(_round(function, arguments, calls) for _ in range(repeats))


def _round(function, arguments, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / calls * 1e3


def device_milliseconds(function, *, calls: int = 10) -> float:
    """Return the time of a call's kernels and copies on the first GPU, from a profile; 0 without a GPU."""
    jax.block_until_ready(function())
    return sum(device_events(function, calls=calls)) / calls


def device_events(function, *, calls: int = 1) -> list[float]:
    """Return the milliseconds of every kernel and copy of some calls on the first GPU, from a profile."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([function() for _ in range(calls)])
        (profile,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(profile)).planes
        streams = [line for plane in planes if plane.name == "/device:GPU:0" for line in plane.lines]
        return [event.duration_ns / 1e6 for line in streams if line.name.startswith("Stream") for event in line.events]


def log_normal_lengths(tokens: int, count: int, *, sigma: float = 0.8, seed: int = 0) -> list[int]:
    """Draw `count` log-normal document lengths that sum to `tokens`."""
    weights = np.random.default_rng(seed).lognormal(sigma=sigma, size=count)
    lengths = np.maximum(1, weights / weights.sum() * tokens).astype(int)
    lengths[0] += tokens - lengths.sum()
    return lengths.tolist()


def uniform_lengths(tokens: int, low: int = 64, high: int = 1024, *, seed: int = 0) -> list[int]:
    """Draw uniform document lengths from `low` to `high` that sum to `tokens`; the last is truncated."""
    lengths = np.random.default_rng(seed).integers(low, high + 1, size=tokens // low)
    count = int(np.searchsorted(np.cumsum(lengths), tokens))
    return [*lengths[:count].tolist(), tokens - int(lengths[:count].sum())]


def table(results: list[dict]) -> str:
    """Format results as a Markdown table with a column per key."""
    header = list(results[0])
    rows = [header, ["---"] * len(header), *([str(value) for value in row.values()] for row in results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_results(path: Path, results: list[dict] | dict, *, gpu: str | None = None) -> None:
    """Write results as JSON with their provenance; the GPU is by default this process's."""
    write_json(path, provenance(gpu or jax.devices()[0].device_kind) | {"results": results})


def provenance(gpu: str) -> dict:
    """Return the fields that every result file has, with the versions of our packages."""
    installed = {distribution.name for distribution in distributions()}
    return record.provenance(gpu, {package: version(package) for package in PACKAGES if package in installed})


def save_figure(figure, path: Path, data) -> None:
    """Save a chart whose file tells what it was drawn from, so that a test knows an old one."""
    figure.savefig(path, dpi=110, metadata={"Description": digest(data), "Software": None})


def digest(data) -> str:
    """Return a digest of a chart's data."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()
