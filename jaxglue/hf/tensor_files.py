"""Safetensors files, read and written one tensor at a time.

The library only writes tensors that are all in memory, hence the writer here. Format: 8-byte little-endian header
length, JSON header {name: {dtype, shape, data_offsets}}, data without gaps; see
https://github.com/huggingface/safetensors#format.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxglue.data.progress import DataProgress, NoProgress
from jaxglue.data.store import UnchangedFile
from jaxglue.files.regular_file import open_regular

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class StoredNames(Protocol):
    """Names of tensors in files, and the same tensors' names in a model."""

    def ours(self, stored: str) -> str | None:
        """Return a tensor's name in the model; None for those of other parts."""

    def stored(self, name: str) -> str:
        """Invert `ours`."""


class FolderNames(Protocol):
    """Names of tensors in files of which several spellings exist."""

    def names(self, stored: Iterable[str]) -> StoredNames:
        """Return the names in files that have these tensors."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Header entry of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    """First byte in the file."""


class TensorFiles:
    """Safetensors files with checked headers; data are read on request, by several threads at once.

    `tensors` are the text model's, under its names; in a wrapper's folder, `others` are those of the parts around it.

    Args:
        paths: of the files.
        names: the wrapper or spelling by which they have others; None where they have the model's.

    Raises:
        ValueError: a missing, truncated or corrupt file, an unsupported dtype, or a tensor in two files.
    """

    def __init__(self, paths: Iterable[Path], names: FolderNames | None = None):
        self.tensors: dict[str, TensorInfo] = {}
        self.others: dict[str, TensorInfo] = {}
        self._metadata: dict[str, str] = {}
        for path in paths:
            tensors, metadata = _read_header(path)
            for name in tensors.keys() & self.tensors.keys():
                raise ValueError(f"tensor {name} is both in {self.tensors[name].file} and in {path}")
            self.tensors |= tensors
            self._metadata |= metadata
        self._given = names
        self.names: StoredNames | None = None if names is None else names.names(self.tensors)
        if self.names is not None:
            self._split(self.names)

    def _split(self, names: StoredNames) -> None:
        """Set the parts around the text model apart, and name its tensors as it does alone."""
        stored, self.tensors = self.tensors, {}
        for name, info in stored.items():
            ours = names.ours(name)
            if ours is None:
                self.others[name] = info
            elif ours in self.tensors:
                raise ValueError(f"tensor {ours} has two names in {info.file}, of which one is {name}: remove one")
            else:
                self.tensors[ours] = info

    def take(self, names: Iterable[str]) -> None:
        """Make tensors of parts around the text model, such as a vision tower's, tensors of the model."""
        if self.names is None:
            return
        for name in names:
            if name not in self.tensors and (info := self.others.pop(self.names.stored(name), None)):
                self.tensors[name] = info

    def __contains__(self, stored: str) -> bool:
        """Tell whether the files hold a tensor of this name."""
        return stored in self.others or (stored if self.names is None else self.names.ours(stored)) in self.tensors

    def read(self, name: str) -> np.ndarray:
        """Read a tensor into its own memory."""
        return self._read(name, 0, self._info(name).shape)

    def _info(self, name: str) -> TensorInfo:
        return self.tensors[name] if name in self.tensors else self.others[name]

    def metadata(self) -> dict[str, str]:
        """Return the texts that the files hold beside their tensors."""
        return self._metadata

    def read_rows(self, name: str, start: int, stop: int, buffer: np.ndarray | None = None) -> np.ndarray:
        """Read rows `start:stop` of a tensor, clipped to its end, into the bytes of a buffer if one is given."""
        rows, *rest = self.tensors[name].shape
        return self._read(name, start * math.prod(rest), (min(stop, rows) - start, *rest), buffer)

    def read_line(self, name: str, index: tuple[int, ...]) -> np.ndarray:
        """Read the values along a tensor's last axis at an index of the others."""
        *others, length = self.tensors[name].shape
        return self._read(name, int(np.ravel_multi_index(index, others)) * length, (length,))

    def _read(self, name: str, first: int, shape: tuple[int, ...], buffer: np.ndarray | None = None) -> np.ndarray:
        """Read an array that begins at the tensor's element `first`; other threads run meanwhile."""
        info = self._info(name)
        size = math.prod(shape) * info.dtype.itemsize
        data = np.empty(size, np.uint8) if buffer is None else buffer[:size]
        _read_into(data, info.file, info.start + first * info.dtype.itemsize)
        return data.view(info.dtype).reshape(shape)

    def mapped(self) -> "MappedFiles":
        """Return the same files, mapped into memory."""
        return MappedFiles({info.file for info in (*self.tensors.values(), *self.others.values())}, self._given)


