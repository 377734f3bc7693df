"""Fields of Hugging Face's config.json: their types, and the readers that families share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from jaxglue.models.config import LAYER_LINEARS, linears_by_layer
from jaxglue.ops.choices import Storage
from jaxglue.ops.gated_mlp import Activation
from jaxglue.ops.quant.formats import FORMATS, skipped_modules, stored_format
from jaxglue.ops.rope import RopeConfig
from jaxglue.settings.config import NonNegativeInt, Range, plain_fields

_Size = Annotated[int, Range(ge=1, le=2**31 - 1)]
_Factor = Annotated[float, Range(gt=0, le=1e12)]
"""Far above those of published models: products of some remain finite."""


@dataclass(frozen=True, kw_only=True)
class HfFields:
    """Types and ranges of the fields read from config.json, in transformers' names; each may be absent or null."""

    model_type: str
    hidden_act: str
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    moe_intermediate_size: _Size
    shared_expert_intermediate_size: _Size
    num_hidden_layers: Annotated[int, Range(ge=1, le=10_000)]
    num_attention_heads: _Size
    num_key_value_heads: _Size
    head_dim: _Size
    num_experts: Annotated[int, Range(ge=1, le=100_000)]
    num_local_experts: Annotated[int, Range(ge=0, le=100_000)]
    num_experts_per_tok: Annotated[int, Range(ge=0, le=100_000)]
    decoder_sparse_step: _Size
    max_position_embeddings: _Size
    original_max_position_embeddings: _Size
    sliding_window: NonNegativeInt
    max_window_layers: NonNegativeInt
    rms_norm_eps: Annotated[float, Range(gt=0, le=1)]
    initializer_range: Annotated[float, Range(ge=0, le=1000)]
    attention_dropout: Annotated[float, Range(ge=0, lt=1)]
    rope_theta: _Factor
    swiglu_limit: _Factor
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    norm_topk_prob: bool
    qkv_bias: bool
    q_lora_rank: _Size
    kv_lora_rank: _Size
    qk_nope_head_dim: _Size
    qk_rope_head_dim: _Size
    v_head_dim: _Size
    rope_interleave: bool
    topk_method: str
    mlp_layer_types: tuple[str, ...]
    use_qk_norm: bool
    n_routed_experts: Annotated[int, Range(ge=1, le=100_000)]
    n_shared_experts: _Size
    n_group: _Size
    topk_group: _Size
    routed_scaling_factor: _Factor
    first_k_dense_replace: NonNegativeInt
    num_nextn_predict_layers: NonNegativeInt
    use_sliding_window: bool
    attention_multiplier: _Factor
    embedding_multiplier: _Factor
    residual_multiplier: _Factor
    logits_scaling: _Factor
    query_pre_attn_scalar: _Factor
    attn_logit_softcapping: _Factor
    final_logit_softcapping: _Factor
    rope_local_base_freq: _Factor
    no_rope_layer_interval: _Size
    hidden_activation: str
    layer_types: tuple[str, ...]
    full_attention_interval: _Size
    linear_num_key_heads: _Size
    linear_num_value_heads: _Size
    linear_key_head_dim: _Size
    linear_value_head_dim: _Size
    linear_conv_kernel_dim: _Size
    global_head_dim: _Size
    num_global_key_value_heads: _Size
    num_kv_shared_layers: NonNegativeInt
    hidden_size_per_layer_input: NonNegativeInt
    vocab_size_per_layer_input: _Size
    attention_k_eq_v: bool
    use_double_wide_mlp: bool
    enable_moe_block: bool
    top_k_experts: _Size
    no_rope_layers: tuple[int, ...]
    mlp_only_layers: tuple[int, ...]


NO_WINDOW = (
    "layer_types in config.json says that layers slide, and there is no window for them: "
    "give sliding_window (of the Qwens with use_sliding_window: true), or say full_attention"
)
_OBJECTS = ("rope_scaling", "rope_parameters", "quantization_config", "per_layer_config")


