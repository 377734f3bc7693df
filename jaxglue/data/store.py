"""Memory-mapped store of tokenized documents."""

import hashlib
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
from jaxtyping import Float32, Int, Int32, Int64, Shaped, UInt8

from jaxglue.vision.records import ImageRecords

TOKEN_BYTES = 4
"""Size of a stored token."""
_BLOCK = 2**24
"""Bytes of a mask counted at a time."""


class UnchangedFile:
    """A mapped file that must not change in place: values would differ, and reading past a shorter one's end crashes.

    It stays open; one that replaces it leaves this one readable.
    """

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


class Encoded(NamedTuple):
    """Concatenated documents, which processes send each other."""

    tokens: Int32[np.ndarray, "N"]
    mask: UInt8[np.ndarray, "N"]
    """1 for tokens to predict."""
    lengths: Int32[np.ndarray, "documents"]
    columns: Mapping[str, Float32[np.ndarray, "rows"]] = {}
    """Values of the rows in each column that is read; NaN for anything but a number."""
    findings: Mapping[str, int] = {}
    """Rows by what was found in them: special tokens that are read as text, and further ones of `Encoder`."""
    images: ImageRecords | None = None
    """Images of the documents; None of a model that sees none."""


class StoreInfo(TypedDict):
    """Facts about a store's documents, as JSON."""

    digest: str
    """Digest of the content."""
    max_token: int
    findings: NotRequired[dict[str, int]]
    """See `Encoded`."""
    files: NotRequired[dict[str, str]]
    """Digests of the files by name."""
    format: NotRequired[str]
    """Format of the rows."""
    images: NotRequired[int]
    """Images of the documents."""
    unused: NotRequired[list[str]]
    """Columns of the rows that the format does not use."""


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """Concatenated documents: document `d` is `tokens[offsets[d] : offsets[d + 1]]`."""

    tokens: Int32[np.ndarray, "N"]
    mask: UInt8[np.ndarray, "N"]
    """1 for tokens to predict."""
    offsets: Int64[np.ndarray, "documents+1"]
    info: StoreInfo
    columns: Mapping[str, Float32[np.ndarray, "rows"]] = field(default_factory=dict)
    """Values of the rows by column, NaN for anything but a number; without columns that no row gives."""
    files: tuple[UnchangedFile, ...] = ()
    """Files that the tokens and the mask are mapped from."""
    images: ImageRecords | None = None
    """Images of the documents; None without any."""

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

    def count_targets(self, vocab_size: int) -> Int64[np.ndarray, "V"]:
        """Return how often each token is one to predict."""
        counts = np.zeros(vocab_size, np.int64)
        for first in range(0, len(self.mask), _BLOCK):
            places = np.arange(first, min(first + _BLOCK, len(self.mask)))
            counts += np.bincount(self.tokens[places[self.mask[places] > 0]], minlength=vocab_size)
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
    info: StoreInfo = {
        "digest": digest,
        "max_token": max(store.info["max_token"] for store in stores),
        "findings": sum_findings(store.info.get("findings", {}) for store in stores),
    }
    seen = [store.images or ImageRecords.of([]) for store in stores]
    images = ImageRecords.joined(seen, [len(store.lengths) for store in stores]) if any(map(len, seen)) else None
    return TokenStore(
        images=images,
        tokens=_Joined([store.tokens for store in stores]),  # type: ignore[arg-type]
        mask=_Joined([store.mask for store in stores]),  # type: ignore[arg-type]
        offsets=np.concatenate([*offsets, starts[-1:]]),
        files=tuple(file for store in stores for file in store.files),
        info=info,
    )


def sum_findings(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the rows of all parts by what was found in them."""
    total = Counter[str]()
    for part in parts:
        total.update(part)
    return dict(total)


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
