"""Train a model that sees on drawn pictures, then on texts of as many tokens; print times of both as JSON.

    python benchmarks/vision_step.py --shape qwen3.5-9b --documents 96 --epochs 3 --json results.json
    python benchmarks/vision_step.py --shape gemma-3-12b --peer /venv/bin/python --json results.json

Weights are random, adapters of the text train, and the tower is frozen: its features are computed in the first epoch
and kept. A step is one row of `--seq-len` tokens, of pictures with sides of 448 to 1,344 pixels and texts of 32 to 512
words. `--peer` measures Unsloth on the same documents (`peers/vision.py`), in batches by length, and one by one.
"""

import argparse
import json
import shutil
import subprocess
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
TINY_SIGLIP = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
QWEN_MARKS = "<|vision_start|><|image_pad|><|vision_end|>"
PEER = Path(__file__).parent / "peers" / "vision.py"


class Clock(Callback):
    """Notes when each step's values are known."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, step: int, values: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def make_model(folder: Path, shape: str) -> Path:
    """Write a folder without weights: the shape's text model, with its family's tower or a tiny one."""
    shutil.copytree(SEEING, folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    text = {**SHAPES[shape], "initializer_range": 0.02}
    text.pop("architectures", None)
    family, marks = around(text, raw)
    raw = {**raw, "tie_word_embeddings": text["tie_word_embeddings"], **family, "text_config": text}
    (folder / "config.json").write_text(json.dumps(raw))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace(QWEN_MARKS, marks))
    (folder / "preprocessor_config.json").unlink()
    return folder


def around(text: dict[str, Any], raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the fields of config.json around a text model, and what its chat template writes for an image."""
    width, is_tiny = text["hidden_size"], text["hidden_size"] < 1024
    begin, mark, end = raw["vision_start_token_id"], raw["image_token_id"], raw["vision_end_token_id"]
    kind = text["model_type"].removesuffix("_text")
    if kind == "gemma3":
        vision = {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14, "vision_use_head": False}
        vision |= TINY_SIGLIP if is_tiny else {}
        tokens = {"image_token_index": mark, "boi_token_index": begin, "eoi_token_index": end}
        fields = {"architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256, **tokens}
        return {"model_type": kind, "vision_config": vision, **fields}, "<|vision_start|>"
    if kind == "gemma4_unified":
        vision = {"model_type": "gemma4_unified_vision", "mm_embed_dim": width, "output_proj_dims": width}
        tokens = {"image_token_id": mark, "boi_token_id": begin, "eoi_token_id": end, "audio_config": None}
        fields = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "vision_config": vision, **tokens}
        return {"model_type": kind, **fields}, "<|image_pad|>"
    vision = {"model_type": "qwen3_5_vision", "patch_size": 16, "out_hidden_size": width}
    return {"vision_config": vision | (TINY_TOWER if is_tiny else {})}, QWEN_MARKS


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
    plan = dict(json.loads((output / "plan.json").read_text())["rows"])
    epochs = [spans[max(3, epoch * steps) : (epoch + 1) * steps - 1] for epoch in range(args.epochs)]
    return {
        "tokens_per_second": [args.seq_len / float(np.mean(part)) if len(part) else None for part in epochs],
        "best_step_ms": float(spans[3:].min() * 1e3),
        "steps_an_epoch": steps,
        "peak_gib": summary.peak_memory_gb * 1e9 / 2**30,
        "losses": [summary.first_loss, summary.last_loss],
        "startup_seconds": summary.startup_seconds,
        "planned": {name: plan[name] for name in ("remat", "memory", "step time") if name in plan},
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
    parser.add_argument("--peer", type=Path, help="Python of an environment with a peer's packages")
    parser.add_argument("--peer-engine", choices=("unsloth", "peft"), default="unsloth")
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
            print(json.dumps(results[-1]))
        if args.peer:
            for result in measure_peer(folder, model, pictures, args):
                print(json.dumps(result))
                results.append(result)
    if args.json:
        write_results(args.json, results)


def document_lengths(model: Path, data: Path, args: argparse.Namespace, folder: Path) -> list[int]:
    """Return the tokens of the rows with pictures."""
    return read_documents(model, data, args, folder).lengths.tolist()


def read_documents(model: Path, data: Path, args: argparse.Namespace, folder: Path) -> Any:
    """Return the rows with pictures as documents."""
    from jaxglue.data.config import DataConfig
    from jaxglue.data.prepare import prepare_data, read_vision
    from jaxglue.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    config = DataConfig(data=(str(data),), seq_len=args.seq_len, cache_dir=str(folder / "cache"))
    return prepare_data(config, tokenizer, processor=read_vision(model, None, tokenizer)).train


def measure_peer(folder: Path, model: Path, data: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the documents with their patches; return the peer's rates in batches by length, and one by one."""
    documents = read_documents(model, data, args, folder)
    arrays: dict[str, np.ndarray] = {"lengths": documents.lengths}
    for number in range(len(documents)):
        indices = documents.indices(number)
        arrays[f"tokens{number}"], arrays[f"mask{number}"] = (
            documents.store.tokens[indices],
            documents.store.mask[indices],
        )
        (image,) = documents.reader.images_of(int(documents.documents[number]))
        arrays[f"grid{number}"], arrays[f"patches{number}"] = np.array(image.grid), image.patches
    np.savez(folder / "documents.npz", **arrays)
    results = []
    for batch_tokens in (args.seq_len, 0):
        command = [str(args.peer), str(PEER), "--engine", args.peer_engine, "--model", str(model)]
        command += ["--documents", str(folder / "documents.npz"), "--batch-tokens", str(batch_tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            results.append({"engine": args.peer_engine, "error": done.stderr[-2000:]})
            continue
        how = "batches by length" if batch_tokens else "one by one"
        results.append({"engine": args.peer_engine, "rows": how, **json.loads(done.stdout.strip().splitlines()[-1])})
    return results


if __name__ == "__main__":
    main()
