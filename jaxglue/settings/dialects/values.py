"""Settings of other programs whose values differ from ours in kind."""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from jaxglue.files.json_file import parse_json
from jaxglue.settings.config import Kind
from jaxglue.settings.dialects.data_sets import data_sets

Nested = dict[str, Any]
"""Values by groups and fields, those of groups one level down."""
_STAGES: dict[Any, dict[str, str]] = {
    **{stage: {} for stage in (None, "sft", "pt")},
    **{stage: {"objective": stage} for stage in ("dpo", "kto")},
    "rm": {"objective": "reward"},
}
"""Settings by LLaMA-Factory's stages."""
_PREFERENCE_LOSSES: dict[Any, dict[str, str]] = {
    **{loss: {} for loss in (None, "sigmoid")},
    **{loss: {"objective": loss} for loss in ("ipo", "orpo", "simpo")},
    "hinge": {"loss_type": "hinge"},
}
"""Further settings by the losses of its stage dpo."""


_LAYERS = (0, 1, 6, 23)
"""Layers of which a regular expression of targets is asked."""
_LINEAR = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
    "linear_attn": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
}
"""Linear layers by their parents, as models of Hugging Face name them."""
_ROOTS = (
    *("model.layers", "model.language_model.layers", "language_model.model.layers"),
    "model.text_model.layers",
)
_LONGEST_PATTERN = 300
"""Characters of a regular expression of targets: longer ones may take long to match."""


_OWN_TOKENS = ("bos_token", "unk_token")
"""Special tokens of axolotl's that the tokenizer's own stand for."""
SUPERVISED = ("nll", "chunked_nll")
"""TRL's names of the loss of supervised training."""
_DYNAMIC = {"loss_type": "dft", "use_dft_loss": True, "enable_dft_loss": True}
"""Settings for dynamic fine-tuning, of TRL, LLaMA-Factory and ms-swift."""
WIDER = {
    **dict.fromkeys(("adamw_torch_4bit", "adamw_4bit"), ("adamw_8bit", 4, 8)),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), ("lion", 8, 32)),
}
"""Our optimizers, bits of moments there and here, by names of those whose moments have more bits here."""


def renamed(
    recipe: Mapping[str, Any],
    where: str,
    readers: Mapping[str, Callable[[Any], Nested]],
    names: Mapping[str, str],
    left_out: Collection[str],
) -> Nested:
    """Return a program's own settings by names that others or jaxglue have: by their reader, or of another name.

    Raises:
        ValueError: of a reader; begins with `where` and the key.
    """
    flat: Nested = {}
    for key, value in recipe.items():
        if key in left_out or value is None:
            continue
        try:
            flat |= readers[key](value) if key in readers else {names.get(key, key): value}
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}{key}: {error}") from None
    return flat


def with_one_name(recipe: Mapping[str, Any]) -> Nested:
    """Return the recipe with one of the names that programs read beside each other.

    axolotl's `lora_target_linear` contains any `lora_target_modules`, and its `lora_target_parameters` name experts,
    which get no adapters otherwise; the trainer's `max_length` and `seed` decide over those with which Unsloth loads a
    model and draws its adapters. TRL's list of losses to add has often one, or the
    supervised one as the second.
    """
    values = dict(recipe)
    for key in ("optimizer", "optim"):
        if isinstance(name := values.get(key), str) and name in WIDER:
            values[key] = WIDER[name][0]
    if values.get("warmup_steps") == 0 and values.get("warmup_ratio"):
        del values["warmup_steps"]  # transformers takes the share then
    if isinstance(losses := values.get("loss_type"), list):
        weights = values.get("loss_weights") or [1] * len(losses)
        if len(losses) == 2 and losses[1] == "sft" and isinstance(weights, list) and weights[:1] == [1]:
            values |= {"loss_type": losses[0], "rpo_alpha": weights[-1]}
            values.pop("loss_weights", None)
        elif len(losses) == 1:
            values["loss_type"] = losses[0]
    if isinstance(tokens := values.get("special_tokens"), dict):
        values["special_tokens"] = {key: token for key, token in tokens.items() if key not in _OWN_TOKENS}
        values |= {key: tokens[key] for key in _OWN_TOKENS if tokens.get(key) is not None}
    if values.get("loss_type") in SUPERVISED:
        del values["loss_type"]
    for name, on in _DYNAMIC.items():
        if values.get(name) == on:
            del values[name]
            values["objective"] = "dft"
    if values.get("num_labels") == 1:
        del values["num_labels"]  # a score, as reward models have it
    linear, modules = values.get("lora_target_linear") is True, values.get("lora_target_modules")
    if linear:
        values.pop("lora_target_modules", None)
    if isinstance(experts := values.get("lora_target_parameters"), list):
        del values["lora_target_parameters"]
        try:
            named = [] if linear or modules is None else [*_targets(modules)["lora"]["targets"]]
        except ValueError as error:
            raise ValueError(f"lora_target_modules: {error}") from None
        values |= {"exclude_modules": []} if linear else {"lora_target_modules": [*named, *experts]}
    _use_totals(values)
    for name, other in (("max_length", "max_seq_length"), ("seed", "random_state")):
        if values.get(name) is not None and "model_name" in values:
            values.pop(other, None)
    return values


