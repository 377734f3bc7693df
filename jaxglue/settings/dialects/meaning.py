"""Translation of other programs' defaults where a recipe says nothing."""

from collections.abc import Mapping
from typing import Any

from jaxglue.settings.dialects.values import Nested

_PACKING = ("packing", "sample_packing", "neat_packing", "padding_free")
_BATCHES = ("micro_batch_size", "per_device_train_batch_size")
_LLAMA_FACTORY = {"finetuning_type", "cutoff_len", "stage", "dataset_dir"}
"""Settings of LLaMA-Factory that the other programs do not have."""


def use_documents(recipe: Mapping[str, Any], values: Nested) -> str | None:
    """Let steps have a number of documents where the recipe does not pack; return a line that says so.

    axolotl, LLaMA-Factory and TRL then count documents, which they pad, in batch size and accumulation. Steps of
    answers that are written in training have sizes of their own.
    """
    packs = any(recipe.get(name) is True for name in _PACKING) or recipe.get("stage") == "pt"
    run = values.setdefault("run", {})
    if packs or "rollouts" in values or not any(name in recipe for name in (*_BATCHES, "gradient_accumulation_steps")):
        return None
    size = run.pop("per_device_batch_size", 1 if "base_model" in recipe else 8)
    documents = size * run.pop("gradient_accumulation_steps", 1)
    run["documents_per_step"] = documents
    return (
        f"the recipe does not pack, so a step has the {documents:,} documents that it has on one GPU there, packed by "
        "themselves: --documents-per-step changes their number"
    )


def use_chats(recipe: Mapping[str, Any], values: Nested) -> str | None:
    """Render Alpaca's rows with the chat template where the recipe is LLaMA-Factory's; return a line that says so."""
    if not _LLAMA_FACTORY & recipe.keys():
        return None
    values.setdefault("data", {}).setdefault("format", "auto_chat")
    return "rows of instruction and output are rendered with the chat template (--format auto_chat)"


def use_wandb(recipe: Mapping[str, Any], values: Nested) -> None:
    """Switch Weights & Biases on where the recipe names a project there, as axolotl does."""
    if recipe.get("wandb_project"):
        run = values["run"]
        run["log_to"] = tuple(dict.fromkeys((*run.get("log_to", ("tensorboard",)), "wandb")))
