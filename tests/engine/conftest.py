"""Split models for the executor, built once per session."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policies
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model


class Parts(NamedTuple):
    config: Any
    graphdefs: Any
    trainable: Any
    frozen: Any

    def executor(self, policy: str, **options) -> Executor:
        policies = parse_policies(policy, len(self.graphdefs.layers))
        return Executor(
            self.graphdefs,
            self.config,
            policy=policies,
            **{"dtype": jnp.float32} | options,
        )


def _randomize_lora_b(model):
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == "lora_B":  # zero at the start: the gradient to A would vanish
            variable.set_value(jax.random.normal(jax.random.key(len(path)), variable.shape) * 0.1)


@pytest.fixture(scope="session")
def split_parts(tiny_config):
    """Builds a tiny Qwen3's parts: split_parts(kind, dropout=…, quantize=…, **changes to its config.json)."""

    made: dict[str, Parts] = {}

    def make(kind: str = "lora", dropout: float = 0.0, quantize: str = "none", **changes) -> Parts:
        key = repr((kind, dropout, quantize, changes))
        if key not in made:
            made[key] = build(kind, dropout, quantize, changes)
        return made[key]

    def build(kind: str, dropout: float, quantize: str, changes: dict) -> Parts:
        config = config_from_hf({**tiny_config, "model_type": "qwen3", **changes}).quantized(quantize)
        model = build_model(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
        if kind == "lora":
            add_lora(model, LoraConfig(rank=4, dropout=dropout), rngs=nnx.Rngs(1))
            _randomize_lora_b(model)
        return Parts(config, *split_model(model, nnx.LoRAParam if kind == "lora" else nnx.Param))

    return make
