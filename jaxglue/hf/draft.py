"""Draft heads in files: read from a model's folder, and written under its names beside an adapter or in a folder."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from jaxglue.files.atomic import atomic_file
from jaxglue.files.json_file import read_json, write_json
from jaxglue.hf.checkpoint import open_checkpoint
from jaxglue.hf.experts import expert_parts, find_source, part_shape
from jaxglue.hf.tensor_files import TensorFiles, write_file
from jaxglue.models.config import DecoderConfig
from jaxglue.models.draft import DRAFTS, DraftHead, DraftTensors, build_draft, parameter_name

DRAFT_FILE = "draft.safetensors"
"""A trained head beside an adapter, under the names of the base's files."""
TOKENS_FILE = "draft_tokens.json"
"""Beside a trained head: the tokens that drafts are chosen among."""
MOST_TOKENS = 32_768
"""Tokens that drafts are chosen among, where a vocabulary has more than twice as many."""
_EMBEDDING = "model.embed_tokens.weight"
_ROWS = 4096

Shape = tuple[int, ...]


class DraftFiles(NamedTuple):
    """A folder's tensors of a head, in the place in which each is read and written."""

    files: TensorFiles
    """With a head's names."""
    shapes: Mapping[str, Shape]
    """Of a head's parameters."""
    layout: Mapping[str, tuple[str, Any]]
    """A head's parameter, and the index of the part in it, by the tensors' names in `files`."""


def find_draft(folder: str | Path, config: DecoderConfig) -> DraftFiles:
    """Find the tensors of a folder's draft head by the headers of its files; load nothing.

    Args:
        folder: of the model.
        config: its architecture.

    Raises:
        ValueError: the family or the folder has none, or one of other shapes, quantized, or with a vocabulary that is
            not the model's.
    """
    if config.model_type not in DRAFTS:
        known = ", ".join(sorted(DRAFTS))
        raise ValueError(
            f"{config.model_type} has no draft head here: those of {known} are read; leave out --train-draft and "
            "--drafts, or name a head of jaxglue draft with --draft-model"
        )
    names, model = DRAFTS[config.model_type].of(config.num_hidden_layers), open_checkpoint(folder)
    files = TensorFiles(sorted({info.file for info in (*model.tensors.values(), *model.others.values())}), names)
    if not files.tensors:
        raise ValueError(
            f"{folder} holds no draft head ({names.known.start}…), which transformers leaves out when it saves a "
            "model: use the published folder, or leave out --train-draft and --drafts"
        )
    shapes = draft_shapes(config)
    sources = {name: find_source(files, name, shape) for name, shape in shapes.items()}
    wanted = {name: shape for source in sources.values() for name, shape in source.shapes.items()}
    assert files.names is not None
    for name in sorted(wanted.keys() ^ files.tensors.keys()):
        stored, lacks = files.names.stored(name), name in wanted
        raise ValueError(
            f"{folder} lacks {stored} of its draft head"
            if lacks
            else f"{stored} in {files.tensors[name].file} belongs to no draft head of one layer, which alone is trained"
        )
    for name, shape in wanted.items():
        info, stored = files.tensors[name], files.names.stored(name)
        if info.shape != shape:
            raise ValueError(f"{stored} in {info.file} is {list(info.shape)}, config.json says {list(shape)}")
        if info.dtype.itemsize == 1:
            raise ValueError(f"{stored} in {info.file} is quantized ({info.dtype}): use a folder in 16 bits")
    _check_copies(model, files)
    layout: dict[str, tuple[str, Any]] = {}
    for name, shape in shapes.items():
        parts: Mapping[str, Any] = {} if name in files.tensors else expert_parts(name, shape)
        layout |= {tensor: (name, index) for tensor, index in (parts or {name: ()}).items()}
    return DraftFiles(files, shapes, layout)


def find_head(folder: str | Path, config: DecoderConfig, adapter: Path | None) -> DraftFiles:
    """Find a folder's draft head, or the one that was trained beside an adapter on it; errors as of `find_draft`."""
    found = find_draft(folder, config)
    if read_draft(adapter, folder):
        assert adapter is not None
        names = DRAFTS[config.model_type].of(config.num_hidden_layers)
        found = found._replace(files=TensorFiles([adapter / DRAFT_FILE], names))
    return found


def folder_has_head(folder: str | Path, config: DecoderConfig) -> bool:
    """Tell whether a folder has tensors under the names of its family's draft heads."""
    if config.model_type not in DRAFTS:
        return False
    names, model = DRAFTS[config.model_type].of(config.num_hidden_layers), open_checkpoint(folder)
    files = sorted({info.file for info in (*model.tensors.values(), *model.others.values())})
    return bool(TensorFiles(files, names).tensors)


def head_modules(folder: str | Path, config: DecoderConfig) -> list[str]:
    """Return the names of the modules with matrices of a folder's draft head, if it has one, which are never quantized.

    Readers of quantized folders find them among the modules to leave alone.
    """
    if config.model_type not in DRAFTS:
        return []
    names, others = DRAFTS[config.model_type].of(config.num_hidden_layers), open_checkpoint(folder).others
    owned = TensorFiles(sorted({info.file for info in others.values()}), names)
    assert owned.names is not None
    matrices = [owned.names.stored(name) for name, info in owned.tensors.items() if len(info.shape) > 1]
    return sorted(name.removesuffix(".weight") for name in matrices)


