"""Make the goldens of other programs' recipes: documents, loss masks and optimizer steps, computed by these programs.

Run with torch, transformers, trl, datasets, llamafactory and axolotl installed (made with torch 2.13, transformers
5.24, trl 1.16, llamafactory 0.9.5 and axolotl 0.19; the last two without their dependencies for images, sound and
servers, which stubs replace, and with DISABLE_VERSION_CHECK=1), after `make_models.py`:

    python tests/goldens/make_recipes.py

The recipes are ours, after the programs' documentation; {model} and {folder} stand for paths. `recipes.json`, by name:
    program, recipe (YAML), rows    and files beside them
    documents                       of each row its tokens and the ranges [first, last) that are trained on
    steps                           optimizer steps of the run
"""

import importlib.machinery
import json
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import transformers
import yaml
from datasets import Dataset
from make_masks import TEMPLATE
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "jaxglue" / "recipes" / "quickstart" / "model"


class Stubs:
    """Finds modules that the tokenization of texts does not use."""

    names = ("torchaudio", "torchvision", "av", "librosa", "fire", "gradio", "modelscope", "uvicorn", "fastapi", "tyro")

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module

    def exec_module(self, module):
        """Leave the stub as it is."""


CHATS = [
    {"messages": [
        *([{"role": "system", "content": "Be brief."}] if number % 4 == 0 else []),
        {"role": "user", "content": f"What is {number} plus 2?"},
        {"role": "assistant", "content": f"It is {number + 2}."},
        *([{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}] if number % 3 == 0 else []),
    ]}
    for number in range(13)
]  # fmt: skip
ALPACA = [
    {"instruction": f"Add 2 to {number}.", "input": "Whole numbers." if number % 2 else "", "output": f"{number + 2}"}
    for number in range(11)
]
RECIPES = {
    "trl": ("TRL", CHATS, """
model_name_or_path: {model}
output_dir: {folder}/out
per_device_train_batch_size: 2
gradient_accumulation_steps: 3
num_train_epochs: 2
learning_rate: 2.0e-4
lr_scheduler_type: cosine
warmup_steps: 1
max_length: 128
assistant_only_loss: true
use_peft: true
lora_r: 8
lora_alpha: 16
lora_target_modules: all-linear
gradient_checkpointing: true
"""),
    "llama_factory": ("LLaMA-Factory", ALPACA, """
model_name_or_path: {model}
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: sums
dataset_dir: {folder}
template: chatml
cutoff_len: 256
output_dir: {folder}/out
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
num_train_epochs: 3.0
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
"""),
    "axolotl_chat": ("axolotl", CHATS, """
base_model: {model}
datasets:
  - path: {folder}/rows.jsonl
    type: chat_template
    roles_to_train: [assistant]
    train_on_eos: turn
sequence_len: 256
sample_packing: false
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 3
learning_rate: 0.0002
optimizer: adamw_torch
lr_scheduler: cosine
output_dir: {folder}/out
"""),
    "axolotl_alpaca": ("axolotl", ALPACA, """
base_model: {model}
datasets:
  - path: {folder}/rows.jsonl
    type: alpaca
sequence_len: 256
train_on_inputs: false
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
micro_batch_size: 3
gradient_accumulation_steps: 1
num_epochs: 2
learning_rate: 0.0002
output_dir: {folder}/out
"""),
    "unsloth": ("Unsloth", [{"text": f"{n} plus 2 is {n + 2}."} for n in range(9)], """
model_name: {model}
max_seq_length: 128
load_in_4bit: false
r: 8
lora_alpha: 16
lora_dropout: 0
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
warmup_steps: 1
max_steps: 4
learning_rate: 2.0e-4
optim: adamw_8bit
weight_decay: 0.01
lr_scheduler_type: linear
seed: 3407
output_dir: {folder}/out
"""),
}  # fmt: skip


def document(tokens: list[int], labels: list[int]) -> dict:
    runs = [[i for i, _ in run] for on, run in groupby(enumerate(labels), lambda pair: pair[1] != -100) if on]
    return {"tokens": tokens, "trained": [[run[0], run[-1] + 1] for run in runs]}


