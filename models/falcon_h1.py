"""Falcon-H1: attention and Mamba-2 side by side in every layer, with factors of nearly all values."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.config import (
    ATTENTION,
    AttentionOptions,
    CacheSizes,
    DecoderConfig,
    FamilyShape,
    LayerKind,
    Mixer,
    Scales,
)
from jaxglue.models.context import LayerContext
from jaxglue.models.family import Family, ModuleNames, NormNames, Parts, register
from jaxglue.models.hf_fields import check_fields, decoder_fields
from jaxglue.models.layers import Attention, DecoderLayer, GatedMLP, copied
from jaxglue.models.mamba import GatedNorm, Mamba2, Mamba2Config, mamba_sizes, read_limits
from jaxglue.models.residual import Branch
from jaxglue.models.wrapper import Spelling, spell
from jaxglue.ops import names
from jaxglue.ops.gated_mlp import ACTIVATIONS
from jaxglue.ops.projection import Projection, adapted_projection
from jaxglue.ops.recurrence import KeysAndStates
from jaxglue.ops.residual_norm import Normed
from jaxglue.settings.config import PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class SideBySide(Mixer):
    """Attention and Mamba-2 of one norm."""

    title = "attention beside Mamba-2"
    recurrent = True
    attends = True
    record = "mamba"

    mamba: Mamba2Config

    def make(self, config: Any, parts: Any, kind: Any, *, dtype: Any, rngs: Any) -> None:
        """Leave attention to the layer."""

    def weights(self, config: DecoderConfig, kind: LayerKind) -> int:
        """See `Mixer`."""
        return ATTENTION.weights(config, kind) + self.mamba.weights(config, kind)

    def make_cache(self, kind: LayerKind, sizes: CacheSizes) -> KeysAndStates:
        """See `Mixer`."""
        return KeysAndStates(ATTENTION.make_cache(kind, sizes), self.mamba.make_cache(kind, sizes))

    def token_bytes(self, kind: LayerKind, dtype: Any) -> int:
        """See `Mixer`."""
        return ATTENTION.token_bytes(kind, dtype)

    def state_bytes(self, dtype: Any) -> int:
        """See `Mixer`."""
        return self.mamba.state_bytes(dtype)

    def step_values(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """See `Mixer`."""
        return self.mamba.step_values(dtype)

    @property
    def prefill_values(self) -> int:
        """See `Mixer`."""
        return self.mamba.prefill_values

    @property
    def exchanged(self) -> int:
        """See `Mixer`."""
        return self.mamba.exchanged

    def why_not_split(self, devices: int) -> str | None:
        """See `Mixer`."""
        return self.mamba.why_not_split(devices)

    def initial(self, name: str, key: Any, spec: Any) -> Array | None:
        """See `Mixer`."""
        return self.mamba.initial(name, key, spec)

    def backends(self, capability: Any, dtype: Any) -> dict[str, Any]:
        """See `Mixer`."""
        return self.mamba.backends(capability, dtype)


@dataclass(frozen=True, kw_only=True)
class Factors(FamilyShape):
    """Factors of outputs that no other factor contains."""

    attention: float
    """Of the output of attention."""
    mamba: float
    """Of Mamba-2's output."""
    gate: float
    """Of the feed-forward's gate, before its activation."""
    mlp: float
    """Of the feed-forward's output."""


class BothMixers:
    """The stages of attention and of Mamba-2, whose outputs are summed."""

    value_names = (*Attention.value_names, *Mamba2.value_names)
    gated = True

    def __init__(self, attention: Attention, mamba: Mamba2, factors: Factors):
        self._attention, self._mamba, self._factors = attention, mamba, factors

    def __call__(self, normed: Normed, context: LayerContext) -> Branch:
        """Apply both."""
        values, gate = self.project(normed, context)
        return self.output(self.attend(values, context), gate, context)

    def project(self, normed: Normed, context: LayerContext) -> tuple[tuple[Array, ...], Array]:
        """Return the values of both, attention's first, and the gate of Mamba-2's output."""
        queries, _ = self._attention.project(normed, context)
        values, gate = self._mamba.project(normed, context)
        return (*queries, *values), gate

    def attend(self, values: tuple[Array, ...], context: LayerContext) -> Float[Array, "B T outputs"]:
        """Return attention's outputs and those of Mamba-2 side by side."""
        count = len(Attention.value_names)
        both = self._attention.attend(values[:count], context), self._mamba.attend(values[count:], context)
        return jnp.concatenate([y.reshape(*y.shape[:2], -1) for y in both], axis=-1)

    def output(self, attended: Array, gate: Array, context: LayerContext) -> Branch:
        """Project both back."""
        of_attention, of_mamba = jnp.split(attended, [attended.shape[-1] - gate.shape[-1]], axis=-1)
        first = replace(self._attention.output(of_attention, None, context), factor=self._factors.attention)
        second = replace(self._mamba.output(of_mamba, gate, context), factor=self._factors.mamba)
        return Branch(lambda x: x + first + second)

    @property
    def inputs(self) -> list[Projection]:
        """Return the readers of the layer's norm."""
        return [*self._attention.inputs, *self._mamba.inputs]


