"""Qwen3-MoE: Qwen3's attention, with experts as the feed-forward of most layers."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import DecoderConfig, MoeConfig, decoder_fields, experts_quantized, require_fields
from jaxglue.models.context import LayerContext
from jaxglue.models.decoder import CausalLM
from jaxglue.models.layers import DecoderLayer, GatedMLP
from jaxglue.models.moe_layers import ExpertConfig, Experts, Router, mix_experts

_EXPERTS = ExpertConfig(activation="swiglu", transposed=True, bias=False)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `Qwen3MoeForCausalLM` config.json; transformers 5 writes `num_local_experts` for `num_experts`.

    Raises:
        ValueError: a missing field, or a value that is not supported.
    """
    raw = {"num_experts": raw.get("num_local_experts"), **raw}
    fields = decoder_fields(raw, max_position_embeddings=32768)
    require_fields(raw, ("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
    layers, window = raw["num_hidden_layers"], raw.get("sliding_window") if raw.get("use_sliding_window") else None
    moe = MoeConfig(
        num_experts=raw["num_experts"],
        num_experts_per_tok=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        sparse_layers=_sparse_layers(raw),
        norm_topk_prob=raw.get("norm_topk_prob", False),
        quantize=experts_quantized(raw),
    )
    return DecoderConfig(**fields, layer_windows=(window,) * layers, moe=moe)


def _sparse_layers(raw: Mapping[str, Any]) -> tuple[bool, ...]:
    dense, step = set(raw.get("mlp_only_layers") or ()), raw.get("decoder_sparse_step") or 1
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(raw["num_hidden_layers"]))


class Qwen3MoeMLP(nnx.Module):
    """Experts chosen and weighted by a softmax over all of them."""

    def __init__(self, config: DecoderConfig, *, dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        self.gate = Router(config, bias=False, dtype=dtype, rngs=rngs)
        self.experts = Experts(config, _EXPERTS, dtype=dtype, rngs=rngs)
        self.experts_per_token, self.normalize = config.moe.num_experts_per_tok, config.moe.norm_topk_prob

    def __call__(self, x: Float[Array, "B T D"], context: LayerContext) -> Float[Array, "B T D"]:
        """Apply the feed-forward."""
        return mix_experts(x, self.gate, self.experts, context, self.experts_per_token, normalize=self.normalize)


def build(config: DecoderConfig, *, dtype, rngs: nnx.Rngs) -> CausalLM:
    """Build a Qwen3-MoE with random weights in `dtype`."""
    assert config.moe is not None
    sparse = config.moe.sparse_layers

    def make_layer(index: int) -> DecoderLayer:
        mlp = Qwen3MoeMLP if sparse[index] else GatedMLP
        return DecoderLayer(config, mlp=mlp, qk_norm=True, kind=config.layer_kinds[index], dtype=dtype, rngs=rngs)

    return CausalLM(config, make_layer, dtype=dtype, rngs=rngs)
