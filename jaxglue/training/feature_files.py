"""Features of images on disk: a file for each, of its digest and values, in a folder of what they depend on."""

import hashlib
import logging
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxglue.data.store_files import content_key
from jaxglue.files.atomic import atomic_file

_VERSION = 2
"""Increment when the same tower and images yield other values."""
_SHARE = 0.5
"""Of the disk's free space, for features."""
_READERS = 4
"""Files read at a time."""
_DIGEST = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


class FeatureFiles:
    """Files of images' features by `Image.cache_key`; those that other runs on the same tower wrote are read too.

    Args:
        cache: folder in which the features have one of their own.
        computed_by: all that the values depend on, in JSON's types.
        width: D of the features.
        dtype: of the features.
    """

    def __init__(self, cache: Path, computed_by: Iterable[Any], width: int, dtype: Any):
        device = jax.local_devices()[0].device_kind
        key = content_key(_VERSION, *computed_by, width, str(dtype), device, jax.__version__, version("pillow"))
        self.folder = cache / f"features-{key}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._width, self._dtype = width, np.dtype(dtype)
        self._names = {path.name for path in self.folder.iterdir()}
        self._room = _SHARE * shutil.disk_usage(self.folder).free

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and _name(key) in self._names

    def read(self, keys: Iterable[tuple]) -> dict[tuple, Float[np.ndarray, "I D"]]:
        """Return the features of those that are on disk and whole; damaged files are forgotten, and said."""
        known = [key for key in keys if key in self]
        with ThreadPoolExecutor(_READERS) as pool:  # digests let other threads run
            found = dict(zip(known, pool.map(self._read, known), strict=True))
        for key in [key for key, features in found.items() if features is None]:
            self._names.discard(_name(key))
            _log.warning("%s is damaged: the features of its image are computed again", self.folder / _name(key))
        return {key: features for key, features in found.items() if features is not None}

    def _read(self, key: tuple) -> Float[np.ndarray, "I D"] | None:
        try:
            content = (self.folder / _name(key)).read_bytes()
        except FileNotFoundError:
            return None
        digest, values = content[:_DIGEST], memoryview(content)[_DIGEST:]
        row = self._width * self._dtype.itemsize
        if not values or len(values) % row or hashlib.sha256(values).digest() != digest:
            return None
        return np.frombuffer(values, self._dtype).reshape(-1, self._width)

    def write(self, key: tuple, features: Float[np.ndarray, "I D"]) -> bool:
        """Write an image's features; return False where they have no room, as the disk keeps half of its free space.

        Raises:
            OSError: a failed write, naming the file.
        """
        if key in self:
            return True
        if features.nbytes > self._room:
            return False
        self._room -= features.nbytes
        values = np.ascontiguousarray(features).view(np.uint8).data
        with atomic_file(self.folder / _name(key)) as temporary, temporary.open("wb") as file:
            file.write(hashlib.sha256(values).digest())
            file.write(values)
        self._names.add(_name(key))
        return True


def _name(key: tuple) -> str:
    digest, rows, columns = key
    return f"{digest.hex()}-{rows}x{columns}"
