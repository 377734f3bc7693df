"""OLMo Hybrid: the gated delta rule in three layers of four, whose norms come first, and OLMo 3's layers between."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxglue.models.config import ATTENTION, DecoderConfig, LayerKind
from jaxglue.models.context import LayerContext
from jaxglue.models.delta_net import Convolution, DeltaConfig, DeltaNet
from jaxglue.models.family import Family, NormNames, Parts, register
from jaxglue.models.hf_fields import check_fields, decoder_fields, require_fields
from jaxglue.models.layers import DecoderLayer
from jaxglue.models.linear import Linear, layer_linear, project_together
from jaxglue.models.olmo2 import PARTS
from jaxglue.models.residual import Norm
from jaxglue.ops import names
from jaxglue.ops.residual_norm import Normed


@dataclass(frozen=True, kw_only=True)
class SeparateDeltaConfig(DeltaConfig):
    """Sizes of linear attention with a projection and a convolution each for queries, keys and values."""

    def make(
        self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs
    ) -> "SeparateDeltaNet":
        """See `Mixer`."""
        return SeparateDeltaNet(config, kind, self, dtype=dtype, rngs=rngs)


class SeparateDeltaNet(DeltaNet):
    """Linear attention under the names that OLMo Hybrid's files have."""

    def make_inputs(self, config: DecoderConfig, kind: LayerKind, *, dtype, rngs: nnx.Rngs) -> None:
        """Make the projections that read the layer's norm, and the convolutions."""
        linear, D = partial(layer_linear, config, kind, bias=False, dtype=dtype, rngs=rngs), config.hidden_size
        path, N, K, V = self.shape.module, self.shape.num_value_heads, self.shape.key_width, self.shape.value_width
        self.q_proj, self.k_proj = linear(f"{path}.q_proj", D, K), linear(f"{path}.k_proj", D, K)
        self.v_proj, self.g_proj = linear(f"{path}.v_proj", D, V), linear(f"{path}.g_proj", D, V)
        self.b_proj, self.a_proj = linear(f"{path}.b_proj", D, N), linear(f"{path}.a_proj", D, N)
        options: dict[str, Any] = {"std": config.initializer_range, "dtype": dtype, "rngs": rngs}
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            Convolution(width, self.shape.conv_width, **options) for width in (K, K, V)
        )

    def make_output(self, config: DecoderConfig, kind: LayerKind, *, dtype, rngs: nnx.Rngs) -> None:
        """Make the norm of the output's heads, and the projection back."""
        self.o_norm = Norm(self.shape.value_dim, 1e-5, dtype=dtype)  # whatever the others add
        sizes = self.shape.value_width, config.hidden_size
        options: dict[str, Any] = {"bias": False, "dtype": dtype, "rngs": rngs}
        self.o_proj = layer_linear(config, kind, f"{self.shape.module}.o_proj", *sizes, **options)

    def project(self, normed: Normed, context: LayerContext) -> tuple[tuple[Array, ...], Array]:
        """See `DeltaNet`."""
        q, k, v, z, b, a = project_together(self.inputs_of_norm, normed, context)
        named = zip((jnp.concatenate([q, k, v], axis=-1), b, a), self.value_names, strict=True)
        return tuple(checkpoint_name(y, name) for y, name in named), checkpoint_name(z, names.OUTPUT_GATE)

    @property
    def taps(self) -> jax.Array:
        """See `DeltaNet`."""
        return jnp.concatenate([conv.weight[...] for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])

    @property
    def output_norm(self) -> Norm:
        """See `DeltaNet`."""
        return self.o_norm

    @property
    def output_proj(self) -> Linear:
        """See `DeltaNet`."""
        return self.o_proj

    @property
    def inputs_of_norm(self) -> list[Linear]:
        """Return the linear layers that read the layer's norm."""
        return [self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.b_proj, self.a_proj]


class OlmoHybridLayer(DecoderLayer):
    """OLMo 3's layer, which norms its branches, or one of linear attention, which norms their inputs."""

    def __init__(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype: Any, rngs: nnx.Rngs):
        of_kind = replace(parts, norms=_NORMS_BEFORE) if kind.mixer.recurrent else parts
        super().__init__(config, of_kind, kind, dtype=dtype, rngs=rngs)


_NORMS_BEFORE = NormNames(before_attention="attention_layer_norm", before_mlp="feedforward_layer_norm")


@dataclass(frozen=True, kw_only=True)
class _Fields:
    linear_allow_neg_eigval: bool


_LINEAR, _FULL = "linear_attention", "full_attention"


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read an `OlmoHybridForCausalLM` config.json; layers have no positions where it has no `rope_theta`.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    check_fields(raw, _Fields)
    given = {name: value for name, value in raw.items() if value is not None}
    require_fields(given, ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    layers, heads = given["num_hidden_layers"], given["num_attention_heads"]
    types = given.get("layer_types") or [_FULL if i % 4 == 3 else _LINEAR for i in range(layers - 1)] + [_FULL]
    if len(types) != layers or not {_LINEAR, _FULL} >= set(types):
        raise ValueError(
            f"layer_types in config.json: expected {_LINEAR} or {_FULL} for each of {layers} layers, got {types!r:.100}"
        )
    key_heads = given.get("linear_num_key_heads", heads)
    key_dim = given.get("linear_key_head_dim", int(0.75 * given["hidden_size"] / key_heads))
    delta = SeparateDeltaConfig(
        num_key_heads=key_heads,
        num_value_heads=given.get("linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=given.get("linear_value_head_dim", 2 * key_dim),
        conv_width=given.get("linear_conv_kernel_dim", 4),
        largest_beta=2.0 if given.get("linear_allow_neg_eigval", True) else 1.0,
    )
    turned = given.get("rope_theta") or (given.get("rope_parameters") or {}).get("rope_theta")
    return DecoderConfig(
        **decoder_fields(given, max_position_embeddings=65536) | {"mlp_bias": False},
        layer_windows=(None,) * layers,
        layer_ropes=() if turned else (None,) * layers,
        mixers=tuple(delta if kind == _LINEAR else ATTENTION for kind in types),
    )


_PROJECTIONS = "q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_proj"
register(
    Family(
        model_type="olmo_hybrid",
        config_from_hf=config_from_hf,
        parts=PARTS,
        layer=OlmoHybridLayer,
        linears=tuple(f"linear_attn.{name}" for name in _PROJECTIONS),
    )
)
