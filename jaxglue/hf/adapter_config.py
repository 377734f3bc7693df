"""adapter_config.json: PEFT's settings of an adapter, read and written."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxglue.data.limits import SECONDS, time_limit
from jaxglue.hf.adapter_tensors import SCORE, is_adapter, pattern_entries, target_parameters
from jaxglue.hf.hub import BaseReference
from jaxglue.models import FAMILIES
from jaxglue.models.lora_config import MODULES, PATHS, LoraConfig, VocabularyModule, match_pattern, parse_patterns
from jaxglue.models.vocabulary import ROWS
from jaxglue.models.wrapper import PROJECTORS, TEXT_PATH, from_text_name, is_beside_text

_READ = {
    "alpha_pattern",
    "auto_mapping",
    "ensure_weight_tying",
    "exclude_modules",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
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
_SETTINGS = {"dropout": "lora_dropout", "rslora": "use_rslora", "dora": "use_dora"}
"""PEFT's names of `LoraConfig`'s fields that hold one value."""
SEQUENCE_CLASSIFIER = "SEQ_CLS"
"""PEFT's task type of reward models."""
_SCORES = ("score", "classifier")
"""Names under which PEFT saves a sequence classifier's head."""
_NEUTRAL_STARTS = (True, False, "gaussian")  # others (pissa, olora, loftq, …) also change the base weights


@contextmanager
def matching(folder: Path) -> Iterator[None]:
    """Raise ValueError where the regular expressions of an adapter take longer than any that PEFT writes, together."""
    try:
        with time_limit(SECONDS):
            yield
    except TimeoutError:
        raise ValueError(f"{folder}: the patterns of its adapter_config.json take more than {SECONDS} s") from None


def _kinds(names: Iterable[str]) -> list[str]:
    """Return the adapted layers' last name components, such as q_proj."""
    return sorted({name.split(".")[-2] for name in names})


_EXPERT_NAME = re.compile(r"\.(gate_proj|up_proj|down_proj)\.lora_[^.]+$")
_WITHIN_LAYER = re.compile(r"^model\.layers\.\d+\.")


def _target_modules(names: Sequence[str], config: LoraConfig, text_path: str) -> list[str] | str:
    """Return PEFT's `target_modules`: last components of paths, or whole paths where the config has those.

    Beside other parts, whose modules may have the same last components, a regular expression names those in layers.
    """
    if _names_paths(config):
        return sorted({from_text_name(name.rpartition(".")[0], text_path) for name in names})
    of_tower = [name for name in names if is_beside_text(name)]
    kinds = _kinds(name for name in names if name not in of_tower)
    if text_path == TEXT_PATH or not (kinds or of_tower):
        return kinds
    linears = [kind for kind in kinds if kind not in PATHS]
    paths = [rf"{re.escape(text_path)}\.layers\.\d+\.(.+\.)?({'|'.join(linears)})"] if linears else []
    # Whole paths: a tower's convolutions may have names of its linear layers.
    places = re.compile(r"\\\.\d+(?=\\\.)")
    paths += sorted({places.sub(r"\\.\\d+", re.escape(name.rpartition(".")[0])) for name in of_tower})
    return "|".join([*paths, *(re.escape(from_text_name(PATHS[name], text_path)) for name in PATHS if name in kinds)])


def _patterns(config: LoraConfig, text_path: str, *, weights: bool) -> dict[str, dict[str, float]]:
    """Return PEFT's patterns, with `weights` also for linear layers that are targeted as parameters."""
    fields = {name: parse_patterns(name, getattr(config, name)) for name in ("rank_pattern", "alpha_pattern")}
    numbers = {
        name: {from_text_name(key, text_path): _short(value) for key, value in field.items()}
        for name, field in fields.items()
    }
    if weights:
        numbers = {
            name: field | {f"{key}.weight": value for key, value in field.items()} for name, field in numbers.items()
        }
    return {name: field for name, field in numbers.items() if field}


