"""Tensors to export: those of a model folder, read from memory-mapped files."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from jaxglue.hf.checkpoint import open_checkpoint


class FolderTensors:
    """A model folder's tensors as they are."""

    def __init__(self, folder: str | Path):
        self._files = open_checkpoint(folder).mapped()

    @property
    def specs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return shape and dtype by name."""
        return {name: jax.ShapeDtypeStruct(info.shape, info.dtype) for name, info in self._files.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """Return a view of a tensor."""
        return self._files.read(name)
