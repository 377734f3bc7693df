"""Draw docs/attention.png from benchmarks/results/attention.json: our kernels beside cuDNN's at 16,384 tokens.

python benchmarks/plot_attention.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from measure import save_figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "attention.json"
TOKENS = 16384
BACKENDS = {"triton": ("jaxglue (Triton)", "#2a6fdb"), "cudnn": ("cuDNN, packed", "#b9bec8")}


def main() -> None:
    measured = json.loads(RESULTS.read_text())
    times = plotted(measured["results"])
    figure, axes = plt.subplots(figsize=(8, 0.42 * len(times) + 1.2))
    for offset, (backend, (label, color)) in zip((-0.2, 0.2), BACKENDS.items(), strict=True):
        bars = axes.barh(
            [i + offset for i in range(len(times))],
            [by[backend] for by in times.values()],
            0.38,
            label=label,
            color=color,
        )
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axes.set_yticks(range(len(times)), list(times), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"ms, forward and backward of one layer's attention, {TOKENS:,} tokens, {measured['gpu']}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    save_figure(figure, ROOT / "docs" / "attention.png", times)


def plotted(results: list[dict]) -> dict[str, dict[str, float]]:
    """Return what the chart shows: milliseconds of each backend by model and documents."""
    times: dict[str, dict[str, float]] = {}
    for row in results:
        milliseconds = row["forward + backward ms"]
        if row["tokens"] == TOKENS and isinstance(milliseconds, int | float) and "one" not in row["documents"]:
            times.setdefault(f"{row['model']}, {row['documents']}", {})[row["backend"]] = milliseconds
    return {name: by for name, by in times.items() if by.keys() >= BACKENDS.keys()}


if __name__ == "__main__":
    main()
