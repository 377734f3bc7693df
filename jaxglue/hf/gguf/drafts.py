"""Draft heads in llama.cpp's files: the layer after the last, and norms and a projection before it (`nextn`)."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from jaxglue.hf.draft import find_head, folder_has_head
from jaxglue.hf.gguf.layout import Tensors
from jaxglue.models.config import DecoderConfig
from jaxglue.models.draft import with_head_layer

DRAFTING = frozenset(("qwen3_5_text", "qwen3_5_moe_text"))
"""Families whose heads llama.cpp drafts by (`--spec-type draft-mtp`)."""
_PARTS = {
    "fc.weight": "nextn.eh_proj.weight",
    "embedding_norm.weight": "nextn.enorm.weight",
    "hidden_norm.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}


class WithDraft:
    """Tensors of a model, and those of a draft head as a further layer's.

    Args:
        tensors: of the model.
        config: of the model.
        base: its folder, which has a head.
        adapter: a folder whose trained head takes the place of that, if there is one.

    Raises:
        ValueError: as of `find_head`.
    """

    def __init__(self, tensors: Tensors, config: DecoderConfig, base: Path, adapter: Path | None = None):
        self._tensors, self._head = tensors, find_head(base, config, adapter).files
        layer = f"model.layers.{config.num_hidden_layers}."
        self._names = {layer + _PARTS.get(name, name.removeprefix("layer.")): name for name in self._head.tensors}
        self.config = with_head_layer(config)
        """Architecture with the head's layer."""

    @property
    def specs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """See `Tensors`."""
        head = {ours: self._head.tensors[name] for ours, name in self._names.items()}
        own = {name: jax.ShapeDtypeStruct(info.shape, info.dtype) for name, info in head.items()}
        return {**self._tensors.specs, **own}

    def read(self, name: str) -> np.ndarray:
        """See `Tensors`."""
        return self._head.read(self._names[name]) if name in self._names else self._tensors.read(name)

    def packed_type(self, name: str) -> str | None:
        """See `Tensors`."""
        return None if name in self._names else self._tensors.packed_type(name)

    def read_packed(self, name: str) -> np.ndarray:
        """See `Tensors`."""
        return self._tensors.read_packed(name)


def find_gguf_draft(tensors: Tensors, config: DecoderConfig, base: Path, adapter: Path | None) -> WithDraft | None:
    """Return a model's tensors with its draft head; None where llama.cpp reads none, or the folder has none.

    Raises:
        ValueError: a head in the folder that is not of this architecture, or quantized.
    """
    if config.model_type not in DRAFTING or not folder_has_head(base, config):
        return None
    return WithDraft(tensors, config, base, adapter)
