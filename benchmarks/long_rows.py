"""Measure long rows and large models on one GPU: tiles, dropped inputs, partly streamed weights.

    python benchmarks/long_rows.py --cases 8b-131072 70b --json benchmarks/results/long_rows.json

A step is loss and LoRA gradients of one row with random weights; `8b-524288` takes 4 of 32 layers.
"""

import argparse
import json
import os
from pathlib import Path

from measure import table, write_results
from step import run_case

ATTENTION = "attention_out,attention_lse"
_GROUP = f"1 x offload:layer_input; drop:{ATTENTION} + 3 x drop:layer_input; offload:{ATTENTION}"
_LLAMA = {"shape": "llama-3.1-8b", "no_warm_up": True, "steps": 1}
_EIGHT = {**_LLAMA, "layers": 8, "tokens": 131072, "document_tokens": 131072}
_KEPT = {"remat": f"offload:layer_input,{ATTENTION}"}
CASES: dict[str, dict] = {
    "8b-131072-8": {**_EIGHT, **_KEPT},
    "8b-131072-8-tiles": {**_EIGHT, **_KEPT, "tile": 16384},
    "8b-131072": {
        **_LLAMA,
        "tokens": 131072,
        "document_tokens": 131072,
        "tile": 16384,
        "remat": f"14 x offload:layer_input,{ATTENTION} & 18 x save:{ATTENTION}",
    },
    "8b-524288": {
        **_LLAMA,
        "layers": 4,
        "tokens": 524288,
        "document_tokens": 524288,
        "remat": _GROUP,
        "tile": 32768,
        "attention": "hopper",
    },
    "8b-65536": {**_LLAMA, "tokens": 65536, "document_tokens": 30000, "quantize": "nf4", "remat": "auto"},
    "70b": {
        "shape": "llama-3.3-70b",
        "remat": "full",
        "weights": "16 x device & 64 x host",
        "embeddings": "host",
        "steps": 2,
        "no_warm_up": True,
    },
    "gpt-oss-120b": {
        "shape": "gpt-oss-120b",
        "tokens": 8192,
        "remat": "offload",
        "weights": "18 x device & 18 x host",
    },
    "30b-a3b": {"shape": "qwen3-30b-a3b", "remat": "offload", "weights": "36 x device & 12 x host"},
    "14b-20-gib": {"shape": "qwen3-14b", "quantize": "nf4", "remat": "auto", "memory_limit": 20, "embeddings": "host"},
    "8b-10-gib": {"shape": "qwen3-8b", "quantize": "nf4", "remat": "auto", "memory_limit": 10, "embeddings": "host"},
}


def line(result: dict) -> dict:
    """Return a row of the printed table."""
    if "error" in result:
        return {"case": result["case"], "error": result["error"][:80]}
    return {
        "case": result["case"],
        "s": f"{result['ms'] / 1e3:.2f}",
        "tokens/s": f"{result['tokens_per_second']:,.0f}",
        "peak GiB": f"{result['peak_gib']:.1f}",
        "process GiB": f"{result['host_rss_gib']:.1f}",
        "first step s": f"{result['first_step_s']:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path, help="measured cases replace those in the file")
    args = parser.parse_args()
    known = json.loads(args.json.read_text())["results"] if args.json and args.json.exists() else []
    results = {result["case"]: result for result in known}
    for name in args.cases:
        results[name] = {"case": name, **run_case(**CASES[name])}
        print(line(results[name]), flush=True)
        if args.json:
            gpu = next((result["gpu"] for result in results.values() if "gpu" in result), "unknown")
            write_results(args.json, list(results.values()), gpu=gpu)
    print(table([line(result) for result in results.values()]))


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "106")
    main()
