"""Identity of a base model, recorded in its adapters, so that none is put on another base."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxglue.hf.checkpoint import open_checkpoint, read_config
from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.models.config import DecoderConfig

_MOST_TENSORS = 256
_ROWS, _COLUMNS = 4, 256
_UNQUANTIZED = ("norm.weight", ".bias", ".sinks", "embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors that every storage format keeps as they are."""
_COPY_OF_TIED = "lm_head.weight"
_EXPERTS = ".experts."
"""In names of tensors that folders lay out in several ways, and that the digests leave out."""

Identity = Mapping[str, str]
"""`model_type`; `weights`, digest of tensors that stay unquantized; `linears`, of others; `storage`, their format."""


def identify(folder: str | Path) -> Identity:
    """Return the identity of a base model's folder, from a sample of its tensors in bfloat16.

    The folder's dtype and the copy of a tied embedding make no difference; a quantized copy differs in `storage` and
    `linears` alone.

    Raises:
        ValueError: a bad folder.
    """
    raw, files = read_config(folder), open_checkpoint(folder)
    tied = {_COPY_OF_TIED} if raw.get("tie_word_embeddings") else set()
    names = sorted(name for name in files.tensors.keys() - tied if _EXPERTS not in name)
    kept = [name for name in names if name.endswith(_UNQUANTIZED)]
    storage = sorted({str(files.tensors[name].dtype) for name in names if files.tensors[name].dtype.kind in "iub"})
    return {
        "model_type": str(raw.get("model_type")),
        "weights": _digest(files, kept),
        "linears": _digest(files, sorted(set(names) - set(kept))),
        "storage": "+".join(storage) or "unquantized",
    }


def identify_random(config: DecoderConfig, seed: int) -> Identity:
    """Return the identity of random weights: they follow from shape and seed."""
    shape = hashlib.sha256(repr(replace(config, quantize="none")).encode()).hexdigest()[:16]
    return {"model_type": config.model_type, "weights": f"random {seed} {shape}"}


def difference(recorded: Identity, found: Identity) -> str | None:
    """Describe how two identities differ; None if they are of one model, stored in whichever format."""
    names = ["model_type", "weights"]
    if recorded.get("storage") == found.get("storage"):
        names.append("linears")
    for name in names:
        if recorded.get(name) != found.get(name):
            return f"{name} {recorded.get(name)} was recorded, this base has {found.get(name)}"
    return None


def _digest(files: TensorFiles, names: list[str]) -> str:
    digest = hashlib.sha256()
    for name in _spread(names, _MOST_TENSORS):
        digest.update(f"{name} {files.tensors[name].shape}".encode())
        for rows in _sample(files, name):
            digest.update((rows if rows.dtype.kind in "iub" else rows.astype(ml_dtypes.bfloat16)).tobytes())
    return digest.hexdigest()[:16]


def _sample(files: TensorFiles, name: str) -> Iterable[np.ndarray]:
    """Yield the first values of a few rows, spread over the tensor."""
    shape = files.tensors[name].shape
    if len(shape) < 2:
        yield files.read(name)
        return
    for row in _spread(range(shape[0]), _ROWS):
        yield np.ascontiguousarray(files.read_rows(name, row, row + 1).reshape(-1)[:_COLUMNS])


def _spread[T](items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items at equal distances, first and last included."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
