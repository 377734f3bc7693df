"""Recipes of other programs (axolotl, LLaMA-Factory, TRL), and their settings that have no place here.

Most of their names are aliases beside our fields; this module has the rest.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jaxglue.config import KEEP, Kind, groups, nearest, plain_fields

_logger = logging.getLogger(__name__)

_REASONS = {
    "documents are always packed, and see only themselves": (
        *("packing", "sample_packing", "eval_sample_packing", "pad_to_sequence_len", "neat_packing", "group_by_length"),
        *("padding_free", "multipack_real_batches", "remove_unused_columns", "dataloader_num_workers"),
        *("dataloader_prefetch_factor", "dataloader_pin_memory", "pad_to_multiple_of", "packing_strategy"),
        *("eval_packing", "length_column_name", "eval_sequence_len", "sample_packing_bin_size"),
        *("sample_packing_group_size", "dataloader_drop_last"),
    ),
    "--remat decides what is recomputed": (
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "use_gradient_checkpointing"),
        *("activation_offloading", "disable_gradient_checkpointing"),
    ),
    "--attention chooses the kernel; auto takes the fastest": (
        *("attn_implementation", "flash_attention", "flash_attn", "sdp_attention", "xformers_attention"),
        *("flex_attention", "eager_attention", "use_eager_attention"),
    ),
    "kernels are chosen by GPU and shape": (
        *("tf32", "liger_kernel", "use_liger_kernel", "enable_liger_kernel", "torch_compile", "plugins", "liger_rope"),
        *("liger_rms_norm", "liger_glu_activation", "liger_swiglu", "liger_layer_norm", "cut_cross_entropy"),
        *("liger_fused_linear_cross_entropy", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"),
        *("use_unsloth", "use_logits_to_keep", "fused_attn_kernel", "use_kernels", "torch_compile_mode"),
        *("torch_compile_backend", "flex_attn_compile_kwargs", "cross_entropy_loss_fusion", "use_v1_kernels"),
    ),
    "--mesh says how GPUs share the work": (
        *("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "ddp_timeout", "ddp", "ddp_find_unused_parameters"),
        *("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree", "ddp_bucket_cap_mb"),
        *("ddp_broadcast_buffers", "ignore_bias_buffers", "gpus", "num_gpus", "n_gpu", "num_processes"),
        *("nproc_per_node", "dp_shard_size", "dp_replicate_size", "use_ray", "ray_num_workers", "accelerator_config"),
    ),
    "name files, folders or hf:owner/name with --data, parts of them with ?split=": (
        *("dataset", "dataset_name", "dataset_dir", "dataset_config", "dataset_text_field", "dataset_test_split"),
        "max_samples",
    ),
    "--weights and --embeddings say where weights are": (
        *("device_map", "low_cpu_mem_usage", "lora_on_cpu", "experimental_skip_move_to_device"),
    ),
    "--memory-limit sets how much of the GPU is planned with": ("gpu_memory_limit", "gpu_memory_utilization"),
    "--quantize nf4 and int8 are bitsandbytes' formats, nf4 with nested scales": (
        *("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "use_bnb_nested_quant", "double_quantization"),
        *("quantization_method", "bnb_4bit_quant_storage", "bnb_config_kwargs"),
    ),
    "MXFP4 experts are read as they are; --expand-experts expands them": (
        *("model_quantization_config", "model_quantization_config_kwargs"),
    ),
    "turns end where the chat template ends them": ("eot_tokens",),
    "documents are shuffled anew each epoch, by --seed": (
        *("dataset_shuffle", "shuffle_dataset", "shuffle_merged_datasets", "shuffle_before_merging_datasets"),
        "data_seed",
    ),
    "--seq-len bounds prompt and answer together": ("max_prompt_length", "max_completion_length", "truncation_mode"),
    "--on-spike skip leaves out steps whose loss is a spike": ("loss_watchdog_threshold", "loss_watchdog_patience"),
    "metrics.jsonl is always written; --log-to names trackers, their own variables (WANDB_PROJECT) the rest": (
        *("logging_dir", "plot_loss", "run_name", "logging_first_step", "use_tensorboard"),
        *("wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_run_id", "wandb_log_model"),
        *("mlflow_experiment_name", "comet_project_name", "project", "wandb_mode", "trackio_space_id"),
    ),
    "--sample-prompt shows answers before and after training": ("eval_table_size", "eval_max_new_tokens"),
    "the tokenizer's own chat template is used, or the Jinja file of --chat-template": ("template", "chat_template"),
    "config.json names the model's family": (
        *("model_type", "tokenizer_type", "is_llama_derived_model", "is_mistral_derived_model"),
        *("is_qwen_derived_model", "tokenizer_use_fast", "tokenizer_legacy"),
    ),
    "evaluations and checkpoints are counted in steps: --eval-every, --save-every": (
        *("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy", "evals_per_epoch"),
        "saves_per_epoch",
    ),
    "evaluation takes the training's batch size": (
        *("per_device_eval_batch_size", "eval_batch_size", "auto_find_batch_size", "eval_accumulation_steps"),
    ),
    "checkpoints can always be resumed, and results are safetensors": ("save_safetensors", "save_only_model"),
    "this is what training does": ("do_train", "do_eval", "strict"),
    "jaxglue export --push publishes a result": ("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo"),
    "adapters have no biases": ("bias", "lora_bias"),
    "dtypes are bfloat16 and float32: --dtype": ("fp16", "pure_bf16"),
    "no remote code is ever run": ("trust_remote_code",),
    "the cache knows what has changed": ("overwrite_cache", "tokenized_path"),
    "the tokenizer's own are used": ("eos_token", "pad_token"),
    "the console and metrics.jsonl have it": (
        *("log_level", "debug", "include_tokens_per_second", "include_num_input_tokens_seen", "disable_tqdm"),
    ),
    "each program finds this by itself": ("local_rank", "lora_task_type", "lora_fan_in_fan_out"),
    "the first and the last step are always shown, the last always saved": ("save_first_step",),
    "--resume continues the latest checkpoint of --output": (
        *("resume_from_checkpoint", "auto_resume_from_checkpoints"),
    ),
}
NOTES = {name: reason for reason, names in _REASONS.items() for name in names}
"""Remedies for settings of other programs, by name."""
REFUSED = {
    **dict.fromkeys(("tokens", "add_tokens", "new_special_tokens"), "--new-tokens reads them from a file, one a line"),
    **dict.fromkeys(("betas", "adam_betas"), "--beta1 and --beta2 are AdamW's"),
    **dict.fromkeys(("fp8", "fp8_backend"), "--matmul fp8 multiplies in FP8"),
    **dict.fromkeys(("router_aux_loss_coef", "moe_aux_loss_coef"), "--router-balance-loss weighs ours"),
    "lora_target_parameters": "--targets names experts' projections, too",
    "dataset_exact_deduplication": "jaxglue data preview counts duplicates: leave them out of the data",
    "compute_environment": "accelerate's settings: --mesh says how GPUs share the work",
}
"""The same of settings without which a run would be another."""

Nested = dict[str, Any]


def translate(recipe: Mapping[str, Any], cls: type, where: str) -> Nested:
    """Return the values of another program's flat recipe by our groups and fields, those of groups one level down.

    Settings in `NOTES` are named in a warning and left out.

    Raises:
        ValueError: names all the settings that are not known, or whose values are not.
    """
    places = dict(_places(cls))
    values: Nested = {}
    unknown, wrong = [], []
    left_out: dict[str, list[str]] = {}
    for key, value in {**_method(recipe), **_with_objective(_with_our_data(recipe, where), where)}.items():
        try:
            if key in _CONVERTERS:
                _merge(values, _CONVERTERS[key](value))
            elif key in places:
                group, field, kind = places[key]
                if (read := kind.from_alias(key, value)) is not KEEP:
                    _merge(values, {group: {field: kind.read(read)}})
            elif key in NOTES:
                left_out.setdefault(NOTES[key], []).append(key)
            elif key in REFUSED:
                unknown.append(f"{key} ({REFUSED[key]})")
            elif value is False or value is None or value in ("", [], {}):
                left_out.setdefault("off", []).append(key)
            else:
                unknown.append(f"{key}{nearest(key, places)}")
        except ValueError as error:
            wrong.append(f"{key}: {error}")
        except (TypeError, AttributeError):
            wrong.append(f"{key}: a value of another type is expected, got {value!r:.100}")
    if unknown:
        wrong.append(f"settings that jaxglue does not know: {', '.join(unknown)}. Remove them to go on")
    if wrong:
        raise ValueError(where + "; ".join(wrong))
    if left_out:
        notes = (f"{', '.join(names)} ({reason})" for reason, names in left_out.items())
        _logger.warning("%sleft out: %s", where, "; ".join(notes))
    return values


def _places(cls: type) -> Iterator[tuple[str, tuple[str, str, Kind]]]:
    """Yield the names of every group's fields, each with its group, field and declaration."""
    for group, members in groups(cls).items():
        for field, kind in plain_fields(members).values():
            for name in (field.name, *kind.aliases):
                yield name, (group, field.name, kind)


