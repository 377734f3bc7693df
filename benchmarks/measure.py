"""Timing on a GPU, and results with what is needed to read them again."""

import json
import shlex
import statistics
import sys
import tempfile
import time
from importlib.metadata import distributions, version
from pathlib import Path

import jax
import numpy as np

PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "nvidia-cudnn-cu13")


def milliseconds(function, *arguments, budget: float = 50.0, repeats: int = 7) -> float:
    """Median time of one call, of as many dispatched back to back as fit into `budget` ms; compiles and warms up."""
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
    """Time of one call's kernels and copies on the first GPU, from a profile; 0 where there is none."""
    jax.block_until_ready(function())
    return sum(device_events(function, calls=calls)) / calls


def device_events(function, *, calls: int = 1) -> list[float]:
    """Milliseconds of every kernel and copy of some calls on the first GPU, from a profile."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([function() for _ in range(calls)])
        (profile,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(profile)).planes
        streams = [line for plane in planes if plane.name == "/device:GPU:0" for line in plane.lines]
        return [event.duration_ns / 1e6 for line in streams if line.name.startswith("Stream") for event in line.events]


def log_normal_lengths(tokens: int, count: int, *, sigma: float = 0.8, seed: int = 0) -> list[int]:
    """`count` random document lengths that add up to `tokens`."""
    weights = np.random.default_rng(seed).lognormal(sigma=sigma, size=count)
    lengths = np.maximum(1, weights / weights.sum() * tokens).astype(int)
    lengths[0] += tokens - lengths.sum()
    return lengths.tolist()


def uniform_lengths(tokens: int, low: int = 64, high: int = 1024, *, seed: int = 0) -> list[int]:
    """Random document lengths from `low` to `high` that add up to `tokens`; the last is cut to fit."""
    lengths = np.random.default_rng(seed).integers(low, high + 1, size=tokens // low)
    count = int(np.searchsorted(np.cumsum(lengths), tokens))
    return [*lengths[:count].tolist(), tokens - int(lengths[:count].sum())]


def table(results: list[dict]) -> str:
    """A Markdown table with a column for each key of the results."""
    header = list(results[0])
    rows = [header, ["---"] * len(header), *([str(value) for value in row.values()] for row in results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_results(path: Path, results: list[dict], *, gpu: str | None = None) -> None:
    """Writes the results as JSON with GPU (by default the one this process uses), versions and command."""
    installed = {distribution.name for distribution in distributions()}
    info = {
        "gpu": gpu or jax.devices()[0].device_kind,
        "versions": {package: version(package) for package in PACKAGES if package in installed},
        "command": shlex.join(["python", *sys.argv]),
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(info, indent=2) + "\n")
    temporary.rename(path)
