"""Nemotron-H (Nemotron 3 Nano): layers of one part each: Mamba-2, attention, a feed-forward without gate, experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import (
    CacheSizes,
    DecoderConfig,
    FamilyShape,
    GroupedAttention,
    LayerKind,
    LayerShape,
    Mixer,
    MoeConfig,
)
from jaxglue.models.context import LayerContext
from jaxglue.models.family import ExpertParts, Family, NormNames, Parts, register
from jaxglue.models.hf_fields import check_fields, decoder_fields, expert_format, require_fields
from jaxglue.models.layers import Attention, DecoderLayer, copied
from jaxglue.models.linear import layer_linear
from jaxglue.models.mamba import Mamba2Config, read_limits
from jaxglue.models.moe_layers import SparseMLP, apply_experts
from jaxglue.models.residual import Branch, Norm
from jaxglue.models.wrapper import Spelling, spell
from jaxglue.ops import names
from jaxglue.ops.moe import Groups
from jaxglue.ops.norm_rope import NormStyle
from jaxglue.ops.projection import Projection, adapted_projection
from jaxglue.ops.recurrence import SlotStates
from jaxglue.ops.residual_norm import Normed
from jaxglue.ops.state_space import StateHeads
from jaxglue.settings.config import NonNegativeInt, PositiveFloat, PositiveInt


class MixerMamba2Config(Mamba2Config):
    """Mamba-2 under the name that any part of a layer has."""

    module = "mixer"


class MixerAttention(GroupedAttention):
    """Attention under the name that any part of a layer has."""

    module = "mixer"


@dataclass(frozen=True)
class NoMixer(Mixer):
    """No part in which tokens see others."""

    title = "feed-forward alone"
    attends = False

    def make(self, config: Any, parts: Any, kind: Any, *, dtype: Any, rngs: Any) -> None:
        """Make nothing."""

    def weights(self, config: DecoderConfig, kind: LayerKind) -> int:
        """See `Mixer`."""
        return 0

    def attended(self, heads: int, head_dim: int) -> tuple[int, int]:
        """See `Mixer`."""
        return 1, 1

    def make_cache(self, kind: LayerKind, sizes: CacheSizes) -> SlotStates:
        """See `Mixer`."""
        return SlotStates({})


class _Nothing:
    """The stage between those of a layer whose tokens see no others."""

    value_names = ("first_column",)
    gated = False

    def __init__(self, inputs: list[Projection]):
        self.inputs = inputs

    def attend(self, values: tuple[Array, ...], context: Any) -> Float[Array, "B T 1"]:
        """Return what nobody reads."""
        return values[0]


class SquaredMLP(nnx.Module):
    """Feed-forward without gate: down(max(up(x), 0)²)."""

    def __init__(self, config: DecoderConfig, kind: LayerKind, path: str, size: int, *, dtype: Any, rngs: nnx.Rngs):
        options: dict[str, Any] = {"bias": config.mlp_bias, "dtype": dtype, "rngs": rngs}
        self.up_proj = layer_linear(config, kind, f"{path}.up_proj", config.hidden_size, size, **options)
        self.down_proj = layer_linear(config, kind, f"{path}.down_proj", size, config.hidden_size, **options)

    def __call__(self, normed: Normed, context: LayerContext) -> Branch:
        """Apply the feed-forward."""
        (up,) = adapted_projection(copied(normed), self.inputs, context)
        squared = jnp.square(jax.nn.relu(checkpoint_name(up, names.UP)))
        return Branch(lambda x: self.down_proj.add_to(x, squared, context))

    @property
    def inputs(self) -> list[Projection]:
        """Return the readers of the layer's norm."""
        return [self.up_proj.projection]