class ScaledMLP(GatedMLP):
    """Gated feed-forward with a factor of its gate before the activation, and one of its output."""

    factors: Factors

    def __call__(self, normed: Normed, context: LayerContext) -> Branch:
        """Apply the feed-forward."""
        if self.factors.gate == 1.0:
            scaled = replace(super().__call__(normed, context), factor=self.factors.mlp)
            return Branch(lambda x: x + scaled)
        gate, up, down = self.linears
        projected = adapted_projection(copied(normed), [gate.projection, up.projection], context)
        named = zip(projected, (names.GATE, names.UP), strict=True)
        gates, ups = (checkpoint_name(y, name) for y, name in named)
        product = ACTIVATIONS[self.activation](gates * self.factors.gate) * ups
        scaled = Branch(lambda x: down.add_to(x, product, context), factor=self.factors.mlp)
        return Branch(lambda x: x + scaled)

    @property
    def inputs(self) -> Any:
        """Return the readers of the layer's norm."""
        return super().inputs if self.factors.gate == 1.0 else [linear.projection for linear in self.linears[:2]]


class FalconH1Layer(DecoderLayer):
    """x + attention(norm(x)) + Mamba-2(norm(x)), then + mlp(norm(x)), each times a factor."""

    in_stages = False

    def __init__(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype: Any, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        super().__init__(config, parts, kind, **options)
        assert isinstance(kind.mixer, SideBySide) and isinstance(config.family_shape, Factors)
        self.mamba = Mamba2(config, kind, kind.mixer.mamba, **options)
        self.mamba.output_name = names.RECURRENT_OUT
        self.factors = config.family_shape
        self.feed_forward = ScaledMLP(config, kind, self.mlp_name, modules=parts.names, **options)
        self.feed_forward.factors = self.factors

    @property
    def token_mixer(self) -> BothMixers:
        """Return both parts in which tokens see others."""
        return BothMixers(getattr(self, self.mixer_name), self.mamba, self.factors)


@dataclass(frozen=True, kw_only=True)
class _Fields:
    mamba_d_ssm: PositiveInt
    mamba_rms_norm: bool
    mamba_norm_before_gate: bool
    mamba_use_mlp: bool
    projectors_bias: bool
    lm_head_multiplier: PositiveFloat
    key_multiplier: PositiveFloat
    attention_in_multiplier: PositiveFloat
    attention_out_multiplier: PositiveFloat
    ssm_in_multiplier: PositiveFloat
    ssm_out_multiplier: PositiveFloat
    mlp_multipliers: tuple[PositiveFloat, ...]
    ssm_multipliers: tuple[PositiveFloat, ...]


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `FalconH1ForCausalLM` config.json.

    Factors of inputs are those of what is computed from them: of queries and keys one of their scores, of values one of
    attention's output.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    check_fields(raw, _Fields)
    given = {name: value for name, value in raw.items() if value is not None}
    given = {"num_key_value_heads": 8, **given}

    def factor(name: str) -> float:
        return float(given.get(name, 1.0))

    gate, mlp = _several(given, "mlp_multipliers", 2)
    z, x, b, c, dt = (factor("ssm_in_multiplier") * each for each in _several(given, "ssm_multipliers", 5))
    of_input = factor("attention_in_multiplier")
    _check(given)
    fields = decoder_fields(given, theta=10_000.0, max_position_embeddings=8192, eps=1e-5)
    norm: GatedNorm = "gate_last" if given.get("mamba_norm_before_gate", True) else "gate_first"
    norm = norm if given.get("mamba_rms_norm", False) else "none"
    sizes = mamba_sizes(given, width=given.get("mamba_d_ssm", 1024 if "mamba_d_ssm" not in raw else None))
    sizes |= {"output_bias": given.get("projectors_bias", False)}
    mamba = Mamba2Config(**sizes, limits=read_limits(given), norm=norm, scales=(z, x, b, c, dt))
    layers = fields["num_hidden_layers"]
    return DecoderConfig(
        **fields,
        layer_windows=(None,) * layers,
        attention=AttentionOptions(scale=fields["head_dim"] ** -0.5 * of_input**2 * factor("key_multiplier")),
        scales=Scales(embedding=factor("embedding_multiplier"), logit_divisor=1 / factor("lm_head_multiplier")),
        mixers=(SideBySide(mamba=mamba),) * layers,
        family_shape=Factors(
            attention=factor("attention_out_multiplier") * of_input,
            mamba=factor("ssm_out_multiplier"),
            gate=gate,
            mlp=mlp,
        ),
    )


def _several(given: Mapping[str, Any], name: str, count: int) -> list[float]:
    values = given.get(name, [1.0] * count)
    if len(values) != count:
        raise ValueError(f"{name} in config.json: expected {count} factors, got {values!r:.100}")
    return [float(value) for value in values]


def _check(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a bias of what has a factor of its input, and for layers without feed-forward."""
    for bias, factor in (("attention_bias", "attention_in_multiplier"), ("mamba_proj_bias", "ssm_in_multiplier")):
        if given.get(bias) and given.get(factor, 1.0) != 1.0:
            raise ValueError(f"{bias}=true with {factor}={given[factor]} in config.json is not supported for falcon_h1")
    if not given.get("mamba_use_mlp", True):
        raise ValueError("mamba_use_mlp=false in config.json is not supported for falcon_h1")


register(
    Family(
        model_type="falcon_h1",
        config_from_hf=config_from_hf,
        parts=Parts(norms=NormNames(before_mlp="pre_ff_layernorm"), names=ModuleNames(mlp="feed_forward")),
        layer=FalconH1Layer,
        linears=(
            *("mamba.in_proj", "mamba.out_proj"),
            *(f"feed_forward.{name}_proj" for name in ("gate", "up", "down")),
        ),
    )
)
spell(Spelling(model_type="falcon_h1", parts=(("model.norm.", "model.final_layernorm."),)))
