"""Weight deltas of an adapter, to merge into a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxglue.hf.adapter import Adapter
from jaxglue.hf.adapter_tensors import MAGNITUDE
from jaxglue.hf.experts import expert_parts
from jaxglue.hf.tensor_files import TensorInfo
from jaxglue.models.vocabulary import ROWS


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A weight's delta scale · B · A in factors, with a leading axis for stacked experts."""

    b: np.ndarray
    a: np.ndarray
    transposed: bool = False
    """The weight is stored as [in, out]."""
    magnitude: np.ndarray | None = None
    """Norms [out] of the rows of the sum, for DoRA."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape."""
        out_features, in_features = self.b.shape[-2], self.a.shape[-1]
        return (*self.b.shape[:-2], *((in_features, out_features) if self.transposed else (out_features, in_features)))

    def add_to(self, weight: np.ndarray) -> np.ndarray:
        """Add the delta to a weight in float32 and cast to the weight's dtype."""
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks for finite values
            total = np.swapaxes(self.a, -1, -2) @ np.swapaxes(self.b, -1, -2) if self.transposed else self.b @ self.a
            total += weight.astype(np.float32)
            if self.magnitude is not None:
                total *= (self.magnitude / np.linalg.norm(total, axis=1))[:, None]
            return total.astype(weight.dtype)


def adapter_deltas(adapter: Adapter, base: Mapping[str, TensorInfo]) -> dict[str, Delta]:
    """Return the adapter's deltas by base weight name.

    Experts follow the base's layout: one tensor per expert or one for all; MXFP4 experts go by their expanded name.
    """
    deltas: dict[str, Delta] = {}
    for name in adapter.modules:
        scale = np.float32(adapter.config.scale_of(name))
        b, a = scale * adapter.tensors[f"{name}.lora_B"], adapter.tensors[f"{name}.lora_A"]
        magnitude = adapter.tensors.get(f"{name}.{MAGNITUDE}")
        linear = {f"{name}.weight": Delta(b=b, a=a, magnitude=magnitude)}
        deltas |= linear if b.ndim == 2 else _expert_deltas(name, b, a, base)
    return deltas


def vocabulary_matrix(adapter: Adapter, path: str, weight: Any) -> np.ndarray | None:
    """Return embedding or output projection with an adapter's values; None where it has none.

    Args:
        adapter: fitted to the base by `check_adapter`.
        path: of the module.
        weight: the base's matrix [V, D].
    """
    whole, rows = (adapter.tensors.get(f"{path}.{last}") for last in ("weight", ROWS))
    if whole is not None or rows is None:
        return whole
    weight = np.asarray(weight)
    matrix = np.zeros((max(len(weight), adapter.vocab_size), weight.shape[1]), weight.dtype)
    matrix[: len(weight)] = weight
    matrix[sorted(set(adapter.config.trainable_token_indices))] = rows.astype(weight.dtype)
    return matrix


def _expert_deltas(name: str, b: np.ndarray, a: np.ndarray, base: Mapping[str, TensorInfo]) -> dict[str, Delta]:
    parts = expert_parts(name, (*b.shape[:2], a.shape[2]))
    if not parts.keys() & base.keys():
        return {name: Delta(b=b, a=a, transposed=True)}
    return {part: Delta(b=b[index], a=a[index[0]]) for part, index in parts.items()}
