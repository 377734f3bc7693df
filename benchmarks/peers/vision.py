"""Train a peer's model that sees on the documents of benchmarks/vision_step.py; print its rates as lines of JSON.

    python benchmarks/peers/vision.py --engine unsloth --model DIR --pictures FILE.npz --short FILE.npz

Pictures are trained on one by one, as many as fill a row in a step; packed, where Unsloth packs them; and in batches of
alike lengths of at most `--step-tokens` with their padding. Short rows are trained on in batches of two by chance, four
of them a step, as Unsloth's notebooks do. The tower is frozen, and adapters of the text train, as in the benchmark.
Weights are random. Each kind begins with two steps of its first batches; then its batches are passed once before those
that count: Unsloth compiles. The time of each step is printed when it ends. After `--limit` seconds nothing new begins,
and a rate is that of the steps of the last pass that were made.
"""

import argparse
import functools
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from typing import Any

import engines
import numpy as np

_TEXT = r".*language_model.*\.({names})"


def load(engine: str, folder: str, seq_len: int) -> Any:
    """Return a model with random weights, a frozen tower, and adapters on the text's linear layers."""
    engines.stay_offline()
    writer = multiprocessing.get_context("spawn").Process(target=write_weights, args=(folder,))
    writer.start()  # in a process whose transformers Unsloth does not patch, while it is imported here
    if engine == "unsloth":
        engines.import_unsloth()
    import torch

    writer.join()
    assert writer.exitcode == 0, "no weights were written"
    names = "|".join([*engines.TARGETS, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"])
    pattern = _TEXT.format(names=names)
    if engine == "unsloth":
        from unsloth import FastVisionModel

        shared = {"max_seq_length": seq_len, "use_gradient_checkpointing": "unsloth"}
        model, _ = FastVisionModel.from_pretrained(
            model_name=folder, load_in_4bit=False, load_in_16bit=True, local_files_only=True, **shared
        )
        model = FastVisionModel.get_peft_model(
            model,
            r=engines.RANK,
            lora_alpha=engines.ALPHA,
            lora_dropout=0,
            bias="none",
            target_modules=pattern,
            **shared,
        )
        return FastVisionModel.for_training(model)
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, device_map={"": 0 if cuda else "cpu"})
    model = get_peft_model(model, LoraConfig(r=engines.RANK, lora_alpha=engines.ALPHA, target_modules=pattern))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def write_weights(folder: str) -> None:
    """Write random weights beside a folder's config.json, bfloat16 on a GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    cuda = torch.cuda.is_available()
    config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda" if cuda else "cpu"):
        torch.set_default_dtype(torch.bfloat16 if cuda else torch.float32)
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)


def batches_of(lengths: np.ndarray, tokens: int) -> list[list[int]]:
    """Return documents in batches of at most so many tokens with their padding, longest first."""
    batches: list[list[int]] = []
    for number in np.argsort(-lengths).tolist():
        if not batches or not tokens or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > tokens:
            batches.append([])
        batches[-1].append(number)
    return batches


def inputs_of(config: Any, documents: Any, numbers: list[int]) -> dict[str, Any]:
    """Return a padded batch with its images; tokens of images and padding have no loss."""
    import torch

    image = getattr(config, "image_token_id", None) or config.image_token_index
    longest = max(len(documents[f"tokens{number}"]) for number in numbers)
    ids, labels = np.zeros((len(numbers), longest), np.int64), np.full((len(numbers), longest), -100, np.int64)
    attention = np.zeros_like(ids)
    for row, number in enumerate(numbers):
        tokens, mask = documents[f"tokens{number}"], documents[f"mask{number}"]
        ids[row, : len(tokens)], attention[row, : len(tokens)] = tokens, 1
        labels[row, : len(tokens)][mask > 0] = tokens[mask > 0]
    grids = [documents[f"grid{number}"] for number in numbers]
    values = [documents[f"patches{number}"].astype(np.float32) for number in numbers]
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels, "attention_mask": attention}
    kind = config.model_type
    if kind.startswith("qwen"):
        scaled = [
            ((part / 255 - 0.5) / 0.5).reshape(len(part), 3, 1, -1).repeat(2, 2).reshape(len(part), -1)
            for part in values
        ]
        batch |= {"pixel_values": np.concatenate(scaled), "image_grid_thw": np.array([[1, *grid] for grid in grids])}
        batch |= {"mm_token_type_ids": (ids == image).astype(np.int64)}
    elif kind == "gemma3":
        patch = config.vision_config.patch_size
        pixels = [squares(part, grid, patch, merge=4) for part, grid in zip(values, grids, strict=True)]
        batch |= {
            "pixel_values": (np.stack(pixels) / 255 - 0.5) / 0.5,
            "token_type_ids": (ids == image).astype(np.int64),
        }
    else:
        most = max(map(len, values))
        padded = np.zeros((len(values), most, values[0].shape[1]), np.float32)
        places = np.full((len(values), most, 2), -1, np.int64)
        for target, place, part, grid in zip(padded, places, values, grids, strict=True):
            target[: len(part)], place[: len(part)] = part / 255, np.indices(grid).reshape(2, -1)[::-1].T
        batch |= {"pixel_values": padded, "image_position_ids": places}
        batch |= {"mm_token_type_ids": (ids == image).astype(np.int64)}
    arrays = {name: value.astype(np.float32) if value.dtype == np.float64 else value for name, value in batch.items()}
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def squares(values: np.ndarray, grid: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Return an image [3, H, W] from its patches, which lie in the order of merged ones."""
    rows, columns = grid // merge
    cut = values.reshape(rows, columns, merge, merge, 3, patch, patch)
    return cut.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * merge * patch, columns * merge * patch)


