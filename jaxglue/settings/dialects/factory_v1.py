"""Recipes of LLaMA-Factory's v1, which have tables for its plugins and a file that describes data sets."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jaxglue.files.regular_file import read_regular_text
from jaxglue.settings.dialects.data_sets import named_source
from jaxglue.settings.dialects.values import Nested, renamed

_ROOM = (
    *("model_class", "kernel_config", "dist_config", "init_config", "sample_backend", "max_new_tokens", "dp_size"),
    *("cp_size", "cp_mode", "mp_replicate_size", "mp_shard_size", "dist_timeout", "batching_workers"),
    *("full_determinism", "save_ckpt_as_hf", "save_epochs"),
)
"""Settings without which a run computes the same."""
_RENAMED = {"custom_chat_template": "chat_template"}
_LORA = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora")
_MUON = {"momentum": (0.95,), "nesterov": (True,), "ns_steps": (5,)}
"""Muon's settings with the values that ours has."""
_DECAY = {"wd": "weight_decay", "adamw_eps": "epsilon"}
_BITS = {4: "nf4", 8: "int8", None: "nf4"}
_CONVERTERS = {"alpaca": "alpaca_chat", "sharegpt": "auto", "pair": "auto", None: "auto"}
"""Row formats by names of converters."""
_KNOWN = ("path", "source", "split", "converter", "size", "weight")
_MAX_BYTES = 2**18


def with_v1_settings(recipe: Mapping[str, Any], where: str) -> Nested:
    """Return the recipe's settings by names that the other programs or jaxglue have.

    Raises:
        ValueError: a value without a counterpart; begins with `where` and the key.
    """
    flat = {"method": "full"} | renamed(recipe, where, _READERS, _RENAMED, _ROOM)
    whole, micro = flat.pop("global_batch_size", None), flat.get("micro_batch_size", 1)
    if isinstance(whole, int) and isinstance(micro, int) and micro > 0:
        flat["gradient_accumulation_steps"] = max(whole // micro, 1)
    return flat


def _plugin(value: Any, *names: str) -> dict[str, Any]:
    """Return a plugin's settings, without its name, which is one of `names`."""
    table = dict(value)
    if (name := table.pop("name", None)) not in names:
        raise ValueError(f"expected the name {' | '.join(names)}, got {name!r:.100}")
    return {key: item for key, item in table.items() if item is not None}


def _only(table: Mapping[str, Any], names: tuple[str, ...]) -> None:
    if unknown := table.keys() - {*names}:
        raise ValueError(f"{', '.join(sorted(unknown))}: not known here: remove it, or write it as a flag")


def _peft(value: Any) -> Nested:
    table = _plugin(value, "lora")
    adapter = {"adapter_name_or_path": table.pop("adapter_name_or_path")} if "adapter_name_or_path" in table else {}
    _only(table, _LORA)
    return {"method": "lora", **table, **adapter}


def _quantization(value: Any) -> Nested:
    table = _plugin(value, "bnb", "auto")
    _only(table, ("quantization_bit", "double_quantization", "quantization_type"))
    if (bits := table.get("quantization_bit")) not in _BITS:
        raise ValueError(f"quantization_bit: expected 4 | 8, got {bits!r:.100}")
    return {"quantize": _BITS[bits]}


def _optimizer(value: Any) -> Nested:
    table = _plugin(value, "muon")
    table.pop("lr", None)  # which learning_rate replaces there
    if wrong := next((name for name, same in _MUON.items() if table.pop(name, same[0]) not in same), None):
        raise ValueError(f"{wrong}: Muon has {_MUON[wrong][0]} here: leave it out")
    flat: Nested = {"optimizer": "muon", "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95}
    flat["beta1"], flat["beta2"] = table.pop("adamw_betas", (0.9, 0.95))
    flat |= {ours: table.pop(theirs) for theirs, ours in _DECAY.items() if theirs in table}
    _only(table, ())
    return flat


def _batching(value: Any) -> Nested:
    """Return whether rows are packed: batches by their tokens have as many rows as these fill."""
    if value not in ("normal", "padding_free", "dynamic_batching", "dynamic_padding_free"):
        raise ValueError(
            f"expected normal | padding_free | dynamic_batching | dynamic_padding_free, got {value!r:.100}"
        )
    return {"packing": value.startswith("dynamic")}


def _data(field: str) -> Callable[[Any], Nested]:
    """Return the reader of a file that describes data sets, or of the name of one, into a field of [data]."""

    def read(value: Any) -> Nested:
        if not isinstance(value, str):
            raise ValueError(f"expected a name, got {value!r:.100}")
        if not value.endswith((".yaml", ".yml")):
            return {field: [named_source(value, None)]}
        if not os.path.isfile(value):
            raise ValueError(f"no such file: {value:.200}")
        from jaxglue.files.yaml_file import parse_yaml  # only such recipes need the library

        described = parse_yaml(read_regular_text(Path(value), "utf-8", _MAX_BYTES))
        flat: Nested = {field: [_source(name, info) for name, info in described.items()]}
        if any("rows=" in source for source in flat[field]):
            flat["dataset_sample"] = True
        if field == "data" and all(info.get("converter") == "pair" for info in described.values()):
            flat["objective"] = "dpo"
        return flat

    return read


def _source(name: str, info: Any) -> str:
    """Return a described data set as `name?option=value`."""
    if not isinstance(info, dict) or not isinstance(info.get("path"), str):
        raise ValueError(f"{name}: expected a table with a path, got {info!r:.100}")
    if unknown := [key for key, value in info.items() if key not in _KNOWN and value]:
        raise ValueError(f"{name}: {', '.join(unknown)} has no counterpart: remove it to go on")
    if (converter := info.get("converter")) not in _CONVERTERS:
        raise ValueError(f"{name}: converter: expected {' | '.join(filter(None, _CONVERTERS))}, got {converter!r:.100}")
    path = info["path"] if info.get("source", "hf_hub") == "local" else named_source(info["path"], None)
    options = {"format": _CONVERTERS[converter]} if _CONVERTERS[converter] != "auto" else {}
    options |= {"split": info["split"]} if info.get("split", "train") != "train" else {}
    options |= {ours: str(info[theirs]) for theirs, ours in (("size", "rows"), ("weight", "weight")) if theirs in info}
    query = "&".join(f"{key}={quote(str(option), safe='[]%:,=')}" for key, option in options.items())
    return f"{path}?{query}" if query else path


_READERS: Mapping[str, Callable[[Any], Nested]] = {
    "peft_config": _peft,
    "quant_config": _quantization,
    "optim_config": _optimizer,
    "batching_strategy": _batching,
    "train_dataset": _data("data"),
    "eval_dataset": _data("eval_data"),
}
"""Readers of settings whose names or values differ."""
