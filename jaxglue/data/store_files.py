"""Checksummed files of a store of tokenized documents."""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from jaxtyping import Float32

from jaxglue.data.store import TokenStore
from jaxglue.data.unchanged import UnchangedFile
from jaxglue.json_file import read_json

if TYPE_CHECKING:
    from jaxglue.data.encode import Encoded

_FILES = {
    "tokens": ("tokens.int32", np.int32),
    "mask": ("mask.uint8", np.uint8),
    "offsets": ("offsets.int64", np.int64),
}
_MARGINS = "margins.float32"
"""File of the margins, in a store that has some."""
_BLOCK = 2**24
"""Bytes read at a time."""


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
    store = TokenStore(**arrays, margins=_read_margins(folder, info["files"]), info=info, files=mapped)
    _check_bounds(store, ranges, folder)
    return store


def _read_margins(folder: Path, digests: dict[str, str]) -> Float32[np.ndarray, "rows"] | None:
    if "margins" not in digests:
        return None
    path = folder / _MARGINS
    if not path.is_file() or file_digest(path) != digests["margins"]:
        raise DamagedStoreError(f"{path} has changed since it was written")
    return np.fromfile(path, np.float32)


def write_store(folder: Path, chunks: "Iterable[Encoded]", **info: Any) -> None:
    """Write the documents under a temporary name, sync them to disk, then rename.

    Raises:
        ValueError: no token at all.
        OSError: a failed write; nothing is left behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    temporary = _temporary(folder)
    temporary.mkdir()
    try:
        content = {**_write_documents(temporary, chunks), **info}
        (temporary / "info.json").write_text(json.dumps({**content, "check": _info_digest(content)}))
        sync(temporary / "info.json")
        sync(temporary)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_store(folder: Path) -> None:
    """Remove a store; open ones stay readable."""
    temporary = _temporary(folder)
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
    with path.open("rb") as file:
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


def _write_documents(folder: Path, chunks: "Iterable[Encoded]") -> dict[str, Any]:
    lengths, margins, largest = [np.zeros(1, np.int64)], [], -1
    with (folder / "tokens.int32").open("wb") as tokens, (folder / "mask.uint8").open("wb") as mask:
        for chunk in chunks:
            tokens.write(chunk.tokens.data)
            mask.write(chunk.mask.data)
            lengths.append(chunk.lengths)
            margins.append(chunk.margins)
            largest = max(largest, int(chunk.tokens.max(initial=-1)))
    if largest < 0:
        raise ValueError("the data set is empty: no row has any text")
    np.cumsum(np.concatenate(lengths), dtype=np.int64).tofile(folder / "offsets.int64")
    for file, _ in _FILES.values():
        sync(folder / file)
    files = {name: file_digest(folder / file) for name, (file, _) in _FILES.items()}
    given = [values for values in margins if values is not None]
    if any(map(np.any, given)):
        np.concatenate(given).tofile(folder / _MARGINS)
        sync(folder / _MARGINS)
        files["margins"] = file_digest(folder / _MARGINS)
    return {"files": files, "digest": _info_digest(files), "max_token": largest}


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


def _temporary(folder: Path) -> Path:
    """Return a hidden name beside `folder` that tells its writer: mkdtemp would exclude other users."""
    return folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def _remove_abandoned(folder: Path) -> None:
    """Remove leftovers of this machine's killed writers."""
    for path in folder.parent.glob(f".{folder.name}.{socket.gethostname()}.*.tmp"):
        if not psutil.pid_exists(int(path.name.split(".")[-3])):
            shutil.rmtree(path, ignore_errors=True)
