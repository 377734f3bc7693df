"""Llama 3.x: grouped-query attention, llama3 rope scaling, SwiGLU."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxglue.models.config import DecoderConfig, decoder_fields
from jaxglue.models.decoder import CausalLM
from jaxglue.models.layers import DecoderLayer


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a `LlamaForCausalLM` config.json."""
    return DecoderConfig(**decoder_fields(raw), layer_windows=(None,) * raw["num_hidden_layers"])


def build(config: DecoderConfig, *, dtype, rngs: nnx.Rngs) -> CausalLM:
    """Build a Llama with random weights in `dtype`."""

    def make_layer(index: int) -> DecoderLayer:
        return DecoderLayer(config, kind=config.layer_kinds[index], dtype=dtype, rngs=rngs)

    return CausalLM(config, make_layer, dtype=dtype, rngs=rngs)
