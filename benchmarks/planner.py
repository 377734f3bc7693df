"""The planner's predictions against measured steps.

python benchmarks/planner.py --json benchmarks/results/planner.json
"""

import argparse
import os
from pathlib import Path

from step import run_case, workload

from jaxglue.memory.gpus import GIB, find_gpu
from jaxglue.memory.planner import Planner
from jaxglue.memory.policy import parse_policies

CASES = [
    {"shape": "qwen3-8b", "remat": ["full"]},
    {"shape": "qwen3-8b", "remat": ["dots"]},
    {"shape": "qwen3-8b", "remat": ["offload"]},
    {"shape": "qwen3-8b", "remat": ["full", "dots"], "last": 18},
    {"shape": "qwen3-0.6b", "tokens": 8192, "remat": ["dots"]},
    {"shape": "qwen3-0.6b", "tokens": 8192, "remat": ["none"]},
    {"shape": "qwen3-1.7b", "method": "full", "remat": ["full"]},
    {"shape": "llama-3.1-8b", "tokens": 8192, "remat": ["dots; offload:layer_input"]},
    {"shape": "qwen3-32b", "layers": 16, "remat": ["offload"], "weights": "host"},
]


def row(case: dict, gpu: str) -> dict:
    case = {"tokens": 16384, **case}
    work = workload(case["shape"], case.get("layers"), case["tokens"], case.get("method", "lora"))
    count, last = work.config.num_hidden_layers, case.get("last", 0)
    text = case["remat"][0] if not last else f"{count - last} x {case['remat'][0]} + {last} x {case['remat'][1]}"
    streams = case.get("weights") == "host"
    plan = Planner(work, find_gpu(gpu)).plan(parse_policies(text, count), stream_weights=streams)
    measured = run_case(**case)
    shape = case["shape"] + (f", {case['layers']} layers" if case.get("layers") else "")
    setting = {"model": shape, "method": case.get("method", "lora"), "tokens": case["tokens"], "remat": text}
    if "error" in measured:
        return {**setting, "error": measured["error"]}
    return {
        **setting,
        "weights": case.get("weights", "device"),
        "predicted ms": round(plan.seconds * 1e3, 1),
        "measured ms": round(measured["ms"], 1),
        "time": f"{plan.seconds * 1e3 / measured['ms'] - 1:+.1%}",
        "predicted GiB": round(plan.device_bytes / GIB, 2),
        "measured GiB": round(measured["peak_gib"], 2),
        "memory": f"{plan.device_bytes / GIB / max(measured['peak_gib'], 1e-9) - 1:+.1%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for case in CASES:
        results.append(row(case, args.gpu))
        print(results[-1], flush=True)
    if args.json:
        from measure import write_results

        write_results(args.json, results)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "110")
    main()