def by_trl(tokenizer, rows: list[dict], recipe: dict) -> tuple[list[dict], int]:
    """Train by TRL's trainer, which Unsloth patches for speed alone."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps")
    options = {name: recipe[name] for name in (*names, "assistant_only_loss") if name in recipe}
    length = recipe.get("max_length", recipe.get("max_seq_length"))
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "save_strategy": "no",
            "gradient_checkpointing": False,
        }
        config = SFTConfig(folder, max_length=length, **shared, **options)
        model = AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(MODEL))
        trainer = SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        documents = []
        for row in trainer.train_dataset:
            batch = trainer.data_collator([row])
            documents.append(document(row["input_ids"], batch["labels"][0].tolist()))
        trainer.train()
        return documents, trainer.state.global_step


def steps_of_trainer(count: int, batch: int, accumulation: int, epochs: float) -> int:
    """Return the steps of transformers' Trainer, which LLaMA-Factory and axolotl extend."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        config = TrainingArguments(
            folder, report_to=[], use_cpu=True, save_strategy="no", **sizes, num_train_epochs=epochs
        )
        model = AutoModelForCausalLM.from_pretrained(HERE / "qwen3_tied")
        rows = Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * count)
        trainer = Trainer(model, config, train_dataset=rows)
        trainer.train()
        return trainer.state.global_step


def by_llama_factory(tokenizer, rows: list[dict], recipe: dict) -> tuple[list[dict], int]:
    from llamafactory.data.converter import AlpacaDatasetConverter
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    data = DataArguments(template=recipe["template"], cutoff_len=recipe["cutoff_len"])
    template = get_template_and_fix_tokenizer(tokenizer, data)
    attributes = DatasetAttr("file", dataset_name="rows.jsonl")
    attributes.join({})
    converter = AlpacaDatasetConverter(dataset_attr=attributes, data_args=data)
    converted = [converter(row) for row in rows]
    batch = {key: [row[key] for row in converted] for key in converted[0]}
    processor = SupervisedDatasetProcessor(template=template, tokenizer=tokenizer, processor=None, data_args=data)
    found = processor.preprocess_dataset(batch)
    documents = [document(*pair) for pair in zip(found["input_ids"], found["labels"], strict=True)]
    sizes = recipe["per_device_train_batch_size"], recipe["gradient_accumulation_steps"], recipe["num_train_epochs"]
    return documents, steps_of_trainer(len(rows), *sizes)


def by_axolotl(tokenizer, rows: list[dict], recipe: dict) -> tuple[list[dict], int]:
    from axolotl.prompt_strategies.alpaca_chat import load as _  # noqa: F401 - registers the strategies' parents
    from axolotl.utils.dict import DictDefault

    config = DictDefault(recipe | {"train_on_inputs": False, "sequence_len": recipe["sequence_len"]})
    (source,) = recipe["datasets"]
    if source["type"] == "chat_template":
        from axolotl.prompt_strategies.chat_template import load

        strategy = load(tokenizer, config, ds_cfg=DictDefault(source | {"chat_template": "tokenizer_default"}))
    else:
        from axolotl.prompt_tokenizers import AlpacaPromptTokenizingStrategy
        from axolotl.prompters import AlpacaPrompter

        strategy = AlpacaPromptTokenizingStrategy(AlpacaPrompter(), tokenizer, False, recipe["sequence_len"])
    found = [strategy.tokenize_prompt(row) for row in rows]
    documents = [document(one["input_ids"], one["labels"]) for one in found]
    sizes = recipe["micro_batch_size"], recipe["gradient_accumulation_steps"], recipe["num_epochs"]
    return documents, steps_of_trainer(len(rows), *sizes)


PROGRAMS = {"TRL": by_trl, "Unsloth": by_trl, "LLaMA-Factory": by_llama_factory, "axolotl": by_axolotl}


def main() -> None:
    sys.meta_path.append(Stubs())
    golden = {}
    for name, (program, rows, text) in RECIPES.items():
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        if "assistant_only_loss" in text:
            tokenizer.chat_template = TEMPLATE
        filled = text.replace("{model}", str(MODEL)).replace("{folder}", "data")
        documents, steps = PROGRAMS[program](tokenizer, rows, yaml.safe_load(filled))
        golden[name] = {"program": program, "recipe": text, "rows": rows, "documents": documents, "steps": steps}
        print(name, steps, documents[0], SimpleNamespace(text=tokenizer.decode(documents[0]["tokens"])))
    (HERE / "recipes.json").write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
