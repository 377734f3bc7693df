"""Merging an adapter into its base model: weight deltas, and their export as a complete Hugging Face folder."""

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.data.progress import DataProgress
from jaxglue.files.atomic import atomic_folder, require_empty
from jaxglue.files.json_file import write_json
from jaxglue.hf.adapter import Adapter, load_adapter, vocabulary_matrix, warn_of_adapter_inside
from jaxglue.hf.adapter_check import check_adapter
from jaxglue.hf.adapter_tensors import MAGNITUDE, SCORE, is_adapter
from jaxglue.hf.checkpoint import HEAD, open_checkpoint, read_config, stored_form, untie_files
from jaxglue.hf.draft import TOKENS_FILE, read_draft
from jaxglue.hf.experts import expert_parts, find_source, part_shape, read_expanded
from jaxglue.hf.export import (
    copy_texts,
    describe_classifier,
    describe_format,
    expert_matrices,
    linear_matrices,
    quantized_tensors,
    unquantized_modules,
)
from jaxglue.hf.export_check import ROWS_FILE, ExportCheck, ExportRows, check_merge, load_rows
from jaxglue.hf.files import MAX_SHARD_BYTES
from jaxglue.hf.identity import identify
from jaxglue.hf.input_check import check_input
from jaxglue.hf.loading import require_stored
from jaxglue.hf.reading import carry_record, read_record
from jaxglue.hf.serving import (
    folder_stops,
    has_tokenizer,
    load_own_tokenizer,
    stop_tokens,
    write_stops,
    write_tokenizer,
)
from jaxglue.hf.serving_check import check_serving
from jaxglue.hf.tensor_files import TensorFiles, TensorInfo, write_shards
from jaxglue.models import abstract_model, config_from_hf, with_vision
from jaxglue.models.config import DecoderConfig
from jaxglue.models.decoder import CausalLM
from jaxglue.models.family import find_family
from jaxglue.models.lora import base_shapes
from jaxglue.models.lora_config import PATHS
from jaxglue.models.parameters import abstract_parameters, quantized_names
from jaxglue.models.tower_config import TowerConfig
from jaxglue.models.wrapper import text_config, with_text
from jaxglue.ops.choices import SERVED, Quantize, Storage, served_storage
from jaxglue.ops.projection.dora import magnitude_gain
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import FORMATS, Shape, Stored, experts_format, find_stored, is_unneeded
from jaxglue.ops.quant.served import Served, is_sensitive, k_quant_of
from jaxglue.ops.quant.stack import Stack, hold_matrices

_log = logging.getLogger(__name__)


def export_adapter(
    adapter: str | Path,
    base: str | Path,
    output: str | Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    storage: Quantize | None = None,
    experts: Storage = "none",
    quantize: Storage = "none",
    progress: DataProgress | None = None,
) -> ExportCheck:
    """Write the base model with a merged adapter: W + scale · B · A in float32, cast to the base's dtype.

    An adapter that was trained for a format (`--serve-as`) is merged into it. One trained on quantized weights is
    merged into these, expanded, as other weights would not be those that it was trained with. One on MXFP4 experts
    makes all experts be written in bfloat16, by default. The folder is read back before it appears, and must predict as
    base and adapter apart, on rows of the adapter's run, or else on random tokens.

    Args:
        adapter: a PEFT folder.
        base: the adapter's base model folder.
        output: absent or empty; it appears complete or not at all.
        max_shard_bytes: shard limit in bytes.
        storage: format in which the base's linear layers were held in training; by default the base folder's, else the
            adapter's record.
        experts: format to quantize all experts to, again or for the first time: mxfp4.
        quantize: format of the merged linear layers: nvfp4, nf4, int8 or fp8.
        progress: shows the bytes written; by default nothing does.

    Raises:
        ValueError: an adapter of another model, bad input folders, a non-empty output folder, or other predictions.
        OSError: a failed write, such as on a full disk.
    """
    require_empty(Path(output))
    rows = load_rows(Path(adapter).resolve().parent / ROWS_FILE)
    merge = MergedTensors(Path(base), Path(adapter), storage)
    if merge.config.quantize in SERVED or quantize != "none":
        return _export_rounded(merge, Path(base), Path(output), quantize, rows, max_shard_bytes, progress)
    _refuse_quantized_others(open_checkpoint(base).others)
    assert merge.adapter is not None
    specs, made = merge.specs, FORMATS[experts]
    read: Callable[[str], np.ndarray] = merge.read
    if matrices := expert_matrices(specs, merge.config) if made.parts else {}:
        specs, read = quantized_tensors(specs, read, made, matrices)
    with atomic_folder(Path(output)) as temporary:
        copy_texts(base, temporary, specs)
        if matrices:
            describe_format(temporary, made)
        _describe(merge, merge.adapter, Path(base), temporary)
        head = _trained_head(Path(adapter), base, temporary)
        write_shards(temporary, *stored_form(base, specs, read, head), max_shard_bytes, progress)
        dtypes = merge.dtypes | ({np.dtype(jnp.float4_e2m1fn)} if matrices else set())
        check = check_merge(base, merge.config, merge.adapter, temporary, dtypes, rows)
        if merge.config.quantize == "none":
            check_input(base, adapter, temporary)
        return check


