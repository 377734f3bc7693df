"""Files of a store of tokenized documents, with their digests, and their content-addressed cache."""

import errno
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import Float32

from jaxglue.data.config import NO_COLUMNS, Columns
from jaxglue.data.store import Encoded, StoreInfo, TokenStore, UnchangedFile
from jaxglue.files.atomic import sync, temporary_beside
from jaxglue.files.json_file import read_json
from jaxglue.files.regular_file import file_digest
from jaxglue.vision.records import RECORD_FILES, ImageRecords, open_records

_BLOCK = 2**24
"""Bytes read at a time."""
_FILES = {
    "tokens": ("tokens.int32", np.int32),
    "mask": ("mask.uint8", np.uint8),
    "offsets": ("offsets.int64", np.int64),
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


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
    images = _open_images(folder, info["files"]) if info.get("images") else None
    store = TokenStore(
        **arrays,
        images=images,
        columns=dict(_read_columns(folder, info["files"])),
        info=cast(StoreInfo, info),
        files=mapped,
    )
    _check_bounds(store, ranges, folder)
    return store


def _read_columns(folder: Path, digests: dict[str, str]) -> Iterator[tuple[str, Float32[np.ndarray, "rows"]]]:
    others = _FILES.keys() | set(RECORD_FILES.values())
    for name in (plural.removesuffix("s") for plural in digests.keys() - others):
        path = _column_file(folder, name)
        if not path.is_file() or file_digest(path) != digests[f"{name}s"]:
            raise DamagedStoreError(f"{path} has changed since it was written")
        yield name, np.fromfile(path, np.float32)


def _open_images(folder: Path, digests: dict[str, str]) -> ImageRecords:
    for name in RECORD_FILES.values():
        if not (folder / name).is_file() or file_digest(folder / name) != digests[name]:
            raise DamagedStoreError(f"{folder / name} has changed since it was written")
    images = open_records(folder)
    if (path := images.changed()) is not None:
        raise DamagedStoreError(f"image {path} was changed or removed since the rows were tokenized")
    return images


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
    images, blob = list[tuple[int, ImageRecords]](), folder / RECORD_FILES["blob"]
    with (folder / "tokens.int32").open("wb") as tokens, (folder / "mask.uint8").open("wb") as mask:
        for chunk in chunks:
            tokens.write(chunk.tokens.data)
            mask.write(chunk.mask.data)
            lengths.append(chunk.lengths)
            columns.append(chunk.columns)
            findings.update(chunk.findings)
            if chunk.images is not None and len(chunk.images):
                with blob.open("ab") as images_file:
                    images_file.write(chunk.images.blob.data)
            if chunk.images is not None:  # without their bytes, which may not fit into memory
                images.append((len(chunk.lengths), replace(chunk.images, blob=chunk.images.blob[:0])))
            largest = max(largest, int(chunk.tokens.max(initial=-1)))
    if largest < 0:
        raise ValueError("the data set is empty: no row has any text")
    np.cumsum(np.concatenate(lengths), dtype=np.int64).tofile(folder / "offsets.int64")
    for file, _ in _FILES.values():
        sync(folder / file)
    files = {name: file_digest(folder / file) for name, (file, _) in _FILES.items()}
    count = sum(len(records) for _, records in images)
    if count:
        files |= _write_images(folder, images)
    for name, value in absent.items():
        values = np.concatenate([chunk[name] for chunk in columns])
        if (values != value).any():
            path = _column_file(folder, name)
            values.tofile(path)
            sync(path)
            files[f"{name}s"] = file_digest(path)
    info = {"files": files, "digest": _info_digest(files), "max_token": largest, "findings": findings}
    return info | ({"images": count} if count else {})


def _write_images(folder: Path, parts: list[tuple[int, ImageRecords]]) -> dict[str, str]:
    """Write the images of chunks of documents, whose bytes are written; return the files' digests."""
    records = ImageRecords.joined([part for _, part in parts], [documents for documents, _ in parts])
    for name, path in RECORD_FILES.items():
        if name != "blob":
            np.ascontiguousarray(getattr(records, name)).tofile(folder / path)
        sync(folder / path)
    return {file: file_digest(folder / file) for file in RECORD_FILES.values()}


def _publish(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
        sync(folder.parent)
    except OSError:
        if not (folder / "info.json").is_file():  # else another process published the same content
            raise


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
