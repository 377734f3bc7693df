"""Train a tiny model to guess numbers in a game of textarena, beside a control whose rewards are shuffled.

    pip install textarena
    python benchmarks/agent_curve.py --json benchmarks/results/agent_curve.json --plot docs/agent_curve.png
    python benchmarks/agent_curve.py --layers 30 --width 576 --learning-rate 1e-4  # as wide and deep as SmolLM2-135M

GuessTheNumber-v0 has a number from 1 to 20 and says after each guess whether it is higher or lower; with four guesses
three in four games are won by halving what is left. A guess that is made twice ends a game: its reward is then the
closeness of the guess. A Qwen3 of about 100,000 parameters with a token for each number first learns the form from
random guesses, and then has 150 steps of DAPO on 4 games × 16 episodes. The control's rewards are those of other
episodes of the step.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from measure import save_figure, write_results
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

import jaxglue
from jaxglue.environments.textarena_games import TextArena
from jaxglue.rl import loop
from jaxglue.rl.advantages import rewards_of
from jaxglue.training.record import read_metrics

GAME, TURNS, GUESSES = "GuessTheNumber-v0", 4, range(1, 21)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}={{ m.content }}<eos>{% else %}{{ m.content }} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def write_model(folder: Path, layers: int, width: int) -> None:
    """Write the configuration of a Qwen3, and a tokenizer of the words that matter."""
    words = ["<eos>", "<pad>", "<unk>", "=", "higher", "lower", "Player", *(f"[{n}]" for n in GUESSES)]
    words += [f"<{n}>" for n in range(-len(words) % 8)]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"\[\d+\]|higher|lower|=|\b\w\b"), "removed", invert=True)
    named = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    head = 16 if width < 256 else 64
    count = width // head
    heads = {"num_attention_heads": count, "num_key_value_heads": count // (2 if count % 3 else 3), "head_dim": head}
    shape |= {"vocab_size": len(words)}
    other = {"max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "initializer_range": 0.1}
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(kind | shape | heads | other | {"tie_word_embeddings": False}))


def write_rows(folder: Path, games: int) -> None:
    """Write games by their seeds, and games with random guesses as chats."""
    rng, chats = random.Random(0), []
    for seed in range(games):
        game = TextArena(GAME)
        messages = [{"role": "user", "content": game.reset(seed=seed)}]
        for turn in range(TURNS):
            guess = f"[{rng.choice(GUESSES)}]"
            messages.append({"role": "assistant", "content": guess})
            reply = game(guess, last=turn + 1 == TURNS)
            if not isinstance(reply, str):
                break
            messages.append({"role": "user", "content": reply})
        chats.append({"messages": messages})
    seeds = [{"seed": seed} for seed in range(games)]
    for name, rows in {"chats": chats, "games": seeds}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def supervise(folder: Path, steps: int, width: int) -> None:
    """Learn to guess, at random."""
    jaxglue.train(
        model=str(folder / "model"),
        random_weights=True,
        method="full",
        data=(str(folder / "chats.jsonl"),),
        seq_len=1024,
        learning_rate=3e-3 * 64 / width,
        steps=steps,
        output=folder / "supervised",
    )


def reward(folder: Path, name: str, steps: int, change: Callable[..., Any], learning_rate: float) -> list[float]:
    """Train on games whose rewards are changed; return the mean reward of each step."""
    with patch.object(loop, "rewards_of", change):
        summary = jaxglue.train(
            model=str(folder / "supervised" / "model"),
            method="full",
            remat="none",
            data=(str(folder / "games.jsonl"),),
            objective="dapo",
            environment=f"textarena?game={GAME}",
            max_turns=TURNS,
            num_generations=16,
            generation_batch_size=64,
            max_episodes=32,
            max_completion_length=64,
            seq_len=512,
            batch_size=2,
            learning_rate=learning_rate,
            schedule="constant",
            steps=steps,
            save_every=steps,
            log_every=1,
            output=folder / name,
        )
    assert summary is not None
    return [float(values["reward"]) for values in read_metrics(summary.metrics)]


def shuffled(plan: Any, generation: Any) -> Any:
    """Return the rewards of a generation, each for another episode."""
    found = rewards_of(plan, generation)
    rng = np.random.default_rng(generation.following)
    flat = rng.permutation(found.by_function.reshape(-1, found.by_function.shape[-1]))
    return replace(found, by_function=flat.reshape(found.by_function.shape))


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the rewards of both runs by step, as means of ten."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for row, color in zip(results, ("tab:blue", "tab:gray"), strict=True):
        values, width = row["by step"], 10
        smooth = np.convolve(values, np.ones(width) / width, "valid")
        label = {"reward": "reward", "shuffled": "shuffled rewards"}[row["run"]]
        axes.plot(np.arange(width, len(values) + 1), smooth, color=color, label=label)
    axes.set(xlabel="step", ylabel="reward of a game", ylim=(0, 1))
    axes.legend(frameon=False)
    save_figure(figure, path, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--supervised-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--games", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--runs", nargs="+", choices=("reward", "shuffled"), default=["reward", "shuffled"])
    parser.add_argument("--folder", type=Path, help="keeps the model between calls")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        if not (folder / "supervised").exists():
            (folder / "model").mkdir(parents=True)
            write_model(folder / "model", args.layers, args.width)
            write_rows(folder, args.games)
            supervise(folder, args.supervised_steps, args.width)
        results = []
        for name in args.runs:
            begun, change = time.perf_counter(), {"reward": rewards_of, "shuffled": shuffled}[name]
            values = reward(folder, name, args.steps, change, args.learning_rate)
            part = max(1, min(10, args.steps // 3))
            means = {"first": np.mean(values[:part]), "last": np.mean(values[-part:])}
            results.append({"run": name, **{key: round(float(value), 3) for key, value in means.items()}})
            results[-1] |= {"seconds": round(time.perf_counter() - begun), "by step": [round(v, 4) for v in values]}
            print({key: value for key, value in results[-1].items() if key != "by step"}, flush=True)
            if args.json:
                write_results(args.json, results)
        if args.plot and len(results) == 2:
            plot(results, args.plot)


if __name__ == "__main__":
    main()
