"""Writing of GGUF files: tensors are read, quantized and written a few at a time."""

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxglue.data.progress import DataProgress, NoProgress
from jaxglue.hf.gguf.layout import GgufTensor, join_mxfp4
from jaxglue.hf.gguf.package import load_gguf
from jaxglue.ops.quant.k_quants import BLOCK_BYTES, SUPER_BLOCK, quantize_super_blocks
from jaxglue.ops.quant.mxfp4 import quantize_mxfp4

_WORKERS = 4
"""Tensors in work at once: enough to read, copy, quantize and write at the same time."""
_ALIGNMENT = 32
_FLOATS = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
_HOST_VALUES = 1 << 20
"""Values that are converted on the host at once, so that they stay in its caches."""
_DEVICE_BLOCKS = 1 << 14
"""Super-blocks that a GPU quantizes at once."""
_CPU_BLOCKS = 1 << 12
"""Super-blocks that a CPU quantizes at once, so that they stay in its caches."""
_LEAST_BLOCKS = 64
"""Super-blocks to which fewer are padded, so that few programs are compiled."""

Metadata = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """A tensor with its type in the file."""

    tensor: GgufTensor
    type: str
    """Type in lower case, such as `q4_k`."""
    importance: np.ndarray | None = None
    """Mean square of each input [in], or [pieces, in] of each piece."""

    @property
    def nbytes(self) -> int:
        """Return the bytes in the file."""
        return values_bytes(math.prod(self.tensor.shape), self.type)


def values_bytes(values: int, type_: str) -> int:
    """Return the bytes of so many values of a type."""
    gguf = load_gguf()
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_.upper()]]
    return values // block * size


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Metadata,
    tensors: Sequence[FileTensor],
    progress: DataProgress | None = None,
) -> None:
    """Write a GGUF file.

    Args:
        path: of the file, which appears beside others in a temporary folder.
        architecture: in llama.cpp's words, such as `qwen3`.
        metadata: values by key.
        tensors: in the order of the file.
        progress: shows the bytes written; by default nothing does.

    Raises:
        ValueError: too little space on the disk, or values that are not finite or above a type's range.
        OSError: a failed write.
    """
    total = sum(_padded(tensor.nbytes) for tensor in tensors)
    _require_space(path, total)
    start = _write_head(path, architecture, metadata, tensors)
    offsets = np.cumsum([start, *(_padded(tensor.nbytes) for tensor in tensors)])
    file = os.open(path, os.O_WRONLY)
    try:
        os.ftruncate(file, int(offsets[-1]))
        with (progress or NoProgress()).stage(f"writing {total / 1e9:.1f} GB", total) as advance:
            _write_tensors(file, list(zip(tensors, map(int, offsets), strict=False)), advance)
        os.fsync(file)
    finally:
        os.close(file)


def _require_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise ValueError(
            f"{path.name} needs {needed / 1e9:.1f} GB, and {path.parent.parent} has {free / 1e9:.1f} GB free: "
            "make room, or name a folder on another disk"
        )


