"""Train a small model on arithmetic by rewards, beside a control whose rewards are shuffled within each group.

    python benchmarks/rl_curve.py --json benchmarks/results/rl_curve.json --plot docs/rl_curve.png

A Qwen3 of a few million parameters is trained on sums of two numbers of two digits, `4 7 + 8 5 =`; in seven of ten
answers a digit is replaced by any other, so that it is right in about two of five. Each sum has several such answers,
which few steps do not memorize. Then GRPO has 200 steps of 32 prompts × 16 answers. Held-out pairs of numbers are in no
step of either.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measure import save_figure, table, write_results
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import jaxglue
from jaxglue.training.record import read_metrics

HELD_OUT, WRONG, SHOWN_TIMES = 256, 0.7, 2
"""Pairs that are not trained on, the share of demonstrations with a wrong digit, and those of each pair."""
SHOWN = ("reward", "eval_reward", "entropy", "sampling/sampling_logp_difference/mean")
REWARDS = """
import random


def exact(completions, answer):
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer)]


def shuffled(completions, answer):
    rewards = exact(completions, answer)
    random.Random(repr((completions, answer))).shuffle(rewards)
    return rewards
"""


def write_inputs(folder: Path, layers: int, width: int) -> None:
    """Write the model's configuration and tokenizer, demonstrations, prompts and rewards."""
    words = ["<eos>", "=", "+", *map(str, range(10)), "<pad>", "<unk>", "<unused>"]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    named = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder / "model")
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(width // 128, 1), "head_dim": 64}
    other = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "initializer_range": 0.05}
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": len(words), "eos_token_id": 0}
    config = kind | shape | heads | other | {"tie_word_embeddings": False}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "rewards.py").write_text(REWARDS)
    rng = np.random.default_rng(0)
    pairs = rng.permutation(10_000)
    lines: dict[str, list[str]] = {"held_out": [], "prompts": [], "shown": []}
    for place, pair in enumerate(pairs.tolist()):
        spaced = [" ".join(f"{number:0{digits}d}") for number, digits in ((pair // 100, 2), (pair % 100, 2))]
        answer = " ".join(f"{pair // 100 + pair % 100:03d}")
        row = {"prompt": f"{spaced[0]} + {spaced[1]} =", "answer": answer}
        lines["held_out" if place < HELD_OUT else "prompts"].append(json.dumps(row))
        for _ in range(SHOWN_TIMES if place >= HELD_OUT else 0):
            digits = answer.split()
            if rng.random() < WRONG:
                digits[rng.integers(3)] = str(rng.integers(10))
            lines["shown"].append(json.dumps({"prompt": row["prompt"], "completion": " ".join(digits)}))
    for name, found in lines.items():
        (folder / f"{name}.jsonl").write_text("\n".join(found) + "\n")


def supervise(folder: Path, args: argparse.Namespace) -> None:
    """Train on the demonstrations."""
    jaxglue.train(
        model=str(folder / "model"),
        random_weights=True,
        method="full",
        data=(str(folder / "shown.jsonl"),),
        seq_len=args.row,
        batch_size=args.rows,
        learning_rate=1e-3,
        steps=args.supervised_steps,
        log_every=max(1, args.supervised_steps // 5),
        output=folder / "supervised",
    )


def reward(folder: Path, model: Path, function: str, args: argparse.Namespace) -> dict[str, list]:
    """Train by a reward, and return its metrics by step."""
    begun = time.perf_counter()
    summary = jaxglue.train(
        model=str(model),
        method="full",
        data=(str(folder / "prompts.jsonl"),),
        eval_data=(str(folder / "held_out.jsonl"),),
        eval_every=args.steps // 4,
        save_every=args.steps,
        log_every=1,
        seq_len=args.row,
        batch_size=args.rows,
        objective="grpo",
        reward=(f"{folder / 'rewards.py'}:{function}",),
        num_generations=16,
        generation_batch_size=512,
        max_completion_length=6,
        learning_rate=args.learning_rate,
        schedule="constant",
        warmup_steps=5,
        steps=args.steps,
        output=folder / function,
    )
    assert summary is not None
    found: dict[str, list] = {name: [] for name in SHOWN}
    for values in read_metrics(summary.metrics):
        for name in SHOWN:
            if name in values:
                found[name].append((int(values["step"]), float(values[name])))
    return found | {"seconds": [round(time.perf_counter() - begun, 1)]}


def plot(results: dict[str, dict[str, list]], path: Path) -> None:
    """Draw both rewards by step, and those of held-out prompts."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    colors = {"exact": "tab:blue", "shuffled": "tab:gray"}
    for name, found in results.items():
        steps, values = np.array(found["reward"]).T
        width = min(5, len(values))
        smooth = np.convolve(values, np.ones(width) / width, "valid")
        axes.plot(
            steps[width - 1 :],
            smooth,
            color=colors[name],
            label={"exact": "reward", "shuffled": "shuffled rewards"}[name],
        )
        axes.plot(*np.array(found["eval_reward"]).T, "o", color=colors[name], label=f"held-out prompts, {name}")
    axes.set(xlabel="step", ylabel="share of right sums", ylim=(0, 1.02))
    axes.legend(frameon=False, loc="center right")
    save_figure(figure, path, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--supervised-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--row", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument("--folder", type=Path, help="inputs, for a single run")
    parser.add_argument("--function", help="the reward of a single run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.function:
        found = reward(args.folder, args.folder / "supervised" / "model", args.function, args)
        (args.folder / f"{args.function}.json").write_text(json.dumps(found))
        return
    results: dict[str, dict[str, list]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, args.layers, args.width)
        begun = time.perf_counter()
        supervise(folder, args)
        print(f"supervised: {time.perf_counter() - begun:.1f} s on {jax.devices()[0].device_kind}", flush=True)
        runs = {function: start(folder, function) for function in ("exact", "shuffled")}
        for function, run in runs.items():
            if run.wait():
                print((folder / f"{function}.txt").read_text()[-2000:], flush=True)
                continue
            found = results[function] = json.loads((folder / f"{function}.json").read_text())
            rows = [{"metric": key, **_few(values)} for key, values in found.items() if key != "seconds"]
            print(f"{function}: {found['seconds'][0]} s\n{table(rows)}", flush=True)
        settings: dict[str, Any] = {key: str(value) for key, value in vars(args).items()}
        if args.json:
            write_results(args.json, {"settings": settings, "curves": results})
        if args.plot and len(results) == 2:
            plot(results, args.plot)


def start(folder: Path, function: str) -> subprocess.Popen:
    """Start a run of this program that trains by a reward; both share the GPU."""
    command = [sys.executable, *sys.argv, "--folder", str(folder), "--function", function]
    with (folder / f"{function}.txt").open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def _few(values: list[tuple[int, float]]) -> dict[str, str]:
    chosen = [values[i] for i in np.linspace(0, len(values) - 1, 5).round().astype(int)] if values else []
    return {f"at {place}": f"{value:.4g} (step {step})" for place, (step, value) in enumerate(chosen)}


if __name__ == "__main__":
    main()
