"""Train a peer's DPO on the pairs of benchmarks/dpo_step.py; print a JSON line after each size of batches.

    python benchmarks/dpo_step.py --shape qwen3-8b --pairs-only FILE.npz
    python benchmarks/peers/dpo.py --pairs FILE.npz --engine liger --batch 4 8 --by-length --checkpointing device none

TRL's DPOTrainer with PEFT, alone (trl), with Liger's kernels (liger), or with Unsloth's model and patches (unsloth);
bf16; the reference is the model with its adapter off. Batches are padded: `padding_free` is without effect in TRL 1.15
and 1.16, whose trainer says so. Several sizes of batches run one after the other, with new weights, until a larger one
is slower, with each kind of checkpointing; the last line is the fastest, with what all took in `tried`.
"""

import argparse
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import engines
import numpy as np
from host import HostMemory
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


def by_length(rows: list[dict], batch: int, steps: int) -> list[dict]:
    """Return rows of batches whose pairs are about as long: the longest, then `steps` of all lengths, twice.

    Those are spread evenly, so that a few of them take as long on average as all; transformers' `group_by_length` has
    nearly the same batches in a random order. The second time counts: kernels are compiled for lengths.
    """
    longest = sorted(rows, key=lambda row: -max(_lengths(row)))
    batches = [longest[begin : begin + batch] for begin in range(0, len(rows) // batch * batch, batch)]
    middles = ((np.arange(steps) + 0.5) / steps * len(batches)).astype(int)
    return [row for number in (0, *middles, *middles) for row in batches[number]]


def _lengths(row: dict) -> tuple[int, int]:
    prompt = len(row["prompt_ids"])
    return prompt + len(row["chosen_ids"]), prompt + len(row["rejected_ids"])


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


def build_trainer(args: argparse.Namespace, batch: int, kind: str, clock):
    """Return a trainer of the engine's model that takes the pairs as they are, by length if asked for."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler

    model, lora = ENGINES[args.engine](args, kind)
    from trl import DPOConfig, DPOTrainer  # after unsloth, which patches it

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

        def _get_train_sampler(self, *args, **kwargs):
            return SequentialSampler(self.train_dataset) if rows is not given else super()._get_train_sampler()

    given = examples(args.pairs)
    rows = by_length(given, batch, args.steps) if args.by_length else given
    config = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        max_steps=args.warm_up + args.steps,
        learning_rate=5e-6,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=kind != "none",
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
        train_dataset=Dataset.from_list(rows),
        processing_class=build_tokenizer(),
        peft_config=lora,
        callbacks=[clock],
    )


def peft_model(args: argparse.Namespace, kind: str):
    """Return a random model, and the adapter that TRL gives it."""
    del kind  # the trainer's
    from peft import LoraConfig

    lora = LoraConfig(r=engines.RANK, lora_alpha=engines.ALPHA, target_modules=engines.TARGETS, task_type="CAUSAL_LM")
    return build_model(args.pairs, args.layers), lora


def unsloth_model(args: argparse.Namespace, kind: str):
    """Return Unsloth's model with its adapter, by way of a folder."""
    import torch

    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    model = build_model(args.pairs, args.layers)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    model = engines.unsloth_model(str(folder), quantize="none", checkpointing=kind, seq_len=2 * LONGEST)
    shutil.rmtree(folder)
    torch.cuda.reset_peak_memory_stats()
    return model, None


ENGINES = {"trl": peft_model, "liger": peft_model, "unsloth": unsloth_model}
LONGEST = 2048
"""Tokens of the longest prompt and of the longest answer."""


def make_clock(batch: int, warm_up: int, host: HostMemory, results: list[dict]):
    """Return a callback that puts the result so far, after each step past the warm-up, in the place of the last."""
    import torch
    from transformers import TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            if (steps := len(ends) - warm_up) < 1:
                return
            seconds = ends[-1] - ends[warm_up - 1]
            results[-1] |= {
                "pairs_per_second": batch * steps / seconds,
                "ms_per_step": seconds / steps * 1e3,
                "steps": steps,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0,
                "host_gib": host.added(),
            }

    return Clock()


def measure(args: argparse.Namespace) -> Iterator[dict]:
    """Yield the result of the fastest size of batches so far, with those of all."""
    import torch

    results: list[dict] = []
    for kind in args.checkpointing:
        before = 0.0
        for batch in args.batch:
            results.append({"pairs_per_step": batch, "checkpointing": kind})
            host = HostMemory()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            try:
                build_trainer(args, batch, kind, make_clock(batch, args.warm_up, host, results)).train()
            except torch.cuda.OutOfMemoryError as error:
                # Steps before are of shorter pairs: a size that does not hold all of them has no speed.
                results[-1] = {"pairs_per_step": batch, "checkpointing": kind, "error": str(error).splitlines()[0]}
            gc.collect()  # a trainer and its model hold each other
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            best = max(results, key=lambda result: result.get("pairs_per_second", 0.0))
            told = {"engine": args.engine, "by_length": args.by_length, **best}
            yield told | {"tried": results, "versions": engines.versions()}
            if results[-1].get("pairs_per_second", 0.0) <= before:
                break
            before = results[-1]["pairs_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--engine", choices=ENGINES, default="trl")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[4], help="pairs of a batch; several one after the other"
    )
    parser.add_argument("--by-length", action="store_true", help="pairs of a batch are about as long")
    parser.add_argument("--checkpointing", nargs="+", choices=("device", "none"), default=["device"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3, help="steps before; with --by-length one more than --steps")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.warm_up = 1 + args.steps if args.by_length else args.warm_up
    engines.stay_offline()
    if args.engine == "unsloth":
        engines.import_unsloth()
    for result in measure(args):
        print(json.dumps(result), flush=True)
        if args.json:
            engines.write_results(args.json, result)


if __name__ == "__main__":
    main()
