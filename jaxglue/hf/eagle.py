"""Folders of EAGLE-3's draft heads, as vLLM and its speculators library read and write them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from jaxglue.files.atomic import atomic_folder
from jaxglue.files.json_file import read_json, write_json
from jaxglue.hf.checkpoint import open_checkpoint, read_config
from jaxglue.hf.draft import same_rows, write_draft
from jaxglue.hf.tensor_files import SINGLE, TensorFiles
from jaxglue.models.config import DecoderConfig
from jaxglue.models.draft import parameter_name
from jaxglue.models.eagle import EagleHead, EagleShape, default_taps, layer_start, stored_name, why_no_eagle
from jaxglue.models.llama import config_from_hf

_MATRIX, _OFFSETS, _KNOWN, _EMBEDDING = "lm_head.weight", "d2t", "t2d", "embed_tokens.weight"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_ROPE = "rope_theta", "rope_scaling", "rope_parameters"
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "initializer_range"),
)


class EagleWeights(NamedTuple):
    """A head with its projection to tokens."""

    head: EagleHead
    matrix: Float[jax.Array, "W D"]
    """Projection to the tokens that drafts are chosen among."""
    tokens: list[int]
    """These tokens, in order."""


class EagleFiles(NamedTuple):
    """A folder of a head, of which the headers are read and checked."""

    shape: EagleShape
    files: TensorFiles
    start: str
    """Beginning of the names of the layer's tensors."""
    tokens: list[int]
    """Tokens that drafts are chosen among, in order."""


def new_shape(raw: Mapping[str, Any], model: DecoderConfig) -> EagleShape:
    """Return the shape of a head for a model with this config.json: a Llama layer of the model's sizes and rotation.

    Raises:
        ValueError: a model that no such head is for here.
    """
    if reason := why_no_eagle(model):
        raise ValueError(f"the model has {reason}")
    return EagleShape(layer=config_from_hf(_layer_fields(raw, model)), taps=default_taps(model.num_hidden_layers))


def _layer_fields(raw: Mapping[str, Any], model: DecoderConfig) -> dict[str, Any]:
    """Return the config.json of a Llama model of the head's one layer."""
    text = raw.get("text_config", raw)
    fields: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    fields |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
    fields |= {name: getattr(model, name) for name in _SIZES} | {"rope_theta": model.rope.rope_theta}
    return fields | {name: text[name] for name in _ROPE if text.get(name) is not None}


def open_eagle(folder: str | Path, base: str | Path, model: DecoderConfig) -> EagleFiles:
    """Check the config.json and the headers of a head's folder against a model; load nothing but its tokens.

    Args:
        folder: of the head, in the names of vLLM's speculators or of EAGLE-3's authors.
        base: of the model.
        model: its architecture.

    Raises:
        ValueError: a folder of something else, or a head of another model.
    """
    shape = _read_shape(Path(folder), model)
    files = TensorFiles([Path(folder) / SINGLE])
    start = layer_start(files.tensors)
    shapes = {stored_name(name, start): size for name, size in _parameter_shapes(shape).items()}
    size, count = model.vocab_size, files.tensors[_OFFSETS].shape[0] if _OFFSETS in files.tensors else model.vocab_size
    shapes |= {_MATRIX: (count, model.hidden_size)}
    optional = {_OFFSETS: (count,), _KNOWN: (size,), _EMBEDDING: (size, model.hidden_size)}
    for name in sorted(files.tensors.keys() - shapes.keys() - optional.keys()):
        raise ValueError(f"{name} in {files.tensors[name].file} belongs to no EAGLE-3 head of one Llama layer")
    for name, expected in (shapes | {name: optional[name] for name in optional.keys() & files.tensors.keys()}).items():
        if name not in files.tensors:
            raise ValueError(f"{folder} lacks {name} of its draft head")
        if (info := files.tensors[name]).shape != expected:
            raise ValueError(f"{name} in {info.file} is {list(info.shape)}: a head of this model has {list(expected)}")
        if name in shapes and info.dtype.itemsize == 1:
            raise ValueError(f"{name} in {info.file} is quantized ({info.dtype}): use a folder in 16 bits")
    if _EMBEDDING in files.tensors and not same_rows(files, _EMBEDDING, open_checkpoint(base), f"model.{_EMBEDDING}"):
        raise ValueError(f"{_EMBEDDING} in {folder} differs from that of {base}: heads read the model's embedding here")
    offsets = files.read(_OFFSETS) if _OFFSETS in files.tensors else np.zeros(count, np.int64)
    tokens = (np.arange(count) + offsets).tolist()
    if not all(token < following for token, following in pairwise([-1, *tokens, size])):
        raise ValueError(f"{_OFFSETS} in {folder}: expected the offsets of rising tokens below {size:,}")
    return EagleFiles(shape, files, start, tokens)


