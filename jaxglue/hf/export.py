"""Complete Hugging Face model folders from what was trained, written tensor by tensor."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.checkpoint import MAX_SHARD_BYTES, open_checkpoint, read_config
from jaxglue.hf.files import atomic_folder
from jaxglue.hf.tensor_files import TensorInfo, write_shards

_COPIED = (  # what belongs to a model beside its weights; other files of the base's folder stay behind
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
    "NOTICE*",
)


def export_adapter(
    adapter: str | Path, base: str | Path, output: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes the base model with an adapter merged in: W + scale · B · A in float32, cast to the base's dtype.

    Args:
        adapter: a PEFT folder.
        base: the model folder that the adapter was trained on.
        output: must not exist, or be empty; it appears complete or not at all.
        max_shard_bytes: size at which a new file is begun.

    Raises:
        ValueError: an adapter that does not fit the base, bad input folders, or an output folder that is not empty.
        OSError: the disk is full, ….
    """
    read_config(base)
    files = open_checkpoint(base)
    factors = _factors(adapter)
    for name, (b, a) in factors.items():
        _require_fit(name, (b.shape[0], a.shape[1]), files.tensors.get(name), adapter, base)

    def merged(name: str) -> np.ndarray:
        weight = files.read(name)
        if name not in factors:
            return weight
        b, a = factors[name]
        total = b @ a
        total += weight.astype(np.float32)
        return total.astype(weight.dtype)

    specs = {name: jax.ShapeDtypeStruct(info.shape, info.dtype) for name, info in files.tensors.items()}
    with atomic_folder(Path(output)) as temporary:
        _copy_files(base, temporary)
        write_shards(temporary, specs, merged, max_shard_bytes)


def _factors(adapter: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name of an adapted weight → (scale · B [out, R], A [R, in]) in float32."""
    config, lora = load_adapter(adapter)
    linears = dict.fromkeys(name.rpartition(".")[0] for name in lora)
    scale = np.float32(config.scale)
    return {f"{linear}.weight": (scale * lora[f"{linear}.lora_B"], lora[f"{linear}.lora_A"]) for linear in linears}


def _require_fit(
    name: str, shape: tuple[int, int], info: TensorInfo | None, adapter: str | Path, base: str | Path
) -> None:
    if info is None:
        raise ValueError(f"{adapter} does not belong to {base}: it adapts {name}, which the base does not have")
    if info.shape != shape:
        raise ValueError(
            f"{adapter} does not belong to {base}: for {name} it is {list(shape)}, the base {list(info.shape)}"
        )
    if info.dtype.kind in "iub":
        raise ValueError(f"{name} in {info.file} is quantised ({info.dtype}): merge into the unquantised checkpoint")


def save_model(
    folder: str | Path,
    tensors: Mapping[str, jax.Array],
    base: str | Path,
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a complete model folder from parameters in memory.

    Args:
        folder: a model that an earlier call wrote there is replaced; it appears complete or not at all.
        tensors: all parameters, by Hugging Face's full name.
        base: the folder whose config.json and tokenizer belong to them.
        dtype: of the written tensors, cast one by one; by default each keeps its own.
        max_shard_bytes: size at which a new file is begun.

    Raises:
        OSError: the disk is full, ….
    """
    specs = {name: jax.ShapeDtypeStruct(tensor.shape, dtype or tensor.dtype) for name, tensor in tensors.items()}
    with atomic_folder(Path(folder), replace=True) as temporary:
        _copy_files(base, temporary)
        write_shards(
            temporary, specs, lambda name: np.asarray(tensors[name].astype(specs[name].dtype)), max_shard_bytes
        )


def _copy_files(base: str | Path, output: Path) -> None:
    for pattern in _COPIED:
        for path in filter(Path.is_file, Path(base).glob(pattern)):
            shutil.copyfile(path, output / path.name)
