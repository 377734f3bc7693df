"""Translation of other programs' defaults where a recipe says nothing."""

from collections.abc import Mapping
from typing import Any

from jaxglue.settings.dialects.defaults import (
    AXOLOTL,
    FACTORY_V1,
    LLAMA_FACTORY,
    READ,
    SWIFT,
    TORCHTUNE,
    TRL,
    UNSLOTH,
    ForeignProgram,
)
from jaxglue.settings.dialects.values import WIDER, Nested

_PACKING = ("packing", "sample_packing", "neat_packing")
TRACKERS = ("wandb", "mlflow", "trackio")
"""Those that axolotl switches on by `use_…`."""
_PARTS = {"finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules"}
"""Unsloth's switches of parts of a model that sees."""
_PROMPT = 2048
"""Tokens left for a prompt that the recipe does not bound."""
_BATCHES = ("micro_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "batch_size")


def use_documents(recipe: Mapping[str, Any], values: Nested, program: ForeignProgram | None) -> str | None:
    """Let steps have a number of documents where the recipe does not pack; return a line that says so.

    These programs then count documents, which they pad, in batch size and accumulation. Steps of answers that are
    written in training have sizes of their own.
    """
    packs = any(recipe.get(name) is True for name in _PACKING)
    packs |= recipe.get("stage") == "pt" and recipe.get("packing") is None
    run = values.setdefault("run", {})
    if "rollouts" in values or (program is None and not any(name in recipe for name in _BATCHES)):
        return None
    size = run.pop("per_device_batch_size", program.batch if program else 1)
    default = program.accumulation if program else 1
    if program is not None and program.documents and isinstance(size, int):
        default = -(-program.documents // size)
    accumulation = run.pop("gradient_accumulation_steps", default)
    if packs or values.get("data", {}).get("streaming"):
        run |= {"per_device_batch_size": size, "gradient_accumulation_steps": accumulation}
        return None
    run["documents_per_step"] = size * accumulation
    return (
        f"the recipe does not pack, so a step has the {size * accumulation:,} documents that it has on one GPU there, "
        "packed by themselves: --documents-per-step changes their number"
    )


def use_room(recipe: Mapping[str, Any], values: Nested) -> str | None:
    """Make rows of answers written in training long enough for a prompt and its answer; return a line that says so.

    These programs bound a prompt and its answer apart.
    """
    data, answer = values.setdefault("data", {}), values.get("rollouts", {}).get("max_completion_length", 512)
    if "rollouts" not in values or "seq_len" in data or not isinstance(answer, int):
        return None
    prompt = recipe.get("max_prompt_length")
    if not isinstance(prompt, int):
        prompt = _PROMPT if answer > _PROMPT else None  # otherwise rows without --seq-len have room for both
    data["seq_len"] = None if prompt is None else answer + prompt
    told = [f"prompt and answer together have {data['seq_len']:,} tokens at most (--seq-len)"] if prompt else []
    if (share := values["rollouts"].get("lmbda", 1.0)) < 1:
        told.append(
            f"{1 - share:.0%} of the steps are on answers of the rows, of which {answer:,} tokens are read at most "
            "(--lmbda, --max-completion-length)"
        )
    return "; ".join(told) or None


def use_whole_distribution(values: Nested, program: ForeignProgram | None) -> str | None:
    """Return a line about answers from a part of the vocabulary, whose log-probabilities are others with vLLM."""
    corrects = values.get("objective", {}).get("importance_sampling_mode") != "none"
    names = [name for name in ("top_p", "top_k", "min_p") if name in values.get("rollouts", {})]
    if not names or not corrects or program not in (AXOLOTL, TRL):
        return None
    return (
        f"{', '.join(names)}: log-probabilities of sampling are those among all tokens, as those of the loss, where "
        "vLLM's are those among the tokens that are left, by which TRL's correction lowers the weights of answers"
    )


def use_no_share(values: Nested) -> str | None:
    """Hold no share of the prompts out where answers are written in training; return a line that says so."""
    if "rollouts" not in values or not (share := values.get("data", {}).pop("eval_fraction", None)):
        return None
    return f"{share:g} of the prompts are held out there, and none here: --eval-data names a file of them"


def use_chats(values: Nested, program: ForeignProgram | None) -> str | None:
    """Render Alpaca's rows with the chat template where the program does; return a line that says so."""
    if program is FACTORY_V1:
        return "a chat is one document, where each of its answers is one there, with what precedes it"
    reads = values.get("objective", {}).get("objective") in READ
    if program not in (LLAMA_FACTORY, SWIFT) or reads or "format" in values.setdefault("data", {}):
        return None
    values["data"]["format"] = "auto_chat"
    if program is LLAMA_FACTORY and values["data"].get("overlong", "truncate") == "truncate":
        return (
            "rows of instruction and output are rendered with the chat template (--format auto_chat); long ones lose "
            "their ends (--overlong), where prompts and answers are shortened in proportion there"
        )
    return "rows of instruction and output are rendered with the chat template (--format auto_chat)"


def use_texts(values: Nested, program: ForeignProgram | None) -> str | None:
    """Return a line about embeddings or rerankers of ms-swift; texts that are embedded twice have no dropout."""
    objective = values.get("objective", {}).get("objective")
    if program is not SWIFT or objective not in READ:
        return None
    if objective != "embed":
        return (
            "prompts are those of Qwen3's rerankers, and all documents of a row count, where one positive and seven "
            "negatives are drawn there"
        )
    if values.get("model", {}).get("method") != "full":
        values.setdefault("lora", {}).setdefault("dropout", 0.0)
    return (
        "texts are embedded as they are, without a chat template, and adapters drop nothing out; all other texts of a "
        "step are negatives, where those of a micro-batch are there (--documents-per-step)"
    )


def use_pieces(recipe: Mapping[str, Any], values: Nested, program: ForeignProgram | None) -> str | None:
    """Split long documents where the program does; return a line that says so."""
    data = values.setdefault("data", {})
    splits = {
        LLAMA_FACTORY.name: recipe.get("stage") == "pt" and recipe.get("packing") is not False,
        TRL.name: recipe.get("packing") is True and recipe.get("packing_strategy") in ("wrapped", "bfd_split"),
    }
    if program is None or not splits.get(program.name):
        return None
    data["overlong"] = "split"
    return "documents above the longest length are split, as there (--overlong split)"


def use_tower(recipe: Mapping[str, Any], values: Nested, program: ForeignProgram | None) -> str | None:
    """Train the vision tower where the program does; return a line that says so.

    axolotl loads a model that sees with `processor_type`, and trains or adapts all of it but for `freeze_mm_modules`;
    so does Unsloth with its switches of parts.
    """
    model, lora = values.setdefault("model", {}), values.get("lora", {})
    sees = recipe.get("processor_type") if program is AXOLOTL else _PARTS & recipe.keys()
    if not sees or "train_vision" in model or program not in (AXOLOTL, UNSLOTH):
        return None
    named = recipe.get("lora_target_modules") if program is AXOLOTL else None
    if model.get("method") == "full" or lora.get("targets") == ("all-linear",) or program is UNSLOTH:
        model["train_vision"] = "all"
        return "the vision tower trains, too, as there: --train-vision none freezes it"
    if isinstance(named, list):
        return (
            "lora_target_modules adapt layers of these names in the vision tower, too, there, and none of it here: "
            "--train-vision all adapts them all"
        )
    return None


def use_images(recipe: Mapping[str, Any], program: ForeignProgram | None) -> str | None:
    """Return a line about images that a recipe without their size brings to one."""
    if program is AXOLOTL and recipe.get("processor_type") and not recipe.get("image_size"):
        return (
            "images are brought to the tower's own size there, where it has one, with black around them, and here to "
            "those of the model's files"
        )
    if program is UNSLOTH and _PARTS & recipe.keys() and not recipe.get("vision_image_size"):
        return (
            "images wider than the tower's own size, or than 512 pixels where it has none, are made smaller there: "
            "--image-max-pixels bounds them"
        )
    return None


def use_whole_embedding(values: Nested, program: ForeignProgram | None) -> str | None:
    """Train the embedding whole where Unsloth's targets name it; return a line that says so."""
    lora = values.get("lora", {})
    if program is not UNSLOTH or "embed_tokens" not in lora.get("targets", ()):
        return None
    lora["targets"] = tuple(name for name in lora["targets"] if name != "embed_tokens")
    lora["modules_to_save"] = tuple(dict.fromkeys((*lora.get("modules_to_save", ()), "embed_tokens")))
    return "embed_tokens is trained whole, as there (--modules-to-save); --targets would adapt it"


def use_balance(recipe: Mapping[str, Any]) -> str | None:
    """Return a line about the loss of routers, which is one of all layers together there."""
    if not any(recipe.get(name) for name in ("router_aux_loss_coef", "moe_aux_loss_coef")):
        return None
    return (
        "--router-balance-loss weighs the mean of the layers' losses, where one of all layers' tokens is weighed there"
    )


def use_constant_rate(recipe: Mapping[str, Any], values: Nested, program: ForeignProgram | None) -> str | None:
    """Leave the warm-up out where the schedule of that name has none in transformers; return a line that says so."""
    names = {recipe.get("lr_scheduler_type"), recipe.get("lr_scheduler")} if program is not TORCHTUNE else set()
    if program is None or "constant" not in names:
        return None
    table = values.setdefault("optimizer", {})
    given = table.pop("warmup_steps", 0) or table.get("warmup_ratio", 0)
    table["warmup_ratio"] = 0.0
    line = "schedule constant has no warm-up there, so none is taken; constant_with_warmup has one"
    return line if given else None


def use_wide_weights(values: Nested, program: ForeignProgram | None) -> str | None:
    """Return a line about weights that train in bfloat16 in torchtune."""
    if program is not TORCHTUNE or values.get("model", {}).get("dtype") != "bfloat16":
        return None
    return "weights that train are in float32 here, in bfloat16 there"


def use_betas_of_muon(values: Nested, program: ForeignProgram | None) -> str | None:
    """Give the parameters that Muon leaves to AdamW axolotl's betas, unless the recipe names both; return a line."""
    table = values.get("optimizer", {})
    if program is not AXOLOTL or table.get("optimizer") != "muon" or {"beta1", "beta2"} <= table.keys():
        return None
    table |= {"beta1": 0.95, "beta2": 0.95}
    return "betas of what Muon leaves to AdamW are 0.95 and 0.95, as there without both adam_beta1 and adam_beta2"


def use_wider_moments(recipe: Mapping[str, Any]) -> str | None:
    """Return a line about moments that have more bits here."""
    names = [name for key in ("optimizer", "optim") if isinstance(name := recipe.get(key), str) and name in WIDER]
    if not names:
        return None
    ours, there, here = WIDER[names[0]]
    return f"{names[0]}: its moments have {here} bits here, not {there} (--optimizer {ours})"


def use_no_dropout(recipe: Mapping[str, Any], values: Nested, program: ForeignProgram | None) -> str | None:
    """Switch the adapters' dropout off where the program's trainer does; return a line that says so."""
    table, objective = values.get("lora", {}), values.get("objective", {}).get("objective", "sft")
    switch = recipe.get("disable_dropout")
    is_off = switch is True or (program is not None and objective in program.drops_out_nothing)
    if switch is False or not is_off or not table.get("dropout"):
        return None
    dropout, table["dropout"] = table["dropout"], 0.0
    return f"dropout {dropout:g} has no effect there (its trainer switches it off), so it is 0"


def use_trackers(recipe: Mapping[str, Any], values: Nested) -> None:
    """Switch the trackers on that the recipe names, and Weights & Biases with a project there, as axolotl does."""
    switched = {name: recipe.get(f"use_{name}") for name in TRACKERS}
    if recipe.get("wandb_project") and switched["wandb"] is None:
        switched["wandb"] = True
    if names := [name for name, is_on in switched.items() if is_on]:
        run = values.setdefault("run", {})
        run["log_to"] = tuple(dict.fromkeys((*run.get("log_to", ("tensorboard",)), *names)))
