"""Export of complete Hugging Face model folders: trained, merged or quantized, written tensor by tensor."""

import shutil
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.adapter_check import check_adapter
from jaxglue.hf.bitsandbytes import QuantizedReader, quantization_config, stored_specs
from jaxglue.hf.checkpoint import open_checkpoint, read_config
from jaxglue.hf.experts import checkpoint_layout, part_shape, read_expanded
from jaxglue.hf.export_check import ExportCheck, check_merge
from jaxglue.hf.files import MAX_SHARD_BYTES, atomic_folder, require_empty, write_json
from jaxglue.hf.hub import TEXTS
from jaxglue.hf.identity import identify
from jaxglue.hf.merge import adapter_deltas
from jaxglue.hf.tensor_files import TensorInfo, write_shards
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.lora import linear_shapes
from jaxglue.models.parameters import quantized_names
from jaxglue.ops.choices import Quantize
from jaxglue.ops.quant.formats import quantize_matrix
from jaxglue.ops.quant.mxfp4 import BLOCK


def export_adapter(
    adapter: str | Path, base: str | Path, output: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> ExportCheck:
    """Write the base model with a merged adapter: W + scale · B · A in float32, cast to the base's dtype.

    An adapter on MXFP4 experts makes all experts be written in bfloat16. The folder is read back before it appears, and
    must predict as base and adapter apart.

    Args:
        adapter: a PEFT folder.
        base: the adapter's base model folder.
        output: absent or empty; it appears complete or not at all.
        max_shard_bytes: shard limit in bytes.

    Raises:
        ValueError: an adapter of another model, bad input folders, a non-empty output folder, or other predictions.
        OSError: a failed write, such as on a full disk.
    """
    require_empty(Path(output))
    files, loaded = open_checkpoint(base), load_adapter(adapter)
    check_adapter(loaded, base_shapes(base), identify(base), str(base))
    deltas = adapter_deltas(loaded, files.tensors)
    expands = any(f"{name}_blocks" in files.tensors for name in deltas)
    specs = _merged_specs(files.tensors, expands=expands)
    for name, delta in deltas.items():
        _require_fit(name, delta.shape, specs.get(name), adapter, base)

    def merged(name: str) -> np.ndarray:
        weight = files.read(name) if name in files.tensors else np.asarray(read_expanded(files, name))
        return _finite(name, deltas[name].add_to(weight)) if name in deltas else weight

    with atomic_folder(Path(output)) as temporary:
        _copy_files(base, temporary, specs)
        write_shards(temporary, specs, merged, max_shard_bytes)
        return check_merge(base, loaded, temporary, {specs[name].dtype for name in deltas})


def base_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model folder's linear layers by path (`linear_shapes`)."""
    config = config_from_hf(read_config(folder))
    return linear_shapes(nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0))))


def _finite(name: str, weight: np.ndarray) -> np.ndarray:
    if not np.isfinite(weight).all():
        raise ValueError(f"{name} is not finite (NaN or infinity) after the merge into {weight.dtype}")
    return weight


