"""Decode windows of a mixture, compiled for an H200, hold the expanded experts of one layer at most, or of none."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import thorough

from jaxglue.generation.engine import STEPS, Engine
from jaxglue.generation.inputs import ProgramKind, SlotTable
from jaxglue.generation.pages import make_caches, plan_cache
from jaxglue.generation.programs import DecodeWindow, make_sequences
from jaxglue.generation.sampling import Controls, Features
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.ops import backend
from jaxglue.ops.backend import HOPPER, tracing_for
from jaxglue.ops.moe import FEW_ROWS_EXPERTS

LAYERS, E, D, F, SLOTS = 4, 32, 512, 256, 32
SHAPE = {
    **{"model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": D, "intermediate_size": F, "head_dim": 64},
    **{"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1e4},
    **{"num_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": F, "norm_topk_prob": True},
}
EXPANDED = 2 * E * 3 * D * F
"""Bytes of a layer's experts in bfloat16."""


@pytest.fixture
def window_bytes(h200):
    """Return the temporary memory of a window of all layers, with adapters on the experts: window_bytes(quantize)."""

    def measure(quantize: str) -> int:
        config = config_from_hf(SHAPE).quantized(quantize)

        def build():
            model = build_model(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
            add_lora(model, LoraConfig(rank=8), rngs=nnx.Rngs(0))
            return model

        graphdefs, *trees = split_model(nnx.eval_shape(build), nnx.LoRAParam)
        engine, features = Engine(graphdefs, config, dtype=jnp.bfloat16), Features(draws=True)
        plan = plan_cache([(64, 128)] * SLOTS, config, jnp.bfloat16, free=1e10)
        state = jax.eval_shape(
            lambda: (
                make_sequences(plan, config.vocab_size, features),
                make_caches(plan, config, jnp.bfloat16, jnp.bfloat16),
            )
        )
        arrays = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200),
            (tuple(trees), *state, window(plan, features)),
        )
        compiled = engine._programs.compile_window(*arrays, size=SLOTS, steps=STEPS, plan=plan, features=features)
        return compiled.memory_analysis().temp_size_in_bytes

    def window(plan, features) -> DecodeWindow:
        table = SlotTable(plan, ProgramKind(features, 8, 0), SHAPE["vocab_size"], sees=False)
        first = np.zeros(SLOTS, np.int32)
        return DecodeWindow(
            slots=first,
            fresh=first > 0,
            tables=table._tables[first],
            controls=Controls(**{name: rows[first] for name, rows in table._controls.items()}),
            **{name: rows[first] for name, rows in table._fields.items()},
        )

    return measure


@thorough("generation/test_decoded_experts.py")
@pytest.mark.parametrize(("few_rows", "most"), [(True, 0.2), (False, 1.1)])
def test_no_window_expands_the_experts_of_two_layers(few_rows, most, window_bytes, monkeypatch):
    monkeypatch.setattr(backend, "UNTRIED", set())
    with tracing_for(HOPPER), nullcontext() if few_rows else FEW_ROWS_EXPERTS.using(None):
        assert window_bytes("nf4") < most * EXPANDED
