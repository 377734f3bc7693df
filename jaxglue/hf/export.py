"""Export of complete Hugging Face model folders: trained, merged or quantized, written tensor by tensor."""

import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import DTypeLike
from transformers import PreTrainedTokenizerBase

from jaxglue.data.progress import DataProgress
from jaxglue.data.tokenizer import padding_token
from jaxglue.files.atomic import atomic_folder
from jaxglue.files.json_file import write_json
from jaxglue.hf.adapter import warn_of_adapter_inside
from jaxglue.hf.checkpoint import has_weights, open_checkpoint, read_config, stored_form
from jaxglue.hf.draft import copied_tensors, head_modules
from jaxglue.hf.experts import checkpoint_layout, expert_parts, part_shape
from jaxglue.hf.export_check import ExportCheck, check_quantized
from jaxglue.hf.files import MAX_SHARD_BYTES, refuse_link_out
from jaxglue.hf.hub import TEXTS
from jaxglue.hf.tensor_files import write_shards
from jaxglue.models import abstract_model, config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.parameters import abstract_parameters, buffers, quantized_names
from jaxglue.models.wrapper import WRAPPERS, find_wrapper, text_config, with_text
from jaxglue.ops.choices import Storage
from jaxglue.ops.quant.formats import FORMATS, Shape, WeightFormat, experts_format


def save_model(
    folder: str | Path,
    tensors: Mapping[str, jax.Array],
    base: str | Path,
    *,
    dtype: DTypeLike | None = None,
    write: bool = True,
    finish: Callable[[Path], None] | None = None,
    draft: Mapping[str, np.ndarray] | None = None,
    progress: DataProgress | None = None,
) -> None:
    """Write a complete model folder from parameters in memory.

    Args:
        folder: replaced if present; it appears complete or not at all.
        tensors: all parameters by Hugging Face's full name.
        base: source of config.json and tokenizer.
        dtype: of the written tensors, but for those that a base in 16 bits holds in float32, such as routers' biases
            and decays; by default each keeps its own.
        write: False on processes that only contribute their shards of the tensors.
        finish: called with the folder before it appears.
        draft: tensors of a trained draft head, in place of the base's.
        progress: shows the bytes written; by default nothing does.

    Raises:
        OSError: a failed write, such as on a full disk.
    """
    tensors = {**_read_buffers(base, dtype), **tensors}
    layout = checkpoint_layout({name: tensor.shape for name, tensor in tensors.items()}, read_config(base))
    wide = wide_tensors(base)

    def dtype_of(name: str) -> DTypeLike:
        parameter, _ = layout[name]
        return tensors[parameter].dtype if dtype is None else jnp.float32 if name in wide else dtype

    specs = {
        name: jax.ShapeDtypeStruct(part_shape(tensors[parameter].shape, index), dtype_of(name))
        for name, (parameter, index) in layout.items()
    }

    @lru_cache(maxsize=1)  # tensors of one layer's experts are consecutive
    def whole(parameter: str, dtype: DTypeLike) -> np.ndarray:
        return on_host(tensors[parameter].astype(dtype))

    def read(name: str) -> np.ndarray:
        parameter, index = layout[name]
        return whole(parameter, specs[name].dtype)[index]

    if not write:
        for name in specs:
            read(name)
        return
    with atomic_folder(Path(folder), replace=True) as temporary:
        copy_texts(base, temporary, specs)
        if dtype is not None:
            described = read_config(temporary)
            name = "torch_dtype" if "torch_dtype" in described else "dtype"  # the one of transformers before 5
            write_json(temporary / "config.json", described | {name: str(jnp.dtype(dtype))})
        if finish is not None:
            finish(temporary)
        others = copied_tensors(base, config_from_hf(read_config(base)), read) | dict(draft) if draft else {}
        write_shards(temporary, *stored_form(base, specs, read, others), MAX_SHARD_BYTES, progress)


def wide_tensors(base: str | Path) -> set[str]:
    """Return the names of float32 tensors in a folder that has others in 16 bits; of one without weights, buffers."""
    if not has_weights(Path(base)):
        return {*buffers(abstract_model(config_from_hf(read_config(base))))}
    tensors = open_checkpoint(base).tensors
    narrow = any(info.dtype in (jnp.bfloat16, np.float16) for info in tensors.values())
    return {name for name, info in tensors.items() if narrow and info.dtype == np.float32}


def _read_buffers(base: str | Path, dtype: DTypeLike | None) -> dict[str, jax.Array]:
    """Return values of a base that no method trains, in a dtype or their own; without weights, ones or zero biases."""
    wanted = buffers(abstract_model(config_from_hf(read_config(base))))
    if not wanted or not has_weights(Path(base)):
        fill = {name: jnp.zeros if name.endswith("bias") else jnp.ones for name in wanted}
        return {name: fill[name](spec.shape, dtype or spec.dtype) for name, spec in wanted.items()}
    files = open_checkpoint(base)
    return {name: jnp.asarray(files.read(name)) for name in wanted}


