"""Recipes of ms-swift, whose data sets have their number of rows in their names, as flat settings."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxglue.files.json_file import parse_json
from jaxglue.files.regular_file import read_regular_text
from jaxglue.settings.dialects.data_sets import named_source
from jaxglue.settings.dialects.values import Nested, renamed

_METHODS = {"lora": "lora", "full": "full"}
_OBJECTIVES = {
    **{name: name for name in ("dpo", "kto", "orpo", "simpo", "grpo")},
    **{"rm": "reward", "gkd": "distill"},
}
_DISTILLED = {"per_device_train_batch_size": 1, "max_completion_length": 512, "lmbda": 0.5}
"""Settings of a teacher's recipe that names none."""
_DOCUMENTS = 16
"""Documents of a step whose recipe names no accumulation."""
_ELSEWHERE = {
    "ppo": "it needs a model of values: --objective grpo compares answers to a prompt instead",
    "regression": "--objective classify learns labels, not numbers",
}
"""Remedies for values without a counterpart."""
_TASKS = {
    "seq_cls": "classify",
    "embedding": "embed",
    "reranker": "rerank_score",
    "generative_reranker": "rerank",
}
_RANKED: dict[Any, Nested] = {
    "pointwise_reranker": {"rerank_loss": "pointwise"},
    "listwise_reranker": {"rerank_loss": "listwise"},
}
_READ_LOSSES: dict[str, dict[Any, Nested]] = {
    "embed": {"infonce": {"embed_loss": "infonce", "similarity_scale": 10.0}},
    **dict.fromkeys(("rerank", "rerank_score"), _RANKED),
}
"""Our settings by its losses, of objectives whose texts are read; its temperature of InfoNCE is 0.1."""
_LONGEST = {"embed": "max_text_length", **dict.fromkeys(("rerank", "rerank_score"), "max_document_length")}
_ROW = 4096
"""Tokens of a text where its recipe bounds none, which is then as long as a row."""
_LABELS = ("single_label_classification", "multi_label_classification")
_LOSSES = {"default": "assistant", "last_round": "last-turn", "all": "all"}
_OVERLONG = {"delete": "drop", "right": "truncate", "split": "split"}
_BITS = {4: "nf4", 8: "int8"}
_COLUMNS = {"query": "question", "response": "answer"}
"""Our names of columns by those of its rows."""
_MAX_BYTES = 2**18
"""Size of the largest file of a system message."""
_EMPTY_THINKING = "ignore_empty_think"
_RENAMED = {
    **{"adapters": "adapter", "target_regex": "target_modules", "lorap_lr_ratio": "loraplus_lr_ratio"},
    **{"split_dataset_ratio": "eval_fraction", "early_stop_interval": "early_stopping", "attn_impl": "flash_attn"},
    **{"swanlab_exp_name": "swanlab_name", "dynamic_sample": "dynamic_sampling"},
    **{"overlong_filter": "mask_truncated_completions", "max_epochs": "num_train_epochs"},
    **{"teacher_model": "teacher", "tau_pos": "sapo_temperature_pos", "tau_neg": "sapo_temperature_neg"},
}
_ROOM = (
    *("use_hf", "check_model", "model_name", "model_author", "model_type", "create_checkpoint_symlink", "add_version"),
    *("ddp_backend", "lora_dtype", "val_dataset_shuffle", "download_mode", "load_args", "ignore_args_error"),
    *("label_names", "teacher_deepspeed", "offload_teacher_model"),
)
"""Settings without which a run computes the same: names for an assistant are of ms-swift's own data set."""
_REWARDS = {
    "format": r"regex?pattern=^<think>.*?</think>\s*<answer>.*?</answer>\Z",
}


