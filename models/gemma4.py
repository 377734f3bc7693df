"""Gemma 4 (text): heads of two sizes, keys and values shared by layers, embeddings for each layer, experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import (
    AttentionOptions,
    DecoderConfig,
    FamilyShape,
    LayerKind,
    LayerShape,
    MoeConfig,
    PerLayerShape,
)
from jaxglue.models.context import LayerContext
from jaxglue.models.family import ExpertParts, Family, Parts, register
from jaxglue.models.gemma2 import NORMS, gemma_fields
from jaxglue.models.gemma4_audio import with_hearing
from jaxglue.models.gemma4_vision import with_tower
from jaxglue.models.hf_fields import expert_format, layer_types, layer_windows, require_fields, ropes_by_type
from jaxglue.models.layers import DecoderLayer
from jaxglue.models.linear import layer_linear
from jaxglue.models.moe_layers import Experts, ScaledRouter, apply_experts
from jaxglue.models.parameters import Buffer
from jaxglue.models.residual import Branch, Norm
from jaxglue.models.shared_kv import KeysValues, SharedAttention
from jaxglue.models.wrapper import Wrapper, wrap
from jaxglue.ops import names
from jaxglue.ops.gated_mlp import ACTIVATIONS
from jaxglue.ops.norm_rope import NormStyle

_POSITIONS = 131_072
_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETAS = {_FULL: 1_000_000.0, _SLIDING: 10_000.0}
_ROPES = {_FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25}, _SLIDING: {}}
"""Rotary embeddings where config.json has no `rope_parameters`."""
_NORM = NormStyle(rounds_first=False)
_READ_HERE = "use_bidirectional_attention", "per_layer_config"
"""Fields that other types may not have."""
_EXPERT_NORMS = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
"""Norms of the dense feed-forward's output beside experts, of these experts' input, and of their output."""


@dataclass(frozen=True, kw_only=True)
class Gemma4Shape(FamilyShape):
    """Sizes of each layer, and what layers read beside the residual stream."""

    layer_shapes: tuple[LayerShape, ...]
    shared_width: int
    per_layer: PerLayerShape | None

    def with_layers(self, indices: Sequence[int]) -> "Gemma4Shape":
        """See `FamilyShape`."""
        return replace(self, layer_shapes=tuple(self.layer_shapes[index] for index in indices))

    @property
    def recorded(self) -> dict[str, object]:
        """See `FamilyShape`."""
        return {"layer_shapes": self.layer_shapes}


class Gemma4Layer(DecoderLayer):
    """(x + norm(attention) + norm(feed-forward) + norm(branch of the layer's own embeddings)) · a stored scalar.

    With experts, the feed-forward is the sum of a dense one and of the routed experts, each with norms of its own.
    """

    attention = SharedAttention

    def __init__(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs):
        super().__init__(config, parts, kind._replace(sparse=False), dtype=dtype, rngs=rngs)
        self.sparse = kind.sparse
        if kind.sparse:
            self.router = ScaledRouter(config, parts.norm, dtype=dtype, rngs=rngs)
            self.experts = Experts(config, parts.experts, dtype=dtype, rngs=rngs)
            for name in _EXPERT_NORMS:
                setattr(self, name, Norm(config.hidden_size, config.rms_norm_eps, style=parts.norm, dtype=dtype))
        self.layer_scalar = Buffer(jnp.ones(1, dtype))
        self.in_stages = not config.shared_width and config.per_layer is None
        self.width, self.shape = config.hidden_size, kind.shape
        self.activation = config.activation
        if config.per_layer is not None:
            D, P = config.hidden_size, config.per_layer.size
            options: dict[str, Any] = {"bias": False, "dtype": dtype, "rngs": rngs}
            self.per_layer_input_gate = layer_linear(config, kind, "per_layer_input_gate", D, P, **options)
            self.per_layer_projection = layer_linear(config, kind, "per_layer_projection", P, D, **options)
            self.post_per_layer_input_norm = Norm(D, config.rms_norm_eps, style=parts.norm, dtype=dtype)
        self.has_input = config.per_layer is not None

    def __call__(self, x: Float[Array, "B T W"], context: LayerContext) -> Float[Array, "B T W"]:
        """Apply the layer to the residual stream, and to keys and values in its columns after D."""
        attention, carried = self.token_mixer, x[..., self.width :]
        assert isinstance(attention, SharedAttention)
        taken = self._read(carried) if self.shape.shares == "takes" else None
        x, normed = self._fork(x[..., : self.width], self.norms.before_attention, attention, context)
        values, made = attention.project_shared(normed, context, taken)
        attended = attention.attend(values, context)
        x = x + self._branch(
            attention.output(attended, None, context), self.norms.after_attention, names.ATTENTION_BRANCH
        )
        x = self._add_mlp(x, context)
        carried = self._written(carried, made) if self.shape.shares == "gives" else carried
        return jnp.concatenate([x, carried], axis=-1) if carried.shape[-1] else x

    def _add_mlp(self, x: Float[Array, "B T D"], context: LayerContext) -> Float[Array, "B T D"]:
        if not self.sparse:
            return super()._add_mlp(x, context)
        x = checkpoint_name(x, names.ATTENTION_RESIDUAL)
        x, normed = self._fork(x, self.norms.before_mlp, self.ffn, context)
        dense_norm, before, after = (getattr(self, name) for name in _EXPERT_NORMS)
        dense = dense_norm.of(self.ffn(normed, context).add_to(jnp.zeros_like(x)))
        flat = x.reshape(-1, x.shape[-1])
        logits, routing = self.router(flat, exact=context.exact)
        routed = apply_experts(self.experts, before(flat), logits, routing, context).reshape(x.shape)
        both = Branch(lambda stream: stream + after.of(routed, dense))
        return self._finish(x + self._branch(both, self.norms.after_mlp, names.MLP_BRANCH), context)

    def _read(self, carried: Array) -> KeysValues:
        """Return keys and values from their columns."""
        shape = self.shape
        columns = carried[..., shape.place : shape.place + shape.shared_width]
        keys, values = jnp.split(columns.reshape(*carried.shape[:2], 2 * shape.kv_heads, shape.head_dim), 2, axis=2)
        return keys, values

    def _written(self, carried: Array, made: KeysValues) -> Array:
        """Return the columns with keys and values in their place."""
        shape = self.shape
        columns = jnp.concatenate(made, axis=2).reshape(*carried.shape[:2], -1)
        before, after = carried[..., : shape.place], carried[..., shape.place + shape.shared_width :]
        return jnp.concatenate([before, columns, after], axis=-1)

    def _finish(self, x: Float[Array, "B T D"], context: LayerContext) -> Float[Array, "B T D"]:
        """Add the branch of the layer's own embeddings, and scale the stream."""
        if self.has_input:
            assert context.layer_input is not None
            gate = ACTIVATIONS[self.activation](self.per_layer_input_gate(x, context)) * context.layer_input
            branch = Branch(lambda stream: self.per_layer_projection.add_to(stream, gate, context))
            x = x + self._branch(branch, "post_per_layer_input_norm")
        return x * self.layer_scalar[...].astype(x.dtype)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Gemma4ForCausalLM` config.json.

    Raises:
        ValueError: a field missing or not supported; or layers share keys and values of none.
    """
    if raw.get("use_bidirectional_attention") not in (None, False, "vision"):
        found = raw["use_bidirectional_attention"]
        raise ValueError(f"use_bidirectional_attention {found!r:.40} in config.json is not supported for gemma4_text")
    given = {name: value for name, value in raw.items() if name not in _READ_HERE}
    if given.get("rope_parameters") is None:
        given["rope_parameters"] = _ROPES
    if raw.get("rope_scaling") or not {_FULL, _SLIDING} & given["rope_parameters"].keys():
        raise ValueError(
            "gemma4_text reads rope_parameters by type of layer, full_attention and sliding_attention, and no "
            "rope_scaling: write them so in config.json"
        )
    ropes = ropes_by_type(given, _THETAS, max_position_embeddings=_POSITIONS)
    fields = gemma_fields(
        given,
        max_position_embeddings=_POSITIONS,
        rope=ropes[_SLIDING],
        logit_softcap=raw.get("final_logit_softcapping"),
    )
    types = _types(raw, fields["num_hidden_layers"])
    shapes, shared_width = _shapes(raw, fields, types)
    window = 512 if raw.get("sliding_window") is None else raw["sliding_window"]
    return DecoderConfig(
        **{**fields, "attention": AttentionOptions(scale=1.0)},
        layer_windows=layer_windows({**raw, "layer_types": types}, types, window),
        layer_ropes=tuple(ropes[kind] for kind in types),
        family_shape=Gemma4Shape(layer_shapes=shapes, shared_width=shared_width, per_layer=_per_layer(raw, fields)),
        moe=_experts(raw, fields) if raw.get("enable_moe_block") else None,
    )


def _types(raw: Mapping[str, Any], layers: int) -> list[str]:
    """Return each layer's type; the last one always attends to all tokens."""
    types = list(layer_types(raw, [_FULL if (index + 1) % 6 == 0 else _SLIDING for index in range(layers)]))
    return [*types[:-1], _FULL]


def _per_layer(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> PerLayerShape | None:
    size = 256 if raw.get("hidden_size_per_layer_input") is None else raw["hidden_size_per_layer_input"]
    vocabulary = raw.get("vocab_size_per_layer_input") or 262_144
    return PerLayerShape(size=size, vocab_size=vocabulary, layers=fields["num_hidden_layers"]) if size else None


def _experts(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> MoeConfig:
    """Read the experts of all layers; the dense feed-forward beside them serves every token, as shared ones do."""
    require_fields(raw, ("num_experts", "top_k_experts", "moe_intermediate_size"))
    if raw["top_k_experts"] > raw["num_experts"]:
        raise ValueError(
            f"top_k_experts={raw['top_k_experts']} in config.json is above num_experts={raw['num_experts']}"
        )
    return MoeConfig(
        num_experts=raw["num_experts"],
        num_experts_per_tok=raw["top_k_experts"],
        intermediate_size=raw["moe_intermediate_size"],
        sparse_layers=(True,) * fields["num_hidden_layers"],
        quantize=expert_format(raw),
        shared_size=fields["intermediate_size"],
    )


def _shapes(
    raw: Mapping[str, Any], fields: Mapping[str, Any], types: Sequence[str]
) -> tuple[tuple[LayerShape, ...], int]:
    """Return each layer's sizes, and the columns that shared keys and values take."""
    count, wide = len(types), bool(raw.get("use_double_wide_mlp"))
    first = count - (raw.get("num_kv_shared_layers") or 0)
    if first < count and not first > 0:
        raise ValueError(f"num_kv_shared_layers={count - first} of {count} layers: at least one must have its own")
    givers = {kind: index for index, kind in enumerate(types[:first])} if first < count else {}
    if missing := set(types[first:]) - givers.keys():
        raise ValueError(
            f"num_kv_shared_layers={count - first}: no earlier layer is of type {min(missing)}, whose keys and values "
            "later ones read"
        )
    # Named, even as null, it says all; transformers 5 writes it in place of the sizes by type.
    entries = _entries(raw["per_layer_config"] or {}, count) if "per_layer_config" in raw else None
    sizes = [_sizes(raw, fields, index, kind, entries) for index, kind in enumerate(types)]
    read = {kind: givers[kind] for kind in sorted(set(types[first:]))}
    places, width = {}, 0
    for kind, index in read.items():
        places[kind] = width
        width += sizes[index].shared_width
    shapes = []
    for index, (kind, shape) in enumerate(zip(types, sizes, strict=True)):
        if index >= first:
            giver = sizes[read[kind]]
            if (giver.kv_heads, giver.head_dim) != (shape.kv_heads, shape.head_dim):
                raise ValueError(f"layer {index} reads keys and values of layer {read[kind]}, whose heads are others")
            F = fields["intermediate_size"] * (2 if wide else 1)
            shape = shape._replace(shares="takes", place=places[kind], intermediate_size=F, keys_as_values=False)
        elif read.get(kind) == index:
            shape = shape._replace(shares="gives", place=places[kind])
        shapes.append(shape)
    return tuple(shapes), width


_OWN = "head_dim", "num_key_value_heads"
"""Sizes in an entry of `per_layer_config`."""


def _entries(given: Mapping[str, Any], count: int) -> dict[int, Mapping[str, Any]]:
    """Read `per_layer_config`, whose keys transformers fills with zeros to equal lengths: "05" beside "11"."""
    entries: dict[int, Mapping[str, Any]] = {}
    for key, own in given.items():
        number = str(key).isdecimal() and int(key) < count
        if not number or not isinstance(own, Mapping) or not own.keys() <= set(_OWN):
            raise ValueError(
                f"per_layer_config in config.json: expected layers below {count} with {' and '.join(_OWN)}, got "
                f"{key!r}: {own!r:.100}"
            )
        entries[int(key)] = own
    return entries


def _sizes(
    raw: Mapping[str, Any],
    fields: Mapping[str, Any],
    index: int,
    kind: str,
    entries: Mapping[int, Mapping[str, Any]] | None,
) -> LayerShape:
    """Return a layer's sizes: by its own entry of `per_layer_config`, else by its type."""
    joined = kind == _FULL and bool(raw.get("attention_k_eq_v"))
    if entries is not None:
        own = entries.get(index, {})
    else:
        heads = raw.get("num_global_key_value_heads") if joined else None
        own = {"head_dim": raw.get("global_head_dim") or 512, "num_key_value_heads": heads} if kind == _FULL else {}
    H, K = (own.get(name) or fields[name] for name in _OWN)
    if not all(type(size) is int and size > 0 for size in (H, K)) or H % 2 or fields["num_attention_heads"] % K:
        raise ValueError(f"layer {index} of config.json has head_dim={H!r} and num_key_value_heads={K!r}")
    return LayerShape(H, K, fields["intermediate_size"], keys_as_values=joined)


PARTS = Parts(**{**NORMS, "norm": _NORM}, head_norms="heads", experts=ExpertParts(activation="geglu"))
SIZES = {
    **{"vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216},
    **{"num_hidden_layers": 30, "num_attention_heads": 8},
}
"""transformers' where config.json has none."""
register(
    Family(
        model_type="gemma4_text",
        config_from_hf=config_from_hf,
        parts=PARTS,
        layer=Gemma4Layer,
    )
)
wrap(
    Wrapper(
        model_type="gemma4",
        text_types=("gemma4_text",),
        others=("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
        tower=with_tower,
        hearing=with_hearing,
        tied=True,
        defaults=SIZES,
    )
)