def quantize_folder(
    base: str | Path,
    output: str | Path,
    how: Storage,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    progress: DataProgress | None = None,
) -> tuple[ExportCheck, float]:
    """Write a model folder with linear layers or experts in a format, and read it back before it appears.

    It must predict as the base quantized in memory, on random tokens.

    Args:
        base: the model folder.
        output: absent or empty; it appears complete or not at all.
        how: of the decoder layers' linear layers, bitsandbytes' nf4 or int8 or compressed-tensors' fp8; or of GPT-OSS's
            experts, mxfp4.
        max_shard_bytes: shard limit in bytes, which also bounds memory.
        progress: shows the bytes written; by default nothing does.

    Returns:
        the comparison, and the KL between base and folder, nats per token.

    Raises:
        ValueError: an already quantized base, weights not finite, sizes the format cannot hold, a bad folder, or other
            predictions.
        OSError: a failed write, such as on a full disk.
    """
    warn_of_adapter_inside(Path(base))
    raw = read_config(base)
    if method := (raw.get("quantization_config") or {}).get("quant_method"):
        raise ValueError(
            f"{base} is already quantized ({method}) and a folder holds one format: use it unchanged, "
            "or start from the original folder"
        )
    # A folder in FP8 does not say whether its readers multiply in it.
    config, files, made = config_from_hf(raw), open_checkpoint(base), FORMATS["fp8_stored" if how == "fp8" else how]
    plain = {name: jax.ShapeDtypeStruct(info.shape, info.dtype) for name, info in files.tensors.items()}
    matrices = expert_matrices(plain, config) if made.parts else linear_matrices(plain, config, made)

    def read(name: str) -> np.ndarray:
        tensor = files.read(name)
        if tensor.dtype.kind not in "iub" and not np.isfinite(tensor).all():
            raise ValueError(f"{base}: {name} holds values that are not finite (NaN or infinity): download it again")
        return tensor

    specs, read_quantized = quantized_tensors(plain, read, made, matrices)
    with atomic_folder(Path(output)) as temporary:
        copy_texts(base, temporary, specs)
        describe_format(temporary, made, unquantized_modules(config, base))
        write_shards(temporary, *stored_form(base, specs, read_quantized), max_shard_bytes, progress)
        return check_quantized(base, temporary, made, matrices)


def describe_format(folder: Path, made: WeightFormat, unquantized: Sequence[str] = ("lm_head",)) -> None:
    """Enter a format into a folder's config.json, and write the files that its readers want beside."""
    entry = made.config(unquantized)
    write_json(folder / "config.json", read_config(folder) | {"quantization_config": entry})
    for name, content in made.beside(entry).items():
        write_json(folder / name, content)


def unquantized_modules(config: DecoderConfig, base: str | Path) -> list[str]:
    """Return the modules beside the decoder layers of a base that stay as they are."""
    around = WRAPPERS[config.wrapper].unquantized if config.wrapper else []
    return ["score" if config.scores else "lm_head", *around, *head_modules(base, config)]


def linear_matrices(
    tensors: Mapping[str, jax.ShapeDtypeStruct], config: DecoderConfig, made: WeightFormat
) -> dict[str, Shape]:
    """Return the shapes of linear layers of decoder layers among a folder's tensors, and of experts one by one.

    Raises:
        ValueError: experts that the format cannot hold.
    """
    if config.moe and config.moe.quantize == "none" and not made.holds_experts:
        raise ValueError(f"{made.label} cannot hold experts, as {config.model_type} has: use fp8, or leave it out")
    model = abstract_model(replace(config.quantized(made.name), moe=config.moe))
    experts = {
        name: parts for name, spec in abstract_parameters(model).items() if (parts := expert_parts(name, spec.shape))
    }
    if stacked := next((name for name in experts if name in tensors), None):
        raise ValueError(
            f"{stacked} holds all experts, which {made.label} cannot hold: use --quantize mxfp4, or leave it out"
        )
    names = quantized_names(model).union(*experts.values())
    return {name: spec.shape for name, spec in tensors.items() if name in names}


