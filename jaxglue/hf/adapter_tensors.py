"""Names of an adapter's tensors: PEFT's keys, and ours, which are Hugging Face's paths.

PEFT (0.21) concatenates the matrices of all experts into two 2-D tensors, and wraps the experts' module once per
targeted parameter: `experts.lora_A` belongs to the outer wrapper, `experts.base_layer.lora_A` to the inner one.
`gate_up_proj`, or `up_proj` of experts without gates, is wrapped first and thus is the inner one.
"""

import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxglue.models.lora_config import PATHS, LoraConfig, VocabularyModule, is_target, match_pattern, parse_patterns
from jaxglue.models.vocabulary import ROWS
from jaxglue.models.wrapper import TEXT_PATH, from_text_name, is_beside_text, to_stored_name, to_text_name

MAGNITUDE = "lora_magnitude_vector"
"""PEFT's name of DoRA's magnitudes."""
NO_PATTERNS: Mapping[str, float] = {}
_MATRICES = ("lora_A", "lora_B")
_PREFIX = "base_model.model."
_LINEAR = re.compile(rf"(model\.layers\.\d+\..+|lm_head)\.({'|'.join((*_MATRICES, MAGNITUDE))})")
_EMBEDDING = re.compile(rf"({re.escape(PATHS['embed_tokens'])}\.lora_)embedding_([AB])")
"""PEFT's names of the matrices of an embedding's adapter."""
SCORE = "score.weight"
"""Weight [1, D] of a reward model's score, which is stored whole."""
_VOCABULARY = re.compile(
    rf"({'|'.join(map(re.escape, PATHS.values()))})(\.token_adapter)?(\.base_layer)?\.(weight|{ROWS})"
)


def is_adapter(name: str) -> bool:
    """Tell whether a tensor belongs to the adapter of a linear layer or of experts."""
    return name.rpartition(".")[2] in (*_MATRICES, MAGNITUDE)


def split_others(tensors: Mapping[str, np.ndarray], *, ours: bool = False) -> tuple[dict[str, np.ndarray], str]:
    """Return an adapter's tensors, without untrained ones around the text model, and the decoder's path in their keys.

    PEFT adapts every module of a target's name, such as a vision tower's; without images these learn nothing.

    Args:
        tensors: by their keys.
        ours: it is of this library, where a tower's adapters are those that were to train, whatever they learned.
    """
    names = {key: key.removeprefix(_PREFIX) for key in tensors}
    others = {key for key, name in names.items() if is_beside_text(name)}
    trained = ours or any("lora_" not in key or (".lora_B" in key and tensors[key].any()) for key in others)
    kept = {key: tensor for key, tensor in tensors.items() if trained or key not in others}
    paths = {text_path for key in kept if (text_path := to_text_name(names[key])[1]) != TEXT_PATH}
    return kept, min(paths, default=TEXT_PATH)


def to_keys(tensors: Mapping[str, Any], *, tied: bool, text_path: str = TEXT_PATH) -> dict[str, np.ndarray]:
    """Return an adapter's tensors by PEFT's keys; PEFT also stores the copy of a tied embedding.

    Args:
        tensors: by our names.
        tied: the output projection is the embedding.
        text_path: of the decoder among the base's modules.
    """
    named = dict(to_peft(*item, tensors) for item in tensors.items())
    by_key = dict(_to_key(from_text_name(name, text_path), array) for name, array in named.items())
    embedding = by_key.get(f"{_PREFIX}{from_text_name(PATHS['embed_tokens'], text_path)}.weight")
    return by_key | ({f"{_PREFIX}{PATHS['lm_head']}.weight": embedding} if tied and embedding is not None else {})


