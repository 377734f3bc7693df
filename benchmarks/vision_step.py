"""Train a model that sees on drawn pictures, and on texts of as many tokens; write times as JSON, row after row.

    python benchmarks/vision_step.py --shape qwen3.5-9b --documents 96 --epochs 3 --json results.json
    python benchmarks/vision_step.py --rows pictures short --memory-limit 22 --json results.json
    python benchmarks/vision_step.py --rows pictures --set train_vision=all quantize=nf4 --json results.json
    python benchmarks/vision_step.py --rows --peer /venv/bin/python --json results.json

Weights are random, adapters of the text train, and the tower is frozen: its features are computed in the first epoch
and kept. A step is one row of `--seq-len` tokens, of pictures with sides of 448 to 1,344 pixels and texts of 32 to 512
words; `short` rows have at most 640 pixels and 384 words, fewer than 800 tokens. A result holds the planned memory and
time of a step, which counts a tower that runs in each. `--peer` measures Unsloth on the same documents
(`peers/vision.py`), before ours, in a process that has the GPU for itself.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import harmonic_mean
from threading import Timer
from typing import Any

import jax
import numpy as np
from measure import provenance, write_json
from PIL import Image
from shapes import SHAPES

import jaxglue
from jaxglue.data.config import DataConfig
from jaxglue.data.prepare import prepare_data, read_vision
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.planner.device_memory import outside_pool
from jaxglue.planner.gpus import GIB
from jaxglue.training.callbacks import Callback, Decision
from jaxglue.training.record import read_metrics

SEEING = Path(__file__).resolve().parent.parent / "jaxglue" / "recipes" / "quickstart" / "seeing"
TINY_TOWER = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128}
TINY_SIGLIP = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
QWEN_MARKS = "<|vision_start|><|image_pad|><|vision_end|>"
PEER = Path(__file__).parent / "peers" / "vision.py"
SHORT = {"largest": 640, "most_words": 384}
"""Of rows whose image and text have fewer than 800 tokens."""
_PLANNED_EPOCHS = 100
_GRACE = 60
"""Seconds after the peer's limit, for a step that compiles, until it is killed."""


def make_model(folder: Path, shape: str, layers: int | None = None) -> Path:
    """Write a folder without weights: the shape's text model, with its family's tower or a tiny one."""
    shutil.copytree(SEEING, folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    text = {**SHAPES[shape], "initializer_range": 0.02}
    text.pop("architectures", None)
    if layers is not None:
        text["num_hidden_layers"] = layers
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:layers]
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
    if kind == "qwen3_vl":
        vision = {"model_type": "qwen3_vl", "patch_size": 16, "out_hidden_size": width}
        vision |= {"deepstack_visual_indexes": [8, 16, 24]}
        architectures = ["Qwen3VLForConditionalGeneration"]
        return {"model_type": kind, "architectures": architectures, "vision_config": vision}, QWEN_MARKS
    vision = {"model_type": "qwen3_5_vision", "patch_size": 16, "out_hidden_size": width}
    return {"vision_config": vision | (TINY_TOWER if is_tiny else {})}, QWEN_MARKS


def make_data(folder: Path, documents: int, largest: int, most_words: int = 512, seed: int = 0) -> Path:
    """Write rows with a picture each into a new folder; return their file."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(documents):
        height, width = rng.integers(largest // 3, largest + 1, 2).tolist()
        noise = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3)).astype(np.uint8))
        noise.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=85)
        words = " ".join(rng.choice(["red", "green", "circle", "cross", "a", "then"], rng.integers(32, most_words + 1)))
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


class StopAfter(Callback):
    """Ends a run after some epochs."""

    def __init__(self, epochs: int):
        self._epochs = epochs

    def on_step(self, step: int, values: Mapping[str, float]) -> Decision:
        """Stop after the last epoch's last step."""
        return "stop" if values.get("epoch", 0) >= self._epochs else None


