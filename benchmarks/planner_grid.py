"""Settings drawn at random, planned and measured: the errors of the planner.

Run by `benchmarks/planner.py --grid`. Constants were fitted to settings of seeds 1 to 13; seed 14 was measured since,
and the next are fresh.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import jax
import numpy as np
import step
from grid_runs import PINNED_GIB, arguments, device, measure_all
from shapes import SHAPES

from jaxglue.engine.policy import AUTO, PRESETS, parse_policies
from jaxglue.engine.residency import DEVICE
from jaxglue.planner.candidates import tile_sizes
from jaxglue.planner.gpus import GIB, Dispatch, Gpu, find_gpu
from jaxglue.planner.plan import MARGIN, DoesNotFit
from jaxglue.planner.planner import Planner
from jaxglue.planner.step import MicroBatch

HELD_OUT, FITTED = 15, 13
"""Seeds: the next to measure, and the last that constants were fitted to."""
COUNT = 66
LAYERS = {
    "qwen3-0.6b": 8,
    "llama-3.2-1b": 8,
    "llama-3.1-8b": 6,
    "qwen3-14b": 4,
    "gpt-oss-20b": 4,
    "qwen3-30b-a3b": 4,
}
FAMILIES = {
    "qwen2.5-7b": 4,
    "mistral-7b": 4,
    "gemma-2-9b": 4,
    "gemma-3-12b": 6,
    "olmo-3-7b": 4,
    "smollm3-3b": 4,
    "granite-3.3-8b": 4,
    "phi-4": 3,
    "glm-4-9b": 4,
    "qwen3.5-9b": 4,
}
"""Further types, which no constant was fitted to: two settings each (`--families`)."""
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
DOCUMENTS = ((16, 128), (64, 1024), (256, 4096), (2048, 8192), (10_000, 35_000))
METHODS = ("lora", "lora", "lora", "nf4", "fp8", "int8", "full")
METHODS_OF = {"gpt-oss-20b": ("lora", "lora", "nf4"), "qwen3-30b-a3b": ("lora",)}
"""Methods of models with experts."""
REMATS = ("none", "dots", "full", "offload", "auto", "auto", "auto")
TILED = ("full", "offload", "offload:layer_input,attention_out,attention_lse")
"""Policies of rows by tiles, which half of the long rows of models with experts are."""
LIMITS = (0.02, 0.15, 0.4, 0.8)
"""Memory of `auto`, between the needs of the leanest and of the fastest preset."""
_WHOLE = {
    "tokens": 16_384,
    "documents": (64, 1024),
    "method": "lora",
    "remat": "auto",
    "limit": 0.0,
    "embeddings": "host",
}
_LLAMA, _QWEN = {"shape": "llama-3.1-8b", "layers": 32}, {"shape": "qwen3-8b", "layers": 36}
STREAMED = [
    {**_WHOLE, **model, "quantize": quantize, "gib": gib, **lengths}
    for quantize in ("none", "fp8")
    for model, gib, lengths in (
        (_LLAMA, 18.5, {"documents": (300, 3000)}),
        (_LLAMA, 18.5, {"documents": (64, 16_384)}),
        (_LLAMA, 12.0, {"log-normal": 24}),
        (_QWEN, 18.8, {}),
        (_QWEN, 18.8, {"log-normal": 24}),
        (_QWEN, 14.0, {"log-normal": 6}),
    )
]
"""Whole models within less memory than their weights take: mixes of policies, streamed weights, embeddings on the host.

