"""Muse Glimmer (30B; text): Gemma's four norms, plain ones of embeddings and heads, a gate of attention's output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxglue.models.config import AttentionOptions, DecoderConfig, FamilyShape, LayerKind, Scales
from jaxglue.models.family import Family, Parts, register
from jaxglue.models.gemma2 import NORMS
from jaxglue.models.hf_fields import check_fields, decoder_fields, layer_types, layer_windows
from jaxglue.models.layers import DecoderLayer
from jaxglue.models.wrapper import Wrapper, wrap
from jaxglue.ops.norm_rope import NormStyle
from jaxglue.settings.config import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class MuseShape(FamilyShape):
    """Settings of Muse alone."""

    post_norm_eps: float
    """Of the norms of outputs."""


class MuseLayer(DecoderLayer):
    """A layer whose norms of outputs have an ε of their own."""

    def __init__(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs):
        super().__init__(config, parts, kind, dtype=dtype, rngs=rngs)
        assert isinstance(config.family_shape, MuseShape)
        for name in (parts.norms.after_attention, parts.norms.after_mlp):
            norm = self.norm_named(name)
            assert norm is not None
            norm.eps = config.family_shape.post_norm_eps


@dataclass(frozen=True, kw_only=True)
class _Fields:
    qk_scale_factor: PositiveFloat
    output_multiplier: PositiveFloat
    post_norm_eps: PositiveFloat
    layer_rope_theta: tuple[NonNegativeFloat, ...]


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read the `text_config` of a `MuseGlimmerForConditionalGeneration`, where θ = 0 takes a layer's positions.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    check_fields(raw, _Fields)
    given = {"head_dim": 128, "num_key_value_heads": 2, **raw, "mlp_bias": False}
    given["hidden_act"] = raw.get("hidden_activation") or "silu"
    fields = decoder_fields(given, max_position_embeddings=131_072, eps=1e-5)
    layers, value = fields["num_hidden_layers"], lambda name, default: default if raw.get(name) is None else raw[name]
    last = [(layers - 1 - layer) % 4 == 0 for layer in range(layers)]
    types = layer_types(raw, ["full_attention" if full else "sliding_attention" for full in last])
    thetas = value("layer_rope_theta", [not full for full in last])
    if len(thetas) != layers:
        raise ValueError(f"layer_rope_theta has {len(thetas)} entries for num_hidden_layers={layers}")
    return DecoderConfig(
        **fields,
        layer_windows=layer_windows(raw, types, value("sliding_window", 2048)),
        layer_ropes=tuple(fields["rope"] if theta else None for theta in thetas),
        attention=AttentionOptions(scale=value("qk_scale_factor", 3.87) * fields["head_dim"] ** -0.5),
        scales=Scales(
            logit_divisor=1 / value("output_multiplier", 0.19611613513818404),
            logit_softcap=value("final_logit_softcapping", 20.0),
        ),
        family_shape=MuseShape(post_norm_eps=value("post_norm_eps", 1e-8)),
    )


register(
    Family(
        model_type="muse_glimmer_text",
        config_from_hf=config_from_hf,
        parts=Parts(
            **NORMS,
            final_norm=NormStyle(rounds_first=False),
            embedding_norm=True,
            head_norms="plain",
            gate="gate_proj",
        ),
        layer=MuseLayer,
        linears=("self_attn.gate_proj",),
    )
)
wrap(
    Wrapper(
        model_type="muse_glimmer",
        text_types=("muse_glimmer_text",),
        others=("vision_tower.", "vision_adapter.", "vision_projection."),
        tied=False,
        defaults={
            **{"vocab_size": 202_048, "hidden_size": 6656, "intermediate_size": 19_968},
            **{"num_hidden_layers": 52, "num_attention_heads": 32},
        },
    )
)
