"""Predict what fits which GPU with the planner, and print the table of docs/memory.md.

python benchmarks/what_fits.py --json benchmarks/results/what_fits.json
python benchmarks/what_fits.py --table benchmarks/results/what_fits.json
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from measure import provenance, table, write_json
from shapes import SHAPES

from jaxglue.commands.configs import EstimateConfig
from jaxglue.commands.estimate import make_planner
from jaxglue.planner.gpus import GIB
from jaxglue.planner.plan import DoesNotFit
from jaxglue.settings.recipe import from_settings

GPUS = ("3060", "4080", "4090", "5090", "L40S", "A100-40", "H100", "H200")
HOST_MEMORY = 64 * GIB
SEQ_LEN = 4096
"""Tokens in the rows whose speed is predicted."""


class Row(NamedTuple):
    """A model and how it trains."""

    name: str
    shape: str
    settings: dict[str, str]


ROWS = (
    Row("Qwen3-0.6B, LoRA", "qwen3-0.6b", {}),
    Row("Qwen3-0.6B, full", "qwen3-0.6b", {"method": "full"}),
    Row("Qwen3-8B, LoRA", "qwen3-8b", {}),
    Row("Qwen3-8B, QLoRA", "qwen3-8b", {"quantize": "nf4"}),
    Row("Qwen3-8B, full, 8-bit AdamW", "qwen3-8b", {"method": "full", "moments": "8bit"}),
    Row("Qwen3-14B, QLoRA", "qwen3-14b", {"quantize": "nf4"}),
    Row("gpt-oss-20b, LoRA", "gpt-oss-20b", {}),
    Row("Mistral-7B, LoRA", "mistral-7b", {}),
    Row("Qwen2.5-7B, LoRA", "qwen2.5-7b", {}),
    Row("Gemma-3-12B, LoRA", "gemma-3-12b", {}),
    Row("Gemma-3-12B, QLoRA", "gemma-3-12b", {"quantize": "nf4"}),
)


def predict(row: Row, gpu: str) -> dict:
    """Predict the longest row of tokens that fits, and tokens/s with rows of `SEQ_LEN`; None where nothing fits."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[row.shape]))
        settings = {"model": folder, "gpu": gpu, "seq_len": SEQ_LEN, **row.settings}
        planner = make_planner(from_settings(EstimateConfig, settings))
    longest = planner.longest_row(host_memory=HOST_MEMORY)
    try:
        plan = planner.choose(host_memory=HOST_MEMORY, weights="auto")
    except DoesNotFit:
        return {"row": row.name, "gpu": planner.gpu.name, "longest": longest, "tokens_per_second": None}
    result = {"longest": longest, "tokens_per_second": SEQ_LEN / plan.seconds, "settings": str(plan)}
    return {"row": row.name, "gpu": planner.gpu.name, **result}


def format_table(results: list[dict]) -> str:
    """Return a row for each GPU and a column for each model."""
    cells = {(result["gpu"], result["row"]): _cell(result) for result in results}
    gpus, rows = (list(dict.fromkeys(result[key] for result in results)) for key in ("gpu", "row"))
    return table([{"GPU": gpu, **{row: cells.get((gpu, row), "") for row in rows}} for gpu in gpus])


def _cell(result: dict) -> str:
    if not result["longest"]:
        return "–"
    rate = result["tokens_per_second"]
    return f"{_short(result['longest'])}" + (f", {_short(rate)}/s" if rate else "")


def _short(number: float) -> str:
    return (
        f"{number / 1000:.0f}k" if number >= 10_000 else f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--table", type=Path, help="print the table of this file, and predict nothing")
    args = parser.parse_args()
    if args.table:
        print(format_table(json.loads(args.table.read_text())["results"]))
        return
    results = []
    for row in ROWS:
        for gpu in GPUS:
            results.append(predict(row, gpu))
            print(results[-1], flush=True)
    if args.json:
        write_json(args.json, provenance("none: predictions") | {"seq_len": SEQ_LEN, "results": results})
    print(format_table(results))


if __name__ == "__main__":
    main()