def _export_rounded(
    merge: "MergedTensors",
    base: Path,
    output: Path,
    quantize: Storage,
    rows: ExportRows | None,
    max_shard_bytes: int,
    progress: DataProgress | None,
) -> ExportCheck:
    """Write a base with its adapter merged and rounded: on the grid for which it was trained, or on the merge's own."""
    adapter, served, rounding = merge.adapter, merge.config.quantize in SERVED, None
    assert adapter is not None
    label = FORMATS[merge.config.quantize].label
    if served and quantize != "none" and FORMATS[quantize].label != label:
        raise ValueError(f"the adapter was trained to be served in {label}: leave out --quantize {quantize}")
    if served and label not in FORMATS:
        raise ValueError(f"the adapter was trained to be served in {label}: write it with --gguf {label}")
    if served and quantize == "none":
        stored = config_from_hf(read_config(base)).quantize
        quantize = label if stored == "none" else stored
    made = FORMATS["fp8_stored" if quantize == "fp8" else quantize]
    specs, read = merge.specs, cast(Callable[[str], np.ndarray], merge.read)
    if served:  # of experts in MXFP4 the tensors are the base's own, with other blocks
        if not made.parts:
            specs, read = quantized_tensors(specs, read, made, merge.served, pack=merge.read_packed)
    elif merge.config.quantize != "none" or adapter.config.dora or merge.config.moe:
        raise ValueError(f"--quantize {quantize}: merge first, then quantize the folder (--quantize with --base)")
    else:
        matrices = linear_matrices(specs, merge.config, made)
        specs, read = quantized_tensors(specs, read, made, matrices)

        def rounding(name: str, matrix: jax.Array) -> jax.Array:
            return dequantize(made.quantize(matrix), matrix.dtype) if name in matrices else matrix

    with atomic_folder(output) as temporary:
        copy_texts(base, temporary, specs)
        if not (served and made.parts):
            describe_format(temporary, made, unquantized_modules(merge.config, base))
        _describe(merge, adapter, base, temporary)
        head = _trained_head(adapter.folder, base, temporary)
        write_shards(temporary, *stored_form(base, specs, read, head), max_shard_bytes, progress)
        dtypes = merge.dtypes | {np.dtype(jnp.bfloat16)}
        return check_merge(base, merge.config, adapter, temporary, dtypes, rows, rounding)


def _trained_head(adapter: Path, base: str | Path, output: Path) -> Mapping[str, np.ndarray]:
    """Return the tensors of the head trained beside an adapter, if there is one; copy the tokens that it drafts."""
    head = read_draft(adapter, base)
    if head and (adapter / TOKENS_FILE).is_file():
        shutil.copyfile(adapter / TOKENS_FILE, output / TOKENS_FILE)
    return head


def _refuse_quantized_others(others: Mapping[str, TensorInfo]) -> None:
    """Raise ValueError for quantized parts around a text model, which is not quantized after the merge."""
    for name, info in others.items():
        if info.dtype.itemsize == 1 and info.dtype.kind != "b":
            raise ValueError(
                f"{name} in {info.file} is quantized ({info.dtype}), the merged text model is not: use the "
                "unquantized original"
            )