They are measured with each fresh seed, in pools that end at the limit.
"""
_CPU_PROCESSES = 6


def settings(seed: int | None, *, families: bool = False) -> list[dict]:
    """Draw the settings of a seed, every shape equally often; without one, return `STREAMED` alone."""
    if seed is None:
        return STREAMED
    if families:
        rng = np.random.default_rng(seed)
        return [_draw(rng, shape, FAMILIES, TOKENS[4:9]) for _ in range(2) for shape in FAMILIES]
    rng, shapes = np.random.default_rng(seed), list(LAYERS)
    order = ((index + index // len(shapes)) % len(shapes) for index in range(COUNT))  # every part has all shapes
    lengths = (TOKENS if index % 3 else None for index in range(COUNT))
    drawn = [_draw(rng, shapes[shape], LAYERS, tokens) for shape, tokens in zip(order, lengths, strict=True)]
    return drawn + (STREAMED if seed >= HELD_OUT else [])


def _draw(rng: np.random.Generator, shape: str, layers: dict[str, int], lengths: tuple[int, ...] | None) -> dict:
    """Draw a setting of a shape with these layers, and a row of one of the lengths, or of any where none are given."""
    tokens = int(rng.choice(lengths)) if lengths else int(rng.integers(8, 300)) * 128
    ranges = [(low, min(high, tokens)) for low, high in DOCUMENTS if low < tokens]
    documents = [(tokens, tokens), *ranges][rng.integers(len(ranges) + 1)]
    methods = METHODS_OF.get(shape, METHODS)
    method = methods[rng.integers(len(methods))]
    if method == "full" and SHAPES[shape]["hidden_size"] > 4096:
        method = "lora"
    drawn = {
        "shape": shape,
        "layers": layers[shape] // (2 if method == "full" or tokens > 100_000 else 1),
        "tokens": tokens,
        "documents": documents,
        "method": "full" if method == "full" else "lora",
        "quantize": method if method in ("nf4", "fp8", "int8") else "none",
        "remat": REMATS[rng.integers(len(REMATS))],
        "limit": LIMITS[rng.integers(len(LIMITS))],
    }
    if shape in METHODS_OF and (tiles := tile_sizes(tokens)) and rng.integers(2):
        drawn |= {"remat": TILED[rng.integers(len(TILED))], "tile": tiles[rng.integers(len(tiles))]}
    return drawn


def planned(setting: dict, gpu: Gpu) -> dict:
    """Return the setting with its plan: what to run, and predicted time and memory; `refused` where nothing fits."""
    jax.config.update("jax_platforms", "cpu")
    work = step.args_workload(arguments(setting))
    planner = Planner(work, gpu)
    if setting["remat"] == AUTO and "gib" not in setting:
        lean, fat = (planner.plan(PRESETS[name]).device_bytes for name in ("offload", "none"))
        gib = (lean + setting["limit"] * max(fat - lean, 0)) / (1 - MARGIN) / GIB + 0.01
        setting = {**setting, "gib": round(min(gib, gpu.memory / GIB), 2)}
    planner = Planner(work, gpu.limited(setting.get("gib")))
    weights = AUTO if setting["remat"] == AUTO else DEVICE
    try:
        plan = planner.resolve(setting["remat"], weights=weights, host_memory=PINNED_GIB * GIB)
    except DoesNotFit as error:
        return {**setting, "refused": str(error)[:160]}
    return {**setting, **prediction(planner, plan)}


def prediction(planner: Planner, plan) -> dict:
    """Return a plan's flags, work (`MicroBatch`), time and memory, without the optimizer's update."""
    work = planner.predictor.work(plan)
    return {
        "run": plan.remat,
        "weights": plan.places,
        "attention": planner.workload.attention,
        "layers_per_program": plan.layers_per_program,
        **({} if plan.tile is None else {"tile": plan.tile}),
        "work": [round(value, 5) for value in work],
        "predicted_ms": round(work.seconds(planner.gpu.dispatch) * 1e3, 2),
        "predicted_gib": round(plan.device_bytes / GIB, 3),
        "predicted_compile_s": round(plan.start_seconds + plan.seconds, 1),
    }


def plans(seed: int | None, part: int, parts: int, gpu: Gpu, *, families: bool = False) -> Iterator[dict]:
    """Yield the planned settings of a part."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(_CPU_PROCESSES, os.cpu_count() or 1), mp_context=context) as pool:
        yield from pool.map(
            planned,
            *zip(*((setting, gpu) for setting in settings(seed, families=families)[part - 1 :: parts]), strict=True),
        )