def expert_matrices(tensors: Mapping[str, jax.ShapeDtypeStruct], config: DecoderConfig) -> dict[str, Shape]:
    """Return the shapes [E, out, in] of GPT-OSS's experts [E, in, out] among a folder's tensors.

    Raises:
        ValueError: another model.
    """
    if config.model_type != "gpt_oss":
        raise ValueError(f"mxfp4 is for GPT-OSS's experts, not for {config.model_type}: use nf4, int8 or fp8")
    named = {
        name: spec.shape
        for name, spec in tensors.items()
        if name.endswith(("experts.gate_up_proj", "experts.up_proj", "experts.down_proj"))
    }
    return {name: (E, out, columns) for name, (E, columns, out) in named.items()}


def quantized_tensors(
    tensors: Mapping[str, jax.ShapeDtypeStruct],
    read: Callable[[str], np.ndarray],
    made: WeightFormat,
    matrices: Mapping[str, Shape],
    pack: Callable[[str], Any] | None = None,
) -> tuple[dict[str, jax.ShapeDtypeStruct], Callable[[str], np.ndarray]]:
    """Return specs and reader of a folder's tensors with some of its matrices in a format.

    Args:
        tensors: of the folder.
        read: reads them.
        made: the format.
        matrices: shapes of those to quantize, [out, in] as they are, or [E, out, in] of transposed ones.
        pack: returns one of them in the format; by default what is read is quantized.
    """
    specs: dict[str, jax.ShapeDtypeStruct] = {}
    parts: dict[str, str] = {}
    for name, spec in tensors.items():
        stored = made.specs(name, matrices[name]) if name in matrices else {}
        parts |= dict.fromkeys(stored, name)
        specs |= stored or {name: spec}

    def quantize(name: str) -> Mapping[str, np.ndarray]:
        if pack is not None:
            return made.tensors(name, pack(name))
        matrix = jnp.asarray(read(name))
        return made.tensors(name, made.quantize(matrix if matrix.ndim == 2 else matrix.mT))

    return specs, _QuantizingReader(quantize, parts, read)


class _QuantizingReader:
    """Reader of a quantized folder's tensors that quantizes each matrix when its first part is read.

    Holds the unread parts, at most one shard's worth.
    """

    def __init__(
        self,
        quantize: Callable[[str], Mapping[str, np.ndarray]],
        parts: Mapping[str, str],
        read: Callable[[str], Any],
    ):
        """Take `quantize`, from a matrix to its parts, `parts`, from these to matrices, and `read` for the others."""
        self._quantize, self._parts, self._read = quantize, parts, read
        self._ready: dict[str, np.ndarray] = {}

    def __call__(self, name: str) -> np.ndarray:
        """Return the named tensor; each part of a matrix can be read once."""
        if name not in self._parts:
            return self._read(name)
        if name not in self._ready:
            self._ready |= self._quantize(self._parts[name])
        return self._ready.pop(name)


def on_host(tensor: jax.Array) -> np.ndarray:
    """Gather an array to the host; every process that holds shards must call."""
    if tensor.is_fully_addressable or tensor.is_fully_replicated:
        return np.asarray(tensor)
    return np.asarray(multihost_utils.process_allgather(tensor, tiled=True))


def copy_texts(base: str | Path, output: Path, names: Collection[str]) -> None:
    """Copy a base's files other than weights, and take quantization out of config.json where there is none left.

    Args:
        base: the folder to copy from.
        output: an existing folder.
        names: of the weights in `output`.

    Raises:
        ValueError: a link out of the base's folder.
    """
    for pattern in TEXTS:  # no other files of the base are copied
        for path in filter(Path.is_file, Path(base).glob(pattern)):
            refuse_link_out(path, Path(base))
            shutil.copyfile(path, output / path.name)
    config = read_config(output)
    quantized = text_config(config).get("quantization_config")
    if quantized and not any(experts_format(names, name.rpartition("_")[0]) for name in names):
        config.pop("quantization_config", None)
        if find_wrapper(config):
            config["text_config"].pop("quantization_config", None)
        write_json(output / "config.json", config)


_CLASS = "ForSequenceClassification"
_APART = re.compile(r"(?<!\d)_|_(?!\d)")
"""Between the words of a model type; not within a version, as in qwen3_5."""


def describe_classifier(
    folder: Path, tokenizer: PreTrainedTokenizerBase, labels: int = 1, problem_type: str | None = None
) -> None:
    """Enter class, labels and padding token of a reward model or classifier into a folder's config.json.

    The class scores the last token that is not the padding token.
    """
    raw = read_config(folder)
    family = "".join(part.capitalize() for part in _APART.split(raw["model_type"]))
    names = {str(index): f"LABEL_{index}" for index in range(labels)}
    described: dict[str, Any] = {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
    described |= {"num_labels": labels, "architectures": [family + _CLASS]}
    described |= {"problem_type": problem_type} if problem_type else {}
    write_json(folder / "config.json", with_text(raw, pad_token_id=padding_token(tokenizer)) | described)