def _merge(values: Nested, more: Nested) -> None:
    for group, fields in more.items():
        table = values.setdefault(group, {})
        if twice := [name for name in fields if name in table and table[name] != fields[name]]:
            raise ValueError(f"{', '.join(twice)} is given twice, by this name and another: leave one out")
        table.update(fields)


def _method(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the training method that another program takes where its recipe names none: full, but in LLaMA-Factory."""
    full = "base_model" in recipe or "model_name_or_path" in recipe
    named = {"adapter", "finetuning_type", "use_peft", "stage", "method", "full_finetuning"} & recipe.keys()
    return {"method": "full"} if full and not named else {}


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


def _with_objective(recipe: Mapping[str, Any], where: str) -> Nested:
    """Return the recipe with our objective in place of LLaMA-Factory's `stage` and `pref_loss`."""
    values = dict(recipe)
    for key, known in (("stage", _STAGES), ("pref_loss", _PREFERENCE_LOSSES)):
        value = values.pop(key, None)
        if not isinstance(value, str | None) or value not in known:
            expected = " | ".join(str(name) for name in known if name)
            raise ValueError(f"{where}{key}: expected {expected}, got {value!r:.100}")
        values |= known[value]
    return values


def _with_our_data(recipe: Mapping[str, Any], where: str) -> Nested:
    """Return the recipe with TRL's data set as our sources, and names of templates and data sets apart from files."""
    values = dict(recipe)
    if "dataset" in values and "eval_dataset" in values:  # LLaMA-Factory's are names in its dataset_info.json
        values["dataset"] = (values["dataset"], values.pop("eval_dataset"))
    if not os.path.isfile(str(values.get("chat_template"))) and "chat_template" in values:
        values["template"] = values.pop("chat_template")
    if "chat_template_jinja" in values:
        values["chat_template"] = values.pop("chat_template_jinja")
    if not values.get("dataset_name"):
        return values
    names = {key: values.pop(key, None) for key in ("dataset_name", "dataset_config", "dataset_test_split")}
    if wrong := next((key for key, name in names.items() if not isinstance(name, str | None)), None):
        raise ValueError(f"{where}{wrong}: expected a name, got {names[wrong]!r:.100}")
    return values | _hub_data(*names.values())


def _hub_data(name: str, subset: str | None, held_out: str | None) -> Nested:
    source = name if os.path.exists(name) else "hf:" + ":".join(filter(None, [name, subset]))
    return {"data": [source], **({"eval_data": [f"{source}?split={held_out}"]} if held_out else {})}


def _adapter(value: Any) -> Nested:
    if value not in ("lora", "qlora"):
        raise ValueError(f"expected lora | qlora, got {value!r:.100}")
    return {"model": {"method": "lora", **({"quantize": "nf4"} if value == "qlora" else {})}}


_FORMATS = {
    **dict.fromkeys(("chat_template", "sharegpt", "chat", "chat_template.default", "chat_template.argilla"), "auto"),
    "bradley_terry.chat_template": "auto",
    **{"alpaca": "alpaca", "alpaca_chat.load_qa": "question_answer", "completion": "text", "pretrain": "text"},
}
"""Row formats by axolotl's types."""
_THINKING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning that templates read."""
_ROWS = {"role": ("role", "from"), "content": ("content", "value")}
"""Names of a message's keys that are read without renaming."""


def _data_sets(field: str) -> Callable[[Any], Nested]:
    """Return the reader of axolotl's list of data sets into a field of the table [data]."""

    def read(value: Any) -> Nested:
        if not isinstance(value, list) or not all(isinstance(item, dict) and "path" in item for item in value):
            raise ValueError("expected a list of data sets, each with its path")
        return {"data": {field: tuple(source for item in value for source in _sources(dict(item)))}}

    return read


def _sources(item: dict[str, Any]) -> list[str]:
    """Return a data set's files, or its name on the hub, with the settings of its rows."""
    path, files, subset = item.pop("path"), item.pop("data_files", []), item.pop("name", None)
    item.pop("ds_type", None)
    for name in (path, *([files] if isinstance(files, str) else files), *([subset] if subset else [])):
        if not isinstance(name, str):
            raise ValueError(f"expected names, got {name!r:.100}")
    hub = not os.path.exists(path) and not Path(path).suffix and path.count("/") == 1
    names = [files] if isinstance(files, str) else files
    names = names or ["hf:" + ":".join(filter(None, [path, subset])) if hub else path]
    options = "&".join(f"{key}={quote(value, safe='[]%:,=')}" for key, value in _row_options(path, item).items())
    return [f"{name}?{options}" if options else str(name) for name in names]


def _row_options(path: str, item: dict[str, Any]) -> dict[str, str]:
    """Return the settings of a data set's rows that differ from the defaults; takes them out of `item`."""
    options: dict[str, str] = {}
    if not isinstance(kind := item.pop("type", "chat_template"), str) or kind not in _FORMATS:
        raise ValueError(f"{path}: type: expected {' | '.join(_FORMATS)}, got {kind!r:.100}")
    if _FORMATS[kind] != "auto":
        options["format"] = _FORMATS[kind]
    if (split := item.pop("split", "train")) != "train":
        options["split"] = str(split)
    names = {
        "text": "field",
        **{name: f"field_{name}" for name in ("messages", "chosen", "rejected", "system", "tools")},
    }
    columns = {name: item.pop(theirs, name) for name, theirs in names.items()}
    renamed = [f"{new}={old}" for new, old in columns.items() if old not in (new, "conversations")]
    if renamed:
        options["columns"] = ",".join(renamed)
    mapping = item.pop("message_property_mappings", {})
    for key, known in _ROWS.items():
        given = item.pop(f"message_field_{key}", mapping.pop(key, known[0]))
        if given not in known:
            raise ValueError(f"{path}: {key} of a message: expected {' | '.join(known)}, got {given!r:.100}: rename it")
    for key in ("field_thinking", "template_thinking_key"):
        if (given := item.pop(key, _THINKING[0])) not in _THINKING:
            raise ValueError(f"{path}: {key}: expected {' | '.join(_THINKING)}, got {given!r:.100}: rename it")
    if (ends := item.pop("train_on_eos", "turn")) != "turn":
        raise ValueError(f"{path}: train_on_eos: expected turn, got {ends!r:.100}")
    _check_roles(path, item.pop("roles", {}))
    if item.pop("roles_to_train", ["assistant"]) not in (["assistant"], ["gpt"], ["assistant", "gpt"]):
        raise ValueError(f"{path}: roles_to_train: the loss is on the assistant's turns, or on all: --loss-on all")
    item.pop("chat_template", None)
    if unknown := [*item, *mapping]:
        raise ValueError(f"{path}: settings that jaxglue does not know: {', '.join(unknown)}. Remove them to go on")
    return options


def _check_roles(path: str, roles: Any) -> None:
    """Refuse names of roles other than those that rows may have for them."""
    known = {"user": {"user", "human"}, "assistant": {"assistant", "gpt", "chatgpt", "model"}, "tool": {"tool"}}
    for role, names in dict(roles).items():
        if other := {names} - known.get(role, {role}) if isinstance(names, str) else {*names} - known.get(role, {role}):
            named = ", ".join(map(repr, sorted(other)))
            raise ValueError(f"{path}: roles: {named:.100} stands for {role}: rename it in the rows")


def _steps(value: Any) -> Nested:
    """Return the steps; -1 leaves them to the epochs."""
    return {} if value == -1 else {"run": {"steps": Kind(scalar=int).read(value)}}


def _schedule(value: Any) -> Nested:
    """Return the schedule; the names of variants with a floor and a warm-up stand for ours, which have both."""
    names = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}
    return {"optimizer": {"schedule": names.get(value, value)}}


