"""Digest by which a folder's weights are recognized."""

import hashlib
from pathlib import Path

import numpy as np

from jaxglue.hf.checkpoint import open_checkpoint
from jaxglue.hf.tensor_files import TensorFiles

_LINES = 4
"""Lines read of each tensor: checkpoints are too large to read."""
_SMALL = 4096
"""Elements of a tensor that is read whole."""


def weights_digest(folder: str | Path) -> str:
    """Return 16 hexadecimal digits of every tensor's name, shape, dtype and sampled values.

    Tensors up to 4,096 elements are read whole, others in four lines along the last axis, evenly spaced.
    """
    files, digest = open_checkpoint(folder), hashlib.sha256()
    for name, info in sorted(files.tensors.items()):
        digest.update(f"{name} {info.shape} {info.dtype}".encode())
        digest.update(_sample(files, name).tobytes())
    return digest.hexdigest()[:16]


def _sample(files: TensorFiles, name: str) -> np.ndarray:
    *lines, width = shape = files.tensors[name].shape or (1,)
    count = int(np.prod(lines))
    if int(np.prod(shape)) <= _SMALL:
        return files.read(name)
    if not lines:
        starts = np.linspace(0, width - _SMALL // _LINES, _LINES).astype(int)
        return np.concatenate([files.read_rows(name, start, start + _SMALL // _LINES) for start in starts])
    chosen = np.unique(np.linspace(0, count - 1, _LINES).astype(int))
    return np.stack([files.read_line(name, np.unravel_index(line, lines)) for line in chosen])