def _read_shape(folder: Path, model: DecoderConfig) -> EagleShape:
    """Read a head's config.json; errors as of `open_eagle`."""
    if reason := why_no_eagle(model):
        raise ValueError(f"the model has {reason}")
    file = folder / "config.json"
    raw = read_json(file)
    if (kind := raw.get("speculators_model_type", "eagle3")) != "eagle3":
        raise ValueError(f"{file} is of a head of the kind {kind!r:.50}: those of EAGLE-3 are read")
    if raw.get("norm_before_fc"):
        raise ValueError(
            f"{file}: norm_before_fc is not supported: use a head without it, or train one (jaxglue draft)"
        )
    if "draft_vocab_size" not in raw:
        raise ValueError(f"{file} lacks draft_vocab_size: {folder} holds no EAGLE-3 head (jaxglue draft trains one)")
    fields = raw.get("transformer_layer_config", raw)
    if fields.get("model_type") != "llama" or fields.get("num_hidden_layers") != 1:
        raise ValueError(f"{file}: heads of one Llama layer are read, and this is no such")
    layer = config_from_hf(fields)
    if (wide := raw.get("target_hidden_size")) not in (None, model.hidden_size):
        raise ValueError(f"{file}: target_hidden_size is {wide}, and the model's hidden_size {model.hidden_size}")
    for name in ("hidden_size", "vocab_size", "num_key_value_heads", "head_dim"):
        if (own := getattr(layer, name)) != (expected := getattr(model, name)):
            raise ValueError(f"{file}: {name} is {own}, and the model's {expected}: the head is not for this model")
    inner, count = raw.get("eagle_config") or {}, model.num_hidden_layers
    listed = raw.get(_TAPS) or inner.get(_TAPS) or list(default_taps(count))
    taps = tuple(sorted(listed))
    if len({*taps}) != 3 or not all(isinstance(tap, int) and 0 <= tap < count for tap in taps):
        raise ValueError(f"{file}: {_TAPS} {listed} should name three of the model's {count} layers")
    before = raw.get("norm_before_residual", "speculators_model_type" in raw)
    return EagleShape(layer=layer, taps=taps, norm_before_residual=bool(before))


def _abstract(shape: EagleShape, dtype: Any) -> EagleHead:
    return nnx.eval_shape(lambda: EagleHead(shape, dtype=dtype, rngs=nnx.Rngs(0)))


def _parameter_shapes(shape: EagleShape) -> dict[str, tuple[int, ...]]:
    flat = nnx.to_flat_state(nnx.state(_abstract(shape, jnp.float32)))
    return {parameter_name(path): value.shape for path, value in flat}


def load_eagle(found: EagleFiles, dtype: Any) -> EagleWeights:
    """Load a head's weights in a dtype."""
    graphdef, state = nnx.split(_abstract(found.shape, dtype))

    def read(name: str) -> jax.Array:
        return jnp.asarray(found.files.read(stored_name(name, found.start)), dtype)

    flat = [(path, value.replace(read(parameter_name(path)))) for path, value in nnx.to_flat_state(state)]
    return EagleWeights(nnx.merge(graphdef, nnx.from_flat_state(flat)), read(_MATRIX), found.tokens)


def write_eagle(
    folder: Path,
    base: str | Path,
    shape: EagleShape,
    parameters: Mapping[str, np.ndarray],
    matrix: Float[np.ndarray, "W D"],
    tokens: Sequence[int],
    *,
    drafts: int,
    name: str,
) -> None:
    """Write a head that vLLM drafts by, to a new folder.

    Args:
        folder: absent or empty.
        base: of the model.
        shape: of the head.
        parameters: of the head, in their files' dtype.
        matrix: projection to tokens.
        tokens: that it projects to, in order.
        drafts: tokens of a step that servers draft where they are told nothing else.
        name: of the model, for servers.
    """
    raw, start = read_config(base), layer_start(())
    tensors = {stored_name(name, start): value for name, value in parameters.items()} | {_MATRIX: matrix}
    if len(tokens) < shape.layer.vocab_size:
        known = np.zeros(shape.layer.vocab_size, bool)
        known[list(tokens)] = True
        tensors |= {_OFFSETS: np.asarray(tokens, np.int64) - np.arange(len(tokens)), _KNOWN: known}
    greedy = {"proposal_type": "greedy", "speculative_tokens": drafts, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(tokens),
        "norm_before_residual": shape.norm_before_residual,
        "target_hidden_size": None,
        _TAPS: list(shape.taps),
        "transformer_layer_config": _layer_fields(raw, shape.layer),
        "torch_dtype": str(matrix.dtype),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": name, "architectures": raw.get("architectures", [])},
        },
    }
    with atomic_folder(folder) as temporary:
        write_json(temporary / "config.json", config)
        write_draft(temporary / SINGLE, tensors)