def _schedule_settings(value: Any) -> Nested:
    if not isinstance(value, dict) or value.keys() - {"min_lr_rate"}:
        raise ValueError(f"expected min_lr_rate alone, got {value!r:.100}")
    return {"optimizer": {"min_lr_ratio": value.get("min_lr_rate", 0.0)}}


def _special_tokens(value: Any) -> Nested:
    if not isinstance(value, dict) or value.keys() - {"pad_token"}:
        raise ValueError(
            f"the tokenizer's own are used, got {value!r:.100}: leave them out if it has them, or save one that does"
        )
    return {}  # packed rows need no padding token


def _warmup(value: Any) -> Nested:
    """Return the warm-up, of which numbers below 1 are shares."""
    is_share = isinstance(value, float) and 0 < value < 1
    return {"optimizer": {"warmup_ratio" if is_share else "warmup_steps": value}}


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


_CONVERTERS: dict[str, Callable[[Any], Nested]] = {
    "adapter": _adapter,
    "datasets": _data_sets("data"),
    "test_datasets": _data_sets("eval_data"),
    "max_steps": _steps,
    "warmup_steps": _warmup,
    "reward_model": _reward_model,
    "num_labels": _only(1),
    "metric_for_best_model": _only("eval_loss", "loss", None),
    "greater_is_better": _only(False, None),
    "lr_scheduler": _schedule,
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs": _schedule_settings,
    "special_tokens": _special_tokens,
}
"""Readers of settings whose values differ in kind."""
