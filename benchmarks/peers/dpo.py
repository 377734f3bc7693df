"""Train a peer's DPO on the pairs of benchmarks/dpo_step.py; print a JSON line of speed and memory after each step.

    python benchmarks/dpo_step.py --shape qwen3-8b --pairs-only FILE.npz
    python benchmarks/peers/dpo.py --pairs FILE.npz --engine trl

TRL's DPOTrainer with PEFT, alone (trl), with Liger's kernels (liger), or with Unsloth's model and patches (unsloth);
bf16, gradient checkpointing; the reference is the model with its adapter off.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import engines
import numpy as np
from random_model import random_model


def examples(path: Path) -> list[dict]:
    """Read the pairs in the form of TRL's collator."""
    with np.load(path) as stored:
        tokens, lengths = stored["tokens"].tolist(), stored["lengths"]
    ends = np.cumsum(lengths.ravel()).reshape(lengths.shape)
    return [
        {
            name: tokens[end - size : end]
            for name, end, size in zip(("prompt_ids", "chosen_ids", "rejected_ids"), row, sizes, strict=True)
        }
        for row, sizes in zip(ends, lengths, strict=True)
    ]


def build_model(pairs: Path, layers: int | None):
    """Return a random model of the shape that the pairs are for."""
    with np.load(pairs) as stored:
        return random_model(json.loads(str(stored["config"])), layers)


def build_tokenizer():
    """Return a tokenizer that pads; the pairs are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def build_trainer(args: argparse.Namespace, clock):
    """Return a trainer of the engine's model that takes the pairs as they are."""
    import torch
    from datasets import Dataset

    model, lora = ENGINES[args.engine](args)
    from trl import DPOConfig, DPOTrainer  # after unsloth, which patches it

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

    config = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=1,
        max_steps=args.warm_up + args.steps,
        learning_rate=5e-6,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=True,
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **({"use_liger_kernel": True} if args.engine == "liger" else {}),
    )
    return Trainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(examples(args.pairs)),
        processing_class=build_tokenizer(),
        peft_config=lora,
        callbacks=[clock],
    )


def peft_model(args: argparse.Namespace):
    """Return a random model, and the adapter that TRL gives it."""
    from peft import LoraConfig

    lora = LoraConfig(r=engines.RANK, lora_alpha=engines.ALPHA, target_modules=engines.TARGETS, task_type="CAUSAL_LM")
    return build_model(args.pairs, args.layers), lora


def unsloth_model(args: argparse.Namespace):
    """Return Unsloth's model with its adapter, by way of a folder."""
    import torch

    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    model = build_model(args.pairs, args.layers)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    model = engines.unsloth_model(str(folder), quantize="none", checkpointing="device", seq_len=2 * LONGEST)
    shutil.rmtree(folder)
    torch.cuda.reset_peak_memory_stats()
    return model, None


ENGINES = {"trl": peft_model, "liger": peft_model, "unsloth": unsloth_model}
LONGEST = 2048
"""Tokens of the longest prompt and of the longest answer."""


def make_clock(args: argparse.Namespace):
    """Return a callback that prints the result so far after each step past the warm-up."""
    import torch
    from transformers import TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            if (steps := len(ends) - args.warm_up) < 1:
                return
            seconds = ends[-1] - ends[args.warm_up - 1]
            peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0
            result = {
                "engine": args.engine,
                "pairs_per_second": args.batch * steps / seconds,
                "ms_per_step": seconds / steps * 1e3,
                "pairs_per_step": args.batch,
                "steps": steps,
                "peak_gib": peak,
                "versions": engines.versions(),
            }
            print(json.dumps(result), flush=True)

    return Clock()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--engine", choices=ENGINES, default="trl")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    args = parser.parse_args()
    if args.engine == "unsloth":
        engines.import_unsloth()
    build_trainer(args, make_clock(args)).train()


if __name__ == "__main__":
    main()
