"""Qwen3-Next (80B-A3B): Qwen3.5's layers with experts, whose linear attention has two projections in place of four."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxglue.models import qwen3_5
from jaxglue.models.config import DecoderConfig, LayerKind, MoeConfig
from jaxglue.models.context import LayerContext
from jaxglue.models.delta_net import DeltaConfig, DeltaNet
from jaxglue.models.family import ExpertParts, Family, Parts, register
from jaxglue.models.hf_fields import expert_format, require_fields, sparse_layers
from jaxglue.models.linear import Linear, layer_linear, project_together
from jaxglue.models.wrapper import Spelling, spell
from jaxglue.ops import names
from jaxglue.ops.residual_norm import Normed


@dataclass(frozen=True, kw_only=True)
class JoinedDeltaConfig(DeltaConfig):
    """Sizes of linear attention with two projections: of queries, keys, values and gates, and of β and decays."""

    def make(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs) -> "JoinedDeltaNet":
        """See `Mixer`."""
        return JoinedDeltaNet(config, kind, self, dtype=dtype, rngs=rngs)


class JoinedDeltaNet(DeltaNet):
    """Linear attention whose projections have rows in groups, one for each key head."""

    def make_inputs(self, config: DecoderConfig, kind: LayerKind, *, dtype, rngs: nnx.Rngs) -> None:
        """See `DeltaNet`."""
        linear, D = partial(layer_linear, config, kind, bias=False, dtype=dtype, rngs=rngs), config.hidden_size
        self.in_proj_qkvz = linear("linear_attn.in_proj_qkvz", D, self.shape.channels + self.shape.value_width)
        self.in_proj_ba = linear("linear_attn.in_proj_ba", D, 2 * self.shape.num_value_heads)
        self.make_convolution(config, dtype=dtype, rngs=rngs)

    def project(self, normed: Normed, context: LayerContext) -> tuple[tuple[Array, ...], Array]:
        """See `DeltaNet`."""
        joined, gates = project_together(self.inputs_of_norm, normed, context)
        shape, (K, H) = self.shape, (self.shape.num_key_heads, self.shape.key_dim)
        V = shape.value_width // K
        bounds = H, 2 * H, 2 * H + V
        q, k, v, z = (x.reshape(*x.shape[:2], -1) for x in _by_group(joined, K, bounds))
        b, a = (x.reshape(*x.shape[:2], -1) for x in _by_group(gates, K, (shape.num_value_heads // K,)))
        values = jnp.concatenate([q, k, v], axis=-1), b, a
        named = zip(values, self.value_names, strict=True)
        return tuple(checkpoint_name(y, name) for y, name in named), checkpoint_name(z, names.OUTPUT_GATE)

    @property
    def inputs_of_norm(self) -> list[Linear]:
        """Return the linear layers that read the layer's norm."""
        return [self.in_proj_qkvz, self.in_proj_ba]


def _by_group(x: jax.Array, groups: int, bounds: tuple[int, ...]) -> list[jax.Array]:
    """Cut each group's columns of x [B, T, …] at these bounds."""
    return jnp.split(x.reshape(*x.shape[:2], groups, -1), bounds, axis=-1)


_DEFAULTS = {
    **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True},
    **{"shared_expert_intermediate_size": 512, "num_key_value_heads": 2},
}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Qwen3NextForCausalLM` config.json; transformers 5 may write `num_local_experts` for `num_experts`.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    given = {name: value for name, value in raw.items() if value is not None}
    given = {
        **_DEFAULTS,
        **({"num_experts": raw["num_local_experts"]} if raw.get("num_local_experts") else {}),
        **given,
    }
    require_fields(given, ("num_hidden_layers",))
    config = qwen3_5.config_from_hf(given)
    moe = MoeConfig(
        num_experts=given["num_experts"],
        num_experts_per_tok=given["num_experts_per_tok"],
        intermediate_size=given["moe_intermediate_size"],
        sparse_layers=sparse_layers(given),
        norm_topk_prob=given["norm_topk_prob"],
        quantize=expert_format(given),
        shared_size=given["shared_expert_intermediate_size"],
    )
    return replace(config, moe=moe, mixers=tuple(map(_joined, config.mixers)))


def _joined(mixer: Any) -> Any:
    if not isinstance(mixer, DeltaConfig):
        return mixer
    return JoinedDeltaConfig(**{field.name: getattr(mixer, field.name) for field in fields(mixer)})


register(
    Family(
        model_type="qwen3_next",
        config_from_hf=config_from_hf,
        parts=replace(qwen3_5.PARTS, experts=ExpertParts(shared_gate=True, stored="apart")),
        linears=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
    )
)
spell(Spelling(model_type="qwen3_next", others=("mtp.",)))
