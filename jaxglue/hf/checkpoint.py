"""Model folders in Hugging Face's layout: config.json, and safetensors streamed to and from parameters."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.data.progress import DataProgress, NoProgress, metered
from jaxglue.files.atomic import atomic_folder
from jaxglue.files.json_file import read_json
from jaxglue.hf.experts import ParameterSource, find_source
from jaxglue.hf.files import MAX_SHARD_BYTES
from jaxglue.hf.tensor_files import INDEX, SINGLE, TensorFiles, write_shards
from jaxglue.hf.upload_buffers import UploadBuffers
from jaxglue.models import config_from_hf
from jaxglue.models.file_param import FileParam
from jaxglue.models.wrapper import Spelling, Wrapper, find_names, find_wrapper, ties, with_text
from jaxglue.ops.backend import compute_capability
from jaxglue.ops.quant.formats import Quantized, is_unneeded
from jaxglue.settings.recipe import shipped_recipes

HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_KEYS_VALUES = re.compile(r"(.+\.self_attn\.)[kv]_(proj|norm)\.(weight|bias)")
_SHOWN = 5
_READERS = min(8, os.cpu_count() or 1)
"""Tensors read concurrently."""
_LARGE = 1 << 29
"""Bytes of tensors of which two at most are on their way, such as stacks of experts that are quantized on a GPU."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the folder's `config.json`; a wrapper's says whether the files tie the output projection.

    Raises:
        ValueError: no such folder, no config.json in it, or not a JSON object.
    """
    path = model_folder(folder) / "config.json"
    if (path.parent / "adapter_config.json").is_file() and not path.is_file():
        raise ValueError(
            f"{folder} is an adapter: give it as adapter, or merge it with jaxglue export --adapter {folder}"
        )
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {folder} is not a Hugging Face model folder")
    raw = read_json(path)
    if find_wrapper(raw) is None or not isinstance(raw.get("text_config"), Mapping) or not has_weights(path.parent):
        return raw
    tied = ties(raw)
    tied = HEAD not in open_checkpoint(folder).tensors if tied is None else tied
    return {**with_text(raw, tie_word_embeddings=tied), "tie_word_embeddings": tied}


def has_weights(folder: Path) -> bool:
    """Tell whether a folder has safetensors of a model."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def model_folder(folder: str | Path) -> Path:
    """Return the folder as a path; raise ValueError unless it is a directory."""
    path = Path(folder)
    if not path.is_dir():
        run = path.parent
        made = run.parent.name == "runs" and run.name in shipped_recipes()
        remedy = f"run jaxglue train --recipe {run.name} first, which writes it; " if made else ""
        expected = "expected a local Hugging Face model folder (nothing is downloaded)"
        raise ValueError(f"{path} is not a folder: {remedy}{expected}")
    return path


def open_checkpoint(folder: str | Path) -> TensorFiles:
    """Open `model.safetensors`, or every shard of the index, and check the headers; load nothing.

    Tensors have the names of the text model, also in the folder of a wrapper around it.

    Raises:
        ValueError: no safetensors, a missing, truncated or corrupt shard, or an index that disagrees with its shards.
    """
    folder = model_folder(folder)
    names = _read_names(folder)
    if (folder / SINGLE).exists():
        return TensorFiles([folder / SINGLE], names)
    if not (folder / INDEX).exists():
        raise ValueError(_no_safetensors(folder))
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no weight_map")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{folder / INDEX}: weight_map should map tensor names to file names")
    files = TensorFiles([_shard(folder, file) for file in sorted(set(weight_map.values()))], names)
    if absent := [name for name in weight_map if name not in files]:
        raise ValueError(f"{folder / INDEX} lists tensors absent from all shards: {_some(absent)}")
    return files


def tensor_names(folder: Path) -> list[str]:
    """Return the names of a folder's tensors, in its index or its files; none where it has neither."""
    if (folder / INDEX).is_file():
        return list(read_json(folder / INDEX).get("weight_map", ()))
    return list(TensorFiles(sorted(folder.glob("*.safetensors"))).tensors)


def _read_names(folder: Path) -> Wrapper | Spelling | None:
    return find_names(read_json(folder / "config.json")) if (folder / "config.json").is_file() else None


def stored_form(
    base: str | Path,
    specs: Mapping[str, jax.ShapeDtypeStruct],
    read: Callable[[str], np.ndarray],
    others: Mapping[str, np.ndarray] | None = None,
) -> tuple[dict[str, jax.ShapeDtypeStruct], Callable[[str], np.ndarray]]:
    """Return specs and reader of a folder's tensors as a base's files name them, with the parts around its text model.

    Args:
        base: the folder.
        specs: of the text model's tensors.
        read: reads them.
        others: values of parts around the text model, by their names in the files, in place of the base's.
    """
    base, others = model_folder(base), others or {}
    names = _read_names(base)
    if names is None:
        assert not others
        return dict(specs), read
    files = open_checkpoint(base) if has_weights(base) else TensorFiles([], names)
    assert files.names is not None
    ours = {files.names.stored(name): name for name in specs}
    passed = {name: info for name, info in files.others.items() if name not in ours}  # others were trained
    around = {name: jax.ShapeDtypeStruct(info.shape, info.dtype) for name, info in passed.items()}
    named = {stored: specs[name] for stored, name in ours.items()}

    def read_stored(name: str) -> np.ndarray:
        if name in ours:
            return read(ours[name])
        return others[name] if name in others else files.read(name)

    return named | around, read_stored


