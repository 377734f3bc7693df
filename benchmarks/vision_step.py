"""Train a model that sees on drawn pictures, then on texts of as many tokens; print times of both as JSON.

    python benchmarks/vision_step.py --shape qwen3.5-9b --documents 96 --epochs 3 --json results.json

Weights are random, adapters of the text train, and the tower is frozen: its features are computed in the first epoch
and kept. A step is one row of `--seq-len` tokens, of pictures with sides of 448 to 1,344 pixels and texts of 32 to 512
words.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import write_results
from PIL import Image
from shapes import SHAPES

import jaxglue
from jaxglue.training.callbacks import Callback

SEEING = Path(__file__).resolve().parent.parent / "jaxglue" / "recipes" / "quickstart" / "seeing"
TINY_TOWER = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128}


class Clock(Callback):
    """Notes when each step's values are known."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, step: int, values: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def make_model(folder: Path, shape: str) -> Path:
    """Write a folder without weights: the shape's text model, with the tower of Qwen3.5-9B or a tiny one."""
    shutil.copytree(SEEING, folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    text = {**SHAPES[shape], "initializer_range": 0.02}
    text.pop("architectures", None)
    tower = TINY_TOWER if text["hidden_size"] < 1024 else {}
    vision = {"model_type": "qwen3_5_vision", "patch_size": 16, "out_hidden_size": text["hidden_size"], **tower}
    (folder / "config.json").write_text(json.dumps({**raw, "text_config": text, "vision_config": vision}))
    (folder / "preprocessor_config.json").unlink()
    return folder


def make_data(folder: Path, documents: int, largest: int, seed: int = 0) -> Path:
    """Write rows with a picture each; return their file."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(documents):
        height, width = rng.integers(largest // 3, largest + 1, 2).tolist()
        noise = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3)).astype(np.uint8))
        noise.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=85)
        words = " ".join(rng.choice(["red", "green", "circle", "cross", "a", "then"], int(rng.integers(32, 513))))
        messages = [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": words}]
        rows.append({"messages": messages, "images": [f"{number}.jpg"]})
    (folder / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "pictures.jsonl"


def as_texts(path: Path, lengths: list[int]) -> Path:
    """Write chats of these tokens, without pictures; return their file."""
    rng = np.random.default_rng(1)
    rows = []
    for length in lengths:
        words = " ".join(rng.choice(["red", "green", "circle", "cross", "a", "then"], max(1, length - 24)))
        rows.append([{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": words}])
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def measure(folder: Path, model: Path, data: Path, args: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """Train for the epochs; return tokens per second of each, but for the first steps, and the peak of memory."""
    clock, output = Clock(), folder / "run"
    summary = jaxglue.train(
        model=str(model),
        random_weights=True,
        data=[str(data)],
        seq_len=args.seq_len,
        epochs=args.epochs,
        log_every=1000,
        eval_every=100_000,
        output=str(output),
        overwrite=True,
        cache_dir=str(folder / "cache"),
        callbacks=[clock],
        **settings,
    )
    assert summary is not None
    steps = len(clock.times) // args.epochs
    spans = np.diff(clock.times)
    epochs = [spans[max(3, epoch * steps) : (epoch + 1) * steps - 1] for epoch in range(args.epochs)]
    return {
        "tokens_per_second": [args.seq_len / float(np.mean(part)) if len(part) else None for part in epochs],
        "best_step_ms": float(spans[3:].min() * 1e3),
        "steps_an_epoch": steps,
        "peak_gib": summary.peak_memory_gb * 1e9 / 2**30,
        "losses": [summary.first_loss, summary.last_loss],
        "startup_seconds": summary.startup_seconds,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-9b")
    parser.add_argument("--documents", type=int, default=96)
    parser.add_argument("--largest", type=int, default=1344, help="pixels of a side, at most; a third of it at least")
    parser.add_argument("--seq-len", type=int, default=16_384)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--memory-limit", type=float, help="GiB")
    parser.add_argument("--no-texts", action="store_true", help="leave out the rows of text")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings: dict[str, Any] = {} if args.memory_limit is None else {"memory_limit": args.memory_limit}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, pictures = make_model(folder / "model", args.shape), make_data(folder, args.documents, args.largest)
        results = [{"rows": "pictures", **measure(folder, model, pictures, args, **settings)}]
        print(json.dumps(results[0]))
        if not args.no_texts:
            lengths = document_lengths(model, pictures, args, folder)
            texts = as_texts(folder / "texts.jsonl", lengths)
            results.append({"rows": "texts", **measure(folder, model, texts, args, **settings)})
            print(json.dumps(results[1]))
    if args.json:
        write_results(args.json, results)


def document_lengths(model: Path, data: Path, args: argparse.Namespace, folder: Path) -> list[int]:
    """Return the tokens of the rows with pictures."""
    from jaxglue.data.config import DataConfig
    from jaxglue.data.prepare import prepare_data, read_vision
    from jaxglue.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    config = DataConfig(data=(str(data),), seq_len=args.seq_len, cache_dir=str(folder / "cache"))
    prepared = prepare_data(config, tokenizer, processor=read_vision(model, None, tokenizer))
    return prepared.train.lengths.tolist()


if __name__ == "__main__":
    main()
