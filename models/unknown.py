"""Parts of a model of unknown type: those that exist here, and modules and settings that speak of others."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxglue.models.family import foreign_parts

_MODULE = r"(mlp|block_sparse_moe|feed_forward)"
_PARTS = {
    "grouped attention": r"self_attn\.(q|k|v|o|out|qkv)_proj|attention\.(q|k|v|o)_proj",
    "norms of queries and keys": r"self_attn\.(q|k|query|key)_(layer)?norm",
    "a gate of attention's output": r"self_attn\.(g|gate)_proj",
    "sinks": r"self_attn\.sinks",
    "latent attention": r"self_attn\.(q_a_|q_b_|kv_a_|kv_b_)\w+",
    "the gated delta rule": r"linear_attn\.(in_proj_\w+|conv1d|A_log|dt_bias|norm|out_proj)",
    "short convolutions": r"conv\.(in_proj|conv|out_proj)",
    "gated feed-forwards": r"(mlp|feed_forward)\.(gate|up|down|gate_up)_proj|feed_forward\.w[123]",
    "experts": rf"{_MODULE}\.experts\.(\d+\.)?(\w+)",
    "a router": rf"{_MODULE}\.(gate|router)",
    "corrections of a router's choice": rf"{_MODULE}\.(\w+\.)?(e_score_correction_bias|expert_bias)",
    "an expert that all tokens share": r"mlp\.shared_expert\w*(\.\w+)?",
    "norms": r"\w*norm\w*",
}
"""Parts by the paths of their modules within a layer."""
_LAYER = re.compile(r"(?:.+\.)?(?:layers|h|blocks)\.\d+\.(?P<path>.+?)(?:\.(?:weight|bias))?")


class KnownParts(NamedTuple):
    """Parts of a model for which there is no family."""

    exist: tuple[str, ...]
    """In words."""
    others: tuple[str, ...]
    """Modules of layers that are of none of these, and what settings speak of."""


def known_parts(raw: Mapping[str, Any], tensors: Iterable[str]) -> KnownParts:
    """Return which parts of a model exist here, by its parsed config.json and its tensors' names."""
    paths = sorted({match["path"] for name in tensors if (match := _LAYER.fullmatch(name))})
    parts = {path: _part(path) for path in paths}
    others = [re.sub(r"\.\d+\.", ".N.", path) for path, part in parts.items() if part is None]
    settings = [f"{part} ({name})" for part, name in foreign_parts(raw).items()]
    found = {part for part in parts.values() if part is not None}
    return KnownParts(tuple(part for part in _PARTS if part in found), (*dict.fromkeys(others), *settings))


def _part(path: str) -> str | None:
    return next((part for part, pattern in _PARTS.items() if re.fullmatch(pattern, path)), None)
