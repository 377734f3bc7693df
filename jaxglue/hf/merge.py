"""What an adapter adds to the tensors of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.experts import expert_parts
from jaxglue.hf.tensor_files import TensorInfo


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The change of one weight, scale · B · A, in factors; for all experts at once they have a leading axis."""

    b: np.ndarray
    a: np.ndarray
    transposed: bool = False
    """Whether the weight is stored [in, out]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        out_features, in_features = self.b.shape[-2], self.a.shape[-1]
        return (*self.b.shape[:-2], *((in_features, out_features) if self.transposed else (out_features, in_features)))

    def add_to(self, weight: np.ndarray) -> np.ndarray:
        """The weight with its change, added in float32 and cast to the weight's dtype."""
        total = np.swapaxes(self.a, -1, -2) @ np.swapaxes(self.b, -1, -2) if self.transposed else self.b @ self.a
        total += weight.astype(np.float32)
        return total.astype(weight.dtype)


def load_deltas(adapter: str | Path, base: Mapping[str, TensorInfo]) -> dict[str, Delta]:
    """Name of a weight → its change, for every weight of the base that the adapter changes.

    Experts go by what the base holds: a tensor for each, or one for all. Where that is in MXFP4, the name is that of
    the expanded tensor.

    Raises:
        ValueError: not an adapter folder, or one that is corrupt or not supported.
    """
    config, lora = load_adapter(adapter)
    scale = np.float32(config.scale)
    deltas: dict[str, Delta] = {}
    for name in dict.fromkeys(name.rpartition(".")[0] for name in lora):
        b, a = scale * lora[f"{name}.lora_B"], lora[f"{name}.lora_A"]
        deltas |= {f"{name}.weight": Delta(b=b, a=a)} if b.ndim == 2 else _expert_deltas(name, b, a, base)
    return deltas


def _expert_deltas(name: str, b: np.ndarray, a: np.ndarray, base: Mapping[str, TensorInfo]) -> dict[str, Delta]:
    parts = expert_parts(name, (*b.shape[:2], a.shape[2]))
    if not parts.keys() & base.keys():
        return {name: Delta(b=b, a=a, transposed=True)}
    return {part: Delta(b=b[index], a=a[index[0]]) for part, index in parts.items()}