def _shard(folder: Path, file: str) -> Path:
    if not (folder / file).is_file() or Path(file).name != file:
        raise ValueError(f"{folder / INDEX} names {file}, which is not in {folder}: download or copy it again")
    return folder / file


def _no_safetensors(folder: Path) -> str:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if not pickles:
        return f"{folder} has neither {SINGLE} nor {INDEX}"
    return (
        f"{folder} has only pickles ({_some(pickles)}), which are refused because unpickling runs arbitrary code. "
        "Convert once with transformers: "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    )


def load_tensors(
    folder: str | Path,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    put: Callable[[str, Any], Any] | None = None,
    *,
    complete: bool = True,
    ignored: Collection[str] = (),
    mapped: Callable[[str], bool] = lambda name: False,
    progress: DataProgress | None = None,
) -> dict[str, Any]:
    """Stream the wanted parameters from a folder, casting each to its wanted dtype.

    Experts are stacked, or expanded from MXFP4, as needed (see `find_source`); matrices quantized by bitsandbytes
    arrive as `Quantized` with the wanted dtype. Only a few tensors are on the host at a time: reads overlap transfers,
    and each transfer completes before the next read takes its slot. A GPU copies from buffers of its own.

    Args:
        folder: a local Hugging Face model folder.
        wanted: shape and dtype by Hugging Face's full name (`model.layers.0.…`); with a `sharding`, each row needed by
            this process's devices is read once and placed accordingly.
        put: places a cast array without sharding, or a quantized one; by default on the default device. The array is on
            the host or, if expanded or uploaded as it is, on the default device. Called from several threads.
        complete: refuse further tensors in the folder.
        ignored: further tensors that it may have.
        mapped: whether the named parameter stays in the files, as a `FileParam`.
        progress: shows the bytes read; by default nothing does.

    Raises:
        ValueError: as `open_checkpoint`; or missing, extra or misshaped tensors, all named before any is loaded.
    """
    files, sources = find_tensors(folder, wanted, complete=complete, ignored=ignored)
    if complete and HEAD in files.tensors and HEAD not in wanted and HEAD not in ignored:
        _check_tied(files)
    for name, source in sources.items():
        if not source.packed and jnp.issubdtype(wanted[name].dtype, jnp.floating):
            _require_floats(files, source.shapes)
    put = put or (lambda name, array: jax.device_put(array))
    maps = files.mapped() if any(map(mapped, wanted)) else files

    def load(name: str) -> Any:
        source, dtype = sources[name], wanted[name].dtype
        if mapped(name):
            return _file_param(maps, source, wanted[name])
        if wanted[name].sharding is not None and source.read_rows is not None:
            return jax.block_until_ready(_load_parts(partial(source.read_rows, files), wanted[name]))
        as_it_is = name in source.shapes and not source.packed and files.tensors[name].dtype == dtype
        with few if sizes[name] >= _LARGE else nullcontext():
            array = buffers.upload(files, name) if buffers and as_it_is else source.read(files)
            return jax.block_until_ready(put(name, _cast(array, dtype)))

    sizes, few = {name: source.nbytes(files) for name, source in sources.items()}, BoundedSemaphore(2)
    on_gpu = compute_capability() is not None
    with (
        UploadBuffers(_READERS) if on_gpu else nullcontext() as buffers,
        ThreadPoolExecutor(_READERS) as readers,
        (progress or NoProgress()).stage(f"loading {folder}", sum(sizes.values())) as advance,
    ):
        return dict(metered(zip(wanted, readers.map(load, wanted), strict=True), sizes.values(), advance))


def find_tensors(
    folder: str | Path,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    *,
    complete: bool = True,
    ignored: Collection[str] = (),
) -> tuple[TensorFiles, dict[str, ParameterSource]]:
    """Find the tensors of wanted parameters by the headers of a folder's files; load nothing.

    Args:
        folder, wanted, complete, ignored: as for `load_tensors`.

    Raises:
        ValueError: as `open_checkpoint`; or missing, extra or misshaped tensors.
    """
    files = open_checkpoint(folder)
    files.take(wanted)
    if HEAD in wanted:
        untie_files(folder, files)
    sources = {name: find_source(files, name, spec.shape) for name, spec in wanted.items()}
    shapes = {name: shape for source in sources.values() for name, shape in source.shapes.items()}
    _check_tensors(folder, files, shapes, complete=complete, ignored=ignored)
    return files, sources