class LatentExperts(SparseMLP):
    """Experts, between two projections where they have a width of their own; others read the input itself."""

    def __init__(self, config: DecoderConfig, parts: ExpertParts, kind: LayerKind, *, dtype: Any, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        assert config.moe is not None
        size, D, latent = config.moe.shared_size, config.hidden_size, config.moe.latent_size
        shared = SquaredMLP(config, kind, f"mixer.{parts.shared}", size, **options) if size else None
        super().__init__(config, parts, shared, **options)
        self.latent = latent > 0
        if latent:
            options |= {"bias": config.mlp_bias}
            self.fc1_latent_proj = layer_linear(config, kind, "mixer.fc1_latent_proj", D, latent, **options)
            self.fc2_latent_proj = layer_linear(config, kind, "mixer.fc2_latent_proj", latent, D, **options)

    def routed(self, tokens: Array, logits: Array, routing: Any, context: LayerContext) -> Array:
        """Return the sum of each token's weighted experts."""
        if not self.latent:
            return super().routed(tokens, logits, routing, context)
        latent = self.fc1_latent_proj(tokens[None], context)[0]
        return self.fc2_latent_proj(apply_experts(self.experts, latent, logits, routing, context)[None], context)[0]


class OnePartLayer(DecoderLayer):
    """x + part(norm(x)), whichever part the layer has."""

    mixer: Any = None

    def __init__(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype: Any, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.norms, self.norm_style, self.factor, self.parallel = parts.norms, parts.norm, 1.0, False
        self.norm = Norm(config.hidden_size, config.rms_norm_eps, style=parts.norm, dtype=dtype)
        self.sees_others = not isinstance(kind.mixer, NoMixer)
        if self.sees_others:
            made = kind.mixer.make(config, parts, kind, **options)
            self.mixer = made or Attention(config, parts, kind, **options)
        elif kind.sparse:
            self.mixer = LatentExperts(config, parts.experts, kind, **options)
        else:
            self.mixer = SquaredMLP(config, kind, "mixer", kind.shape.intermediate_size, **options)

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Float[Array, "B T D"]:
        """Apply the layer to the residual stream."""
        x, normed = self._fork(x, self.norms.before_attention, self.mixer, context)
        return x + self.mixer(normed, context)

    @property
    def token_mixer(self) -> Any:
        """Return the part, or one that does nothing where tokens see no others."""
        return self.mixer if self.sees_others else _Nothing(list(self.mixer.inputs))

    @property
    def ffn(self) -> Any:
        """Return the part where it is a feed-forward."""
        return None if self.sees_others else self.mixer

    def before_attention(self, x: Float[Array, "B T D"], context: LayerContext) -> tuple[tuple[Array, ...], Any]:
        """See `DecoderLayer`."""
        return super().before_attention(x, context) if self.sees_others else ((x[..., :1],), None)

    def after_attention(self, x: Float[Array, "B T D"], attended: Array, gate: Any, context: LayerContext) -> Array:
        """See `DecoderLayer`."""
        if self.sees_others:
            return x + self.mixer.output(attended, gate, context)
        return x + self.mixer(self._normed(x, self.norms.before_attention, context), context)


@dataclass(frozen=True)
class PartSizes(FamilyShape):
    """Sizes of layers, of which some have a feed-forward alone."""

    layer_shapes: tuple[LayerShape, ...] = ()

    def with_layers(self, indices: Any) -> "PartSizes":
        """See `FamilyShape`."""
        return PartSizes(tuple(self.layer_shapes[index] for index in indices))

    @property
    def recorded(self) -> dict[str, object]:
        """Return nothing: tensors' shapes tell them."""
        return {}


@dataclass(frozen=True, kw_only=True)
class _Fields:
    hybrid_override_pattern: str
    layers_block_type: tuple[str, ...]
    mamba_num_heads: PositiveInt
    mamba_head_dim: PositiveInt
    n_groups: PositiveInt
    ssm_state_size: PositiveInt
    conv_kernel: PositiveInt
    use_conv_bias: bool
    use_bias: bool
    mamba_proj_bias: bool
    mamba_hidden_act: str
    mlp_hidden_act: str
    layer_norm_epsilon: PositiveFloat
    norm_eps: PositiveFloat
    moe_shared_expert_intermediate_size: NonNegativeInt
    moe_latent_size: NonNegativeInt
    residual_in_fp32: bool
    attention_head_dim: PositiveInt


_TYPES = {
    **{"M": "mamba", "mamba": "mamba", "linear_attention": "mamba"},
    **{"*": "attention", "attention": "attention", "full_attention": "attention"},
    **{"-": "mlp", "mlp": "mlp", "E": "moe", "moe": "moe"},
}
_DEFAULTS = {
    **{"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
    **{"use_conv_bias": True, "use_bias": False, "mlp_bias": False, "num_key_value_heads": 8, "head_dim": 128},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_latent_size": 0},
    **{"moe_shared_expert_intermediate_size": 7688, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    **{"norm_topk_prob": True, "intermediate_size": 21504, "n_shared_experts": 1},
}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `NemotronHForCausalLM` config.json.

    Step sizes have the limits of `time_step_limit`, as in the published code: `time_step_min`, from which transformers
    5.24 clamps them, is of their random start alone.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    check_fields(raw, _Fields)
    renamed = {"head_dim": raw.get("attention_head_dim"), "rms_norm_eps": raw.get("layer_norm_epsilon")}
    renamed |= {"rms_norm_eps": raw["norm_eps"]} if raw.get("norm_eps") is not None else {}
    given = {name: value for name, value in {**renamed, **raw}.items() if value is not None}
    given = {**_DEFAULTS, **given}
    for name, only in {"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2"}.items():
        if given.get(name, only) != only:
            raise ValueError(f"{name} {given[name]!r:.100} is not supported for nemotron_h: only {only!r} is")
    types = _types(given)
    layers, heads = len(types), (given["mamba_num_heads"], given["mamba_head_dim"])
    mamba = MixerMamba2Config(
        heads=StateHeads(*heads, given["n_groups"], given["ssm_state_size"]),
        conv_width=given["conv_kernel"],
        conv_bias=given["use_conv_bias"],
        input_bias=given["use_bias"],
        output_bias=given["use_bias"],
        limits=read_limits(given),
    )
    fields = decoder_fields({**given, "num_hidden_layers": layers, "hidden_act": "silu"}, eps=1e-5)
    shape = LayerShape(fields["head_dim"], fields["num_key_value_heads"], 0)
    mixers = {"mamba": mamba, "attention": MixerAttention()}
    return DecoderConfig(
        **fields,
        layer_windows=(None,) * layers,
        layer_ropes=(None,) * layers,
        moe=_experts(given, types),
        mixers=tuple(mixers.get(kind, NoMixer()) for kind in types),
        family_shape=PartSizes(
            tuple(shape._replace(intermediate_size=given["intermediate_size"] * (kind == "mlp")) for kind in types)
        ),
    )


def _types(given: Mapping[str, Any]) -> list[str]:
    """Return each layer's part, by `hybrid_override_pattern` or a list of types."""
    types = given.get("layer_types") or given.get("layers_block_type") or given.get("hybrid_override_pattern")
    require_fields({"hybrid_override_pattern": types}, ("hybrid_override_pattern",))
    assert types is not None
    layers = given.get("num_hidden_layers", len(types))
    if not types or not _TYPES.keys() >= set(types) or len(types) != layers:
        raise ValueError(
            f"hybrid_override_pattern in config.json: expected M, *, - or E for each of {layers} layers, or "
            f"layers_block_type of {', '.join(name for name in _TYPES if len(name) > 1)}, got {types!r:.100}"
        )
    return [_TYPES[kind] for kind in types]


def _experts(given: Mapping[str, Any], types: list[str]) -> MoeConfig | None:
    if "moe" not in types:
        return None
    return MoeConfig(
        num_experts=given["n_routed_experts"],
        num_experts_per_tok=given["num_experts_per_tok"],
        intermediate_size=given["moe_intermediate_size"],
        sparse_layers=tuple(kind == "moe" for kind in types),
        norm_topk_prob=given["norm_topk_prob"],
        quantize=expert_format({**given, "num_experts": given["n_routed_experts"]}),
        shared_size=given["moe_shared_expert_intermediate_size"] if given["n_shared_experts"] else 0,
        groups=Groups(given["n_group"], given["topk_group"]),
        routed_scale=given["routed_scaling_factor"],
        latent_size=given["moe_latent_size"],
    )


_EXPERTS = ExpertParts(
    order="sigmoid_topk",
    activation="relu2",
    float32_router=True,
    correction=True,
    stored="apart",
    shared="shared_experts",
)
_SHARED = f"mixer.{_EXPERTS.shared}"
register(
    Family(
        model_type="nemotron_h",
        config_from_hf=config_from_hf,
        parts=Parts(
            norms=NormNames(before_attention="norm", before_mlp=None),
            norm=NormStyle(rounds_first=False),
            experts=_EXPERTS,
        ),
        layer=OnePartLayer,
        linears=(
            *(f"mixer.{name}" for name in ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")),
            *(f"mixer.{name}" for name in ("up_proj", "down_proj", "fc1_latent_proj", "fc2_latent_proj")),
            *(f"{_SHARED}.up_proj", f"{_SHARED}.down_proj"),
        ),
    )
)
spell(
    Spelling(
        model_type="nemotron_h",
        parts=(
            ("model.embed_tokens.", "backbone.embeddings."),
            ("model.norm.", "backbone.norm_f."),
            ("model.layers.", "backbone.layers."),
        ),
        others=("mtp.", "backbone.mtp."),
    )
)