def measure(folder: Path, model: Path, data: Path, args: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """Train for the epochs; return tokens per second of each, but for the first steps and padding, and peak memory.

    Rates are those of the loop, which notes when each step ends; rows have about as many tokens each. The plan is that
    of a long run: of a short one it would weigh the time to compile.
    """
    output = folder / "run"
    settings = {"callbacks": [StopAfter(args.epochs)], **settings}
    summary = jaxglue.train(
        model=str(model),
        random_weights=True,
        data=[str(data)],
        seq_len=args.seq_len,
        epochs=_PLANNED_EPOCHS,
        log_every=1,
        eval_every=100_000,
        output=str(output),
        overwrite=True,
        cache_dir=str(folder / "cache"),
        **settings,
    )
    assert summary is not None
    tokens = int(read_documents(model, data, args, folder).lengths.sum())
    plan = dict(json.loads((output / "plan.json").read_text())["rows"])
    logged = [row for row in read_metrics(output / "metrics.jsonl") if "tokens_per_second" in row]
    epochs = [
        [row["tokens_per_second"] for row in logged if row["step"] > 3 and epoch < row["epoch"] <= epoch + 1]
        for epoch in range(args.epochs)
    ]
    steps = max(row["step"] / row["epoch"] for row in logged)
    return {
        "tokens_per_second": [harmonic_mean(rates) if rates else None for rates in epochs],
        "waits": [row["data_wait"] for row in logged],
        "steps_an_epoch": steps,
        "tokens": tokens,
        "filled": tokens / (steps * args.seq_len),
        "peak_gib": summary.peak_memory_gb * 1e9 / 2**30,
        "losses": [summary.first_loss, summary.last_loss],
        "gpu": jax.devices()[0].device_kind,
        "startup_seconds": summary.startup_seconds,
        "planned": {name: plan[name] for name in ("remat", "memory", "step time") if name in plan},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-9b")
    parser.add_argument("--documents", type=int, default=96)
    parser.add_argument("--short-documents", type=int, help="of the short rows; as many by default")
    parser.add_argument("--largest", type=int, default=1344, help="pixels of a side, at most; a third of it at least")
    parser.add_argument("--seq-len", type=int, default=16_384)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", nargs="*", choices=("pictures", "short", "texts"), default=["pictures", "texts"])
    parser.add_argument("--memory-limit", type=float, help="GiB")
    parser.add_argument("--in-peer-memory", action="store_true", help="let ours allocate the peer's peak")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of training, as train_vision=all")
    parser.add_argument("--peer", type=Path, help="Python of an environment with a peer's packages")
    parser.add_argument("--peer-path", type=Path, help="folder of its packages, in the place of PYTHONPATH")
    parser.add_argument("--peer-limit", type=float, default=400.0, help="seconds after which the peer begins no step")
    parser.add_argument("--peer-kinds", nargs="*", default=[], help="of the peer's rows: packed batches short one; all")
    parser.add_argument("--layers", type=int, help="of the text model, so many of its first ones: to fill caches")
    parser.add_argument("--peer-engine", choices=("unsloth", "peft"), default="unsloth")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for result in measured(Path(scratch), args):
            print(json.dumps(result), flush=True)
            results.append(result)
            if args.json:
                write_json(args.json, provenance(result["gpu"]) | {"results": results})


def measured(folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the results of the peer, which has the GPU for itself as long as no array is on it, then ours."""
    settings: dict[str, Any] = {name: parsed(value) for name, value in (pair.split("=", 1) for pair in args.set)}
    settings |= {} if args.memory_limit is None else {"memory_limit": args.memory_limit}
    model = make_model(folder / "model", args.shape, args.layers)
    files = {"pictures": make_data(folder / "pictures", args.documents, args.largest)}
    short = args.documents if args.short_documents is None else args.short_documents
    files["short"] = make_data(folder / "short", short, **SHORT)
    peaks = dict[str, tuple[float, float]]()
    for result in measure_peer(folder, model, files, args) if args.peer else ():
        yield result
        if "peak_gib" in result and result["peak_gib"] is not None:
            rows = "short" if result["rows"].startswith("short") else "pictures"
            peaks[rows] = max(peaks.get(rows, (0.0, 0.0)), (result["tokens_per_second"], result["peak_gib"]))
    for rows in args.rows:
        if rows == "texts":
            lengths = read_documents(model, files["pictures"], args, folder).lengths.tolist()
            files["texts"] = as_texts(folder / "texts.jsonl", lengths)
        if args.in_peer_memory and rows in peaks:
            settings["memory_limit"] = peaks[rows][1] + outside_pool() / GIB  # which a process takes beside, theirs too
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # JAX sizes its pool of pinned memory once
            found = pool.submit(measure, folder, model, files[rows], args, **settings).result()
        yield {"rows": rows, "memory_limit": settings.get("memory_limit"), "set": args.set, **found}


def parsed(value: str) -> Any:
    """Return a setting's value: JSON's, or a text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def read_documents(model: Path, data: Path, args: argparse.Namespace, folder: Path) -> Any:
    """Return rows as documents."""
    tokenizer = load_tokenizer(model)
    config = DataConfig(data=(str(data),), seq_len=args.seq_len, cache_dir=str(folder / "cache"))
    return prepare_data(config, tokenizer, processor=read_vision(model, tokenizer)).train


def measure_peer(
    folder: Path, model: Path, files: dict[str, Path], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Write the documents with their patches; yield what the peer prints, then why it ended where it failed."""
    command = [str(args.peer), str(PEER), "--engine", args.peer_engine, "--model", str(model)]
    command += ["--step-tokens", str(args.seq_len), "--limit", str(args.peer_limit)]
    command += ["--kinds", *args.peer_kinds] if args.peer_kinds else []
    for name, data in files.items():
        documents = read_documents(model, data, args, folder)
        arrays: dict[str, np.ndarray] = {"lengths": documents.lengths}
        for number in range(len(documents)):
            indices = documents.indices(number)
            arrays[f"tokens{number}"] = documents.store.tokens[indices]
            arrays[f"mask{number}"] = documents.store.mask[indices]
            (image,) = documents.reader.images_of(int(documents.documents[number]))
            arrays[f"grid{number}"], arrays[f"patches{number}"] = np.array(image.grid), image.patches
        np.savez(folder / f"{name}.npz", **arrays)
        command += [f"--{name}", str(folder / f"{name}.npz")]
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    environment |= {"PYTHONPATH": str(args.peer_path)} if args.peer_path else {}
    path = args.json.with_suffix(".log") if args.json else folder / "peer.log"
    with (
        path.open("w+", encoding="utf-8") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        ) as process,
    ):
        end = Timer(args.peer_limit + _GRACE, kill_group, (process,))
        end.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # Unsloth prints, too
                result = json.loads(line)
                if "ended" in result:
                    break
                yield {"engine": args.peer_engine, **result}
        else:
            log.seek(0)
            yield {"engine": args.peer_engine, "gpu": None, "error": f"killed or ended: {log.read()[-2000:]}"}
        end.cancel()
        kill_group(process)


def kill_group(process: subprocess.Popen) -> None:
    """End a process and those that it started, which hold its output open."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
