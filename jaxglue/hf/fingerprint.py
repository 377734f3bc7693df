"""Digests by which weights are recognized: checkpoints are too large to read, so large tensors are sampled."""

import hashlib
from collections.abc import Iterable
from math import ceil, prod
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxglue.hf.checkpoint import open_checkpoint
from jaxglue.hf.tensor_files import TensorFiles

_WHOLE = 4096
"""Elements of a tensor that is read whole."""
_PLACES, _ELEMENTS = 4, 256
"""Places read of a larger one, evenly spaced, and elements at each: rows, or parts of a row of three or more axes."""


def weights_digest(folder: str | Path) -> str:
    """Return 16 hexadecimal digits of every tensor's name, shape, dtype and sampled values."""
    files = open_checkpoint(folder)
    return digest_tensors(files, files.tensors)


def digest_tensors(files: TensorFiles, names: Iterable[str], *, any_float: bool = False) -> str:
    """Return 16 hexadecimal digits of tensors' names, shapes, dtypes and sampled values.

    Args:
        files: that hold the tensors.
        names: of the tensors, in any order.
        any_float: digest floating-point values as bfloat16, whichever dtype they are stored in.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        info = files.tensors[name]
        rounds = any_float and info.dtype.kind not in "iub"
        digest.update(f"{name} {info.shape} {'float' if rounds else info.dtype}".encode())
        values = _sample(files, name)
        digest.update((values.astype(ml_dtypes.bfloat16) if rounds else values).tobytes())
    return digest.hexdigest()[:16]


def _sample(files: TensorFiles, name: str) -> np.ndarray:
    shape = files.tensors[name].shape
    if prod(shape) <= _WHOLE:
        return files.read(name)
    if len(shape) > 2:
        places = np.unique(np.linspace(0, prod(shape[:-1]) - 1, _PLACES).astype(int))
        return np.concatenate([files.read_line(name, np.unravel_index(place, shape[:-1])) for place in places])
    rows = ceil(_ELEMENTS / prod(shape[1:]))
    starts = np.linspace(0, max(0, shape[0] - rows), _PLACES).astype(int)
    return np.concatenate([files.read_rows(name, start, start + rows).reshape(-1) for start in starts])