class MergedTensors:
    """Tensors of a base, with an adapter merged if there is one: their specs, and each one read when it is written.

    Args:
        base: the model folder.
        folder: of the adapter.
        storage: as in `export_adapter`.
        vision: shape of the base's tower, whose tensors are then the model's; by default only those that an adapter
            trained.

    Raises:
        ValueError: an adapter of another model, or bad folders.
    """

    def __init__(
        self,
        base: Path,
        folder: Path | None = None,
        storage: Quantize | None = None,
        *,
        vision: TowerConfig | None = None,
    ):
        warn_of_adapter_inside(base, folder)
        self._holding = Lock()
        self._files = files = open_checkpoint(base).mapped()
        own = config_from_hf(read_config(base))
        loaded = None if folder is None else load_adapter(folder)
        own = own.scored(loaded.labels) if loaded and loaded.scores else own
        own = loaded.merged(own) if loaded else own
        if vision is not None or (loaded and loaded.beside_text):
            hears = loaded is not None and any("audio" in name for name in loaded.beside_text)
            own = with_vision(own, read_config(base), hears=hears) if vision is None else vision.within(own)
            own = loaded.seeing(own) if loaded else own
            files.take(abstract_parameters(abstract_model(own)))
        self._projector = {} if loaded is None else {n: x for n, x in loaded.beside_text.items() if not is_adapter(n)}
        if not own.tie_word_embeddings and not own.scores:
            untie_files(base, files)
        trained: Storage = loaded.storage if loaded else "none"
        how: Storage = storage or (trained if own.quantize == "none" or trained in SERVED else own.quantize)
        if own.quantize != "none" and (how == own.quantize or how in SERVED):
            require_stored(base, own)
        self.config: DecoderConfig = own.quantized(how)
        if loaded and own.quantize == "none" != how:
            self.config = self.config.leaving(loaded.unquantized)
        model = abstract_model(self.config)
        shapes = base_shapes(model)
        self.adapter = None if loaded is None else check_adapter(loaded, shapes, identify(base), str(base))
        self._quantized = {name: shapes[name.removesuffix(".weight")] for name in quantized_names(model)}
        self._experts = {
            tensor: (name, index)
            for name, shape in self._quantized.items()
            if name not in files.tensors
            for tensor, index in expert_parts(name, shape).items()
        }
        self._vocabulary = {f"{path}.weight": path for path in PATHS.values() if path in shapes}
        matrices = _matrix_shapes(files, model) | self._quantized
        self._stored = {name: found for name, shape in matrices.items() if (found := find_stored(files, name, shape))}
        stored = _expand_quantized(files.tensors, self._stored, matrices)
        self._deltas = {} if self.adapter is None else self._find_deltas(self.adapter, stored)
        in_parts = [name for name in self._deltas if experts_format(stored, name)]
        self._blocks = {f"{name}_blocks": name for name in in_parts if self.config.quantize in SERVED}
        self.specs = _merged_specs(stored, expands=bool(in_parts) and not self._blocks)
        for name, delta in self._deltas.items():
            if name not in self._blocks.values():
                _require_fit(name, delta.shape, self.specs.get(name), folder, base)
        self._grow_specs(own)
        if self.adapter and self.adapter.scores:
            self.specs.pop(HEAD, None)
            norm = self.specs["model.norm.weight"]
            self.specs[SCORE] = jax.ShapeDtypeStruct((own.labels, own.hidden_size), norm.dtype)

    @property
    def dtypes(self) -> set[np.dtype]:
        """Return the dtypes of changed tensors."""
        trains_vocabulary = self.adapter and self.adapter.trains_vocabulary
        changed = self._deltas.keys() | (self._vocabulary if trains_vocabulary else {}).keys()
        changed |= ({SCORE} & self.specs.keys()) | self._projector.keys()
        rounded = self._quantized.keys() | self._experts.keys()
        return {self.specs[name].dtype for name in (changed | rounded) & self.specs.keys()}

    def read(self, name: str) -> np.ndarray:
        """Return a tensor of the merged folder."""
        if self.adapter and name in self._vocabulary:
            return self._read_vocabulary(name, self.adapter)
        if self.adapter and name == SCORE and self.adapter.scores:
            return self.adapter.tensors[SCORE].astype(self.specs[SCORE].dtype)
        if name in self._blocks:
            return self._read_blocks(self._blocks[name])
        if name in self.served:
            held, spec = self._held_rows(name), self.specs[name]
            delta, gain = self._change(name, held)
            return np.asarray(held.merged(delta, spec.dtype, gain)).reshape(spec.shape)
        if name in self._projector:
            return self._projector[name].astype(self.specs[name].dtype)
        weight = self._read_base(name)
        return _finite(name, self._deltas[name].add_to(weight)) if name in self._deltas else weight

    @cached_property
    def served(self) -> dict[str, Shape]:
        """Return the shapes of the folder's matrices that lie on the grid of the format in which they are served."""
        if self.config.quantize not in SERVED:
            return {}
        apart = {name: part_shape(self._quantized[of], index) for name, (of, index) in self._experts.items()}
        return {name: shape for name, shape in (self._quantized | apart).items() if name in self.specs}

    def packed_type(self, name: str) -> str | None:
        """Return the type in llama.cpp of a matrix on the grid of a K-quant; None of others."""
        if self.config.quantize != served_storage("q4_k_m") or name not in self.served:
            return None
        return k_quant_of(name, self.config.num_hidden_layers)

    def read_packed(self, name: str) -> Any:
        """Return a served matrix with its adapter merged, as its format stores it."""
        held = self._held_rows(name)
        return held.pack(held.codes(*self._change(name, held)))

    def _read_blocks(self, name: str) -> np.ndarray:
        """Return the blocks [E, out, in/32, 16] of experts in MXFP4 with their adapter merged, one by one."""
        delta, made = self._deltas[name], FORMATS[self.config.quantize]
        stack = made.join({part: jnp.asarray(self._files.read(f"{name}_{part}")) for part in made.parts})
        assert isinstance(stack, Stack) and isinstance(stack.rows, Served)
        blocks = []
        for expert, (b, a) in enumerate(zip(delta.b, delta.a, strict=True)):
            held = stack.rows.part(slice(expert * stack.out, (expert + 1) * stack.out))
            blocks.append(np.asarray(held.pack(held.codes(_product(b, a))).blocks))
        return np.stack(blocks)

    def _change(self, name: str, held: Served) -> tuple[jax.Array | None, jax.Array | None]:
        """Return an adapter's full delta of a matrix and, for DoRA, the factors of its rows; None without."""
        if (delta := self._deltas.get(name)) is None:
            return None, None
        gain = None
        if delta.magnitude is not None:
            factors = jnp.asarray(delta.a), jnp.asarray(delta.b)
            gain = magnitude_gain(held, *factors, jnp.asarray(delta.magnitude), dtype=jnp.float32)
        return _product(delta.b, delta.a).reshape(held.shape), gain

    def _held_rows(self, name: str) -> Served:
        """Return a served matrix, or the rows of all matrices of a stack, as the model held it in training."""
        parameter, index = self._experts.get(name, (name, None))
        held = self._held(parameter)
        rows = held.rows if isinstance(held, Stack) else held
        assert isinstance(rows, Served)
        if index is None:
            return rows
        expert, part = index
        first = expert * held.out
        return rows.part(slice(first + part.start, first + part.stop))

    def _find_deltas(self, adapter: Adapter, stored: Mapping[str, TensorInfo]) -> "dict[str, Delta]":
        out_first = find_family(self.config.model_type).parts.experts.transposed
        return adapter_deltas(adapter, stored, transposed=not out_first)

    def _read_base(self, name: str) -> np.ndarray:
        if name in self._quantized:
            return self._rounded(name, self.specs[name].dtype)
        if name in self._experts:
            parameter, index = self._experts[name]
            return self._rounded(parameter, self.specs[name].dtype)[index]
        if found := self._stored.get(name):
            return np.asarray(dequantize(found.read(self._files), self.specs[name].dtype))
        if name not in self._files.tensors:
            made = experts_format(self._files.tensors, name)
            assert made is not None, name
            return np.asarray(read_expanded(self._files, made, name))
        return self._files.read(name)

    @lru_cache(maxsize=1)  # noqa: B019  # experts one by one are consecutive
    def _rounded(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Return the values of a quantized parameter as the adapter was trained on them."""
        return np.asarray(dequantize(self._held(name), dtype))

    def _held(self, name: str) -> Any:
        """Return a quantized parameter as the model held it in training; threads that read its parts share it."""
        with self._holding:
            return self._hold(name)

    @lru_cache(maxsize=1)  # noqa: B019  # likewise
    def _hold(self, name: str) -> Any:
        value: Any = find_source(self._files, name, self._quantized[name]).read(self._files)
        sensitive = is_sensitive(name, self.config.num_hidden_layers)
        return hold_matrices(FORMATS[self.config.quantize], jax.tree.map(jnp.asarray, value), sensitive=sensitive)

    def _read_vocabulary(self, name: str, adapter: Adapter) -> np.ndarray:
        weight = self._files.read(name)
        if name in self._deltas:
            return _finite(name, self._deltas[name].add_to(weight))
        matrix = vocabulary_matrix(adapter, self._vocabulary[name], weight)
        return weight if matrix is None else _finite(name, matrix.astype(weight.dtype))

    def _grow_specs(self, config: DecoderConfig) -> None:
        """Give embedding and output projection the adapter's rows; leave out a tied projection's copy."""
        if self.adapter is None or not self.adapter.trains_vocabulary:
            return
        if config.tie_word_embeddings:
            self.specs.pop(f"{PATHS['lm_head']}.weight", None)
        size = max(config.vocab_size, self.adapter.vocab_size)
        for name in self._vocabulary:
            self.specs[name] = jax.ShapeDtypeStruct((size, config.hidden_size), self.specs[name].dtype)


def _product(b: np.ndarray, a: np.ndarray) -> jax.Array:
    return jnp.matmul(b, a, precision="highest")


def _describe(merge: "MergedTensors", adapter: Adapter, base: Path, output: Path) -> None:
    """Enter tokenizer, chat template, stop tokens and number of tokens of an adapter into a merged folder."""
    carry_record(adapter.folder, output)
    raw = copied = read_config(output)
    if read_record(output).get("bidirectional"):
        raw = with_text(raw, is_causal=False)
    if adapter.vocab_size > text_config(raw)["vocab_size"]:
        raw = with_text(raw, vocab_size=adapter.vocab_size)
    if config_from_hf(raw).tie_word_embeddings and not merge.config.tie_word_embeddings and not adapter.scores:
        raw = with_text(raw, tie_word_embeddings=False) | {"tie_word_embeddings": False}
    if raw != copied:
        write_json(output / "config.json", raw)
    own = has_tokenizer(adapter.folder)
    if adapter.trains_vocabulary and not own:
        _log.warning("%s has no tokenizer.json: the merged folder has the base's tokenizer", adapter.folder)
    if not own and not has_tokenizer(base):
        return
    try:
        tokenizer = load_own_tokenizer(base, adapter.folder)
    except ValueError as error:
        if own or adapter.scores:
            raise
        _log.warning("%s: the merged folder has the base's files and stop tokens, unchecked", error)
        return
    rows = merge.specs[f"{PATHS['embed_tokens']}.weight"].shape[0]
    if (most := max(tokenizer.get_vocab().values())) >= rows:
        _log.warning("the tokenizer of %s has token %d, the model only %d: do not use it", adapter.folder, most, rows)
    write_tokenizer(output, tokenizer, adapter.folder if own else None)
    if adapter.scores:
        describe_classifier(output, tokenizer, adapter.labels)
    else:
        write_stops(output, stop_tokens(tokenizer) | folder_stops(adapter.folder))
        check_serving(output, tokenizer)


def _matrix_shapes(files: TensorFiles, model: CausalLM) -> dict[str, Shape]:
    """Return the shapes of a folder's tensors, and of experts one by one, which may have other names there."""
    experts = {
        tensor: part_shape(spec.shape, index)
        for name, spec in abstract_parameters(model).items()
        for tensor, index in expert_parts(name, spec.shape).items()
    }
    return {name: info.shape for name, info in files.tensors.items()} | experts


def _expand_quantized(
    tensors: Mapping[str, TensorInfo], stored: Mapping[str, Stored], shapes: Mapping[str, Shape]
) -> dict[str, TensorInfo]:
    """Return a folder's tensors with quantized matrices in bfloat16 in place of their parts."""
    parts = {part for found in stored.values() for part in found.shapes}
    kept = {name: info for name, info in tensors.items() if name not in parts and not is_unneeded(name)}
    infos = {name: tensors[next(iter(found.shapes))] for name, found in stored.items()}
    dtype = np.dtype(jnp.bfloat16)
    return kept | {name: replace(info, shape=shapes[name], dtype=dtype) for name, info in infos.items()}


def _finite(name: str, weight: np.ndarray) -> np.ndarray:
    if not np.isfinite(weight).all():
        raise ValueError(f"{name} is not finite (NaN or infinity) after the merge into {weight.dtype}")
    return weight


def _merged_specs(tensors: Mapping[str, TensorInfo], *, expands: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the merged folder's tensor specs: the base's, with quantized experts expanded if `expands`."""
    specs: dict[str, jax.ShapeDtypeStruct] = {}
    for name, info in tensors.items():
        parameter, _, part = name.rpartition("_")
        if not expands or not (made := experts_format(tensors, parameter)) or part not in made.parts:
            specs[name] = jax.ShapeDtypeStruct(info.shape, info.dtype)
        elif parameter not in specs:
            E, out_features, in_features = made.join(
                {part: tensors[f"{parameter}_{part}"] for part in made.parts}
            ).shape
            specs[parameter] = jax.ShapeDtypeStruct((E, in_features, out_features), jnp.bfloat16)
    return specs


def _require_fit(
    name: str, shape: tuple[int, ...], spec: jax.ShapeDtypeStruct | None, adapter: str | Path | None, base: str | Path
) -> None:
    if spec is None:
        raise ValueError(f"{adapter} does not belong to {base}: it adapts {name}, missing from the base")
    if spec.dtype.kind in "iub":
        raise ValueError(f"{name} in {base} is quantized ({spec.dtype}): merge into the unquantized checkpoint")
    if spec.shape != shape:
        raise ValueError(
            f"{adapter} does not belong to {base}: for {name} it is {list(shape)}, the base {list(spec.shape)}"
        )


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A weight's delta scale · B · A in factors, with a leading axis for stacked experts."""

    b: np.ndarray
    a: np.ndarray
    transposed: bool = False
    """The weight is stored as [in, out]."""
    magnitude: np.ndarray | None = None
    """Norms [out] of the rows of the sum, for DoRA."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape."""
        out_features, in_features = self.b.shape[-2], self.a.shape[-1]
        return (*self.b.shape[:-2], *((in_features, out_features) if self.transposed else (out_features, in_features)))

    def add_to(self, weight: np.ndarray) -> np.ndarray:
        """Add the delta to a weight in float32 and cast to the weight's dtype."""
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks for finite values
            total = np.swapaxes(self.a, -1, -2) @ np.swapaxes(self.b, -1, -2) if self.transposed else self.b @ self.a
            total += weight.astype(np.float32)
            if self.magnitude is not None:
                total *= (self.magnitude / np.linalg.norm(total, axis=1))[:, None]
            return total.astype(weight.dtype)


def adapter_deltas(adapter: Adapter, base: Mapping[str, TensorInfo], *, transposed: bool = False) -> dict[str, Delta]:
    """Return the adapter's deltas by base weight name.

    Experts follow the base's layout: one tensor per expert or one for all, stored [E, in, out] if `transposed`; MXFP4
    experts go by their expanded name.
    """
    deltas: dict[str, Delta] = {}
    for name in adapter.modules:
        scale = np.float32(adapter.config.scale_of(name))
        b, a = scale * adapter.tensors[f"{name}.lora_B"], adapter.tensors[f"{name}.lora_A"]
        magnitude = adapter.tensors.get(f"{name}.{MAGNITUDE}")
        # The embedding looks up the columns of A.
        flipped = name == PATHS["embed_tokens"]
        linear = {f"{name}.weight": Delta(b=b, a=a, transposed=flipped, magnitude=magnitude)}
        deltas |= linear if b.ndim == 2 else _expert_deltas(name, b, a, base, transposed)
    return deltas


def _expert_deltas(
    name: str, b: np.ndarray, a: np.ndarray, base: Mapping[str, TensorInfo], transposed: bool
) -> dict[str, Delta]:
    parts = expert_parts(name, (*b.shape[:2], a.shape[2]))
    if not parts.keys() & base.keys():
        return {name: Delta(b=b, a=a, transposed=transposed)}
    return {part: Delta(b=b[index], a=a[index[0]]) for part, index in parts.items()}
