"""A training step with three habits of PyTorch trainers, with each of them alone, and with what replaces all.

    python benchmarks/seeds.py --json benchmarks/results/seeds.json
    python benchmarks/seeds.py --shape tiny-qwen3-moe --tokens 512 --layers 2 --rounds 1      # a rehearsal on CPUs

Packed documents' bounds and rotary tables are found in every layer, or once for a batch; layer inputs go to the host
through one buffer, so that layers wait for their copies, or through two; experts look for their tokens one after the
other, or all are grouped by one sort. Every step is a whole one of the same model, weights and batch: the losses of all
variants are compared, and their largest relative difference is in the result. Variants take turns, each in a process of
its own (`step.py`); a variant's time is the median over its turns.

Published for the three together, of other models and GPUs: about 25% (Unsloth with NVIDIA, May 2026).
"""

import argparse
import json
import os
import statistics
from pathlib import Path

from measure import table, write_results
from step import run_case

OLD = {"metadata": "layer", "depth": 0, "routing": "loop"}
NEW = {"metadata": "batch", "depth": None, "routing": "sort"}
VARIANTS = {
    "all three habits": OLD,
    "none of them": NEW,
    "metadata in every layer": NEW | {"metadata": OLD["metadata"]},
    "one buffer": NEW | {"depth": OLD["depth"]},
    "loop over experts": NEW | {"routing": OLD["routing"]},
}
"""Each habit is measured alone: in a step by the loop, which takes longest, others would hide."""
SAME_LOSS = 2e-3
"""Relative difference of losses in bfloat16, from which a variant does not count as the same step."""


def summary(turns: list[dict]) -> list[dict]:
    """Return a row for each variant: its time, and what the step without any of the habits saves of it."""
    times, losses = {}, {}
    for turn in turns:
        if "ms" in turn:
            times.setdefault(turn["variant"], []).append(turn["ms"])
            losses[turn["variant"]] = turn["loss"]
    if "none of them" not in times:
        return []
    after, loss = statistics.median(times["none of them"]), losses["none of them"]
    rows = []
    for name, each in times.items():
        ms, apart = statistics.median(each), abs(losses[name] / loss - 1)
        row = {"variant": name, "ms": round(ms, 1), "turns": len(each), "saved without": f"{1 - after / ms:.1%}"}
        row |= {"faster without": f"{ms / after:.3f} ×", "loss apart": f"{apart:.1e}"}
        rows.append(row | {"same loss": "yes" if apart <= SAME_LOSS else "no"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    case = {"shape": args.shape, "layers": args.layers, "tokens": args.tokens, "quantize": args.quantize}
    turns: list[dict] = []
    for number in range(args.rounds):
        for name in args.variants:
            result = run_case(**case, remat="offload", steps=args.steps, **VARIANTS[name])
            turns.append({"variant": name, "round": number, **result})
            shown = ("ms", "loss", "peak_gib", "first_step_s", "error")
            print(json.dumps({"variant": name} | {key: result[key] for key in shown if key in result}), flush=True)
            rows = summary(turns)
            if args.json:
                gpu = next((turn["gpu"] for turn in turns if "gpu" in turn), "none")
                write_results(args.json, {"summary": rows, "turns": turns}, gpu=gpu)
    if rows:
        print(table(rows))


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "110")
    main()
