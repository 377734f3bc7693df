"""Draws docs/speed.png from benchmarks/results/sft_step.json: every engine's share of what matmuls alone would allow.

python benchmarks/plot_sft_step.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from kernel_profile import MATMUL

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "sft_step.json"
ENGINES = {
    "ours": ("jaxglue", "#2a6fdb"),
    "unsloth": ("Unsloth", "#9aa3b2"),
    "peft": ("transformers + PEFT", "#d3d8e0"),
}


def main() -> None:
    measured = [result for result in json.loads(RESULTS.read_text())["results"] if "ms" in result]
    names = list(dict.fromkeys(result["row"] for result in measured))
    figure, axes = plt.subplots(figsize=(8, 0.28 * len(measured) + 0.25 * len(names) + 1.0))
    ticks, place, shown = [], 0.0, set()
    for name in names:
        results = {result["engine"]: result for result in measured if result["row"] == name}
        present = [engine for engine in ENGINES if engine in results]
        ticks.append(place + (len(present) - 1) / 2)
        for engine in present:
            label, colour = ENGINES[engine]
            result = results[engine]
            share = 100 * result["flops"] / result["ms"] * 1e3 / MATMUL
            bars = axes.barh(place, share, 0.9, color=colour, label=None if engine in shown else label)
            text = f"{result['tokens'] / result['ms'] * 1e3:,.0f} tokens/s, {result.get('peak_gib', 0):.1f} GiB"
            axes.bar_label(bars, [text], padding=3, fontsize=7)
            shown.add(engine)
            place += 1
        place += 0.6
    axes.set_yticks(ticks, [_label(name, measured) for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 122)
    axes.axvline(100, color="black", linewidth=1)
    axes.set_xlabel(
        f"% of the speed at which nothing but the model's matmuls took time, one {_gpu(measured)}", fontsize=8
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "speed.png", dpi=110)


def _label(name: str, measured: list[dict]) -> str:
    result = next(result for result in measured if result["row"] == name)
    limit = f", ≤ {result['memory_limit']} GiB" if result["memory_limit"] else ""
    return f"{name}\n{result['tokens']:,} tokens{limit}"


def _gpu(measured: list[dict]) -> str:
    return next(result["gpu"] for result in measured if "gpu" in result)


if __name__ == "__main__":
    main()