def _short(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def config_to_peft(
    config: LoraConfig,
    names: Mapping[str, tuple[int, ...]],
    base: BaseReference,
    *,
    tied: bool,
    model_type: str | None = None,
    text_path: str = TEXT_PATH,
) -> dict[str, Any]:
    """Return adapter_config.json.

    Args:
        config: of the adapter.
        names: shapes of the tensors by name.
        base: of the adapter.
        tied: the base's output projection is its embedding, which PEFT keeps so where it is told to.
        model_type: of the base.
        text_path: of the decoder among the base's modules.
    """
    linears = [name for name, shape in names.items() if is_adapter(name) and len(shape) == 2]
    family = FAMILIES.get(str(model_type))
    # PEFT 0.21 takes targets of the names of an expert's matrices for all experts.
    named_so = family is not None and family.parts.experts.stored == "apart"
    mistaken = [name for name in linears if named_so and _EXPERT_NAME.search(name)]
    linears = [name for name in linears if name not in mistaken]
    parameters = target_parameters(names, whole=_names_paths(config)) + _weights(mistaken, config)
    parameters = [from_text_name(name, text_path) for name in parameters]
    return {
        "base_model_name_or_path": base.name,
        **({"revision": base.revision} if base.revision else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": _short(config.alpha),
        "lora_dropout": config.dropout or 0.0,
        "peft_type": "LORA",
        "r": config.rank,
        **_vocabulary(config, names, tied=tied),
        "target_modules": _target_modules(linears, config, text_path),
        **({"target_parameters": parameters} if parameters else {}),
        "task_type": SEQUENCE_CLASSIFIER if SCORE in names else "CAUSAL_LM",
        "use_dora": config.dora,
        "use_rslora": config.rslora,
        **_patterns(config, text_path, weights=bool(mistaken)),
    }


def _weights(names: Iterable[str], config: LoraConfig) -> list[str]:
    """Return `target_parameters` for linear layers: whole names where the config has those, else those in a layer."""
    paths = {name.rpartition(".")[0] for name in names}
    return sorted({f"{path if _names_paths(config) else _WITHIN_LAYER.sub('', path)}.weight" for path in paths})


def _names_paths(config: LoraConfig) -> bool:
    return bool(config.layers) or any("." in target for target in (*config.targets, *config.exclude))


def _vocabulary(config: LoraConfig, names: Iterable[str], *, tied: bool) -> dict[str, Any]:
    """Return PEFT's entries for embedding, output projection and score: whole, and rows of them."""
    whole = [module for module, path in PATHS.items() if f"{path}.weight" in names]
    rows = [module for module, path in PATHS.items() if f"{path}.{ROWS}" in names]
    entries: dict[str, Any] = {}
    if whole:
        entries = {"ensure_weight_tying": tied, "modules_to_save": list(MODULES) if tied else whole}
    if projectors := _projectors(names):
        entries["modules_to_save"] = [*entries.get("modules_to_save", []), *projectors]
    if SCORE in names:
        entries["modules_to_save"] = [*entries.get("modules_to_save", []), "score"]
    if rows:
        entries["trainable_token_indices"] = dict.fromkeys(rows, sorted(set(config.trainable_token_indices)))
    return entries


def _projectors(names: Iterable[str]) -> list[str]:
    """Return the names of the projectors of a vision tower where they are saved whole."""
    found = (_PROJECTOR.search(name) for name in names if is_beside_text(name) and not is_adapter(name))
    return list(dict.fromkeys(match[1] for match in found if match))


_PROJECTOR = re.compile(rf"\b((?:{'|'.join(PROJECTORS)})(?:\.\d+)?)\.")


def refuse_unsupported(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise ValueError for any enabled but unknown option, so that features of a newer PEFT are not ignored."""
    if raw.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type {raw.get('peft_type')!r:.100} is not supported: only 'LORA' is")
    if missing := [name for name in ("r", "lora_alpha") if name not in raw]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    if type(raw["r"]) is not int or raw["r"] < 1:
        raise ValueError(f"{path}: r: expected int >= 1, got {raw['r']!r:.100}")
    # 0 is no absent value: as layers_to_transform it is the first layer.
    off: tuple[Any, ...] = ("none", "", [], {})
    switched_on = {
        n: value for n, value in raw.items() if value is not None and value is not False and value not in off
    }
    unsupported = [f"{name}={switched_on[name]!r:.100}" for name in sorted(set(switched_on) - _READ - _HARMLESS)]
    if (start := raw.get("init_lora_weights", True)) not in _NEUTRAL_STARTS:
        unsupported.append(f"init_lora_weights={start!r:.100}")
    if raw.get("ensure_weight_tying") and not (raw.get("modules_to_save") or raw.get("trainable_token_indices")):
        unsupported.append("ensure_weight_tying of adapters")
    if unsupported:
        raise ValueError(f"{path}: not supported: {', '.join(unsupported)}")
    _check_lists(path, raw)


def _check_lists(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise ValueError for a field of names that holds others, or names modules of another kind."""
    for name, texts in (
        ("target_modules", (str, list)),
        ("exclude_modules", (str, list)),
        ("target_parameters", list),
        ("modules_to_save", list),
    ):
        value = raw.get(name)
        if value is not None and not (isinstance(value, texts) and all(isinstance(item, str) for item in value)):
            raise ValueError(f"{path}: {name}: expected names, got {value!r:.100}")
    for field in ("rank_pattern", "alpha_pattern"):
        try:
            parse_patterns(field, pattern_entries(field, raw))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    known = {*MODULES, *PROJECTORS, *_scores(raw)}
    if unknown := sorted(name for name in saved_modules(raw) if name.partition(".")[0] not in known):
        raise ValueError(f"{path}: not supported: modules_to_save={unknown}, only {', '.join(MODULES)}")


def saved_modules(raw: Mapping[str, Any]) -> set[str]:
    """Return the last names of the modules that PEFT saves whole; of a list's also their places."""
    return {_BEFORE_LAST.sub("", name) for name in raw.get("modules_to_save") or ()}


_BEFORE_LAST = re.compile(r"^.*\.(?!\d+$)")


def _scores(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the head that an adapter of a sequence classifier saves."""
    return _SCORES if raw.get("task_type") == SEQUENCE_CLASSIFIER else ()


_OF_A_LAYER = re.compile(r"(^|\.)\d+\.")
"""A layer's index in the path of a parameter."""


def config_from_peft(path: Path, raw: Mapping[str, Any], tensors: Iterable[str]) -> LoraConfig:
    """Read the configuration; targets given as a regular expression become the adapted modules' paths.

    Args:
        path: of adapter_config.json.
        raw: its content.
        tensors: names of the adapter's tensors.

    Raises:
        ValueError: a wrong value, or tensors that the configuration names and the folder lacks.
    """
    try:
        rows: list[VocabularyModule] = [module for module, path in PATHS.items() if f"{path}.{ROWS}" in tensors]
        indices = sorted(token_indices(raw, rows[0])) if rows else ()
        whole: list[VocabularyModule] = [module for module, path in PATHS.items() if f"{path}.weight" in tensors]
        if _scores(raw) and SCORE not in tensors:
            raise ValueError(f"task_type {SEQUENCE_CLASSIFIER} needs {SCORE}, which {path.parent} does not hold")
        if missing := sorted(saved_modules(raw) - {*whole, *_scores(raw), *_projectors(tensors)}):
            raise ValueError(f"modules_to_save names {missing[0]}, which {path.parent} does not hold")
        if raw.get("trainable_token_indices") not in (None, [], {}) and not (rows or whole):
            raise ValueError(f"trainable_token_indices names rows, which {path.parent} does not hold")
        adapted = [name for name in tensors if is_adapter(name)]
        modules, named = {name.rpartition(".")[0] for name in adapted}, raw.get("target_modules")
        paths = isinstance(named, str) or raw.get("exclude_modules") or any("." in name for name in named or ())
        paths = paths or any(_OF_A_LAYER.search(name) for name in raw.get("target_parameters") or ())
        given: dict[str, Any] = {"dropout": 0.0}
        given |= {name: raw[key] for name, key in _SETTINGS.items() if raw.get(key) is not None}
        return LoraConfig(
            rank=raw["r"],
            alpha=raw["lora_alpha"],
            **given,
            targets=tuple(sorted(modules) if paths else _kinds(adapted)),
            rank_pattern=_entries("rank_pattern", raw, modules),
            alpha_pattern=_entries("alpha_pattern", raw, modules),
            modules_to_save=tuple(whole),
            trainable_token_indices=tuple(indices),
            token_modules=tuple(rows) if rows else MODULES,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _entries(field: str, raw: Mapping[str, Any], modules: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns, as in `LoraConfig`, that match a module; PEFT ignores the others."""
    entries = pattern_entries(field, raw)
    return tuple(e for e in entries if any(match_pattern(parse_patterns(field, [e]), m) is not None for m in modules))


def token_indices(raw: Mapping[str, Any], module: str) -> list[int]:
    """Return the rows of a module that PEFT trains, in the order of their values.

    Raises:
        ValueError: not a list of distinct whole numbers, or another one for each module.
    """
    given = raw.get("trainable_token_indices")
    lists: dict[str, Any] = given if isinstance(given, dict) else {"embed_tokens": given}
    for indices in lists.values():
        whole = isinstance(indices, list) and all(type(index) is int and index >= 0 for index in indices)
        if not whole or len(set(indices)) != len(indices):
            raise ValueError(f"trainable_token_indices: expected lists of distinct indices, got {given!r:.100}")
    if not lists or (unknown := sorted({_last(name) for name in lists} - set(MODULES))):
        names = ", ".join(unknown) if lists else "nothing"
        raise ValueError(f"trainable_token_indices of {names} are not supported: only of {', '.join(MODULES)}")
    if len({frozenset(indices) for indices in lists.values()}) > 1:
        raise ValueError("trainable_token_indices that differ between modules are not supported")
    by_module = {_last(name): indices for name, indices in lists.items()}
    return by_module.get(module) or next(iter(by_module.values()))


def _last(name: str) -> str:
    return name.rpartition(".")[2]
