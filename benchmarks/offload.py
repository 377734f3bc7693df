"""Compare activations and weights on the host with keeping them on the GPU: time, memory, hidden copies.

    python benchmarks/offload.py --json benchmarks/results/offload.json

A step is loss and LoRA gradients of a packed row. The whole-step programs use XLA's own offloading.
"""

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from gpus import FreeGpus
from measure import table, write_results
from step import run_case

SERIAL = {"depth": 0}
NONE, FULL, OFFLOAD, DOTS, AUTO = ({"remat": name} for name in ("none", "full", "offload", "dots", "auto"))
CASES: dict[str, list[tuple[str, dict]]] = {
    "8b": [
        ("full, on the device", FULL),
        ("offload, two buffers", OFFLOAD),
        ("offload, one buffer", {**OFFLOAD, **SERIAL}),
        ("dots, on the device", DOTS),
        ("auto", AUTO),
        ("auto, 18.8 GiB", {**AUTO, "embeddings": "host", "memory_limit": 18.8}),
        ("auto, NF4, 9.4 GiB", {**AUTO, "embeddings": "host", "memory_limit": 9.4, "quantize": "nf4"}),
    ],
    "0.6b": [("full, on the device", FULL), ("offload, two buffers", OFFLOAD), ("dots, on the device", DOTS)],
    "xla": [
        ("per layer, nothing recomputed", NONE),
        ("per layer, full", FULL),
        ("per layer, offload", OFFLOAD),
        ("whole step unrolled, offload", {**OFFLOAD, "executor": "unrolled"}),
        ("whole step in a scan, offload", {**OFFLOAD, "executor": "scan"}),
    ],
    "depth": [("offload", {**OFFLOAD, "layers": 16}), ("offload", {**OFFLOAD, "layers": 64})],
    "14b": [
        ("full, on the device", FULL),
        ("offload, two buffers", OFFLOAD),
        ("offload, one buffer", {**OFFLOAD, **SERIAL}),
    ],
    "32b": [
        ("full, weights on the device", FULL),
        ("offload, two buffers", OFFLOAD),
        ("offload, one buffer", {**OFFLOAD, **SERIAL}),
        ("auto, 16 GiB", {**AUTO, "embeddings": "host", "memory_limit": 16}),
    ],
    "planner": [
        ("a mix", {"shape": "qwen3-14b", "remat": "25 x full + 15 x dots"}),
        ("dots", {**DOTS, "shape": "llama-3.1-8b"}),
        ("offload of two values", {"shape": "llama-3.1-8b", "remat": "dots; offload:gate,up", "layers": 16}),
        ("none", {"shape": "qwen3-1.7b", **NONE, "tokens": 8192}),
        ("full fine-tuning", {**DOTS, "shape": "qwen3-1.7b", "method": "full"}),
        ("full fine-tuning", {**FULL, "shape": "llama-3.2-1b", "method": "full", "tokens": 8192}),
        ("a long row", {**FULL, "shape": "qwen3-8b", "tokens": 65536}),
        ("NF4", {**OFFLOAD, "shape": "qwen3-14b", "quantize": "nf4"}),
    ],
}
SHAPES = {
    "8b": {"shape": "qwen3-8b"},
    "0.6b": {"shape": "qwen3-0.6b", "tokens": 8192},
    "xla": {"shape": "llama-3.1-8b", "layers": 16},
    "depth": {"shape": "qwen3-1.7b"},
    "14b": {"shape": "qwen3-14b"},
    "32b": {"shape": "qwen3-32b"},
    "planner": {},
}
PUBLISHED = {"8b": 8.4, "14b": 6.7, "32b": 4.6}
"""Percent of a step that Unsloth reports for double buffering (May 2026; similar sizes, another GPU)."""


def gains(results: list[dict]) -> list[dict]:
    """Return the share of a step, and of the copies, that the second buffer saves, beside the published one."""
    rows = []
    for group, published in PUBLISHED.items():
        by_name = {r["how"]: r for r in results if r["group"] == group and "error" not in r}
        one, two = by_name.get("offload, one buffer"), by_name.get("offload, two buffers")
        if one and two:
            saved = one["ms"] - two["ms"]
            ours = {"saved": f"{saved / one['ms']:.1%}", "of the copies' time": f"{saved / one['copies_ms']:.0%}"}
            rows.append({"model": two["shape"], **ours, "published": f"{published}%"})
    return rows


def tasks(groups: list[str], only: str = "") -> list[list[tuple[str, str, dict]]]:
    """Group the cases that one GPU measures in sequence because they are compared; the planner's run separately."""
    cases = [[(group, *case) for case in CASES[group] if only in case[0]] for group in groups]
    return [
        part for task in cases if task for part in ([[case] for case in task] if task[0][0] == "planner" else [task])
    ]


class Measurements:
    """Run tasks in parallel, one per GPU, and write the results after every case."""

    def __init__(self, gpus: int, path: Path | None):
        self.results: list[dict] = []
        self._path, self._lock, self._gpus = path, Lock(), FreeGpus(gpus)

    def measure(self, task: list[tuple[str, str, dict]]) -> None:
        with self._gpus.one() as environment:
            for case in task:
                result = row(*case, environment)
                with self._lock:
                    self._add(result)

    def _add(self, result: dict) -> None:
        self.results.append(result)
        self.results.sort(key=lambda r: list(CASES).index(r["group"]))
        print(line(result), flush=True)
        if self._path:
            gpu = next((r["gpu"] for r in self.results if "gpu" in r), "none")
            write_results(self._path, self.results, gpu=gpu)


def row(group: str, name: str, options: dict, environment: dict[str, str]) -> dict:
    case = {"tokens": 16384, "method": "lora", "weights": "device", "executor": "layers", **SHAPES[group], **options}
    result = run_case(**case, trace=True, environment=environment)
    numbers = {name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}
    return {"group": group, "how": name, **case, **numbers}


def line(result: dict) -> dict:
    model = result["shape"] + (f", {result['layers']} layers" if "layers" in result else "")
    if "error" in result:
        return {"model": model, "how": result["how"], "error": result["error"][:80]}
    return {
        "model": model,
        "how": result["how"],
        "ms": f"{result['ms']:.1f}",
        "peak GiB": f"{result['peak_gib']:.2f}",
        "beside weights": f"{result['peak_gib'] - result['weights_gib']:.2f}",
        "copies ms": f"{result['copies_ms']:.0f}",
        "hidden": f"{result['hidden_share']:.1%}",
        "GPU busy": f"{result['busy_ms'] / result['span_ms']:.1%}",
        "first step s": f"{result['first_step_s']:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--gpus", type=int, default=1, help="groups measured side by side")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    measurements = Measurements(args.gpus, args.json)
    with ThreadPoolExecutor(args.gpus) as pool:
        list(pool.map(measurements.measure, tasks(args.groups, args.only)))
    if second_buffer := gains(measurements.results):
        print(table(second_buffer))


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "110")
    main()