def _to_key(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    path, _, last = name.rpartition(".")
    if last == ROWS:
        return f"{_PREFIX}{path}.token_adapter.{last}", array
    if last in _MATRICES and path.endswith(".embed_tokens"):
        return f"{_PREFIX}{path}.{last.replace('lora_', 'lora_embedding_')}", array
    return f"{_PREFIX}{name}{'.weight' if last in _MATRICES else ''}", array


def from_key(path: Path, key: str, array: np.ndarray, raw: Mapping[str, Any]) -> tuple[str, np.ndarray]:
    """Return our name and the array of a PEFT tensor.

    Raises:
        ValueError: a tensor of no supported feature, or of another shape.
    """
    name, _ = to_text_name(key.removeprefix(_PREFIX))
    if is_beside_text(name):
        name = to_stored_name(name)
        last = name.removesuffix(".weight").rpartition(".")[2]
        return (name.removesuffix(".weight") if last in _MATRICES else name), array
    if vocabulary := _VOCABULARY.fullmatch(name):
        name, axes = f"{vocabulary[1]}.{vocabulary[4]}", 2
    elif name == SCORE:
        axes = 2
    elif embedding := _EMBEDDING.fullmatch(name):
        name, axes = embedding[1] + embedding[2], 2
    elif _LINEAR.fullmatch(name := name.removesuffix(".weight")):
        axes = 1 if name.endswith(MAGNITUDE) else 2
    else:
        raise ValueError(f"{path}: {key} is not the LoRA matrix of a linear layer in model.layers, nor an embedding's")
    if array.ndim != axes:
        raise ValueError(
            f"{path}: {key} has shape {list(array.shape)}, expected {'a matrix' if axes == 2 else '[out]'}"
        )
    if not _THEIRS.fullmatch(name):
        return name, array
    ranks = parse_patterns("rank_pattern", pattern_entries("rank_pattern", raw))
    targets = [to_text_name(target)[0] for target in raw.get("target_parameters") or ()]
    return from_peft(name, array, targets, raw["r"], ranks) or (name, array)


def join_rows(
    path: Path, tensors: dict[str, np.ndarray], indices: Mapping[VocabularyModule, list[int]]
) -> dict[str, np.ndarray]:
    """Sort rows of embedding and output projection by token; put them into a matrix that is stored whole.

    Args:
        path: of the tensors.
        tensors: by our names.
        indices: of each module's rows, in the order of the values.

    Raises:
        ValueError: other numbers of rows than indices, or an index outside the matrix.
    """
    joined = dict(tensors)
    for module, order in indices.items():
        whole, rows = f"{PATHS[module]}.weight", joined.pop(f"{PATHS[module]}.{ROWS}")
        if len(rows) != len(order):
            raise ValueError(f"{path}: {module} has {len(rows)} rows, trainable_token_indices names {len(order)}")
        if whole not in joined:
            joined[f"{PATHS[module]}.{ROWS}"] = rows[np.argsort(order)]
            continue
        if order and max(order) >= len(joined[whole]):
            raise ValueError(f"{path}: token {max(order)} is outside the {len(joined[whole])} rows of {module}")
        joined[whole] = joined[whole].copy()
        joined[whole][order] = rows
    return joined


def check_shapes(path: Path, tensors: Mapping[str, np.ndarray], config: LoraConfig) -> None:
    """Raise ValueError for a linear layer without one of its tensors, or of shapes that do not fit each other."""
    for linear in dict.fromkeys(name.rpartition(".")[0] for name in tensors if is_adapter(name)):
        a, b = tensors.get(f"{linear}.lora_A"), tensors.get(f"{linear}.lora_B")
        if a is None or b is None:
            raise ValueError(f"{path}: {linear} has only one of lora_A and lora_B")
        rank = config.rank_of(linear)
        if a.shape[-2] != rank or b.shape[-1] != rank or a.shape[:-2] != b.shape[:-2]:
            shapes = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
            raise ValueError(f"{path}: {linear} has {shapes}, expected [{rank}, in] and [out, {rank}]")
        magnitude = tensors.get(f"{linear}.{MAGNITUDE}")
        if config.dora != (magnitude is not None):
            raise ValueError(
                f"{path}: {linear} has {'no' if config.dora else 'a'} {MAGNITUDE}, use_dora is {config.dora}"
            )
        if magnitude is not None and magnitude.shape != b.shape[:1]:
            raise ValueError(f"{path}: {linear} has {MAGNITUDE} {list(magnitude.shape)}, expected [{b.shape[0]}]")


_MODULE = r"((mlp|feed_forward|block_sparse_moe|mixer)\.)?experts"
_OURS = re.compile(
    rf"(?P<experts>.+?\.(?P<path>{_MODULE}))\.(?P<projection>gate_up_proj|up_proj|down_proj)\.(?P<matrix>lora_[AB])"
)
_THEIRS = re.compile(rf"(?P<experts>model\.layers\.\d+\.{_MODULE})(?P<inner>\.base_layer)?\.(?P<matrix>lora_[AB])")
_INNER, _OUTER = ("gate_up_proj", "up_proj"), "down_proj"


def target_parameters(names: Iterable[str], *, whole: bool = False) -> list[str]:
    """Return PEFT's `target_parameters` for these tensors, such as `mlp.experts.down_proj`, or whole paths."""
    part = "experts" if whole else "path"
    return sorted({f"{match[part]}.{match['projection']}" for name in names if (match := _OURS.fullmatch(name))})


def to_peft(name: str, tensor: Any, names: Container[str]) -> tuple[str, np.ndarray]:
    """Convert an expert tensor to PEFT's name and shape; return other tensors unchanged.

    Args:
        name: such as `model.layers.0.mlp.experts.down_proj.lora_A`.
        tensor: A [E, R, in], to become [E·R, in], or B [E, out, R], to become [out, R·E].
        names: of all tensors of the adapter.
    """
    if not (match := _OURS.fullmatch(name)):
        return name, np.asarray(tensor)
    inner = match["projection"] in _INNER and f"{match['experts']}.{_OUTER}.lora_A" in names
    array = np.asarray(tensor)
    if match["matrix"] == "lora_A":
        array = array.reshape(-1, array.shape[-1])
    else:
        array = array.transpose(1, 2, 0).reshape(array.shape[1], -1)
    return f"{match['experts']}{'.base_layer' if inner else ''}.{match['matrix']}", array


def from_peft(
    name: str, array: np.ndarray, targets: Iterable[str], rank: int, patterns: Mapping[str, float] = NO_PATTERNS
) -> tuple[str, np.ndarray] | None:
    """Invert `to_peft` for an expert tensor; return None for other names.

    Args:
        name: PEFT's.
        array: of all experts.
        targets: `target_parameters` of the adapter.
        rank: of its matrices, unless `patterns` give another.
        patterns: ranks by patterns of paths.

    Raises:
        ValueError: experts missing from `targets`, or a shape inconsistent with the rank.
    """
    if not (match := _THEIRS.fullmatch(name)):
        return None
    kinds = [kind for kind in (*_INNER, _OUTER) if any(is_target(f"{match['experts']}.{kind}", t) for t in targets)]
    first = next((kind for kind in _INNER if kind in kinds), _INNER[0])
    projection = first if match["inner"] or _OUTER not in kinds else _OUTER
    if projection not in kinds:
        raise ValueError(f"{name} adapts experts, but target_parameters names no {projection}")
    path = f"{match['experts']}.{projection}"
    rank = int(match_pattern(patterns, path) or rank)
    rows = match["matrix"] == "lora_A"
    if array.ndim != 2 or array.shape[0 if rows else 1] % rank:
        expected = f"[experts · {rank}, in]" if rows else f"[out, {rank} · experts]"
        raise ValueError(f"{name} has shape {list(array.shape)}, expected {expected}")
    if rows:
        array = array.reshape(-1, rank, array.shape[1])
    else:
        array = np.ascontiguousarray(array.reshape(array.shape[0], rank, -1).transpose(2, 0, 1))
    return f"{path}.{match['matrix']}", array


def pattern_entries(field: str, raw: Mapping[str, Any]) -> list[str]:
    """Return the entries of a field of PEFT's with numbers by pattern, as in `LoraConfig`.

    Raises:
        ValueError: other values than numbers.
    """
    given = {} if raw.get(field) is None else raw[field]
    if not isinstance(given, dict) or not all(type(value) in (int, float) for value in given.values()):
        raise ValueError(f"{field}: expected numbers by pattern, got {given!r:.100}")
    return [f"{to_text_name(pattern)[0]}={value}" for pattern, value in given.items()]