def check_fields(raw: Mapping[str, Any], types: type = HfFields) -> None:
    """Raise ValueError for a field of config.json with a value of another type or outside its range.

    Args:
        raw: config.json.
        types: dataclass of the fields; a family has one of those that it alone reads.
    """
    for name, (_, kind) in plain_fields(types).items():
        value = raw.get(name)
        if value is None:
            continue
        items = value if isinstance(value, list | tuple) else (value,)
        whole = kind.scalar is int and any(isinstance(item, float) for item in items)  # as in 16.0
        if whole or (kind.many and items is not value):
            raise ValueError(f"{name} in config.json: expected {kind}, got {value!r:.100}")
        try:
            kind.read(value)
        except ValueError as error:
            raise ValueError(f"{name} in config.json: {str(error)[:200]}") from None
    for name in _OBJECTS:
        if not isinstance(raw.get(name), Mapping | None):
            raise ValueError(f"{name} in config.json: expected an object, got {raw[name]!r:.100}")


def require_fields(raw: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError for fields that config.json lacks."""
    if missing := [name for name in names if raw.get(name) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")


def layer_types(raw: Mapping[str, Any], types: Sequence[str]) -> Sequence[str]:
    """Return each layer's kind of attention: Hugging Face's `layer_types`, or a family's `types` where there are none.

    Raises:
        ValueError: an unknown type, or a number of types other than the number of layers.
    """
    types = types if raw.get("layer_types") is None else raw["layer_types"]
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"layer_types {', '.join(unknown)} are not supported: only full_attention, sliding_attention are"
        )
    if len(types) != raw["num_hidden_layers"]:
        raise ValueError(f"layer_types has {len(types)} entries for num_hidden_layers={raw['num_hidden_layers']}")
    return types


def window_pattern(raw: Mapping[str, Any], default: int) -> int:
    """Return the number of layers of which the last attends to all; raise ValueError for what is no number above 0."""
    every = default if (value := raw.get("sliding_window_pattern")) is None else value
    if type(every) is not int or every < 1:
        raise ValueError(f"sliding_window_pattern in config.json: expected a number above 0, got {every!r:.100}")
    return every


def layer_windows(raw: Mapping[str, Any], types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Return each layer's window, one for all that slide; raise ValueError as `layer_types`, or for none of them."""
    types = layer_types(raw, types)
    if window is None and "sliding_attention" in types:
        raise ValueError(NO_WINDOW)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def ropes_by_type(
    raw: Mapping[str, Any], thetas: Mapping[str, float], *, max_position_embeddings: int
) -> dict[str, RopeConfig]:
    """Read the rotary embedding of each type of layer.

    Args:
        raw: config.json, with `rope_parameters` by type of layer, or a `rope_scaling`, which is that of full attention;
            other `rope_parameters`, and an `original_max_position_embeddings` outside, count for nothing, as in
            transformers.
        thetas: `rope_theta` of each type where they have none.
        max_position_embeddings: the family's where config.json has none.

    Raises:
        ValueError: as `RopeConfig.from_hf`.
    """
    parameters = raw.get("rope_parameters") or {}
    given = {kind: parameters.get(kind) or {} for kind in thetas}
    if wrong := [own for own in given.values() if not isinstance(own, Mapping)]:
        raise ValueError(f"rope_parameters in config.json: expected an object for each type of layer, got {wrong[0]!r}")
    scaling = raw.get("rope_scaling") or {}
    if scaling.get("rope_type") is None and scaling.get("type") not in (None, "default"):
        raise ValueError(
            f"rope_scaling in config.json names its type {scaling['type']!r} as type, which transformers 4 reads here "
            "and transformers 5 does not: name it as rope_type if it is meant, or remove rope_scaling"
        )
    given["full_attention"] = {**given["full_attention"], **scaling}
    positions = raw.get("max_position_embeddings") or max_position_embeddings
    return {
        kind: RopeConfig.from_hf({"rope_parameters": given[kind]}, theta=theta, max_position_embeddings=positions)
        for kind, theta in thetas.items()
    }


def sparse_layers(raw: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer of the Qwens whether it has experts, by `mlp_only_layers` and `decoder_sparse_step`."""
    dense, step = set(raw.get("mlp_only_layers") or ()), raw.get("decoder_sparse_step")
    step = 1 if step is None else step
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(raw["num_hidden_layers"]))


def later_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the layers' windows of the Qwens: with `use_sliding_window`, layers from `max_window_layers` on slide.

    Raises:
        ValueError: as `layer_windows`; or layers slide without a window.
    """
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    first = 28 if (given := raw.get("max_window_layers")) is None else given
    types = [
        "sliding_attention" if window is not None and index >= first else "full_attention"
        for index in range(raw["num_hidden_layers"])
    ]
    return layer_windows(raw, types, window)


_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations by transformers' names."""


def decoder_fields(
    raw: Mapping[str, Any],
    *,
    theta: float = 10_000.0,
    max_position_embeddings: int = 2048,
    eps: float = 1e-6,
    partial: float | None = None,
    interleaved: bool = False,
    activations: Sequence[str] = ("silu",),
    rope: RopeConfig | None = None,
) -> dict[str, Any]:
    """Read the config.json fields shared by all families.

    Args:
        raw: config.json.
        theta: the family's `rope_theta` where config.json has none.
        max_position_embeddings: the family's likewise.
        eps: the family's `rms_norm_eps` likewise.
        partial: the family's `partial_rotary_factor` likewise; None for families that turn whole heads.
        interleaved: the family turns neighboring dimensions.
        activations: those that the family may have, in transformers' names; the first one where config.json has none.
        rope: the rotary embedding of families that read their own; `theta`, `partial` and `interleaved` are unused.

    Raises:
        ValueError: a required field is missing, or the activation or rope type is not supported.
    """
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    require_fields(raw, needed)
    if raw.get("per_layer_config"):
        raise ValueError(f"per_layer_config in config.json is not supported for {raw['model_type']}")
    if (act := raw.get("hidden_act", activations[0])) not in activations:
        only = ", ".join(map(repr, activations))
        raise ValueError(f"hidden_act {act!r} is not supported for {raw['model_type']}: only {only} is")
    labels = _labels(raw)
    heads, given = raw["num_attention_heads"], {name: value for name, value in raw.items() if value is not None}
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    rope = rope or RopeConfig.from_hf(
        raw, theta=theta, max_position_embeddings=max_position_embeddings, partial=partial, interleaved=interleaved
    )
    rope.check_width(head_dim)
    return {
        **{name: raw[name] for name in needed},
        "model_type": raw["model_type"],
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": raw.get("max_position_embeddings") or max_position_embeddings,
        "rms_norm_eps": given.get("rms_norm_eps", eps),
        "tie_word_embeddings": given.get("tie_word_embeddings", False) and not labels,
        "scores": labels > 0,
        "bidirectional": not raw.get("is_causal", True),
        "labels": max(labels, 1),
        "attention_bias": given.get("attention_bias", False),
        "mlp_bias": given.get("mlp_bias", False),
        "activation": _ACTIVATIONS[act],
        "initializer_range": given.get("initializer_range", 0.02),
        "rope": rope,
        "quantize": "none" if expert_format(raw) != "none" else stored_format(raw.get("quantization_config")),
        "layer_unquantized": _layer_unquantized(raw),
    }


def _layer_unquantized(raw: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return the linear layers of each layer that a quantized folder holds unquantized; empty where it holds none."""
    layers = raw["num_hidden_layers"]
    modules = [f"model.layers.{layer}.{linear}" for layer in range(layers) for linear in LAYER_LINEARS]
    return linears_by_layer(skipped_modules(raw.get("quantization_config"), modules), layers)


def expert_format(raw: Mapping[str, Any]) -> Storage:
    """Return the format of a folder's experts; none where they are not quantized apart from linear layers.

    Raises:
        ValueError: a dense model in a format of experts.
    """
    config = raw.get("quantization_config") or {}
    if not FORMATS[how := stored_format(config)].parts:
        return "none"
    if not (raw.get("num_experts") or raw.get("num_local_experts")):
        raise ValueError(f"quant_method {config['quant_method']!r} in config.json is for experts, and there are none")
    return how


def _labels(raw: Mapping[str, Any]) -> int:
    """Return the labels of a folder's sequence classifier, of which reward models have one; 0 for a text model."""
    names = raw.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith("ForSequenceClassification") for name in names):
        return 0
    labels = raw.get("id2label")
    return len(labels) if isinstance(labels, Mapping) else raw.get("num_labels", 2)
