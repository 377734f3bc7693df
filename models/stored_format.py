"""Storage of a folder's linear layers, as `quantization_config` in its config.json names it."""

import re
from collections.abc import Mapping
from typing import Any

from jaxglue.ops.choices import Storage

_FP8_METHODS = {
    "fp8": ("quant_algo", None),
    "fbgemm_fp8": ("quant_algo", None),
    "compressed-tensors": ("format", "float-quantized"),
    "modelopt": ("quant_algo", "FP8"),
}
"""Methods that store e4m3 values with their scales, each with an entry and its value for that."""


def stored_format(raw: Mapping[str, Any]) -> Storage:
    """Return the folder's quantization format, from `quantization_config` in config.json.

    Raises:
        ValueError: quantized by another tool, in an unsupported bitsandbytes format, or in part.
    """
    stored = raw.get("quantization_config") or {}
    if not stored or raw["model_type"] == "gpt_oss":
        return "none"
    remedy = "use the original model folder with --quantize nf4 or int8"
    method = stored.get("quant_method")
    if isinstance(method, str) and method in _FP8_METHODS:
        return _stored_fp8(stored)
    if method != "bitsandbytes":
        raise ValueError(f"quant_method {method!r:.100} in config.json is not supported: {remedy}")
    skipped = _names(stored, "llm_int8_skip_modules")
    if within := [name for name in skipped if name not in ("lm_head", "score", "embed_tokens", "model.embed_tokens")]:
        raise ValueError(f"config.json leaves {', '.join(within[:3])} unquantized, which is not supported: {remedy}")
    if stored.get("load_in_8bit"):
        return "int8"
    kind = stored.get("bnb_4bit_quant_type", "fp4"), stored.get("bnb_4bit_use_double_quant", False)
    if kind != ("nf4", True):
        raise ValueError(f"config.json says {kind[0]}, double quantization {kind[1]}; only nf4, True is read: {remedy}")
    return "nf4"


def _stored_fp8(stored: Mapping[str, Any]) -> Storage:
    """Return the format of a folder whose linear layers are in FP8, with scales beside them (`hf.fp8_folders`).

    Raises:
        ValueError: another format of compressed-tensors or ModelOpt, other blocks, or unquantized linear layers.
    """
    method, remedy = stored["quant_method"], "use the original model folder with --matmul fp8"
    key, expected = _FP8_METHODS[method]
    if stored.get(key) != expected or not _holds_floats(stored):
        raise ValueError(f"{method}'s {key} {stored.get(key)!r:.100} in config.json is not read: {remedy}")
    if (block := stored.get("weight_block_size")) not in (None, [128, 128]):
        raise ValueError(f"weight_block_size {block!r:.100} in config.json: expected [128, 128]: {remedy}")
    skipped = _names(stored, "ignore") + _names(stored, "modules_to_not_convert")
    if within := [name for name in skipped if re.search(r"layers\b.*_proj", name)]:
        raise ValueError(f"config.json leaves {', '.join(within[:3])} unquantized, which is not supported: {remedy}")
    return "fp8_stored"


def _holds_floats(stored: Mapping[str, Any]) -> bool:
    """Return whether all groups in `config_groups` have weights of floating-point numbers."""
    groups = stored.get("config_groups") or {}
    listed = groups.values() if isinstance(groups, Mapping) else [groups]
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in listed]
    return all(isinstance(each, Mapping) and each.get("type") == "float" for each in weights)


def _names(stored: Mapping[str, Any], key: str) -> list[str]:
    """Return an entry of names; raise ValueError for anything else."""
    names = stored.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} in config.json: expected a list of names, got {names!r:.100}")
    return names