def _write_head(path: Path, architecture: str, metadata: Metadata, tensors: Sequence[FileTensor]) -> int:
    """Write the metadata and the tensors' table; return the first byte of the tensors."""
    gguf = load_gguf()
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for item in tensors:
        kind = gguf.GGMLQuantizationType[item.type.upper()]
        # A dtype other than bytes says that the shape is in values.
        writer.add_tensor_info(item.tensor.name, item.tensor.shape, np.dtype(np.float16), item.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return _padded(path.stat().st_size)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _write_tensors(file: int, items: Sequence[tuple[FileTensor, int]], advance: Callable[[float], None]) -> None:
    """Write all tensors at their offsets, a few pieces at a time."""
    done, waiting = 0, set[Future[int]]()
    with ThreadPoolExecutor(_WORKERS) as pool:
        try:
            for item, offset in items:
                for index, read in enumerate(item.tensor.pieces()):
                    if len(waiting) >= _WORKERS:
                        finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                        done += sum(future.result() for future in finished)
                        advance(done)
                    rows = math.prod(item.tensor.shape) // _pieces(item)
                    at = offset + index * values_bytes(rows, item.type)
                    waiting.add(pool.submit(_write_piece, file, at, item, index, read))
            done += sum(future.result() for future in waiting)
            advance(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _pieces(item: FileTensor) -> int:
    """Return the number of pieces, all of one size: a stack of matrices comes one by one."""
    return item.tensor.shape[0] if len(item.tensor.shape) == 3 else 1


def _write_piece(file: int, offset: int, item: FileTensor, index: int, read: Callable[[], np.ndarray]) -> int:
    """Convert and write a piece; return its bytes."""
    array, written = read(), 0
    size = array.size if item.tensor.packed else values_bytes(array.size, item.type)
    if item.tensor.packed:
        chunks = iter([array.reshape(-1)])
    elif item.type in BLOCK_BYTES or item.type == "mxfp4":
        weights = None if item.importance is None else np.atleast_2d(item.importance)
        importance = None if weights is None else weights[min(index, len(weights) - 1)]
        chunks = _device_chunks(array, item, importance)
    else:
        chunks = _host_chunks(array, item)
    for chunk in chunks:
        written += _write(file, chunk.reshape(-1)[: size - written], offset + written)
    return written


def _write(file: int, data: np.ndarray, offset: int) -> int:
    rest, at = memoryview(np.ascontiguousarray(data)).cast("B"), offset
    while rest:
        count = os.pwrite(file, rest, at)
        rest, at = rest[count:], at + count
    return at - offset


def _host_chunks(array: np.ndarray, item: FileTensor):
    """Yield the bytes of values in a floating-point type, or in blocks as the gguf package makes them."""
    gguf = load_gguf()
    kind = gguf.GGMLQuantizationType[item.type.upper()]
    rows = array.reshape(-1, array.shape[-1])
    step = max(1, _HOST_VALUES // rows.shape[1])
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        if chunk.dtype == _FLOATS.get(item.type):
            yield np.ascontiguousarray(chunk).view(np.uint8)
            continue
        values = chunk.astype(np.float32)
        if item.type in _FLOATS:
            with np.errstate(over="ignore"):
                result = values.astype(_FLOATS[item.type])
            _require_finite(item, bool(np.isfinite(result).all()))
            yield np.ascontiguousarray(result).view(np.uint8)  # of transposed values, whose order stays
        else:
            _require_finite(item, bool(np.isfinite(values).all()))
            yield gguf.quantize(values, kind)


def _device_chunks(array: np.ndarray, item: FileTensor, importance: np.ndarray | None):
    """Yield the bytes of super-blocks, quantized on the default device; the next ones are computed meanwhile.

    MXFP4 goes through in the same portions, the last of them filled with zeros.
    """
    values = np.ascontiguousarray(array).reshape(-1)
    if rest := -values.size % SUPER_BLOCK:
        values = np.concatenate([values, np.zeros(rest, values.dtype)])
    blocks = values.reshape(-1, SUPER_BLOCK)
    most = _CPU_BLOCKS if jax.default_backend() == "cpu" else _DEVICE_BLOCKS
    weights = None if importance is None else importance.astype(np.float32).reshape(-1, SUPER_BLOCK)
    pending = None
    for start in range(0, len(blocks), most):
        chunk = blocks[start : start + most]
        # Few sizes, as each is compiled: a large matrix has one.
        size = most if start else min(most, max(_LEAST_BLOCKS, 1 << (len(chunk) - 1).bit_length()))
        if size > len(chunk):
            chunk = np.concatenate([chunk, np.zeros((size - len(chunk), SUPER_BLOCK), chunk.dtype)])
        following = _quantize(jnp.asarray(chunk), item.type, weights, start), min(most, len(blocks) - start)
        if pending is not None:
            yield _fetch(pending, item)
        pending = following
    assert pending is not None
    yield _fetch(pending, item)


@partial(jax.jit, static_argnames="kind")
def _quantize(blocks, kind, weights, start):
    """Return the bytes of super-blocks from block `start` of rows on, and whether all values are finite."""
    importance = None
    if weights is not None:
        importance = weights[(start + jnp.arange(len(blocks))) % len(weights)]
    finite = jnp.isfinite(blocks).all()
    if kind == "mxfp4":
        quantized = quantize_mxfp4(blocks)
        return join_mxfp4(quantized.blocks, quantized.scales), finite
    return quantize_super_blocks(blocks, kind, importance), finite


def _fetch(pending: Any, item: FileTensor) -> np.ndarray:
    (data, finite), count = pending
    _require_finite(item, bool(finite))
    return np.asarray(data[:count] if count < len(data) else data)


def _require_finite(item: FileTensor, finite: bool) -> None:
    if not finite:
        hint = "; values above 65,504 need --gguf bf16" if item.type == "f16" else ""
        source = ", ".join(item.tensor.sources[:1])
        raise ValueError(f"{source}: not finite (NaN or infinity) in {item.type}{hint}")
