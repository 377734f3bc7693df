"""Train the quickstart of reinforcement learning in bfloat16 with exact sampling and without, by several seeds.

    python benchmarks/exact_curve.py --json benchmarks/results/exact_curve.json --plot docs/exact_curve.png

Both have the same prompts, random numbers and settings, those of the shipped recipe but for the dtype. Runs that the
file has are not repeated.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import save_figure, table, write_results

import jaxglue
from jaxglue.training.record import read_metrics

DIFFERENCE = "sampling/sampling_logp_difference/mean"
SHOWN = "reward", DIFFERENCE, "clip_ratio/region_mean"


def train(folder: Path, seed: int, exact: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the metrics of a run by step, and its seconds."""
    begun = time.perf_counter()
    summary = jaxglue.train(
        recipe="quickstart-grpo",
        dtype="bfloat16",
        exact_sampling=exact,
        seed=seed,
        generation_batch_size=args.answers,
        steps=args.steps,
        save_every=args.steps,
        log_every=1,
        output=folder / f"{exact}-{seed}",
    )
    assert summary is not None
    found: dict[str, Any] = {name: [] for name in SHOWN}
    for values in read_metrics(summary.metrics):
        for name in SHOWN:
            if name in values:
                found[name].append(float(values[name]))
    return found | {"seconds": round(time.perf_counter() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=int, help="the most in this call; the next call goes on")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--answers", type=int, default=512, help="of a step")
    parser.add_argument("--last", type=int, default=20, help="steps whose mean reward is compared")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    settings = {"steps": args.steps, "answers": args.answers, "last": args.last}
    curves: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
    if args.json.exists():
        known = json.loads(args.json.read_text())["results"]
        assert known["settings"] == settings, f"{args.json} has other settings: {known['settings']}"
        curves = known["curves"]
    with tempfile.TemporaryDirectory() as name:
        missing = [(seed, exact) for seed in range(args.seeds) for exact in curves if seed >= len(curves[exact])]
        for seed, exact in missing[: args.runs]:
            curves[exact].append(train(Path(name), seed, exact, args))
            save(curves, settings, args.json)
    if args.plot:
        save(curves, settings, args.json)
        plot(curves, args.plot)


def save(curves: dict[str, list[dict[str, Any]]], settings: dict[str, int], path: Path) -> None:
    """Print and write the runs so far."""
    rows = summary(curves, settings["last"])
    print(table(rows), flush=True)
    write_results(path, {"settings": settings, "summary": rows, "curves": curves})


def plot(curves: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the rewards of each seed, and their means, by step, as means of ten steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for (exact, runs), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
        values, width = np.array([run["reward"] for run in runs]), 10
        smooth = np.array([np.convolve(each, np.ones(width) / width, "valid") for each in values])
        steps = np.arange(width, values.shape[1] + 1)
        axes.plot(steps, smooth.T, color=color, linewidth=0.6, alpha=0.5)
        axes.plot(steps, smooth.mean(0), color=color, linewidth=2, label=f"--exact-sampling {exact}")
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    axes.legend(frameon=False)
    save_figure(figure, path, curves)


def summary(curves: dict[str, list[dict[str, Any]]], last: int) -> list[dict[str, Any]]:
    """Return a row for exact sampling and one for sampling that is near."""
    rows = []
    for exact, runs in curves.items():
        if not runs:
            continue
        ends = np.array([np.mean(run["reward"][-last:]) for run in runs])
        row = {"exact sampling": exact, "seeds": len(runs), "reward, last steps": round(float(ends.mean()), 4)}
        row |= {"standard deviation": round(float(ends.std(ddof=1)), 4) if len(ends) > 1 else None}
        row |= {"reward, all steps": round(float(np.mean([np.mean(run["reward"]) for run in runs])), 4)}
        largest = max(max(run[DIFFERENCE]) for run in runs)
        row |= {"largest mean difference of a step, nats": largest, "seconds": [run["seconds"] for run in runs]}
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
