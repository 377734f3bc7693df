"""Acceptance of drafts after fine-tuning: by the head as it was, trained with the model, and trained after it.

    python benchmarks/draft_acceptance.py --scratch /tmp/drafts --json benchmarks/results/draft_acceptance.json

A hybrid of bytes and its draft head learn Python together from random weights; then adapters on English text (this
repository's documentation) train with each `--train-draft`. Shares are Σ min(p, q) over the vocabulary at temperature
1, and of equal largest logits, of held-out tokens. Runs that would probably end after --minutes are left out.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from measure import table, write_results
from rl_text_model import write_model
from safetensors.numpy import save_file

from jaxglue.files.json_file import read_json
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.draft import DRAFTS, build_draft, parameter_name
from jaxglue.models.parameters import flatten_names, split_model

HYBRID = {
    **{"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4},
}


def write_base(folder: Path, layers: int, width: int) -> None:
    """Write a hybrid with random weights and a draft head."""
    write_model(folder, layers, width)
    heads = {"linear_num_key_heads": width // 128, "linear_num_value_heads": width // 64}
    heads["full_attention_interval"] = min(4, layers)
    described = folder / "config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | HYBRID | heads))
    config = config_from_hf(read_config(folder))
    tensors = flatten_names(split_model(random_model(config, dtype=jnp.float32), nnx.Param)[1])
    names = DRAFTS[config.model_type].of(layers)
    head = nnx.to_flat_state(nnx.state(build_draft(config, dtype=jnp.float32, rngs=nnx.Rngs(0))))
    tensors |= {names.stored(parameter_name(path)): value[...] for path, value in head}
    save_file({name: np.asarray(value) for name, value in tensors.items()}, folder / "model.safetensors")


def write_rows(path: Path, folder: Path, pattern: str, megabytes: float, length: int) -> None:
    """Write parts of a length of a folder's text files as rows, in an order of their own, up to a size."""
    files, rows = sorted(folder.rglob(pattern)), list[str]()
    for index in np.random.default_rng(0).permutation(len(files)).tolist():
        text = files[index].read_text(encoding="utf-8", errors="ignore")
        parts = [text[begin : begin + length] for begin in range(0, len(text) - length, length)]
        rows += [json.dumps({"text": part}) + "\n" for part in parts if part.isascii()]
    path.write_text("".join(rows[: int(megabytes * 1e6 / length)]))


def train(model: Path, data: Path, output: Path, steps: int, *flags: str) -> dict:
    """Train by the command; return the run's summary."""
    command = [sys.executable, "-m", "jaxglue", "train", "--model", str(model), "--data", str(data)]
    command += ["--output", str(output), "--steps", str(steps), "--eval-fraction", "0.1", *flags]
    subprocess.run(command, check=True)
    return read_json(output / "summary.json")


def save(path: Path | None, results: list[dict]) -> None:
    """Write the results so far, if to a file."""
    if path is not None:
        write_results(path, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=600, help="of the base")
    parser.add_argument("--tuning-steps", type=int, default=150)
    parser.add_argument("--draft-rate", type=float, default=1e-3, help="learning rate of the tuned heads")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # leave the GPU to the runs
    scratch, begun, last = args.scratch, time.monotonic(), 0.0
    (scratch / "start").mkdir(parents=True, exist_ok=True)
    write_base(scratch / "start", args.layers, args.width)
    sizes = args.megabytes, args.seq_len - 1
    write_rows(scratch / "python.jsonl", Path(sysconfig.get_paths()["stdlib"]), "*.py", *sizes)
    write_rows(scratch / "documentation.jsonl", Path(__file__).parents[1] / "docs", "*.md", *sizes)
    rows = ["--seq-len", str(args.seq_len), "--batch-size", str(args.batch_size)]
    base = train(
        *(scratch / "start", scratch / "python.jsonl", scratch / "base", args.steps),
        *("--method", "full", "--learning-rate", "1e-3", "--train-draft", "with", *rows),
    )
    results = [{"text": "the base's own", "head": "trained with the base", **base["drafts"]["trained"]}]
    save(args.json, results)
    for when in ("with", "after"):
        tuning = time.monotonic()
        if tuning - begun + last > 60 * args.minutes:
            print(f"trained {when}: left out after {(tuning - begun) / 60:.0f} minutes", flush=True)
            continue
        tuned = train(
            *(scratch / "base/model", scratch / "documentation.jsonl", scratch / when, args.tuning_steps),
            *("--learning-rate", "1e-3", "--train-draft", when, "--draft-method", "full", *rows),
            *("--draft-learning-rate", str(args.draft_rate)),
        )
        if when == "with":
            results.append({"text": "tuned on", "head": "as it was", **tuned["drafts"]["folder's"]})
        results.append({"text": "tuned on", "head": f"trained {when}", **tuned["drafts"]["trained"]})
        save(args.json, results)
        last = time.monotonic() - tuning
    print(table([{**row, "sampled": f"{row['sampled']:.1%}", "greedy": f"{row['greedy']:.1%}"} for row in results]))


if __name__ == "__main__":
    main()
