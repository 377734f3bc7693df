"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxglue.hf.expert_adapter import from_peft, target_parameters, to_peft
from jaxglue.hf.files import atomic_file, write_json
from jaxglue.hf.hub import BaseReference, base_reference, is_hub_id, model_path
from jaxglue.hf.identity import Identity
from jaxglue.hf.tensor_files import TensorFiles, write_file
from jaxglue.json_file import parse_json, read_json
from jaxglue.models.lora_config import LoraConfig, match_pattern, parse_patterns

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"

_KEY = re.compile(r"base_model\.model\.(?P<name>model\.layers\.\d+\..+\.lora_[AB])\.weight")
_BASE = "jaxglue.base"
"""Key of the base's identity in the tensors' file, where PEFT does not look."""
_READ = {
    "alpha_pattern",
    "auto_mapping",
    "exclude_modules",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "target_parameters",
    "use_rslora",
}
_HARMLESS = {  # provenance
    "base_model_name_or_path",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
}
_NEUTRAL_STARTS = (True, False, "gaussian")  # others (pissa, olora, loftq, …) also change the base weights


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter folder, read and checked by itself; `check_adapter` checks it against a base."""

    folder: Path
    config: LoraConfig
    tensors: Mapping[str, np.ndarray]
    """Float32, named as in `save_adapter`."""
    peft: Mapping[str, Any]
    """adapter_config.json."""
    base: Identity | None
    """Identity of the base that it was trained on; None if unrecorded."""

    @property
    def modules(self) -> list[str]:
        """Return the adapted modules' paths, such as `model.layers.0.self_attn.q_proj`."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.tensors))


def save_adapter(
    folder: str | Path,
    tensors: Mapping[str, jax.Array | np.ndarray],
    config: LoraConfig,
    base_model: str | Path,
    base: Identity | None = None,
) -> None:
    """Write an adapter for `peft.PeftModel.from_pretrained`.

    Args:
        folder: created if absent; an existing adapter is replaced, each file atomically.
        tensors: `model.layers.0.self_attn.q_proj.lora_A` [R, in], `….lora_B` [out, R], …; for experts
            `model.layers.0.mlp.experts.down_proj.lora_A` [E, R, in], `….lora_B` [E, out, R].
        config: of the adapter.
        base_model: folder or hub name of the base model; recorded as absolute path, or as hub name and commit.
        base: identity of the base, to be recorded.

    Raises:
        ValueError: a tensor with values that are not finite.
        OSError: a failed write, such as on a full disk.
    """
    folder = Path(folder)
    experts = target_parameters(tensors)
    by_key = {_key(key): array for key, array in (to_peft(*item, experts) for item in tensors.items())}
    _require_finite(folder / TENSORS, by_key)
    metadata = {} if base is None else {_BASE: json.dumps(base)}
    specs = {key: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for key, tensor in by_key.items()}
    with atomic_file(folder / TENSORS) as temporary:
        write_file(temporary, specs, by_key.__getitem__, metadata)
    linears = _target_modules([name for name, tensor in tensors.items() if tensor.ndim == 2], config)
    write_json(folder / CONFIG, _to_peft(config, linears, experts, base_reference(base_model)))


def _key(name: str) -> str:
    return f"base_model.model.{name}.weight"


def _kinds(names: Iterable[str]) -> list[str]:
    """Return the adapted layers' last name components, such as q_proj."""
    return sorted({name.split(".")[-2] for name in names})


def _target_modules(names: Iterable[str], config: LoraConfig) -> list[str]:
    """Return PEFT's `target_modules`: last components of paths, or whole paths where the config has those."""
    if any("." in target for target in config.targets):
        return sorted({name.rpartition(".")[0] for name in names})
    return _kinds(names)


def _patterns(config: LoraConfig) -> dict[str, dict[str, float]]:
    fields = {name: parse_patterns(name, getattr(config, name)) for name in ("rank_pattern", "alpha_pattern")}
    numbers = {name: {key: _short(value) for key, value in field.items()} for name, field in fields.items()}
    return {name: field for name, field in numbers.items() if field}


