"""Mapped files that must not change in place: values would differ, and reading past a shorter one's end would crash."""

import os
from pathlib import Path

import numpy as np
from jaxtyping import Shaped


class UnchangedFile:
    """A file that stays open; one that replaces it leaves this one readable."""

    def __init__(self, path: Path):
        self._path, self._file = path, path.open("rb")
        self._stamp = self._size_and_time()

    def map(self, dtype: type) -> Shaped[np.ndarray, "N"]:
        """Map the file into memory, for reading."""
        return np.memmap(self._file, dtype, "r")

    def check(self) -> None:
        """Raise ValueError if the file has changed since it was opened."""
        if self._size_and_time() != self._stamp:
            raise ValueError(f"{self._path} was changed while it was in use: bring it back, then start again")

    def _size_and_time(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns
