"""Recipes of torchtune, which name the Python objects that a run is made of, as flat settings."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxglue.settings.dialects.values import Nested

_COMPONENT = "_component_"
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_OPTIMIZERS = {
    "AdamW": "adamw",
    **dict.fromkeys(("AdamW8bit", "PagedAdamW8bit", "AdamWFp8"), "adamw_8bit"),
    "PagedAdamW": "adamw",
}
"""Our optimizers by their classes; AdamWFp8 has moments of 8 bits, too."""
_LOSSES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss")},
    "DPOLoss": {"objective": "dpo"},
    "RSOLoss": {"objective": "dpo", "loss_type": "hinge"},
}
_SOURCES: dict[str, tuple[str | None, str, bool]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca", True),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca", True),
    "chat_dataset": (None, "auto", False),
    "instruct_dataset": (None, "auto", False),
    "text_completion_dataset": (None, "text", False),
    "preference_dataset": (None, "auto", False),
    "stack_exchange_paired_dataset": ("lvwerra/stack-exchange-paired", "auto", False),
}
"""Hub name, row format and whether prompts are trained on, by their builders."""
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_SPLIT = "train"
_ROOM = (
    "device",
    "batch_size_val",
    "compile",
    "profiler",
    "log_peak_memory_stats",
    "log_level",
    "save_adapter_weights_only",
)
"""Settings without which a run computes the same."""


def with_flat_settings(recipe: Mapping[str, Any], where: str) -> Nested:
    """Return the recipe's settings by names that the other programs or jaxglue have.

    Raises:
        ValueError: a component without a counterpart; begins with `where` and the key.
    """
    settings = {key: value for key, value in recipe.items() if key not in _ROOM}
    if (every := settings.pop("run_val_every_n_steps", None)) is None:
        settings.pop("dataset_val", None)  # read with it alone
    if isinstance(limit := settings.get("max_steps_per_epoch"), int):
        settings |= {"steps": limit * settings.get("epochs", 1), "eval_steps": every}
    flat: Nested = {}
    for key, read in _READERS.items():
        if (value := settings.pop(key, None)) is None:
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}{key}: expected a table with {_COMPONENT}, got {value!r:.100}")
        try:
            flat |= read(dict(value))
        except ValueError as error:
            raise ValueError(f"{where}{key}: {error}") from None
    names = {"epochs": "num_train_epochs", "clip_grad_norm": "max_grad_norm", "log_every_n_steps": "logging_steps"}
    names |= {"batch_size": "per_device_train_batch_size", "optimizer_in_bwd": "update_in_backward"}
    flat |= {names.get(key, key): value for key, value in settings.items() if value is not None}
    if isinstance(output := flat.get("output_dir"), str):
        flat["output_dir"] = output.replace("${output_dir}", "")
    if flat.get("dtype") in _DTYPES:
        flat["dtype"] = _DTYPES[flat["dtype"]]
    if flat.pop("resume_from_checkpoint", False):
        raise ValueError(f"{where}resume_from_checkpoint: --resume continues a run of jaxglue's own")
    return flat


def _class_of(table: dict[str, Any]) -> str:
    name = table.pop(_COMPONENT, None)
    if not isinstance(name, str):
        raise ValueError(f"expected {_COMPONENT}, the name of a Python object, got {name!r:.100}")
    return name.rpartition(".")[2]


def _refuse_rest(table: Mapping[str, Any]) -> None:
    if rest := [key for key, value in table.items() if value not in (None, False)]:
        raise ValueError(f"{', '.join(rest)}: not known here: remove it, or write it as a flag")


def _model(table: dict[str, Any]) -> Nested:
    name = _class_of(table)
    if not name.startswith(("lora_", "qlora_")):
        _refuse_rest(table)
        return {"method": "full"}
    flat: Nested = {"method": "lora"}
    if name.startswith("qlora_") or table.pop("quantize_base", False):
        flat["quantize"] = "nf4"
    modules = table.pop("lora_attn_modules", ["q_proj", "v_proj"])
    if not isinstance(modules, list) or not {*modules} <= _ATTENTION.keys():
        raise ValueError(f"lora_attn_modules: expected {' | '.join(_ATTENTION)}, got {modules!r:.100}")
    targets = [_ATTENTION[module] for module in modules]
    targets += _FEED_FORWARD if table.pop("apply_lora_to_mlp", False) else ()
    targets += ["lm_head"] if table.pop("apply_lora_to_output", False) else []
    flat["targets"] = targets
    for theirs, ours in (("lora_rank", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
        if theirs in table:
            flat[ours] = table.pop(theirs)
    flat["dora"] = table.pop("use_dora", False)
    _refuse_rest(table)
    return flat


def _tokenizer(table: dict[str, Any]) -> Nested:
    _class_of(table)
    length = table.pop("max_seq_len", None)
    for name in ("path", "merges_file", "special_tokens_path"):
        table.pop(name, None)
    _refuse_rest(table)
    return {} if length is None else {"seq_len": length}


def _checkpointer(table: dict[str, Any]) -> Nested:
    _class_of(table)
    folder = table.pop("checkpoint_dir", None)
    return {} if folder is None else {"model": folder}


def _dataset(table: dict[str, Any]) -> Nested:
    name = _class_of(table)
    if name not in _SOURCES:
        raise ValueError(f"expected one of {', '.join(_SOURCES)}, got {name}: name the data with --data")
    source, form, trains_prompts = _SOURCES[name]
    source, files = table.pop("source", source), table.pop("data_files", None)
    if source is None and files is None:
        raise ValueError(f"{name} names no source")
    split = table.pop("split", _SPLIT)
    flat: Nested = {"data": files if files is not None else f"hf:{source}", "packing": table.pop("packed", False)}
    flat |= {"format": form} if form != "auto" else {}
    flat |= {"split": split} if split != _SPLIT else {}
    flat["loss_on"] = "all" if table.pop("train_on_input", trains_prompts) else "assistant"
    for key in ("conversation_column", "conversation_style", "column_map", "column", "new_system_prompt"):
        if (value := table.pop(key, None)) is not None and key in ("column_map", "new_system_prompt"):
            raise ValueError(f"{key}: {value!r:.100}: --columns renames columns, --system names a system message")
    _refuse_rest(table)
    return flat


def _optimizer(table: dict[str, Any]) -> Nested:
    name = _class_of(table)
    if name not in _OPTIMIZERS:
        raise ValueError(f"expected one of {', '.join(_OPTIMIZERS)}, got {name}")
    flat: Nested = {"optimizer": _OPTIMIZERS[name]}
    if (betas := table.pop("betas", None)) is not None:
        flat["beta1"], flat["beta2"] = betas
    for theirs, ours in (("lr", "learning_rate"), ("weight_decay", "weight_decay"), ("eps", "epsilon")):
        if theirs in table:
            flat[ours] = table.pop(theirs)
    table.pop("fused", None)
    _refuse_rest(table)
    return flat


def _schedule(table: dict[str, Any]) -> Nested:
    if (name := _class_of(table)) != "get_cosine_schedule_with_warmup":
        raise ValueError(f"expected get_cosine_schedule_with_warmup, got {name}: --schedule names ours")
    flat = {"schedule": "cosine", "warmup_steps": table.pop("num_warmup_steps", 0)}
    _refuse_rest(table)
    return flat


def _loss(table: dict[str, Any]) -> Nested:
    name = _class_of(table)
    if name not in _LOSSES:
        raise ValueError(f"expected one of {', '.join(_LOSSES)}, got {name}: --objective names ours")
    flat = dict(_LOSSES[name])
    table.pop("num_output_chunks", None)
    flat |= {key: table.pop(key) for key in ("beta", "label_smoothing") if key in table and flat}
    _refuse_rest(table)
    return flat


def _metric_logger(table: dict[str, Any]) -> Nested:
    name = _class_of(table)
    return {"log_to": ["tensorboard", "wandb"]} if name == "WandBLogger" else {}


_READERS: dict[str, Callable[[dict[str, Any]], Nested]] = {
    "model": _model,
    "tokenizer": _tokenizer,
    "checkpointer": _checkpointer,
    "dataset": _dataset,
    "dataset_val": lambda table: {"eval_data": _dataset(table)["data"]},
    "optimizer": _optimizer,
    "lr_scheduler": _schedule,
    "loss": _loss,
    "metric_logger": _metric_logger,
}
"""Readers of the parts of a recipe."""
