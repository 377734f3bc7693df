"""Memory-mapped store of tokenized documents, its checksummed files, and their content-addressed cache."""

import errno
import hashlib
import json
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

import numpy as np
from jaxtyping import Float32, Int, Int32, Int64, Shaped, UInt8

from jaxglue.atomic import temporary_beside
from jaxglue.data.config import NO_COLUMNS, Columns
from jaxglue.json_file import read_json
from jaxglue.regular_file import open_regular

TOKEN_BYTES = 4
"""Size of a stored token."""
_BLOCK = 2**24
"""Bytes read at a time."""
_FILES = {
    "tokens": ("tokens.int32", np.int32),
    "mask": ("mask.uint8", np.uint8),
    "offsets": ("offsets.int64", np.int64),
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


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
    """Concatenated documents."""

    tokens: Int32[np.ndarray, "N"]
    mask: UInt8[np.ndarray, "N"]
    """1 for tokens to predict."""
    lengths: Int32[np.ndarray, "documents"]
    columns: Mapping[str, Float32[np.ndarray, "rows"]] = MappingProxyType({})
    """Values of the rows in each column that is read; NaN for anything but a number."""
    findings: Mapping[str, int] = MappingProxyType({})
    """Rows by what was found in them: special tokens that are read as text, and further ones of `Encoder`."""


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
    info: StoreInfo = {
        "digest": digest,
        "max_token": max(store.info["max_token"] for store in stores),
        "findings": sum_findings(store.info.get("findings", {}) for store in stores),
    }
    return TokenStore(
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


class DamagedStoreError(ValueError):
    """The files of a store differ from those written."""


def open_store(folder: Path) -> TokenStore:
    """Memory-map a store of `write_store`, after comparing every file with its digest.

    Raises:
        DamagedStoreError: a missing or changed file, or values out of bounds.
        OSError: a file that may not be read.
    """
    info = _read_info(folder)
    ranges = {}
    for name, (file, dtype) in _FILES.items():
        digest, *ranges[name] = _scan(folder / file, dtype)
        if digest != info["files"][name]:
            raise DamagedStoreError(f"{folder / file} has changed since it was written")
    files = {name: UnchangedFile(folder / file) for name, (file, _) in _FILES.items()}
    arrays = {name: files[name].map(dtype) for name, (_, dtype) in _FILES.items()}
    arrays["offsets"], mapped = np.array(arrays["offsets"]), (files["tokens"], files["mask"])
    store = TokenStore(
        **arrays, columns=dict(_read_columns(folder, info["files"])), info=cast(StoreInfo, info), files=mapped
    )
    _check_bounds(store, ranges, folder)
    return store


def _read_columns(folder: Path, digests: dict[str, str]) -> Iterator[tuple[str, Float32[np.ndarray, "rows"]]]:
    for name in (plural.removesuffix("s") for plural in digests.keys() - _FILES.keys()):
        path = _column_file(folder, name)
        if not path.is_file() or file_digest(path) != digests[f"{name}s"]:
            raise DamagedStoreError(f"{path} has changed since it was written")
        yield name, np.fromfile(path, np.float32)


def _column_file(folder: Path, name: str) -> Path:
    return folder / f"{name}s.float32"


def write_store(folder: Path, chunks: Iterable[Encoded], columns: Columns = NO_COLUMNS, **info: Any) -> None:
    """Write the documents under a temporary name, sync them to disk, then rename.

    Args:
        folder: of the store.
        chunks: documents with the columns of their rows.
        columns: values of rows that give none; a column of these alone is left out.
        info: further fields of `TokenStore.info`.

    Raises:
        ValueError: no token at all.
        OSError: a failed write; nothing is left behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(folder)
    temporary.mkdir()
    try:
        content = {**_write_documents(temporary, chunks, columns), **info}
        (temporary / "info.json").write_text(json.dumps({**content, "check": _info_digest(content)}))
        sync(temporary / "info.json")
        sync(temporary)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_store(folder: Path) -> None:
    """Remove a store; open ones stay readable."""
    temporary = temporary_beside(folder)
    os.rename(folder, temporary)
    shutil.rmtree(temporary)


def _read_info(folder: Path) -> dict[str, Any]:
    try:
        info = read_json(folder / "info.json")
        check = info.pop("check")
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise DamagedStoreError(f"{folder / 'info.json'} is damaged or missing") from error
    if check != _info_digest(info):
        raise DamagedStoreError(f"{folder / 'info.json'} has changed since it was written")
    return info


def _info_digest(info: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _scan(path: Path, dtype: type) -> tuple[str, int, int]:
    """Return the SHA-256 of a file with the least and the greatest of 0 and its values, read block by block."""
    digest, low, high = hashlib.sha256(), 0, 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                values: np.ndarray = np.frombuffer(block, dtype, len(block) // np.dtype(dtype).itemsize)
                low, high = min(low, int(values.min(initial=0))), max(high, int(values.max(initial=0)))
    except FileNotFoundError as error:
        raise DamagedStoreError(f"{path} is missing") from error
    return digest.hexdigest(), low, high


def _check_bounds(store: TokenStore, ranges: dict[str, list[int]], folder: Path) -> None:
    """Check the values: a digest shows changes, not values that were wrong when written."""
    offsets, count = store.offsets, len(store.tokens)
    ordered = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == count and bool((np.diff(offsets) >= 0).all())
    if not ordered or len(store.mask) != count or ranges["mask"][1] > 1:
        raise DamagedStoreError(f"{folder} holds offsets or masks out of bounds")
    if ranges["tokens"] != [0, store.info["max_token"]]:
        raise DamagedStoreError(f"{folder} holds token ids out of bounds")


def _write_documents(folder: Path, chunks: Iterable[Encoded], absent: Columns) -> dict[str, Any]:
    lengths, columns, largest, findings = [np.zeros(1, np.int64)], [], -1, Counter[str]()
    with (folder / "tokens.int32").open("wb") as tokens, (folder / "mask.uint8").open("wb") as mask:
        for chunk in chunks:
            tokens.write(chunk.tokens.data)
            mask.write(chunk.mask.data)
            lengths.append(chunk.lengths)
            columns.append(chunk.columns)
            findings.update(chunk.findings)
            largest = max(largest, int(chunk.tokens.max(initial=-1)))
    if largest < 0:
        raise ValueError("the data set is empty: no row has any text")
    np.cumsum(np.concatenate(lengths), dtype=np.int64).tofile(folder / "offsets.int64")
    for file, _ in _FILES.values():
        sync(folder / file)
    files = {name: file_digest(folder / file) for name, (file, _) in _FILES.items()}
    for name, value in absent.items():
        values = np.concatenate([chunk[name] for chunk in columns])
        if (values != value).any():
            path = _column_file(folder, name)
            values.tofile(path)
            sync(path)
            files[f"{name}s"] = file_digest(path)
    return {"files": files, "digest": _info_digest(files), "max_token": largest, "findings": findings}


def _publish(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
        sync(folder.parent)
    except OSError:
        if not (folder / "info.json").is_file():  # else another process published the same content
            raise


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def content_key(*parts: Any) -> str:
    """Return a name for the result of these inputs, given in JSON's types."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def open_or_write(folder: Path, write: Callable[[], None]) -> tuple[TokenStore, str]:
    """Open the store in `folder`, written first if it is absent or damaged.

    Returns:
        the store, and the damage found, empty if there was none.

    Raises:
        ValueError: a cache that may not be read or written.
        OSError: a full disk.
    """
    try:
        if not folder.is_dir():
            write()
        try:
            return open_store(folder), ""
        except DamagedStoreError as error:
            damage = f"{error}: tokenized again"
        remove_store(folder)
        write()
        return open_store(folder), damage
    except OSError as error:
        if error.errno in _CLOSED:
            reason = f"{error.strerror}: {error.filename}"
            hint = "name a folder of your own with --cache-dir, or have its owner open it to your group"
            raise ValueError(f"cache_dir {folder.parent}: {reason}: {hint}") from error
        if error.errno not in _FULL:
            raise
        hint = "cannot hold the tokenized data: make room, or name another folder with --cache-dir"
        raise OSError(error.errno, f"{error.strerror}: {folder.parent} {hint}") from error
