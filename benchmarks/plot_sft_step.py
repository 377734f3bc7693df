"""Draw docs/speed.png from benchmarks/results/sft_step.json, and print the README's table.

python benchmarks/plot_sft_step.py

A bar is an engine's percentage of matmul-only speed.
"""

import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from kernel_profile import MATMUL
from measure import table

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
    ticks, offset, shown = [], 0.0, set()
    for name in names:
        results = {result["engine"]: result for result in measured if result["row"] == name}
        present = [engine for engine in ENGINES if engine in results]
        ticks.append(offset + (len(present) - 1) / 2)
        for engine in present:
            label, color = ENGINES[engine]
            result = results[engine]
            share = 100 * result["flops"] / result["ms"] * 1e3 / MATMUL
            axes.barh(offset, share, 0.9, color=color, label=None if engine in shown else label)
            text = f"{result['tokens'] / result['ms'] * 1e3:,.0f} tokens/s, {result.get('peak_gib', 0):.1f} GiB"
            at, side, ink = (share - 1, "right", "white") if share > 70 else (share + 1, "left", "black")
            axes.text(at, offset, text, horizontalalignment=side, verticalalignment="center", color=ink, fontsize=7)
            shown.add(engine)
            offset += 1
        offset += 0.6
    axes.set_yticks(ticks, [_label(name, measured) for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"% of matmul-only speed, one {_gpu(measured)}", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "speed.png", dpi=110)
    print(table([_row(name, measured) for name in names]))


def _row(name: str, measured: list[dict]) -> dict[str, str]:
    """Return tokens/s and peak memory by engine, and the speedup over Unsloth."""
    results = {result["engine"]: result for result in measured if result["row"] == name}
    cells = {label: _cell(results.get(engine)) for engine, (label, _) in ENGINES.items()}
    both = "ours" in results and "unsloth" in results
    gain = f"{results['unsloth']['ms'] / results['ours']['ms']:.2f} ×" if both else "–"
    tokens = next(iter(results.values()))["tokens"]
    return {"tokens/s, peak memory": f"{_title(name)}, {tokens:,} tokens"} | cells | {"jaxglue against Unsloth": gain}


def _cell(result: dict | None) -> str:
    if result is None:
        return "–"
    return f"{result['tokens'] / result['ms'] * 1e3:,.0f}, {result['peak_gib']:.1f} GiB"


def _label(name: str, measured: list[dict]) -> str:
    result = next(result for result in measured if result["row"] == name)
    limit = f", ≤ {result['memory_limit']} GiB" if result["memory_limit"] else ""
    return f"{_title(name)}\n{result['tokens']:,} tokens{limit}"


def _title(name: str) -> str:
    """Format a row's name as a model name, such as Qwen3-8B."""
    return re.sub(r"(?<=\d)b\b", "B", name).replace("qwen", "Qwen").replace("llama", "Llama")


def _gpu(measured: list[dict]) -> str:
    return next(result["gpu"] for result in measured if "gpu" in result)


if __name__ == "__main__":
    main()
