"""Measure `jaxglue train --objective decide` on rows of about 200 tokens, extrapolated to a published number of tokens.

    python benchmarks/decide_train.py --scratch /dev/shm/decide --steps 300 --json FILE
    python benchmarks/decide_train.py --shape tiny-qwen3.5 --row 512 --steps 4 --rows 200 --scratch DIR     # on a CPU

All weights of a model folder of random weights, in bf16; a state of some 140 tokens with two questions. Speed and MFU
are the run's own, of all steps but the first; MFU counts products of the layers' weights and attention, forward and
backward, and no output projection.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from gpus import ask_gpu
from inputs import make_model
from measure import ROOT, provenance, write_json
from shapes import SHAPES
from transformers import AutoTokenizer

from jaxglue.data.decide_rows import DecisionEncoder
from jaxglue.data.files import Row

QUESTIONS = {
    "urgent": {"type": "noul", "instructions": "Is it urgent?"},
    "kind": {"type": "choice", "instructions": "Which kind?", "criteria": {"bill": None, "order": None, "other": None}},
}
PUBLISHED_TOKENS, PUBLISHED_HOURS = 183e6, 2.5
"""Published for a model of two billion parameters on a GH200."""
_WORDS = ("three", "plus", "seven", "what", "is", "order", "of", "the", "red", "cups")


def decision(rng: np.random.Generator, words: int) -> dict:
    """Draw a row."""
    gold = {"urgent": {"noul": float(rng.random())}, "kind": {"label": str(rng.choice(("bill", "order", "other")))}}
    return {"state": " ".join(rng.choice(_WORDS, words)), "questions": QUESTIONS, "gold": gold}


def write_rows(path: Path, model: Path, count: int, tokens: int) -> float:
    """Write rows of about so many tokens; return their mean."""
    encoder = DecisionEncoder(AutoTokenizer.from_pretrained(model))

    def mean(words: int, number: int) -> float:
        rows = [Row(origin="row", value=decision(np.random.default_rng(i), words)) for i in range(number)]
        return float(encoder.encode(rows).lengths.mean())

    few, many = mean(50, 20), mean(100, 20)
    words = max(round(50 + (tokens - few) * 50 / (many - few)), 1)
    rng = np.random.default_rng(0)
    path.write_text("".join(json.dumps(decision(rng, words)) + "\n" for _ in range(count)))
    return mean(words, 200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3.5-2b")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder with room for the weights")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--row", type=int, default=16_384, help="tokens of a packed row")
    parser.add_argument("--batch-size", type=int, default=2, help="packed rows of a step")
    parser.add_argument("--rows", type=int, default=60_000, help="states")
    parser.add_argument("--tokens", type=int, default=200, help="of a state with its questions, about")
    parser.add_argument("--json", type=Path)
    parser.add_argument("train_flags", nargs="*", help="further flags of jaxglue train, after --")
    args = parser.parse_args()
    model, data, output = (args.scratch / name for name in ("model", "rows.jsonl", "run"))
    jax.config.update("jax_platforms", "cpu")  # the run's process has the GPU
    args.scratch.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        make_model(model, SHAPES[args.shape])
    mean = write_rows(data, model, args.rows, args.tokens)
    flags = {
        "--model": model,
        "--method": "full",
        "--objective": "decide",
        "--data": data,
        "--seq-len": args.row,
        "--batch-size": args.batch_size,
        "--steps": args.steps,
        "--output": output,
        "--cache-dir": args.scratch / "tokens",
        "--compilation-cache": args.scratch / "xla",
        "--save-every": args.steps + 1,
    }
    pairs = [str(part) for flag in flags.items() for part in flag]
    command = [sys.executable, "-m", "jaxglue", "train", *pairs, "--overwrite", "--log-every", "10", *args.train_flags]
    subprocess.run(command, cwd=ROOT, check=True)
    summary = json.loads((output / "summary.json").read_text())
    speed = summary["tokens_per_second"]
    result = {
        "shape": args.shape,
        "row_tokens_mean": mean,
        "packed_row": args.row,
        "rows_of_a_step": args.batch_size,
        "steps": args.steps,
        "tokens_per_s": speed,
        "mfu": summary["mfu"],
        "peak_memory_gb": summary["peak_memory_gb"],
        "startup_s": summary["startup_seconds"],
        "hours_of_183m_tokens": PUBLISHED_TOKENS / speed / 3600,
        "published_hours": PUBLISHED_HOURS,
    }
    print(json.dumps(result))
    if args.json:
        write_json(args.json, provenance(ask_gpu("name") or "none: the CPU") | {"results": result})


if __name__ == "__main__":
    main()
