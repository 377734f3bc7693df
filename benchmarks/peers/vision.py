"""Train a peer's model that sees on the documents of benchmarks/vision_step.py; print its rate as JSON.

    python benchmarks/peers/vision.py --engine unsloth --model DIR --documents FILE.npz --batch-tokens 16384

Documents of alike lengths make batches of at most so many tokens, padding among them; with 0, each is a batch of its
own, and as many as fill a row make a step. The tower is frozen, and adapters of the text train, as in the benchmark.
Weights are random.
"""

import argparse
import json
import os
import time
from typing import Any

import engines
import numpy as np

_WARM_UP = 2
"""Passes over the batches before those that count: Unsloth compiles in the first."""
_TEXT = r".*language_model.*\.({names})"


def load(engine: str, folder: str, seq_len: int) -> Any:
    """Return a model with random weights, a frozen tower, and adapters on the text's linear layers."""
    engines.stay_offline()
    if engine == "unsloth":
        engines.import_unsloth()
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    cuda = torch.cuda.is_available()
    config = AutoConfig.from_pretrained(folder)
    names = "|".join([*engines.TARGETS, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"])
    pattern = _TEXT.format(names=names)
    weights = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.isfile(weights) and not os.path.isfile(weights.removesuffix(".index.json")):
        with torch.device("cuda" if cuda else "cpu"):
            torch.set_default_dtype(torch.bfloat16 if cuda else torch.float32)
            model = AutoModelForImageTextToText.from_config(config)
            torch.set_default_dtype(torch.float32)
        model.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
    if engine == "unsloth":
        from unsloth import FastVisionModel

        shared = {"max_seq_length": seq_len, "use_gradient_checkpointing": "unsloth"}
        model, _ = FastVisionModel.from_pretrained(
            model_name=folder, load_in_4bit=False, load_in_16bit=True, local_files_only=True, **shared
        )
        return FastVisionModel.get_peft_model(
            model,
            r=engines.RANK,
            lora_alpha=engines.ALPHA,
            lora_dropout=0,
            bias="none",
            target_modules=pattern,
            **shared,
        ).train()
    from peft import LoraConfig, get_peft_model

    dtype = torch.bfloat16 if cuda else torch.float32
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, device_map={"": 0 if cuda else "cpu"})
    model = get_peft_model(model, LoraConfig(r=engines.RANK, lora_alpha=engines.ALPHA, target_modules=pattern))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arrays = {name: value.astype(np.float32) if value.dtype == np.float64 else value for name, value in batch.items()}
    return {name: torch.from_numpy(value).to(device) for name, value in arrays.items()}


def squares(values: np.ndarray, grid: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Return an image [3, H, W] from its patches, which lie in the order of merged ones."""
    rows, columns = grid // merge
    cut = values.reshape(rows, columns, merge, merge, 3, patch, patch)
    return cut.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * merge * patch, columns * merge * patch)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens without padding per second, and the peak of memory."""
    documents = np.load(args.documents)
    lengths = documents["lengths"]
    model = load(args.engine, args.model, int(lengths.max()))
    import torch

    cuda = torch.cuda.is_available()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=cuda)
    batches = batches_of(lengths, args.batch_tokens)
    config, each = model.config, max(1, args.step_tokens // int(lengths.mean())) if not args.batch_tokens else 1
    spans, losses = [], []
    for _ in range(_WARM_UP + args.passes):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for place, numbers in enumerate(batches, 1):
            with torch.autocast("cuda" if cuda else "cpu", dtype=torch.bfloat16, enabled=cuda):
                loss = model(**inputs_of(config, documents, numbers), use_cache=False).loss
            loss.backward()
            if place % each == 0 or place == len(batches):
                optimizer.step()
                optimizer.zero_grad()
        losses.append(float(loss))
        spans.append(time.perf_counter() - start)
    best = min(spans[_WARM_UP:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    rate = float(lengths.sum()) / best
    return {
        **{"tokens_per_second": rate, "seconds_a_pass": spans, "batches": len(batches), "losses": losses},
        **{"peak_gib": peak, "versions": engines.versions()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("unsloth", "peft"), default="unsloth")
    parser.add_argument("--model", required=True)
    parser.add_argument("--documents", required=True)
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--step-tokens", type=int, default=16_384, help="of documents one by one")
    parser.add_argument("--passes", type=int, default=2)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
