"""Parameters that stay in their files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, eq=False)
class FileParam:
    """Parameter in memory-mapped files, read anew for each use; a leaf of parameter trees."""

    shape: tuple[int, ...]
    """Shape of the parameter before quantization."""
    dtype: Any
    nbytes: int
    """Bytes in the files."""
    read: Callable[[], Any]
    """Returns a numpy array, a view of the page cache where nothing is converted, or a quantized matrix of such."""