class Passes:
    """Steps of one model over batches, with AdamW."""

    def __init__(self, model: Any):
        import torch

        self._torch, self._model, self._cuda = torch, model, torch.cuda.is_available()
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=self._cuda)

    def placed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch on the GPU; its copy needs no wait."""
        return {name: value.to("cuda", non_blocking=True) for name, value in batch.items()} if self._cuda else batch

    def pinned(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch in memory that the GPU copies from by itself."""
        return {name: value.pin_memory() for name, value in batch.items()} if self._cuda else batch

    def seconds(self, batches: list[dict[str, Any]]) -> float:
        """Return the time of a step on some batches."""
        begun = time.perf_counter()
        for batch in batches:
            inputs = self.placed(batch)
            with self._torch.autocast("cuda" if self._cuda else "cpu", dtype=self._torch.bfloat16, enabled=self._cuda):
                loss = self._model(**inputs, use_cache=False).loss
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.last_loss = float(loss.detach())  # waits for the GPU
        return time.perf_counter() - begun


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the time until the model is loaded; of each kind, tokens without padding per second, and peak memory."""
    begun = time.perf_counter()

    def is_over() -> bool:
        return time.perf_counter() - begun > args.limit

    pictures, short = dict(np.load(args.pictures)), dict(np.load(args.short))
    model = load(args.engine, args.model, int(max(pictures["lengths"].max(), short["lengths"].max())))
    import torch

    engines.compile_kernels_together()
    gpu = {"gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"}
    yield {**gpu, "loaded_s": round(time.perf_counter() - begun, 1), "versions": engines.versions()}
    lengths, config, passes = pictures["lengths"], model.config, Passes(model)
    row = max(1, args.step_tokens // int(lengths.mean()))
    pairs = np.random.default_rng(0).permutation(len(short["lengths"])).tolist()
    kinds = {
        "packed": (pictures, packed_rows(lengths, args.step_tokens), 1),
        "batches by length": (pictures, batches_of(lengths, args.step_tokens), 1),
        "short rows in batches of two": (short, [pairs[first : first + 2] for first in range(0, len(pairs), 2)], 4),
        "one by one": (pictures, batches_of(lengths, 0), row),
    }
    for kind in [name for name in kinds if not args.kinds or name.split()[0] in args.kinds]:
        documents, batches, each = kinds[kind]
        if is_over():
            yield {**gpu, "rows": kind, "error": f"not begun within {args.limit:g} s"}
            continue
        pack = functools.partial(inputs_of, config)
        if kind == "packed":
            try:
                pack = packer(args.engine, model)
            except (ImportError, ValueError) as error:
                yield {**gpu, "rows": kind, "error": str(error)}
                continue
        inputs = [passes.pinned(pack(documents, numbers)) for numbers in batches]
        steps = [slice(first, first + each) for first in range(0, len(inputs), each)]
        tokens = [sum(int(documents["lengths"][i]) for part in batches[step] for i in part) for step in steps]
        for _ in range(2):  # the first compiles
            yield {**gpu, "rows": kind, "first_step_s": passes.seconds(inputs[steps[0]]), "tokens": tokens[0]}
        rates, counted = [0.0], 0
        for number in range(1 + args.passes):
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            spans: list[float] = []
            for step, count in zip(steps, tokens, strict=True):
                if is_over() and (spans or number):
                    break
                spans.append(passes.seconds(inputs[step]))
                yield {**gpu, "rows": kind, "pass": number, "step_s": spans[-1], "tokens": count}
            if spans and (number or is_over()):
                rates.append(sum(tokens[: len(spans)]) / sum(spans))
                counted = len(spans)
        found = {"tokens_per_second": max(rates), "rates": rates[1:], "steps": counted, "steps_a_pass": len(steps)}
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        yield {**gpu, "rows": kind, **found, "tokens": sum(tokens), "loss": passes.last_loss, "peak_gib": peak}


def packed_rows(lengths: np.ndarray, tokens: int) -> list[list[int]]:
    """Return documents in rows of at most so many tokens, each in the first with room, longest first."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number in np.argsort(-lengths).tolist():
        place = next((place for place, free in enumerate(room) if free >= lengths[number]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(tokens)
        rows[place].append(number)
        room[place] -= int(lengths[number])
    return rows


def packer(engine: str, model: Any) -> Any:
    """Return the function that packs documents into a row of Unsloth's.

    Raises:
        ValueError: Unsloth, or this engine, packs no images for this model.
    """
    if engine != "unsloth":
        raise ValueError("only Unsloth packs images")
    from unsloth.utils.mm_packing import pack_multimodal_documents, prepare_packed_multimodal_model

    prepare_packed_multimodal_model(model)

    def pack(documents: Any, numbers: list[int]) -> dict[str, Any]:
        return pack_multimodal_documents([inputs_of(model.config, documents, [number]) for number in numbers])

    return pack


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("unsloth", "peft"), default="unsloth")
    for name in ("model", "pictures", "short"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--step-tokens", type=int, default=16_384)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no step begins")
    parser.add_argument("--kinds", nargs="*", choices=("packed", "batches", "short", "one"), help="of rows; all")
    try:
        for result in measure(parser.parse_args()):
            print(json.dumps(result), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": str(error)[-2000:], "gpu": None}), flush=True)
    print(json.dumps({"ended": True}), flush=True)
    os._exit(0)  # compile workers would linger


if __name__ == "__main__":
    main()
