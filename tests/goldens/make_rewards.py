"""Make the goldens of reward models: TRL's losses, metrics and gradients, and transformers' scores.

Run with torch, transformers and trl installed (made with torch 2.13, transformers 5.23 and trl 1.16, in float32 on a
CPU), after `make_preferences.py`:

    python tests/goldens/make_rewards.py

Models are those of `make_models.py` as sequence classifiers, whose score has the weights cos(index). `rewards.json`:
    cases.<name>              of `qwen3_tied` on the pairs of `preferences.json`: settings, margins; loss, metrics;
                              (norm, Σ gradient · cos(index / 10)) of parameters
    scores.<folder>           scores of the pairs' preferred and other answers with their prompts
"""

import json
import tempfile

import numpy as np
import torch
from datasets import Dataset
from make_preferences import HERE, result, rounded, tokenizer
from transformers import AutoConfig, AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

CASES = {
    "plain": {},
    "centered": {"center_rewards_coefficient": 0.3},
    "margins": {"center_rewards_coefficient": 0.01},
}
METRICS = ("mean_reward", "accuracy", "margin")
ANSWERS = ("chosen_ids", "rejected_ids")
FOLDERS = ("qwen3_tied", "llama_tied_llama3", "llama_bias_no_groups", "gpt_oss", "qwen3_moe")


def load(folder: str):
    config = AutoConfig.from_pretrained(HERE / folder, num_labels=1, pad_token_id=0)
    options = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForSequenceClassification.from_pretrained(HERE / folder, **options)
    with torch.no_grad():
        wave = np.cos(np.arange(model.score.weight.numel())).reshape(model.score.weight.shape)
        model.score.weight.copy_(torch.tensor(wave, dtype=torch.float32))
    return model


class Trainer(RewardTrainer):
    """A trainer on tokens."""

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset


def case(settings: dict, rows: list[dict]) -> dict:
    options = {"report_to": [], "use_cpu": True, "bf16": False, "max_length": None}
    config = RewardConfig(output_dir=tempfile.mkdtemp(), gradient_checkpointing=False, **options, **settings)
    model = load("qwen3_tied")
    trainer = Trainer(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
    loss = trainer.compute_loss(model, trainer.data_collator(rows))
    kept = {name: value for name, value in trainer._metrics["eval"].items() if name in METRICS}
    return result(model, loss, {}) | {"metrics": {name: float(np.mean(value)) for name, value in kept.items()}}


def score(folder: str, pairs: list[dict]) -> list[list[float]]:
    model = load(folder)
    with torch.no_grad():
        return [
            [float(model(torch.tensor([pair["prompt_ids"] + pair[name]])).logits) for name in ANSWERS] for pair in pairs
        ]


def main() -> None:
    pairs = json.loads((HERE / "preferences.json").read_text())["pairs"]
    whole = [{name: pair["prompt_ids"] + pair[name] for name in ANSWERS} for pair in pairs]
    margins = [0.25 * index for index in range(len(pairs))]
    cases = {}
    for name, settings in CASES.items():
        own = margins if name == "margins" else None
        rows = [row | {"margin": margin} for row, margin in zip(whole, margins, strict=True)] if own else whole
        cases[name] = case(settings, rows) | {"settings": settings, "margins": own}
    golden = {"cases": cases, "scores": {folder: score(folder, pairs) for folder in FOLDERS}}
    (HERE / "rewards.json").write_text(json.dumps(rounded(golden), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
