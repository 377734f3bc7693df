"""Rows of a merged folder, recomputed from the files of base and adapter by PEFT's rules alone.

The comparison of predictions reads the adapter as the merge does, so both would share a mistake. Nothing here uses that
reader.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxglue.files.json_file import read_json
from jaxglue.hf.checkpoint import open_checkpoint, read_config
from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.models.wrapper import TEXT_PATH, from_text_name, text_config, to_text_name

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_MAGNITUDES = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")
_EMBEDDING_A, _EMBEDDING_B = "model.embed_tokens.lora_embedding_A", "model.embed_tokens.lora_embedding_B"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 4
"""Rows compared of each matrix, evenly spaced."""
_ROUNDING = 2.0**-19
"""Error of sums in float32, relative to a row's largest value."""


def check_input(base: str | Path, adapter: str | Path, merged: str | Path) -> None:
    """Compare rows of every matrix that is merged, kept or replaced; experts and quantized matrices are left out.

    Args:
        base: the base model's folder, in floating point.
        adapter: a PEFT folder.
        merged: the folder to check.

    Raises:
        ValueError: names the first matrix that differs.
    """
    expected = _Expected(open_checkpoint(base), Path(adapter), tied=_is_tied(base))
    files = open_checkpoint(merged)
    names = {name: name for name in files.tensors}
    if _is_tied(merged):
        names[_HEAD] = _EMBEDDING
    for name, stored in names.items():
        info = files.tensors[stored]
        if len(info.shape) != 2 or info.dtype.kind in "iub" or ".experts." in name:
            continue
        for row in np.unique(np.linspace(0, info.shape[0] - 1, _ROWS).astype(int)):
            wanted = expected.row(name, row)
            if wanted is not None and not _equal(files.read_line(stored, (row,)), wanted):
                what = f"row {row} of {name} is not that of {base} with {adapter} by PEFT's rules"
                raise ValueError(f"{merged}: {what}; the export failed")


def _equal(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Tell whether values are others in float32, rounded."""
    allowed = jnp.finfo(found.dtype).eps / 2 * np.abs(wanted) + _ROUNDING * np.abs(wanted).max()
    return found.shape == wanted.shape and bool((np.abs(found.astype(np.float32) - wanted) <= allowed).all())


class _Expected:
    """Rows of a base with an adapter."""

    def __init__(self, base: TensorFiles, adapter: Path, *, tied: bool):
        self._base, self._tied, self._raw = base, tied, read_json(adapter / "adapter_config.json")
        files = TensorFiles([adapter / "adapter_model.safetensors"])
        self._adapter, self._path = {}, TEXT_PATH
        for key in files.tensors:
            name, path = to_text_name(key.removeprefix(_PREFIX))
            self._adapter[name] = files.read(key).astype(np.float32)
            self._path = path if _A in key else self._path

    def row(self, name: str, row: int) -> np.ndarray | None:
        """Return a matrix's row; None where these rules do not tell."""
        if name == _EMBEDDING and _EMBEDDING_A in self._adapter:
            a, b = self._adapter[_EMBEDDING_A], self._adapter[_EMBEDDING_B]
            weight = self._base.read_line(name, (row,)).astype(np.float32)
            return weight + np.float32(self._scale("model.embed_tokens", len(a))) * (b @ a[:, row])
        if name == _EMBEDDING or (name == _HEAD and f"lm_head{_A}" not in self._adapter):
            return self._vocabulary_row(name, row)
        stored = _EMBEDDING if name == _HEAD and self._tied else name
        if stored not in self._base.tensors or self._base.tensors[stored].dtype.kind in "iub":
            return None
        weight = self._base.read_line(stored, (row,)).astype(np.float32)
        module = name.removesuffix(".weight")
        if f"{module}{_A}" not in self._adapter:
            return weight
        a, b = self._adapter[f"{module}{_A}"], self._adapter[f"{module}{_B}"]
        weight = weight + np.float32(self._scale(module, len(a))) * (b[row] @ a)
        for magnitudes in (self._adapter.get(f"{module}{end}") for end in _MAGNITUDES):
            if magnitudes is not None:
                weight = weight * (magnitudes.reshape(-1)[row] / np.linalg.norm(weight))
        return weight

    def _scale(self, module: str, rank: int) -> float:
        patterns: Mapping[str, Any] = self._raw.get("alpha_pattern") or {}
        module = from_text_name(module, self._path)
        fits = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(fits, self._raw["lora_alpha"])
        return alpha / (math.sqrt(rank) if self._raw.get("use_rslora") else rank)

    def _vocabulary_row(self, name: str, row: int) -> np.ndarray | None:
        """Return a row of embedding or output projection.

        A saved module replaces the one that it names; the other one of a tied pair follows if PEFT is told to tie them,
        or if the matrix was resized and saved without a copy.
        """
        follows = self._raw.get("ensure_weight_tying") or not self._raw.get("modules_to_save")
        for source in dict.fromkeys((name, *([_EMBEDDING] if self._tied and follows else []))):
            if source in self._adapter:
                return self._adapter[source][row]
        rows = [values for key, values in self._adapter.items() if "trainable_tokens_delta" in key]
        indices = self._raw.get("trainable_token_indices")
        if rows and (len(rows) > 1 or not isinstance(indices, list) or row in indices):
            return None
        stored = _EMBEDDING if self._tied else name
        if stored not in self._base.tensors or row >= self._base.tensors[stored].shape[0]:
            return None
        return self._base.read_line(stored, (row,)).astype(np.float32)


def _is_tied(folder: str | Path) -> bool:
    return bool(text_config(read_config(folder)).get("tie_word_embeddings"))
