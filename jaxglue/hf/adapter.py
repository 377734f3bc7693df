"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxglue.hf.expert_adapter import from_peft, target_parameters, to_peft
from jaxglue.hf.files import atomic_file, write_json
from jaxglue.hf.tensor_files import TensorFiles, write_file
from jaxglue.json_file import read_json
from jaxglue.models.lora import LoraConfig

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"

_KEY = re.compile(r"base_model\.model\.(?P<name>model\.layers\.\d+\..+\.lora_[AB])\.weight")
_READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "init_lora_weights", "target_parameters"}
_HARMLESS = {  # provenance, or layer choices already visible in tensor names
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
    "task_type",
}
_NEUTRAL_STARTS = (True, False, "gaussian")  # others (pissa, olora, loftq, …) also change the base weights


def save_adapter(
    folder: str | Path, tensors: Mapping[str, jax.Array | np.ndarray], config: LoraConfig, base_model: str
) -> None:
    """Write an adapter for `peft.PeftModel.from_pretrained`.

    Args:
        folder: created if absent; an existing adapter is replaced, each file atomically.
        tensors: `model.layers.0.self_attn.q_proj.lora_A` [R, in], `….lora_B` [out, R], …; for experts
            `model.layers.0.mlp.experts.down_proj.lora_A` [E, R, in], `….lora_B` [E, out, R].
        config: of the adapter.
        base_model: folder or hub name of the base model.

    Raises:
        OSError: a failed write, such as on a full disk.
    """
    folder = Path(folder)
    experts = target_parameters(tensors)
    by_key = {_key(key): array for key, array in (to_peft(*item, experts) for item in tensors.items())}
    specs = {key: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for key, tensor in by_key.items()}
    with atomic_file(folder / TENSORS) as temporary:
        write_file(temporary, specs, by_key.__getitem__)
    linears = _kinds(name for name, tensor in tensors.items() if tensor.ndim == 2)
    write_json(folder / CONFIG, _to_peft(config, linears, experts, base_model))


def _key(name: str) -> str:
    return f"base_model.model.{name}.weight"


def _kinds(names: Iterable[str]) -> list[str]:
    """Return the adapted layers' last name components, such as q_proj."""
    return sorted({name.split(".")[-2] for name in names})


def _to_peft(config: LoraConfig, targets: list[str], experts: list[str], base_model: str) -> dict[str, Any]:
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": targets,
        **({"target_parameters": experts} if experts else {}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": config.rslora,
    }


def load_adapter(folder: str | Path) -> tuple[LoraConfig, dict[str, np.ndarray]]:
    """Read an adapter folder written by jaxglue or PEFT.

    Returns:
        its config, with the adapted layers as `targets`, and float32 tensors named as in `save_adapter`.

    Raises:
        ValueError: not an adapter folder, a corrupt file, or an unsupported PEFT feature, by name.
    """
    folder = Path(folder)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise ValueError(_not_an_adapter(folder, name))
    raw = read_json(folder / CONFIG)
    _refuse_unsupported(folder / CONFIG, raw)
    files = TensorFiles([folder / TENSORS])
    tensors = dict(_parameter(folder, key, files.read(key).astype(np.float32), raw) for key in files.tensors)
    config = LoraConfig(
        rank=raw["r"],
        alpha=float(raw["lora_alpha"]),
        dropout=float(raw.get("lora_dropout", 0.0)),
        rslora=bool(raw.get("use_rslora", False)),
        targets=tuple(_kinds(tensors)),
    )
    _check_shapes(folder / TENSORS, tensors, config.rank)
    return config, tensors


def _not_an_adapter(folder: Path, missing: str) -> str:
    if missing == TENSORS and (folder / "adapter_model.bin").exists():
        return (
            f"{folder} has only adapter_model.bin, a pickle, which is refused because unpickling runs arbitrary code. "
            "Save it again with peft: model.save_pretrained(folder, safe_serialization=True)"
        )
    return f"{folder} is not a PEFT adapter folder: {missing} is missing"


def _refuse_unsupported(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise ValueError for any enabled but unknown option, so that features of a newer PEFT are not ignored."""
    if raw.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type {raw.get('peft_type')!r} is not supported: only 'LORA' is")
    if missing := [name for name in ("r", "lora_alpha") if name not in raw]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    switched_on = {name: value for name, value in raw.items() if value and value != "none"}
    unsupported = [f"{name}={switched_on[name]!r}" for name in sorted(set(switched_on) - _READ - _HARMLESS)]
    if (start := raw.get("init_lora_weights", True)) not in _NEUTRAL_STARTS:
        unsupported.append(f"init_lora_weights={start!r}")
    if unsupported:
        raise ValueError(f"{path}: not supported: {', '.join(unsupported)}")


def _parameter(folder: Path, key: str, array: np.ndarray, raw: Mapping[str, Any]) -> tuple[str, np.ndarray]:
    """Return the internal name and array of a PEFT tensor."""
    if not (match := _KEY.fullmatch(key)):
        raise ValueError(f"{folder / TENSORS}: {key} is not the LoRA matrix of a linear layer in model.layers")
    expert = from_peft(match["name"], array, raw.get("target_parameters") or (), raw["r"])
    return expert or (match["name"], array)


def _check_shapes(path: Path, tensors: Mapping[str, np.ndarray], rank: int) -> None:
    for linear in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
        a, b = tensors.get(f"{linear}.lora_A"), tensors.get(f"{linear}.lora_B")
        if a is None or b is None:
            raise ValueError(f"{path}: {linear} has only one of lora_A and lora_B")
        if min(a.ndim, b.ndim) < 2 or a.shape[-2] != rank or b.shape[-1] != rank or a.shape[:-2] != b.shape[:-2]:
            shapes = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
            raise ValueError(f"{path}: {linear} has {shapes}, expected [{rank}, in] and [out, {rank}]")