def _use_totals(values: Nested) -> None:
    """Replace documents of a whole step, and a last learning rate, by the parts that they stand for.

    axolotl's `batch_size` is that of a step on one GPU, micro-batches and accumulation together.
    """
    total, micro = values.get("batch_size"), values.get("micro_batch_size", 1)
    if "base_model" in values and isinstance(total, int) and isinstance(micro, int) and micro > 0:
        del values["batch_size"]
        values.setdefault("gradient_accumulation_steps", max(total // micro, 1))
    settings = values.get("lr_scheduler_kwargs")
    if isinstance(settings, str):  # of a command line
        values["lr_scheduler_kwargs"] = settings = parse_json(settings, "lr_scheduler_kwargs")
    if isinstance(settings, dict) and settings.keys() == {"min_lr"}:
        with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):  # values that are refused as they are
            share = float(settings["min_lr"]) / float(values["learning_rate"])
            values["lr_scheduler_kwargs"] = {"min_lr_rate": share}


def _targets(value: Any) -> Nested:
    """Return the layers to adapt; a text with signs of a regular expression is PEFT's, which matches whole paths."""
    if not isinstance(value, str) or re.fullmatch(r"[\w.,\s-]+", value):
        names = Kind(scalar=str, many=True, comma_separated=True).read(value)
        return {"lora": {"targets": tuple(_TARGETS.get(name, name) for name in names)}}
    try:
        pattern = re.compile(value[:_LONGEST_PATTERN])
    except re.error as error:
        raise ValueError(f"no regular expression of Python's: {error}: {value!r:.100}") from None
    chosen = [
        {
            name
            for parent, names in _LINEAR.items()
            for name in names
            if any(pattern.fullmatch(f"{root}.{layer}.{parent}.{name}") for root in _ROOTS)
        }
        for layer in _LAYERS
    ]
    if len(value) > _LONGEST_PATTERN or not chosen[0] or any(names != chosen[0] for names in chosen):
        raise ValueError(
            f"this regular expression names no linear layers, or other ones in each layer, got {value!r:.100}: name "
            "them in a list, and --layers for some of the layers"
        )
    return {"lora": {"targets": tuple(name for names in _LINEAR.values() for name in names if name in chosen[0])}}


_TARGETS = {"all": "all-linear", "all_linear": "all-linear"}


def _optimizer_settings(value: Any) -> Nested:
    """Return the optimizer's settings, of a table or a text name=value, …"""
    if isinstance(value, str):
        value = dict(part.split("=", 1) for part in value.split(",") if "=" in part)
    if not isinstance(value, dict):
        raise ValueError(f"expected a table, or name=value,…, got {value!r:.100}")
    settings = dict(value)
    ours: Nested = {}
    if "betas" in settings:
        ours["beta1"], ours["beta2"] = map(float, settings.pop("betas"))
    for theirs, name in (("eps", "epsilon"), ("weight_decay", "weight_decay"), ("beta1", "beta1"), ("beta2", "beta2")):
        if theirs in settings:
            ours[name] = float(settings.pop(theirs))
    if settings:
        raise ValueError(f"{', '.join(settings)}: no settings of an optimizer here")
    return {"optimizer": ours}


def with_objective(recipe: Mapping[str, Any], where: str) -> Nested:
    """Return the recipe with our objective in place of LLaMA-Factory's `stage` and `pref_loss`.

    Raises:
        ValueError: another stage or loss; begins with `where` and the key.
    """
    values = dict(recipe)
    for key, known in (("stage", _STAGES), ("pref_loss", _PREFERENCE_LOSSES)):
        value = values.pop(key, None)
        if not isinstance(value, str | None) or value not in known:
            expected = " | ".join(str(name) for name in known if name)
            raise ValueError(f"{where}{key}: expected {expected}, got {value!r:.100}")
        values |= known[value]
    return values


def _adapter(value: Any) -> Nested:
    if value not in ("lora", "qlora"):
        raise ValueError(f"expected lora | qlora, got {value!r:.100}")
    return {"model": {"method": "lora", **({"quantize": "nf4"} if value == "qlora" else {})}}


def _checkpoints(value: Any) -> Nested:
    """Return the checkpoints to keep; numbers below 1 bound none in transformers."""
    number = Kind(scalar=int).read(value)
    return {"run": {"keep_checkpoints": number}} if number > 0 else {}


def _steps(value: Any) -> Nested:
    """Return the steps; -1 leaves them to the epochs."""
    return {} if value == -1 else {"run": {"steps": Kind(scalar=int).read(value)}}


def _schedule(value: Any) -> Nested:
    """Return the schedule; the names of variants with a floor and a warm-up stand for ours, which have both.

    Cosine with restarts has one cycle, which is cosine, where its settings do not say more.
    """
    names = {"cosine_with_min_lr": "cosine", "cosine_with_restarts": "cosine", "constant_with_warmup": "constant"}
    return {"optimizer": {"schedule": names.get(value, value)}}


def _schedule_settings(value: Any) -> Nested:
    if not isinstance(value, dict) or value.keys() - {"min_lr_rate"}:
        raise ValueError(f"expected min_lr or min_lr_rate alone, got {value!r:.100}: --min-lr-ratio is the floor")
    return {"optimizer": {"min_lr_ratio": value.get("min_lr_rate", 0.0)}}


def _special_tokens(value: Any) -> Nested:
    """Return axolotl's eos token; packed rows need no padding token."""
    if not isinstance(value, dict) or value.keys() - {"pad_token", "eos_token"}:
        raise ValueError(
            f"the tokenizer's own are used but for eos_token, got {value!r:.100}: leave out the others if it has them, "
            "or save one that does"
        )
    return {"data": {"eos_token": value["eos_token"]}} if value.get("eos_token") is not None else {}


def _warmup(value: Any) -> Nested:
    """Return the warm-up, of which numbers below 1 are shares."""
    is_share = isinstance(value, float) and 0 < value < 1
    return {"optimizer": {"warmup_ratio" if is_share else "warmup_steps": value}}


def _wandb(value: Any) -> Nested:
    """Return the project; an empty one is none."""
    if value in (None, ""):
        return {}
    if not isinstance(value, str):
        raise ValueError(f"expected a name, got {value!r:.100}")
    return {"run": {"log_project": value}}


def _unfrozen(value: Any) -> Nested:
    """Return settings of axolotl's patterns of what trains, which name the whole text model, and not its tower."""
    names = [value] if isinstance(value, str) else value or []
    if not names:
        return {}
    plain = {re.sub(r"^\^|[.*$]+$", "", name) if isinstance(name, str) else name for name in names}
    if not {"model.language_model", "lm_head"} <= plain <= _TEXT_MODEL:
        raise ValueError(
            "no counterpart here but for the whole text model, model.language_model and lm_head, got "
            f"{names!r:.100}: --layers adapts some layers, --modules-to-save trains embed_tokens and lm_head whole"
        )
    return {"model": {"train_vision": "none"}}


_TEXT_MODEL = {"model.language_model", "lm_head", "embed_tokens"}
"""Parts of a model that sees, without its tower."""


def _reward_model(value: Any) -> Nested:
    if not isinstance(value, bool):
        raise ValueError(f"expected true | false, got {value!r:.100}")
    return {"objective": {"objective": "reward"}} if value else {}


def _only(*values: Any) -> Callable[[Any], Nested]:
    """Return the reader of a setting that has the value of all runs here."""

    def read(value: Any) -> Nested:
        if value not in values:
            raise ValueError(f"expected {' | '.join(map(str, values))}, got {value!r:.100}")
        return {}

    return read


def _switch(ours: Nested | None = None, on: bool = True) -> Callable[[Any], Nested]:
    """Return the reader of a switch that stands for settings of ours where it has the value `on`."""

    def read(value: Any) -> Nested:
        is_on = False if value is None else Kind(scalar=bool).read(value)
        return {group: dict(fields) for group, fields in (ours or {}).items()} if is_on is on else {}

    return read


CONVERTERS: dict[str, Callable[[Any], Nested]] = {
    "adapter": _adapter,
    "datasets": data_sets("data"),
    "test_datasets": data_sets("eval_data"),
    "dataset_text_field": lambda value: (
        {"data": {"columns": f"text={value}"}} if value not in ("text", "", None) else {}
    ),
    "dataset_prompt_column": lambda value: {"data": {"columns": f"question={value}"}} if value != "question" else {},
    "unfrozen_parameters": _unfrozen,
    "freeze_mm_modules": _switch({"model": {"train_vision": "none"}}),
    "max_steps": _steps,
    "save_total_limit": _checkpoints,
    **dict.fromkeys(("fp8", "load_in_fp8"), lambda value: {"model": {"matmul": "fp8"}} if value else {}),
    "warmup_steps": _warmup,
    "reward_model": _reward_model,
    "wandb_project": _wandb,
    "metric_for_best_model": _only("eval_loss", "loss", None),
    "greater_is_better": _only(False, None),
    **dict.fromkeys(("lora_target_modules", "lora_target", "target_modules"), _targets),
    "optim_args": _optimizer_settings,
    **dict.fromkeys(("reinit_weights", "train_from_scratch"), _switch({"model": {"random_weights": True}})),
    "use_muon": _switch({"optimizer": {"optimizer": "muon"}}),
    "bfloat16": _switch({"model": {"dtype": "bfloat16"}}),
    "float32": _switch({"model": {"dtype": "float32"}}),
    "enable_thinking": lambda value: (
        {} if value is None else _switch({"data": {"mask_empty_thinking": True}}, False)(value)
    ),
    **dict.fromkeys(("use_wandb", "use_mlflow", "use_trackio", "disable_dropout"), _switch()),
    "lr_scheduler": _schedule,
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs": _schedule_settings,
    "special_tokens": _special_tokens,
}
"""Readers of settings whose values differ in kind."""
