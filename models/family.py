"""Model families as tables: the reader of a family's config.json, and the parts of its layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from jaxglue.models.config import LAYER_LINEARS, DecoderConfig
from jaxglue.models.wrapper import WRAPPERS
from jaxglue.ops.moe import Activation, Order
from jaxglue.ops.norm_rope import LLAMA_NORM, NormStyle
from jaxglue.parts import Registry


@dataclass(frozen=True, kw_only=True)
class NormNames:
    """Names of a layer's norms, None for those that a family lacks."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """Norm of attention's output, before it is added to the residual stream."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleNames:
    """Names of a layer's modules."""

    output: str = "o_proj"
    """Attention's projection of its output."""
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "gate_up_proj"


NAMES = ModuleNames()


@dataclass(frozen=True, kw_only=True)
class ExpertParts:
    """Router and experts of sparse layers."""

    router: str = "gate"
    """The router's name."""
    order: Order = "softmax_topk"
    """See `jaxglue.ops.moe.route`."""
    activation: Activation = "swiglu"
    transposed: bool = True
    """Matrices are stored [E, out, in]; MXFP4 ones always are."""
    bias: bool = False
    """Router and experts have biases."""
    float32_router: bool = False
    """The router's weight is in float32 whatever the model's dtype, and so is its product."""
    correction: bool = False
    """The router has a stored bias of each expert, `e_score_correction_bias`, that counts for the choice alone."""
    correction_axes: int = 1
    """Axes of these biases in files, the first ones of size 1."""
    stored: Literal["together", "apart", "by_number"] = "together"
    """How files hold matrices: of all experts in one tensor, or of each, as gate_proj, …, or by number, as w1, …."""
    shared: str = "shared_expert"
    """Name of the expert that serves every token, where config.json has one."""
    shared_gate: bool = False
    """The shared expert's output is times the sigmoid of a projection of its input, `shared_expert_gate`."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts that all models of a family share; `DecoderConfig` has those that config.json decides."""

    norms: NormNames = NormNames()
    norm: NormStyle = LLAMA_NORM
    final_norm: NormStyle | None = None
    """Of the norm before the output projection; None for the same as in layers."""
    embedding_norm: bool = False
    """Embeddings are normed, without a weight."""
    head_norms: Literal["none", "heads", "plain", "full", "turned"] = "none"
    """Norms of queries and keys: of each head, these without weights, of the full width, or of turned heads."""
    names: ModuleNames = NAMES
    parallel: bool = False
    """Attention and feed-forward read one norm, that before attention, and add to one residual stream."""
    fused_qkv: bool = False
    """One projection `qkv_proj` gives queries, keys and values."""
    fused_gate_up: bool = False
    """One projection `gate_up_proj` gives gate and up of dense feed-forwards."""
    gated_attention: bool = False
    """The query projection has a gate for each of attention's outputs beside its query."""
    gate: str | None = None
    """Projection of gates of attention's output; None without one of its own."""
    gate_per_head: bool = False
    """It has a gate for each head, not for each of its values."""
    sinks: bool = False
    """Attention's softmax has a learned logit for each head."""
    experts: ExpertParts = ExpertParts()


LLAMA_PARTS = Parts()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type of Hugging Face's, whose checkpoints have the parameters' names."""

    model_type: str
    config_from_hf: Callable[[Mapping[str, Any]], DecoderConfig]
    """Read a parsed config.json; raise ValueError for missing fields and values that are not supported."""
    parts: Parts = LLAMA_PARTS
    layer: type | None = None
    """Its `DecoderLayer`, where it has one of its own."""
    linears: tuple[str, ...] = ()
    """Linear layers of its layers, by paths within a layer, beside `LAYER_LINEARS`."""


FAMILIES = Registry[Family]("model family")
"""Families by `model_type`."""


def register(family: Family) -> Family:
    """Let config.json files of this model type be read and built; raise ValueError for a type that has a family."""
    FAMILIES.add(family.model_type, family)
    LAYER_LINEARS.extend(name for name in family.linears if name not in LAYER_LINEARS)
    return family


_FOREIGN = {
    "index_topk": "attention to keys that an indexer chooses",
    **{
        "ssm_state_size": "state-space layers",
        "mamba_d_state": "state-space layers",
        "state_size": "state-space layers",
    },
    **{"rotary_pct": "another partial rotation", "alibi": "ALiBi positions", "n_positions": "learned positions"},
    **{"vision_config": "a vision tower", "audio_config": "an audio tower", "encoder_layers": "an encoder"},
    **{"decoder_start_token_id": "an encoder", "num_nextn_predict_layers": "layers that predict further tokens"},
    "clip_qkv": "clipped queries, keys and values",
}
"""Parts of models that have no family here, by fields of config.json that speak of them."""


def foreign_parts(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return parts that no family has, in words, by the first field of a config.json that speaks of each."""
    parts: dict[str, str] = {}
    for name, part in _FOREIGN.items():
        if raw.get(name) not in (None, False, 0):
            parts.setdefault(part, name)
    return parts


def find_family(model_type: Any, raw: Mapping[str, Any] | None = None) -> Family:
    """Return the family of a model type.

    Args:
        model_type: of config.json.
        raw: the parsed config.json, by which an error names parts that no family has.

    Raises:
        ValueError: there is none; names those that are, the nearest, and what the model would need.
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    types = sorted({*FAMILIES, *WRAPPERS})
    nearest = get_close_matches(str(model_type), types, n=1, cutoff=0.6)
    hint = f"; the nearest is {nearest[0]}" if nearest else ""
    if parts := foreign_parts(raw or {}):
        hint += f". Its config.json names {', '.join(f'{part} ({name})' for part, name in parts.items())}"
    raise ValueError(f"model_type {model_type!r} is not supported: known are {', '.join(types)}{hint}")
