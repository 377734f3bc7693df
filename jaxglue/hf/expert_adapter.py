"""Expert adapters in PEFT's convention: the matrices of all experts concatenated into two 2-D tensors.

PEFT (0.21) wraps the experts' module once per targeted parameter: `experts.lora_A` belongs to the outer wrapper,
`experts.base_layer.lora_A` to the inner one. `gate_up_proj` is wrapped first and thus is the inner one.
"""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

_OURS = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<projection>gate_up_proj|down_proj)\.(?P<matrix>lora_[AB])")
_THEIRS = re.compile(r"(?P<experts>model\.layers\.\d+\.mlp\.experts)(?P<inner>\.base_layer)?\.(?P<matrix>lora_[AB])")
_INNER, _OUTER = "gate_up_proj", "down_proj"


def target_parameters(names: Iterable[str]) -> list[str]:
    """Return PEFT's `target_parameters` for these tensors, such as `mlp.experts.down_proj`."""
    return sorted({f"mlp.experts.{match['projection']}" for name in names if (match := _OURS.fullmatch(name))})


def to_peft(name: str, tensor: Any, targets: Iterable[str]) -> tuple[str, np.ndarray]:
    """Convert an expert tensor to PEFT's name and shape; return other tensors unchanged.

    Args:
        name: such as `model.layers.0.mlp.experts.down_proj.lora_A`.
        tensor: A [E, R, in], to become [E·R, in], or B [E, out, R], to become [out, R·E].
        targets: `target_parameters` of the adapter.
    """
    if not (match := _OURS.fullmatch(name)):
        return name, np.asarray(tensor)
    inner = match["projection"] == _INNER and f"mlp.experts.{_OUTER}" in targets
    array = np.asarray(tensor)
    if match["matrix"] == "lora_A":
        array = array.reshape(-1, array.shape[-1])
    else:
        array = array.transpose(1, 2, 0).reshape(array.shape[1], -1)
    return f"{match['experts']}{'.base_layer' if inner else ''}.{match['matrix']}", array


def from_peft(name: str, array: np.ndarray, targets: Iterable[str], rank: int) -> tuple[str, np.ndarray] | None:
    """Invert `to_peft` for an expert tensor; return None for other names.

    Raises:
        ValueError: experts missing from `targets`, or a shape inconsistent with the rank.
    """
    if not (match := _THEIRS.fullmatch(name)):
        return None
    kinds = {target.rpartition(".")[-1] for target in targets}
    projection = _INNER if match["inner"] or _OUTER not in kinds else _OUTER
    if projection not in kinds:
        raise ValueError(f"{name} adapts experts, but target_parameters names no {projection}")
    rows = match["matrix"] == "lora_A"
    if array.ndim != 2 or array.shape[0 if rows else 1] % rank:
        expected = f"[experts · {rank}, in]" if rows else f"[out, {rank} · experts]"
        raise ValueError(f"{name} has shape {list(array.shape)}, expected {expected}")
    if rows:
        array = array.reshape(-1, rank, array.shape[1])
    else:
        array = np.ascontiguousarray(array.reshape(array.shape[0], rank, -1).transpose(2, 0, 1))
    return f"{match['experts']}.{projection}.{match['matrix']}", array
