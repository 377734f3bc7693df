"""Make sft_trainer.json: a run of TRL's SFTTrainer with a callback and compute_metrics.

Run with torch, transformers, trl and datasets installed (made with torch 2.13, transformers 5.24 and trl 1.16, in
float32 on a CPU), after `make_masks.py`:

    python tests/goldens/make_sft_trainer.py

The tokenizer is the quickstart's with the template of `masks.json`, the weights are those of `drawn.py`, by a tenth.
Each step has all rows, so their order is of no account. Contents: config, rows, held-out rows; losses and gradient
norms by step, and the values of evaluations, as the callback receives them.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from drawn import drawn
from make_masks import TEMPLATE, TOKENIZER
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

HERE = Path(__file__).parent
SHAPE = {
    "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
SETTINGS = {"learning_rate": 1e-2, "weight_decay": 0.01, "max_grad_norm": 1.0, "lr_scheduler_type": "linear"}
STEPS = 4


def chats(numbers) -> list[dict]:
    """Return chats of additions."""
    return [
        {"messages": [{"role": "user", "content": f"What is {n} plus 3?"},
                      {"role": "assistant", "content": f"It is {n + 3}." + " Sure." * (n % 3)}]}
        for n in numbers
    ]  # fmt: skip


def compute_metrics(found) -> dict[str, float]:
    """Return accuracy and mean log-probability of the target tokens, and the lowest accuracy of a document."""
    logits, labels = torch.tensor(found.predictions[:, :-1]).double(), torch.tensor(found.label_ids[:, 1:])
    counted = labels != -100
    right = (logits.argmax(-1) == labels) & counted
    taken = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    values = right[counted].double().mean(), taken[counted].mean(), (right.sum(-1) / counted.sum(-1)).min()
    return {name: float(value) for name, value in zip(("accuracy", "log_prob", "worst"), values, strict=True)}


class Record(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self):
        self.steps, self.evaluations = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.steps.append({name: float(logs[name]) for name in ("loss", "grad_norm", "learning_rate")})

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        names = ("eval_loss", "eval_accuracy", "eval_log_prob", "eval_worst")
        self.evaluations.append({name: float(metrics[name]) for name in names} | {"step": state.global_step})


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = drawn(name, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(values if name.endswith("norm.weight") else values / 10))
    rows, held_out, record = chats(range(8)), chats(range(20, 25)), Record()
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            folder, assistant_only_loss=True, per_device_train_batch_size=8, per_device_eval_batch_size=5,
            max_steps=STEPS, logging_steps=1, eval_strategy="steps", eval_steps=2, report_to=[], use_cpu=True,
            bf16=False, save_strategy="no", gradient_checkpointing=False, optim="adamw_torch", **SETTINGS,
        )  # fmt: skip
        data = {"train_dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(held_out)}
        own = {"callbacks": [record], "compute_metrics": compute_metrics}
        SFTTrainer(model, config, processing_class=tokenizer, **data, **own).train()
    golden = {"config": SHAPE, "settings": SETTINGS, "rows": rows, "held_out": held_out}
    golden |= {"steps": record.steps, "evaluations": record.evaluations}
    (HERE / "sft_trainer.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    print(np.array([step["loss"] for step in record.steps]), record.evaluations)


if __name__ == "__main__":
    main()
