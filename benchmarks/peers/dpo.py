"""Train a peer's DPO on the pairs of benchmarks/dpo_step.py; print a JSON line of pairs a second and memory.

    python benchmarks/dpo_step.py --shape qwen3-8b --pairs-only FILE.npz
    python benchmarks/peers/dpo.py --pairs FILE.npz --batch 8

TRL's DPOTrainer with PEFT, bf16, gradient checkpointing; the reference is the model with its adapter off. `--kernels`
asks for Liger's kernels where TRL has them.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np


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
    """Return a random model on the GPU, made there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with np.load(pairs) as stored:
        raw = json.loads(str(stored["config"])) | ({"num_hidden_layers": layers} if layers else {})
    config = AutoConfig.for_model(**{key: value for key, value in raw.items() if key != "architectures"})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    return model


def build_tokenizer():
    """Return a tokenizer that pads; the pairs are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    config = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.batch,
        max_steps=args.warm_up + args.steps,
        learning_rate=5e-6,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=True,
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        dataloader_num_workers=2,
        **({"use_liger_kernel": True} if args.kernels else {}),
    )
    trainer = Trainer(
        model=build_model(args.pairs, args.layers),
        args=config,
        train_dataset=Dataset.from_list(examples(args.pairs)),
        processing_class=build_tokenizer(),
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
        callbacks=[Clock()],
    )
    trainer.train()
    seconds = ends[-1] - ends[args.warm_up - 1]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0
    result = {
        "engine": "trl" + (" + liger" if args.kernels else ""),
        "pairs_per_second": args.batch * args.steps / seconds,
        "ms_per_step": seconds / args.steps * 1e3,
        "pairs_per_step": args.batch,
        "peak_gib": peak,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