def untie_files(folder: str | Path, files: TensorFiles) -> None:
    """Have the embedding of a folder that ties them found as its output projection too."""
    if (Path(folder) / "config.json").is_file() and config_from_hf(read_config(folder)).tie_word_embeddings:
        if HEAD in files.tensors:
            _check_tied(files)
        files.tensors[HEAD] = files.tensors[_EMBEDDING]


def _cast(array: Any, dtype: Any) -> Any:
    """Return a parameter in a dtype, without a copy where it has it."""
    return array.of_dtype(dtype) if isinstance(array, Quantized) else array.astype(dtype, copy=False)


def _file_param(maps: TensorFiles, source: ParameterSource, spec: jax.ShapeDtypeStruct) -> FileParam:
    read = lambda: _cast(source.read(maps), spec.dtype)  # noqa: E731
    return FileParam(shape=spec.shape, dtype=spec.dtype, nbytes=source.nbytes(maps), read=read)


def _load_parts(read_rows: Callable[[int, int], Any], wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Assemble a sharded parameter, reading each range of rows once."""
    read: dict[tuple[int, int], Any] = {}

    def part(index: tuple[slice, ...] | None) -> Any:
        assert index is not None
        start, stop, _ = index[0].indices(wanted.shape[0])
        if (start, stop) not in read:
            read[start, stop] = read_rows(start, stop).astype(wanted.dtype, copy=False)
        rows = read[start, stop][:, *index[1:]]
        return rows if wanted.sharding.memory_kind in (None, "device") else np.asarray(rows)

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, part)


def _require_floats(files: TensorFiles, names: Iterable[str]) -> None:
    for name in names:
        if (info := files.tensors[name]).dtype.kind in "iub":
            raise ValueError(
                f"{name} in {info.file} holds {info.dtype}, expected floating-point numbers: use the original model "
                "folder, or one quantized by jaxglue export --quantize"
            )


def _check_tensors(
    folder: str | Path,
    files: TensorFiles,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    complete: bool,
    ignored: Collection[str],
) -> None:
    found = {name: info for name, info in files.tensors.items() if name not in ignored}
    missing = [name for name in shapes if name not in found]
    unknown = [name for name in found if name not in shapes and not _ignored(name, shapes)] if complete else []
    extra = [f"{name} in {found[name].file.name}" for name in unknown]
    misshaped = [
        f"{name} in {found[name].file.name} is {list(found[name].shape)}, config.json says {list(shape)}"
        for name, shape in shapes.items()
        if name in found and found[name].shape != shape
    ]
    problems = {"missing": missing, "not part of the model": extra, "of another shape": misshaped}
    if any(problems.values()):
        lines = [f"  {len(names)} {what}: {_some(names)}" for what, names in problems.items() if names]
        raise ValueError("\n".join([f"the tensors in {folder} do not match its config.json:", *lines]))


def _ignored(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a tensor is not needed.

    It is a legacy rotary buffer, a cache's scale, a tied embedding's copy (`_check_tied`), or of keys and values that
    the layer takes from another one.
    """
    if (unread := _KEYS_VALUES.fullmatch(name)) and f"{unread[1]}k_proj.weight" not in shapes:
        return f"{unread[1]}q_proj.weight" in shapes
    return name.endswith(".rotary_emb.inv_freq") or is_unneeded(name) or (name == HEAD and _EMBEDDING in shapes)


def _check_tied(files: TensorFiles) -> None:
    head, embedding, rows = files.tensors[HEAD], files.tensors[_EMBEDDING], 4096
    same = head.shape == embedding.shape and all(
        np.array_equal(files.read_rows(HEAD, i, i + rows), files.read_rows(_EMBEDDING, i, i + rows))
        for i in range(0, head.shape[0], rows)
    )
    if not same:
        raise ValueError(
            f"config.json ties the output projection to the embedding, but {HEAD} in {head.file} differs from "
            f'{_EMBEDDING}: set "tie_word_embeddings": false in config.json to use both'
        )


def save_tensors(folder: str | Path, tensors: Mapping[str, jax.Array], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write tensors as a safetensors folder, with one at a time on the host.

    Args:
        folder: absent or empty; it appears complete or not at all.
        tensors: by Hugging Face's full name, written in their own dtypes.
        max_shard_bytes: shard limit; a larger tensor gets a shard to itself.

    Raises:
        ValueError: the folder is not empty, or an unsupported dtype.
        OSError: a failed write, such as on a full disk.
    """
    specs = {name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    with atomic_folder(Path(folder)) as temporary:
        write_shards(temporary, specs, lambda name: np.asarray(tensors[name]), max_shard_bytes)


def _some(names: list[str]) -> str:
    more = f", … and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