def _merged_specs(tensors: Mapping[str, TensorInfo], *, expands: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the merged folder's tensor specs: the base's, with MXFP4 expanded if `expands`."""
    specs = {}
    for name, info in tensors.items():
        if not expands or not name.endswith(("_blocks", "_scales")):
            specs[name] = jax.ShapeDtypeStruct(info.shape, info.dtype)
        elif name.endswith("_blocks"):
            E, out_features, blocks, _ = info.shape
            specs[name.removesuffix("_blocks")] = jax.ShapeDtypeStruct((E, blocks * BLOCK, out_features), jnp.bfloat16)
    return specs


def _require_fit(
    name: str, shape: tuple[int, ...], spec: jax.ShapeDtypeStruct | None, adapter: str | Path, base: str | Path
) -> None:
    if spec is None:
        raise ValueError(f"{adapter} does not belong to {base}: it adapts {name}, missing from the base")
    if spec.dtype.kind in "iub":
        raise ValueError(f"{name} in {base} is quantized ({spec.dtype}): merge into the unquantized checkpoint")
    if spec.shape != shape:
        raise ValueError(
            f"{adapter} does not belong to {base}: for {name} it is {list(shape)}, the base {list(spec.shape)}"
        )


def save_model(
    folder: str | Path,
    tensors: Mapping[str, jax.Array],
    base: str | Path,
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    write: bool = True,
) -> None:
    """Write a complete model folder from parameters in memory.

    Args:
        folder: replaced if present; it appears complete or not at all.
        tensors: all parameters by Hugging Face's full name.
        base: source of config.json and tokenizer.
        dtype: of the written tensors; by default each keeps its own.
        max_shard_bytes: shard limit in bytes.
        write: False on processes that only contribute their shards of the tensors.

    Raises:
        OSError: a failed write, such as on a full disk.
    """
    layout = checkpoint_layout({name: tensor.shape for name, tensor in tensors.items()}, read_config(base))
    specs = {
        name: jax.ShapeDtypeStruct(part_shape(tensors[parameter].shape, index), dtype or tensors[parameter].dtype)
        for name, (parameter, index) in layout.items()
    }

    @lru_cache(maxsize=1)  # tensors of one layer's experts are consecutive
    def whole(parameter: str) -> np.ndarray:
        return on_host(tensors[parameter].astype(dtype or tensors[parameter].dtype))

    def read(name: str) -> np.ndarray:
        parameter, index = layout[name]
        return whole(parameter)[index]

    if not write:
        for name in specs:
            read(name)
        return
    with atomic_folder(Path(folder), replace=True) as temporary:
        _copy_files(base, temporary, specs)
        write_shards(temporary, specs, read, max_shard_bytes)


def quantize_folder(
    base: str | Path, output: str | Path, how: Quantize, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a model folder with the decoder layers' linear layers in bitsandbytes' NF4 or int8 format.

    Args:
        base: the model folder.
        output: absent or empty; it appears complete or not at all.
        how: the format.
        max_shard_bytes: shard limit in bytes, which also bounds memory.

    Raises:
        ValueError: an already quantized base, sizes the format cannot hold, or a bad folder.
        OSError: a failed write, such as on a full disk.
    """
    raw = read_config(base)
    if method := (raw.get("quantization_config") or {}).get("quant_method"):
        raise ValueError(
            f"{base} is already quantized ({method}) and a folder holds one format: use it unchanged, "
            "or start from the original folder"
        )
    config, files = config_from_hf(raw).quantized(how), open_checkpoint(base)
    linears = quantized_names(nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0))))
    specs: dict[str, jax.ShapeDtypeStruct] = {}
    parts: dict[str, str] = {}
    for name, info in files.tensors.items():
        stored = stored_specs(name, info.shape, how) if name in linears else {}
        parts |= dict.fromkeys(stored, name)
        specs |= stored or {name: jax.ShapeDtypeStruct(info.shape, info.dtype)}

    def quantize(name: str) -> Any:
        return quantize_matrix(jnp.asarray(files.read(name)), how)

    with atomic_folder(Path(output)) as temporary:
        _copy_files(base, temporary, specs)
        described = read_config(temporary) | {"quantization_config": quantization_config(how)}
        write_json(temporary / "config.json", described)
        write_shards(temporary, specs, QuantizedReader(quantize, parts, files.read), max_shard_bytes)


def on_host(tensor: jax.Array) -> np.ndarray:
    """Gather an array to the host; every process that holds shards must call."""
    if tensor.is_fully_addressable or tensor.is_fully_replicated:
        return np.asarray(tensor)
    return np.asarray(multihost_utils.process_allgather(tensor, tiled=True))


def _refuse_link_out(path: Path, folder: Path) -> None:
    """Refuse a link to a file elsewhere, but for Hugging Face's cache, whose snapshots link into its blobs."""
    target, blobs = path.resolve(), folder.resolve().parent.parent / "blobs"
    if path.is_symlink() and target.parent != blobs and not target.is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link to {target}, outside its folder: copy the file there first")


def _copy_files(base: str | Path, output: Path, names: Iterable[str]) -> None:
    """Copy the base's non-weight files; `names` are the weights in `output`."""
    for pattern in TEXTS:  # no other files of the base are copied
        for path in filter(Path.is_file, Path(base).glob(pattern)):
            _refuse_link_out(path, Path(base))
            shutil.copyfile(path, output / path.name)
    config = read_config(output)
    if config.pop("quantization_config", None) and not any(name.endswith("_blocks") for name in names):
        write_json(output / "config.json", config)