def _short(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _to_peft(config: LoraConfig, targets: list[str], experts: list[str], base: BaseReference) -> dict[str, Any]:
    return {
        "base_model_name_or_path": base.name,
        **({"revision": base.revision} if base.revision else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": _short(config.alpha),
        "lora_dropout": config.dropout,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": targets,
        **({"target_parameters": experts} if experts else {}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": config.rslora,
        **_patterns(config),
    }


def load_adapter(folder: str | Path) -> Adapter:
    """Read an adapter folder written by jaxglue or PEFT.

    Raises:
        ValueError: not an adapter folder, a corrupt file, an unsupported PEFT feature by name, a wrong value in
            adapter_config.json, or tensors that are not finite.
    """
    folder = Path(folder)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise ValueError(_not_an_adapter(folder, name))
    raw = read_json(folder / CONFIG)
    _refuse_unsupported(folder / CONFIG, raw)
    files = TensorFiles([folder / TENSORS])
    tensors = dict(_parameter(folder, key, _read_float(files, key), raw) for key in files.tensors)
    if not tensors:
        raise ValueError(f"{folder / TENSORS} holds no tensors")
    _require_finite(folder / TENSORS, tensors)
    config = _lora_config(folder / CONFIG, raw, tensors)
    _check_shapes(folder / TENSORS, tensors, config)
    return Adapter(folder=folder, config=config, tensors=tensors, peft=raw, base=_recorded_base(folder, files))


def _read_float(files: TensorFiles, key: str) -> np.ndarray:
    if (info := files.tensors[key]).dtype.kind in "iub":
        raise ValueError(f"{info.file}: {key} holds {info.dtype}, expected floating-point numbers")
    with np.errstate(over="ignore"):  # found by the check for finite values
        return files.read(key).astype(np.float32)


def _require_finite(path: Path, tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if not np.isfinite(np.asarray(tensor)).all():
            raise ValueError(f"{path}: {name} holds values that are not finite (NaN or infinity): train it again")


def find_base(folder: str | Path, *, weights: bool = True) -> Path:
    """Return the folder of an adapter's base model, downloaded if it is on the hub.

    Args:
        folder: of the adapter.
        weights: also download the base's weights.

    Raises:
        ValueError: not an adapter folder, no recorded base, or one that is not found.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(_not_an_adapter(folder, CONFIG))
    raw = read_json(folder / CONFIG)
    name = str(raw.get("base_model_name_or_path") or "")
    if not Path(name).is_dir() and not is_hub_id(name):
        raise ValueError(f"{folder} names {name or 'no'} base, which is not a folder here: give the base model's")
    return model_path(name, raw.get("revision"), weights=weights)


def random_seed(folder: str | Path) -> int | None:
    """Return the seed of the random weights that an adapter was trained on; None for loaded weights."""
    base = _recorded_base(Path(folder), TensorFiles([Path(folder) / TENSORS])) or {}
    kind, *rest = base.get("weights", "").split() or [""]
    return int(rest[0]) if kind == "random" else None


def _recorded_base(folder: Path, files: TensorFiles) -> Identity | None:
    if (text := files.metadata().get(_BASE)) is None:
        return None
    base = parse_json(text, f"{_BASE} in {folder / TENSORS}")
    if not isinstance(base, dict) or not all(isinstance(value, str) for value in base.values()):
        raise ValueError(f"{_BASE} in {folder / TENSORS}: expected an object of texts, got {text[:100]}")
    return base


def _lora_config(path: Path, raw: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> LoraConfig:
    """Read the configuration; targets given as a regular expression become the adapted modules' paths."""
    try:
        modules, named = {name.rpartition(".")[0] for name in tensors}, raw.get("target_modules")
        paths = isinstance(named, str) or raw.get("exclude_modules") or any("." in name for name in named or ())
        return LoraConfig(
            rank=raw["r"],
            alpha=raw["lora_alpha"],
            dropout=raw.get("lora_dropout") or 0.0,
            rslora=raw.get("use_rslora") or False,
            targets=tuple(sorted(modules) if paths else _kinds(tensors)),
            rank_pattern=_entries("rank_pattern", raw, modules),
            alpha_pattern=_entries("alpha_pattern", raw, modules),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _entries(field: str, raw: Mapping[str, Any], modules: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns, as in `LoraConfig`, that match a module; PEFT ignores the others."""
    given = raw.get(field) or {}
    if not isinstance(given, dict) or not all(type(value) in (int, float) for value in given.values()):
        raise ValueError(f"{field}: expected numbers by pattern, got {given!r:.100}")
    entries = [f"{pattern}={value}" for pattern, value in given.items()]
    return tuple(e for e in entries if any(match_pattern(parse_patterns(field, [e]), m) is not None for m in modules))


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
        raise ValueError(f"{path}: peft_type {raw.get('peft_type')!r:.100} is not supported: only 'LORA' is")
    if missing := [name for name in ("r", "lora_alpha") if name not in raw]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    if type(raw["r"]) is not int or raw["r"] < 1:
        raise ValueError(f"{path}: r: expected int >= 1, got {raw['r']!r:.100}")
    switched_on = {name: value for name, value in raw.items() if value and value != "none"}
    unsupported = [f"{name}={switched_on[name]!r:.100}" for name in sorted(set(switched_on) - _READ - _HARMLESS)]
    if (start := raw.get("init_lora_weights", True)) not in _NEUTRAL_STARTS:
        unsupported.append(f"init_lora_weights={start!r:.100}")
    if unsupported:
        raise ValueError(f"{path}: not supported: {', '.join(unsupported)}")
    for name, texts in (("target_modules", (str, list)), ("exclude_modules", (str, list)), ("target_parameters", list)):
        value = raw.get(name)
        if value is not None and not (isinstance(value, texts) and all(isinstance(item, str) for item in value)):
            raise ValueError(f"{path}: {name}: expected names, got {value!r:.100}")


def _parameter(folder: Path, key: str, array: np.ndarray, raw: Mapping[str, Any]) -> tuple[str, np.ndarray]:
    """Return the internal name and array of a PEFT tensor."""
    if not (match := _KEY.fullmatch(key)):
        raise ValueError(f"{folder / TENSORS}: {key} is not the LoRA matrix of a linear layer in model.layers")
    if array.ndim != 2:
        raise ValueError(f"{folder / TENSORS}: {key} has shape {list(array.shape)}, expected a matrix")
    expert = from_peft(match["name"], array, raw.get("target_parameters") or (), raw["r"])
    return expert or (match["name"], array)


def _check_shapes(path: Path, tensors: Mapping[str, np.ndarray], config: LoraConfig) -> None:
    for linear in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
        a, b = tensors.get(f"{linear}.lora_A"), tensors.get(f"{linear}.lora_B")
        if a is None or b is None:
            raise ValueError(f"{path}: {linear} has only one of lora_A and lora_B")
        rank = config.rank_of(linear)
        if a.shape[-2] != rank or b.shape[-1] != rank or a.shape[:-2] != b.shape[:-2]:
            shapes = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
            raise ValueError(f"{path}: {linear} has {shapes}, expected [{rank}, in] and [out, {rank}]")