def with_swift_settings(recipe: Mapping[str, Any], where: str) -> Nested:
    """Return the recipe's settings by names that the other programs or jaxglue have.

    Raises:
        ValueError: a value without a counterpart; begins with `where` and the key.
    """
    flat = renamed(recipe, where, _READERS, _RENAMED, _ROOM)
    if recipe.get("use_hf") is not True and any(str(name).startswith("hf:") for name in flat.get("data", ())):
        flat["modelscope"] = True
    if any("?rows=" in str(name) for name in flat.get("data", ())):
        flat["dataset_sample"] = True
    if flat.get("objective") in _READ_LOSSES:
        flat = _with_texts(flat, where)
    if flat.get("objective") == "classify":  # whose texts are read as their labels' objective reads them
        flat = {key: value for key, value in flat.items() if key not in ("format", "loss_on")}
    if flat.get("objective") == "distill":
        flat = _DISTILLED | flat
        if isinstance(batch := flat["per_device_train_batch_size"], int) and batch > 0:
            flat.setdefault("gradient_accumulation_steps", -(-_DOCUMENTS // batch))
    if recipe.get("rlhf_type") in ("grpo", "gkd") and "max_length" in flat:
        flat["max_prompt_length"] = flat.pop("max_length")
    return {"method": "lora"} | flat


def _with_texts(settings: Nested, where: str) -> Nested:
    """Return the settings with those of embeddings or rerankers, whose texts are read as they are."""
    flat = {key: value for key, value in settings.items() if key not in ("format", "loss_on", "loss_type")}
    losses = _READ_LOSSES[settings["objective"]]
    if (loss := settings.get("loss_type")) not in losses:
        raise ValueError(f"{where}loss_type: expected {' | '.join(losses)}, got {loss!r:.100}")
    longest = flat.get("max_length", _ROW)
    if settings["objective"] != "embed":
        flat.pop("max_length", None)  # a row has all documents of a query
    return flat | losses[loss] | {_LONGEST[settings["objective"]]: longest}


def _one_of(known: Mapping[Any, str], value: Any) -> str:
    if not isinstance(value, str | int) or value not in known:
        remedy = f": {_ELSEWHERE[value]}" if isinstance(value, str) and value in _ELSEWHERE else ""
        raise ValueError(f"expected {' | '.join(map(str, known))}, got {value!r:.100}{remedy}")
    return known[value]


def _sources(value: Any) -> list[str]:
    """Return data sets, `hub::name:subset#rows` or files, as our sources."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"expected names, got {value!r:.100}")
    return [_source(name) for name in names]


def _source(text: str) -> str:
    name, _, rows = text.rpartition("#") if "#" in text and not os.path.exists(text) else (text, "", "")
    name, _, subset = name.removeprefix("HF::").removeprefix("MS::").partition(":")
    if "/" in subset or (rows and not rows.isdecimal()):
        raise ValueError(f"{text:.100}: expected name, name:subset, or either with #rows")
    files = os.path.splitext(name)[1] in (".jsonl", ".json", ".csv", ".parquet")
    return (name if files else named_source(name, subset or None)) + (f"?rows={rows}" if rows else "")


def _system(value: Any) -> Nested:
    """Return the system message: the text of a file .txt, or the text itself, in which \\n stands for a line's end."""
    if not isinstance(value, str):
        raise ValueError(f"expected a text, or a file .txt, got {value!r:.100}")
    if not value.endswith(".txt"):
        return {"system": value.replace("\\n", "\n")}
    try:
        return {"system": read_regular_text(Path(value), "utf-8", _MAX_BYTES)}
    except OSError as error:
        raise ValueError(f"cannot read {value:.200}: {error.strerror}") from None


def _columns(value: Any) -> Nested:
    """Return new names of columns; ms-swift gives them by the old ones."""
    names = parse_json(value, "its text") if isinstance(value, str) else value
    if not isinstance(names, dict) or not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise ValueError(f"expected a table from old to new names, got {value!r:.100}")
    return {"columns": ",".join(f"{_COLUMNS.get(new, new)}={old}" for old, new in names.items())}


def _loss(value: Any) -> Nested:
    """Return the tokens with loss; parts of the text behind + weigh some of them."""
    base, *others = str(value).split("+")
    ours: Nested = {"mask_empty_thinking": True} if _EMPTY_THINKING in (base, *others) else {}
    others = [name for name in others if name != _EMPTY_THINKING]
    if others:
        raise ValueError(f"expected {' | '.join(_LOSSES)}, with +{_EMPTY_THINKING} or without, got {value!r:.100}")
    return ours | ({} if base == _EMPTY_THINKING else {"loss_on": _one_of(_LOSSES, base)})


def _rewards(value: Any) -> Nested:
    names = [value] if isinstance(value, str) else value
    return {"reward_funcs": [_REWARDS.get(name, name) for name in names]}


def _targets(value: Any) -> Nested:
    names = [value] if isinstance(value, str) else value
    return {"target_modules": "all-linear" if names == ["all-linear"] else value}


_READERS: Mapping[str, Any] = {
    **dict.fromkeys(("tuner_type", "train_type", "sft_type"), lambda value: {"method": _one_of(_METHODS, value)}),
    "task_type": lambda value: {} if value == "causal_lm" else {"objective": _one_of(_TASKS, value)},
    "problem_type": lambda value: {"problem_type": _one_of({kind: kind for kind in _LABELS}, value)},
    "rlhf_type": lambda value: {"objective": _one_of(_OBJECTIVES, value)},
    "dataset": lambda value: {"data": _sources(value)},
    "val_dataset": lambda value: {"eval_data": _sources(value)},
    "columns": _columns,
    "system": _system,
    "loss_scale": _loss,
    "truncation_strategy": lambda value: {"overlong": _one_of(_OVERLONG, value)},
    "quant_bits": lambda value: {"quantize": _one_of(_BITS, value)},
    "quant_method": lambda value: {} if value == "bnb" else {"quantize": _one_of({"bnb": "none"}, value)},
    "use_chat_template": lambda value: {} if value else {"format": "text", "loss_on": "all"},
    "reward_funcs": _rewards,
    "target_modules": _targets,
}
"""Readers of settings whose names or values differ."""
