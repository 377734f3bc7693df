"""Compare the planner's predictions with measured steps.

    python benchmarks/planner.py benchmarks/results/offload.json --json benchmarks/results/planner.json
    python benchmarks/planner.py --grid --part 1/4 --json benchmarks/results/planner_grid_1.json
    python benchmarks/planner.py --grid --part 1/4 --plan-for H100 --json plans.json
    python benchmarks/planner.py --grid benchmarks/results/planner_grid_*.json
    python benchmarks/planner.py --grid --families --minutes 5 --json benchmarks/results/planner_families.json

The first form takes steps of benchmarks/offload.py and needs no GPU. The second plans and measures a quarter of 64
settings, in at most 8 minutes; with --plans it measures those of the third form, which needs no GPU either. The fourth
predicts measured settings anew and prints the error's distribution. The last is the second for further model types.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import planner_grid
from grid_runs import device
from measure import table, write_results
from step import workload

from jaxglue.engine.policy import parse_policies
from jaxglue.planner.gpus import GIB, find_gpu
from jaxglue.planner.planner import Planner


def predict(case: dict, gpu: str) -> dict:
    """Return predicted and measured time and peak memory of a case."""
    work = workload(case["shape"], case.get("layers"), case["tokens"], case["method"], case.get("quantize", "none"))
    count = work.config.num_hidden_layers
    policies = parse_policies(case["remat"], count)
    plan = Planner(work, find_gpu(gpu)).plan(policies, weights=case["weights"], layers_per_program=1)
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
    parser.add_argument("measured", nargs="*", type=Path, help="results of benchmarks/offload.py, or of --grid")
    parser.add_argument("--grid", action="store_true", help="settings drawn at random")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th setting, from the i-th on")
    parser.add_argument("--seed", type=int, default=planner_grid.HELD_OUT, help="of the grid's settings")
    parser.add_argument(
        "--streamed", action="store_const", const=None, dest="seed", help="whole models in little memory"
    )
    parser.add_argument(
        "--families", action="store_true", help="20 settings of ten further model types, drawn likewise"
    )
    parser.add_argument("--minutes", type=float, default=7, help="begin no setting after this time")
    parser.add_argument("--plan-for", metavar="GPU", help="only plan")
    parser.add_argument("--plans", type=Path, help="planned settings, to measure a part of")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = grid(args) if args.grid else compare(args.measured)
    if args.json:
        write_results(args.json, results, gpu=results[0]["gpu"] if results else "none")


def grid(args: argparse.Namespace) -> list[dict]:
    """Measure settings, or predict measured ones anew, and print both and the error's distribution."""
    found = grid_rows(args)
    results = []
    for row in found:
        results.append(row)
        print(*planner_grid.line(row).values(), sep="  ", flush=True)
        if args.json:
            write_results(args.json, results, gpu=row["gpu"])
    print(table([planner_grid.line(row) for row in results]))
    for name, value in planner_grid.summary(results).items():
        print(f"{name}: {value}")
    return results


def grid_rows(args: argparse.Namespace) -> Iterator[dict]:
    """Yield the rows that the flags ask for."""
    part, parts = map(int, args.part.split("/"))
    if args.measured:
        return planner_grid.predicted_anew([row for path in args.measured for row in read_rows(path)])
    if args.plan_for:
        gpu = find_gpu(args.plan_for)
        return (
            {**row, "gpu": gpu.name} for row in planner_grid.plans(args.seed, part, parts, gpu, families=args.families)
        )
    if args.plans:
        planned = read_rows(args.plans)[part - 1 :: parts]
    else:
        planned = list(planner_grid.plans(args.seed, part, parts, device()[0], families=args.families))
    return planner_grid.measured(planned, args.minutes)


def read_rows(path: Path) -> list[dict]:
    """Return the results in a file."""
    return json.loads(path.read_text())["results"]


def compare(paths: list[Path]) -> list[dict]:
    """Predict steps of benchmarks/offload.py and print the table."""
    jax.config.update("jax_platforms", "cpu")
    results = []
    for path in paths:
        measured = json.loads(path.read_text())
        for case in measured["results"]:
            # An output projection that was measured on the GPU would now be beside the table in host memory.
            if case["executor"] == "layers" and not {"depth", "error", "embeddings"} & case.keys():
                results.append(predict(case, measured["gpu"]))
    print(table(results))
    return results


if __name__ == "__main__":
    main()
