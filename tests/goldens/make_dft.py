"""Make dft.json: TRL's loss of dynamic fine-tuning, with gradients, of the answers of preferences.json.

Run with torch, transformers, trl and datasets installed (made with torch 2.13, transformers 5.24 and trl 1.16, in
float32 on a CPU), after `make_preferences.py`:

    python tests/goldens/make_dft.py

`dft.json`: loss; cross_entropy, the mean without the weights; (norm, Σ gradient · cos(index / 10)) of parameters.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

HERE = Path(__file__).parent


def make_trainer(folder: str) -> SFTTrainer:
    pairs = json.loads((HERE / "preferences.json").read_text())["pairs"]
    rows = [(pair["prompt_ids"], pair[name]) for pair in pairs for name in ("chosen_ids", "rejected_ids")]
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    settings = {"per_device_train_batch_size": len(rows), "use_cpu": True, "bf16": False, "report_to": "none"}
    return SFTTrainer(
        AutoModelForCausalLM.from_pretrained(HERE / "qwen3_tied", dtype=torch.float32, attn_implementation="eager"),
        args=SFTConfig(output_dir=folder, loss_type="dft", completion_only_loss=True, **settings),
        train_dataset=Dataset.from_list(
            [
                {"input_ids": prompt + answer, "completion_mask": [0] * len(prompt) + [1] * len(answer)}
                for prompt, answer in rows
            ]
        ),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    )


def make_golden() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder)
        batch = next(iter(trainer.get_train_dataloader()))
        model = trainer.model.eval()  # without dropout; the model has none
        labels = batch["labels"].clone()
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss = trainer.compute_loss(model, batch)
        loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        flat = parameter.grad.double().numpy().ravel()
        gradients[name] = [float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(flat.size) / 10))]
    return {"loss": float(loss.detach()), "cross_entropy": float(plain.detach()), "gradients": gradients}


if __name__ == "__main__":
    (HERE / "dft.json").write_text(json.dumps(make_golden(), separators=(",", ":")) + "\n")
