"""Merged Hugging Face folders from a base model and what was trained on it, streamed tensor by tensor."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.checkpoint import MAX_SHARD_BYTES, open_checkpoint, read_config
from jaxglue.hf.files import atomic_folder
from jaxglue.hf.tensor_files import TensorFiles, write_shards

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


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a trained model as a Hugging Face folder that transformers, vLLM and others load."""

    base: Path
    """Folder of the model that was trained."""
    output: Path
    """The new folder; must not exist, or be empty."""
    adapter: Path | None = None
    """A PEFT adapter folder, to be merged into the base."""
    parameters: Path | None = None
    """A folder of fully fine-tuned parameters in safetensors, to replace the base's."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    """Size at which a new file is begun, in bytes."""

    def __post_init__(self):
        if (self.adapter is None) == (self.parameters is None):
            raise ValueError("export needs either an adapter folder or a parameters folder: give one of them")


Change = Callable[[str, np.ndarray], np.ndarray]
"""A tensor's name in the file and its value in the base model → its float32 or own-dtype value after training."""


def export(config: ExportConfig) -> None:
    """Writes the merged folder; errors are those of `export_adapter` and `export_parameters`."""
    if config.adapter:
        export_adapter(config.adapter, config.base, config.output, config.max_shard_bytes)
    elif config.parameters:
        export_parameters(config.parameters, config.base, config.output, config.max_shard_bytes)


def export_adapter(
    adapter: str | Path, base: str | Path, output: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes the base model with an adapter merged in: W + scale · B · A in float32, cast to the base's dtype.

    Raises:
        ValueError: an adapter that does not fit the base, bad input folders, or an output folder that is not empty.
        OSError: the disk is full, ….
    """
    config, lora = load_adapter(adapter)
    files = open_checkpoint(base)
    linears = [name.removesuffix(".lora_A") for name in lora if name.endswith(".lora_A")]
    adapted = {f"{linear}.weight": (lora[f"{linear}.lora_A"], lora[f"{linear}.lora_B"]) for linear in linears}
    for name, (a, b) in adapted.items():
        _require(files, name, (b.shape[0], a.shape[1]), adapter, base)

    def merge(name: str, weight: np.ndarray) -> np.ndarray:
        if name not in adapted:
            return weight
        a, b = adapted[name]
        return weight.astype(np.float32) + np.float32(config.scale) * (b @ a)

    _export(files, base, output, merge, max_shard_bytes)


def export_parameters(
    parameters: str | Path, base: str | Path, output: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes the base model with the parameters that `save_tensors` kept in its place, cast to the base's dtype.

    Raises:
        ValueError: parameters that do not fit the base, bad input folders, or an output folder that is not empty.
        OSError: the disk is full, ….
    """
    trained, files = open_checkpoint(parameters), open_checkpoint(base)
    for name, info in trained.tensors.items():
        _require(files, name, info.shape, parameters, base)

    def replace(name: str, weight: np.ndarray) -> np.ndarray:
        return trained.read(name) if name in trained.tensors else weight

    _export(files, base, output, replace, max_shard_bytes)


def save_model(
    folder: str | Path, tensors: Mapping[str, jax.Array], base: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes a complete model folder from parameters in memory, each in its own dtype.

    Args:
        folder: must not exist, or be empty; it appears complete or not at all.
        tensors: all parameters, by Hugging Face's full name.
        base: the folder whose config.json and tokenizer belong to them.
        max_shard_bytes: size at which a new file is begun.

    Raises:
        ValueError: an output folder that is not empty.
        OSError: the disk is full, ….
    """
    specs = {name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    with atomic_folder(Path(folder)) as temporary:
        _copy_files(base, temporary)
        write_shards(temporary, specs, lambda name: np.asarray(tensors[name]), max_shard_bytes)


def _copy_files(base: str | Path, output: Path) -> None:
    for pattern in _COPIED:
        for path in filter(Path.is_file, Path(base).glob(pattern)):
            shutil.copyfile(path, output / path.name)


def _require(files: TensorFiles, name: str, shape: tuple[int, ...], trained: str | Path, base: str | Path) -> None:
    info = files.tensors.get(name)
    if info is None:
        raise ValueError(f"{trained} does not belong to {base}: it has a {name}, the base has none")
    if info.shape != shape:
        raise ValueError(
            f"{trained} does not belong to {base}: its {name} is {list(shape)}, the base's {list(info.shape)}"
        )
    if info.dtype.kind in "iub":
        raise ValueError(f"{name} in {info.file} is quantised ({info.dtype}): merge into the unquantised checkpoint")


def _export(files: TensorFiles, base: str | Path, output: str | Path, change: Change, max_shard_bytes: int) -> None:
    specs = {
        name: jax.ShapeDtypeStruct(info.shape, info.dtype)
        for name, info in files.tensors.items()
        if not _stale_head(name, read_config(base))
    }
    with atomic_folder(Path(output)) as temporary:
        _copy_files(base, temporary)
        write_shards(
            temporary,
            specs,
            lambda name: change(name, files.read(name)).astype(specs[name].dtype, copy=False),
            max_shard_bytes,
        )


def _stale_head(name: str, config: Mapping) -> bool:
    """A tied model's second copy of its embedding would no longer be equal after training."""
    return name == "lm_head.weight" and bool(config.get("tie_word_embeddings"))
