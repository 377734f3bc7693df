"""Digest of a model's or adapter's folder that a run reads beside its base."""

import hashlib
import json
from pathlib import Path

from jaxglue.files.json_file import read_json
from jaxglue.files.regular_file import file_digest
from jaxglue.hf.adapter import CONFIG, TENSORS, find_base
from jaxglue.hf.checkpoint import has_weights, read_config
from jaxglue.hf.identity import weights_digest


def folder_digest(folder: str | Path) -> str:
    """Return 16 hexadecimal digits of a folder's settings and weights, and of the base under an adapter.

    Adapters are read whole; of models, large tensors are sampled as those of the base in training.

    Raises:
        ValueError: neither a model's folder nor an adapter's, or no base for it.
    """
    if (Path(folder) / CONFIG).is_file():
        return _digest(adapter_digest(folder), folder_digest(find_base(folder)))
    weights = weights_digest(folder) if has_weights(Path(folder)) else "random"
    return _digest(json.dumps(read_config(folder), sort_keys=True), weights)


def adapter_digest(folder: str | Path) -> str:
    """Return 16 hexadecimal digits of an adapter's settings and tensors."""
    folder = Path(folder)
    return _digest(json.dumps(read_json(folder / CONFIG), sort_keys=True), file_digest(folder / TENSORS))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