def measured(planned_settings: list[dict], minutes: float) -> Iterator[dict]:
    """Yield the settings with their measurements, those that no plan fits as they are, in the order drawn.

    Times are predicted with the rates of dispatch that each setting's process measures around its steps.
    """
    deadline = time.monotonic() + 60 * minutes
    gpu, total = device()
    yield from ({**row, "gpu": gpu.name} for row in planned_settings if "refused" in row)
    fit = [row for row in planned_settings if "refused" not in row]
    yield from (_with_host({**row, "gpu": gpu.name}) for row in measure_all(fit, total, deadline))


def _with_host(row: dict) -> dict:
    """Return a planned setting with the time predicted for the host's rates, if they were measured."""
    if "dispatch_us" not in row:
        return row
    host = Dispatch(*(1e-6 * rate for rate in row["dispatch_us"]))
    return row | {"predicted_ms": round(MicroBatch(*row["work"]).seconds(host) * 1e3, 2)}


def predicted_anew(results: list[dict]) -> Iterator[dict]:
    """Yield measured settings with the present planner's predictions."""
    for row in results:
        if "ms" not in row:
            yield row
            continue
        planner = Planner(step.args_workload(arguments(row)), find_gpu(row["gpu"]))
        policies, programs = parse_policies(row["run"], row["layers"]), row.get("layers_per_program", 1)
        plan = planner.plan(policies, weights=row.get("weights", DEVICE), layers_per_program=programs)
        yield _with_host(row | prediction(planner, plan) | {"attention": row.get("attention", AUTO)})


def summary(results: list[dict]) -> dict:
    """Return the error's distribution over measured settings."""
    fine = [row for row in results if "ms" in row]
    counts = {
        "settings": len(results),
        "measured": len(fine),
        "refused": sum("refused" in row for row in results),
        "out of memory": sum("RESOURCE_EXHAUSTED" in row.get("error", "") for row in results),
        "other errors": sum("RESOURCE_EXHAUSTED" not in row.get("error", "RESOURCE_EXHAUSTED") for row in results),
    }
    if not fine:
        return counts
    seconds = np.array([row["predicted_ms"] / row["ms"] - 1 for row in fine])
    gib = np.array([row["predicted_gib"] / row["peak_gib"] - 1 for row in fine])
    return counts | {
        "time off, median": _percent(np.median(np.abs(seconds))),
        "time off, 90th percentile": _percent(np.quantile(np.abs(seconds), 0.9)),
        "memory too low, most": _percent(max(0, -gib.min())),
        "memory too high, median": _percent(np.median(gib)),
    }


def _percent(value: float) -> str:
    return f"{value:.1%}"


def line(row: dict) -> dict:
    """Return a setting's row of the printed table."""
    names = {
        "model": f"{row['shape']}, {row['layers']} layers",
        "tokens": row["tokens"],
        "documents": f"{row['log-normal']}, log-normal" if "log-normal" in row else "{}–{}".format(*row["documents"]),
        "method": row["method"] if row["quantize"] == "none" else row["quantize"],
        "remat": row["remat"] + (f" within {row['gib']} GiB" if "gib" in row else ""),
    }
    if "ms" not in row:
        return names | {"ms": row.get("refused", row.get("error", "–"))[:60], "GiB": "–"}
    return names | {
        "ms": beside(row["predicted_ms"], row["ms"]),
        "GiB": beside(row["predicted_gib"], row["peak_gib"]),
    }


def beside(predicted: float, measured: float) -> str:
    return f"{predicted:.1f} / {measured:.1f} ({predicted / measured - 1:+.1%})"
