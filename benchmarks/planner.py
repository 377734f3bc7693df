"""Compare the planner's predictions with steps measured by benchmarks/offload.py; needs no GPU.

python benchmarks/planner.py benchmarks/results/offload.json --json benchmarks/results/planner.json
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import jax
from measure import table, write_results
from step import workload

from jaxglue.engine.policy import parse_policies
from jaxglue.planner.gpus import GIB, find_gpu
from jaxglue.planner.planner import Planner


def predict(case: dict, gpu: str) -> dict:
    """Return predicted and measured time and peak memory of a case."""
    work = workload(case["shape"], case.get("layers"), case["tokens"], case["method"], case.get("quantize", "none"))
    work = replace(work, host_embeddings=case.get("embeddings") == "host")
    count = work.config.num_hidden_layers
    policies = parse_policies(case["remat"], count)
    plan = Planner(work, find_gpu(gpu)).plan(policies, weights=case["weights"])
    ms, gib = plan.seconds * 1e3, plan.device_bytes / GIB
    return {
        "gpu": gpu,
        "model": case["shape"],
        "layers": count,
        "tokens": case["tokens"],
        "method": case["method"] + (f", {case['quantize']}" if "quantize" in case else ""),
        "remat": case["remat"],
        "weights": case["weights"],
        "predicted ms": round(ms, 1),
        "measured ms": round(case["ms"], 1),
        "time off": f"{ms / case['ms'] - 1:+.1%}",
        "predicted GiB": round(gib, 2),
        "measured GiB": round(case["peak_gib"], 2),
        "memory off": f"{gib / case['peak_gib'] - 1:+.1%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="+", type=Path, help="results of benchmarks/offload.py")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    results = []
    for path in args.measured:
        measured = json.loads(path.read_text())
        for case in measured["results"]:
            if case["executor"] == "layers" and "depth" not in case and "error" not in case:
                results.append(predict(case, measured["gpu"]))
    print(table(results))
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
