"""Memory-mapped store of tokenized documents; `store_files.py` reads and writes it."""

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float32, Int, Int32, Int64, UInt8

from jaxglue.data.unchanged import UnchangedFile

TOKEN_BYTES = 4
"""Size of a stored token."""
_BLOCK = 2**24
"""Bytes read at a time."""


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """Concatenated documents: document `d` is `tokens[offsets[d] : offsets[d + 1]]`."""

    tokens: Int32[np.ndarray, "N"]
    mask: UInt8[np.ndarray, "N"]
    """1 for tokens to predict."""
    offsets: Int64[np.ndarray, "documents+1"]
    margins: Float32[np.ndarray, "rows"] | None = None
    """Margins of rows of two documents, NaN for anything but a number; None where no row gives one."""
    info: dict[str, Any]
    """`digest` of the content, `max_token`, and the writer's fields."""
    files: tuple[UnchangedFile, ...] = ()
    """Files that the tokens and the mask are mapped from."""

    @property
    def lengths(self) -> Int64[np.ndarray, "documents"]:
        """Return the tokens in each document."""
        return np.diff(self.offsets)

    def targets_within(self, ends: Int64[np.ndarray, "documents"]) -> Int64[np.ndarray, "documents"]:
        """Count target tokens per document truncated at `ends`; first tokens are never targets."""
        counts = np.zeros(len(ends), np.int64)
        cuts = np.searchsorted(self.offsets, np.arange(0, len(self.mask), _BLOCK), side="right") - 1
        for first, last in pairwise([*np.unique(cuts), len(ends)]):
            begin, end = self.offsets[[first, last]]
            starts = self.offsets[first:last] - begin + 1
            counts[first:last] = _sums(np.asarray(self.mask[begin:end]), starts, ends[first:last] - begin)
            self.release()
        return counts

    def check(self) -> None:
        """Raise ValueError if a mapped file has changed since the store was opened."""
        for file in self.files:
            file.check()

    def release(self) -> None:
        """Take mapped pages out of this process's memory; the system's cache keeps them while it has room."""
        for array in (self.tokens, self.mask):
            _release(array)


def _sums(mask: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the sum of the mask between each start and end, 0 where they are not in order."""
    sums = np.zeros(len(starts), np.int64)
    some = np.flatnonzero(ends > starts)
    bounds = np.stack([starts[some], ends[some]], 1).ravel()
    if len(bounds):
        inside = bounds[:-1] if bounds[-1] == len(mask) else bounds
        sums[some] = np.add.reduceat(mask, inside, dtype=np.int64)[::2]
    return sums


def _release(array: Any) -> None:
    if isinstance(array, _Joined):
        array.release()
    elif isinstance(base := array.base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def join_stores(stores: Sequence[TokenStore]) -> TokenStore:
    """Concatenate the documents of stores, without copying their tokens."""
    if len(stores) == 1:
        return stores[0]
    starts = np.cumsum([0, *(len(store.tokens) for store in stores)])
    offsets = [store.offsets[:-1] + start for store, start in zip(stores, starts[:-1], strict=True)]
    digest = hashlib.sha256("".join(store.info["digest"] for store in stores).encode()).hexdigest()
    return TokenStore(
        tokens=_Joined([store.tokens for store in stores]),  # type: ignore[arg-type]
        mask=_Joined([store.mask for store in stores]),  # type: ignore[arg-type]
        offsets=np.concatenate([*offsets, starts[-1:]]),
        margins=_joined_margins(stores),
        files=tuple(file for store in stores for file in store.files),
        info={"digest": digest, "max_token": max(store.info["max_token"] for store in stores)},
    )


def _joined_margins(stores: Sequence[TokenStore]) -> np.ndarray | None:
    if all(store.margins is None for store in stores):
        return None
    sizes = [len(store.lengths) // 2 for store in stores]
    parts = [np.zeros(size) if s.margins is None else s.margins for s, size in zip(stores, sizes, strict=True)]
    return np.concatenate(parts).astype(np.float32)


class _Joined:
    """Concatenation of arrays, to be read by an array of indices."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays, self._starts = arrays, np.cumsum([0, *map(len, arrays)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def release(self) -> None:
        for array in self._arrays:
            _release(array)

    def __getitem__(self, indices: Int[np.ndarray, "N"]) -> np.ndarray:
        owners = np.searchsorted(self._starts, indices, side="right") - 1
        values = np.empty(len(indices), self._arrays[0].dtype)
        for owner in np.unique(owners):
            own = owners == owner
            values[own] = self._arrays[owner][indices[own] - self._starts[owner]]
        return values