def draft_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Return the shapes of the parameters of a head for a model."""
    head = nnx.eval_shape(lambda: build_draft(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    return {parameter_name(path): value.shape for path, value in nnx.to_flat_state(nnx.state(head))}


def _check_copies(model: TensorFiles, files: TensorFiles) -> None:
    """Raise ValueError for a head with an embedding or output projection that is not the model's."""
    assert isinstance(files.names, DraftTensors)
    plain = TensorFiles(sorted({info.file for info in files.others.values()}))
    for copy, name in files.names.copies().items():
        if copy not in plain.tensors:
            continue
        name = name if name in model.tensors else _EMBEDDING
        if not same_rows(plain, copy, model, name):
            raise ValueError(
                f"{copy} in {plain.tensors[copy].file} differs from {name}: heads with a vocabulary of their own are "
                "not trained"
            )


def same_rows(files: TensorFiles, name: str, others: TensorFiles, other: str) -> bool:
    """Return whether a matrix in some files equals another in others, of which few rows are read at a time."""
    own, info = files.tensors[name], others.tensors[other]
    return (own.shape, own.dtype) == (info.shape, info.dtype) and all(
        np.array_equal(files.read_rows(name, i, i + _ROWS), others.read_rows(other, i, i + _ROWS))
        for i in range(0, own.shape[0], _ROWS)
    )


def load_draft(folder: str | Path, config: DecoderConfig, *, dtype: Any, adapter: Path | None = None) -> DraftHead:
    """Load a folder's draft head, or the one that was trained beside an adapter on it; errors as of `find_draft`."""
    found = find_head(folder, config, adapter)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build_draft(config, dtype=dtype, rngs=nnx.Rngs(0))))

    def value(name: str, spec: Any) -> jax.Array:
        array = find_source(found.files, name, spec.shape).read(found.files)
        return jnp.asarray(array, spec.dtype)

    flat = [
        (path, variable.replace(value(parameter_name(path), variable.get_value())))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def published_tensors(
    folder: str | Path, config: DecoderConfig, parameters: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return a head's parameters under the names, and in the dtypes, that the tensors have in a model's folder."""
    found = find_draft(folder, config)
    assert found.files.names is not None
    return {
        found.files.names.stored(tensor): np.asarray(
            parameters[name][index].reshape(part_shape(found.shapes[name], index)),
            found.files.tensors[tensor].dtype,
        )
        for tensor, (name, index) in found.layout.items()
    }


def copied_tensors(folder: str | Path, config: DecoderConfig, read: Callable[[str], Any]) -> dict[str, Any]:
    """Return the values of a head's copies of a model's tensors, which `read` gives, by the copies' names."""
    if config.model_type not in DRAFTS:
        return {}
    names, others = DRAFTS[config.model_type].of(config.num_hidden_layers), open_checkpoint(folder).others
    return {copy: read(name) for copy, name in names.copies().items() if copy in others}


def frequent_tokens(counts: Int[np.ndarray, " V"]) -> list[int] | None:
    """Return the tokens that drafts are chosen among, in order, by how often texts have each; None for all.

    Where texts have fewer, tokens follow that have the lowest ids: those of byte pairs are numbered by frequency.
    """
    if len(counts) <= 2 * MOST_TOKENS:
        return None
    return np.sort(np.argsort(-counts, kind="stable")[:MOST_TOKENS]).tolist()


def write_draft_tokens(folder: Path, tokens: list[int]) -> None:
    """Write the tokens that drafts are chosen among beside a head."""
    write_json(folder / TOKENS_FILE, {"tokens": tokens})


def read_draft_tokens(folder: str | Path, adapter: Path | None, vocabulary: int) -> list[int] | None:
    """Return the tokens that drafts are chosen among, of an adapter's head or a folder's; None for all.

    Raises:
        ValueError: a file that does not list tokens of the vocabulary in their order.
    """
    found = [each / TOKENS_FILE for each in (adapter, Path(folder)) if each and (each / TOKENS_FILE).is_file()]
    if not found:
        return None
    content = read_json(found[0])
    listed = content.get("tokens") if isinstance(content, dict) else None
    tokens: list[int] = listed if isinstance(listed, list) and all(type(token) is int for token in listed) else []
    rising = all(token < following for token, following in pairwise([-1, *tokens, vocabulary]))
    if not tokens or not rising:
        raise ValueError(
            f"{found[0]}: expected rising `tokens` below {vocabulary}: delete it, so that drafts read the whole "
            "vocabulary"
        )
    return tokens


def write_draft(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a head's tensors to a file, which appears complete or not at all."""
    specs = {name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    with atomic_file(path) as temporary:
        write_file(temporary, specs, lambda name: tensors[name])


def read_draft(adapter: Path | None, base: str | Path) -> dict[str, np.ndarray]:
    """Return the tensors of the head that was trained beside an adapter, by their names in its base; else none.

    Raises:
        ValueError: the base has other ones.
    """
    if adapter is None or not (adapter / DRAFT_FILE).is_file():
        return {}
    files, base_files = TensorFiles([adapter / DRAFT_FILE]), open_checkpoint(base)
    for name, info in files.tensors.items():
        own = base_files.others.get(name)
        if own is None or own.shape != info.shape:
            raise ValueError(f"{name} in {info.file} is no tensor of {base}: the draft head is of another model")
    return {name: files.read(name) for name in files.tensors}