class MappedFiles(TensorFiles):
    """Safetensors files mapped into memory: tensors are read-only views of the page cache.

    A file that is replaced stays readable; one that is changed in place is refused.
    """

    def __init__(self, paths: Iterable[Path], names: FolderNames | None = None):
        super().__init__(paths, names)
        infos = (*self.tensors.values(), *self.others.values())
        self._opened = {file: UnchangedFile(file) for file in {info.file for info in infos}}
        self._bytes = {file: opened.map(np.uint8).view(np.ndarray) for file, opened in self._opened.items()}

    def _read(self, name: str, first: int, shape: tuple[int, ...], buffer: np.ndarray | None = None) -> np.ndarray:
        assert buffer is None, "a view needs none"
        info = self._info(name)
        self._opened[info.file].check()
        start, size = info.start + first * info.dtype.itemsize, math.prod(shape) * info.dtype.itemsize
        return self._bytes[info.file][start : start + size].view(info.dtype).reshape(shape)


def _read_into(target: np.ndarray, path: Path, offset: int) -> None:
    # The library's own reads hold the interpreter's lock, so that several at once take turns.
    rest = memoryview(target)
    with path.open("rb", buffering=0) as file:
        while rest:
            count = os.preadv(file.fileno(), [rest], offset)
            if not count:
                raise ValueError(f"{path} ended while it was read: download or copy it again")
            rest, offset = rest[count:], offset + count


def _read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return a file's tensors, and the texts beside them; the library checks the header."""
    try:
        open_regular(path).close()
        with safe_open(path, framework="numpy") as handle:
            views = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
            starts = _data_starts(path)
            return {name: _info(path, view, name, starts) for name, view in views.items()}, handle.metadata() or {}
    except FileNotFoundError as error:  # raised without permission, too
        reason = "cannot be opened: check its permissions" if path.exists() else "does not exist"
        raise ValueError(f"{path} {reason}") from error
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}): download or copy it again") from error


def _info(path: Path, view, name: str, starts: Mapping[str, int]) -> TensorInfo:
    code = view.get_dtype()
    if code not in _DTYPES:
        raise ValueError(f"tensor {name} in {path} has dtype {code}; supported are {', '.join(_DTYPES)}")
    return TensorInfo(file=path, shape=tuple(view.get_shape()), dtype=_DTYPES[code], start=starts[name])


def _data_starts(path: Path) -> dict[str, int]:
    """Return the first byte of each tensor in a file whose header is known to be sound."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if "data_offsets" in entry}


def write_file(
    path: Path,
    specs: Mapping[str, jax.ShapeDtypeStruct],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file, calling `read` for one tensor at a time, with texts of `metadata` beside them.

    Raises:
        ValueError: an unsupported dtype.
        OSError: a failed write; the caller removes the partial file (`atomic_file`, `atomic_folder`).
    """
    # Widest dtype first keeps every tensor aligned for memory mapping.
    names = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    with path.open("wb") as file:
        file.write(_header(names, specs, metadata or {}))
        for name in names:
            array = np.asarray(read(name), order="C")
            assert (array.shape, array.dtype) == (specs[name].shape, specs[name].dtype), name
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def _header(names: Iterable[str], specs: Mapping[str, jax.ShapeDtypeStruct], metadata: Mapping[str, str]) -> bytes:
    # transformers reads the framework from the metadata.
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name in names:
        spec, start = specs[name], end
        end += nbytes(spec)
        entries[name] = {"dtype": _code(name, spec.dtype), "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _code(name: str, dtype: np.dtype) -> str:
    if np.dtype(dtype) not in _CODES:
        raise ValueError(
            f"tensor {name} has dtype {dtype}, which cannot be written; supported are {', '.join(_DTYPES)}"
        )
    return _CODES[np.dtype(dtype)]


def nbytes(spec: jax.ShapeDtypeStruct) -> int:
    """Return a tensor's size in bytes."""
    return spec.size * spec.dtype.itemsize


def plan_shards(specs: Mapping[str, jax.ShapeDtypeStruct], max_bytes: int) -> list[list[str]]:
    """Split names in order into groups of at most `max_bytes`, or of one larger tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + nbytes(spec) > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes(spec)
    return shards


def write_shards(
    folder: Path,
    specs: Mapping[str, jax.ShapeDtypeStruct],
    read: Callable[[str], np.ndarray],
    max_shard_bytes: int,
    progress: DataProgress | None = None,
) -> None:
    """Write `model.safetensors`, or numbered shards and their index, into an existing folder, and show the progress."""
    total, done = sum(map(nbytes, specs.values())), 0
    with (progress or NoProgress()).stage(f"writing {total / 1e9:.1f} GB", total) as advance:

        def read_metered(name: str) -> np.ndarray:
            nonlocal done
            advance(done)
            done += nbytes(specs[name])
            return read(name)

        _write_shards(folder, specs, read_metered, max_shard_bytes)


def _write_shards(
    folder: Path, specs: Mapping[str, jax.ShapeDtypeStruct], read: Callable[[str], np.ndarray], max_shard_bytes: int
) -> None:
    shards = plan_shards(specs, max_shard_bytes)
    if len(shards) == 1:
        return write_file(folder / SINGLE, specs, read)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        write_file(folder / file, {name: specs[name] for name in names}, read)
        weight_map |= dict.fromkeys(names, file)
    total = sum(map(nbytes, specs.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
