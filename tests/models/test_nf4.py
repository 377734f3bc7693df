"""An NF4 model compared with one holding the expanded weights."""

import json
from dataclasses import replace
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat

from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policy
from jaxglue.hf.checkpoint import save_tensors
from jaxglue.hf.loading import load_model, random_model
from jaxglue.models import config_from_hf
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.ops.quant.nf4 import NF4, dequantize_nf4, quantize_nf4

LENGTHS = [[5, 1, 7], [12]]


@pytest.fixture(scope="module")
def raw(tiny_config):
    """A config.json with sizes divisible by blocks, in which no activation has a weight's shape."""
    return {**tiny_config, "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


class Pair(NamedTuple):
    config: Any
    graphdefs: Any
    trainable: Any
    frozen: Any
    expanded_structure: Any
    expanded_frozen: Any

    def executors(self, policy: str):
        options = {"policy": parse_policy(policy), "dtype": jnp.float32}
        return [Executor(graph, self.config, **options) for graph in (self.graphdefs, self.expanded_structure)]


def _is_nf4(leaf):
    return isinstance(leaf, NF4)


@pytest.fixture(scope="module")
def pair(raw):
    """An NF4 model with non-zero adapters, and the same model with expanded weights."""
    config = config_from_hf(raw)
    parts = []
    for quantize in ("nf4", "none"):
        model = random_model(replace(config, quantize=quantize), dtype=jnp.float32)
        add_lora(model, LoraConfig(rank=4), rngs=nnx.Rngs(1))
        parts.append(split_model(model, nnx.LoRAParam))
    graphdefs, trainable, frozen = parts[0]
    trainable = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * 0.1, trainable)
    expanded = jax.tree.map(lambda x: dequantize_nf4(x, jnp.float32) if _is_nf4(x) else x, frozen, is_leaf=_is_nf4)
    return Pair(config, graphdefs, trainable, frozen, parts[1][0], expanded)


@pytest.mark.parametrize("policy", ["none", repeat("full")])
def test_loss_and_gradients_match_expanded_weights(pair, random_batch, policy):
    batch = random_batch(LENGTHS, 14)
    stored, expanded = pair.executors(policy)
    got = stored.loss_and_gradients(pair.trainable, pair.frozen, [batch], 1.0)
    expected = expanded.loss_and_gradients(pair.trainable, pair.expanded_frozen, [batch], 1.0)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(got[1]["layers"])) > 1e-3


@pytest.mark.parametrize("policy", ["none", "dots", "full"])
def test_no_expanded_weight_is_kept_for_the_backward_pass(pair, random_batch, policy):
    stored, expanded = pair.executors(policy)
    x, contexts = stored.entry_head.embed(pair.trainable, pair.frozen, random_batch(LENGTHS, 14), None)

    def kept(executor, frozen):
        arguments = pair.trainable["layers"][0], frozen["layers"][0], x, contexts[0]
        residuals = executor.layers[0].forward.eval_shape(*arguments)[1]
        return [(value.shape, value.dtype) for value in residuals.saved]

    assert sorted(kept(stored, pair.frozen), key=str) == sorted(kept(expanded, pair.expanded_frozen), key=str)


def test_nf4_layers_take_half_a_byte_per_weight(pair):
    linears = [leaf for leaf in jax.tree.leaves(pair.frozen["layers"], is_leaf=_is_nf4) if _is_nf4(leaf)]
    assert len(linears) == 2 * 7
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(linears))
    fixed = sum(4 * (linear.scale_absmax.size + 1) for linear in linears)  # 0.0002 of a large matrix
    assert stored - fixed == sum(np.prod(linear.shape) for linear in linears) * (1 / 2 + 1 / 64)


def test_folder_is_quantized_while_loading(raw, tmp_path):
    (tmp_path / "model").mkdir()
    original = flatten_names(split_model(random_model(config_from_hf(raw), dtype=jnp.float32), nnx.Param)[1])
    save_tensors(tmp_path / "model", original)
    (tmp_path / "model/config.json").write_text(json.dumps(raw))
    loaded = load_model(tmp_path / "model", dtype=jnp.bfloat16, quantize="nf4")
    linear = loaded.layers[1].mlp.up_proj.weight.get_value()
    weight = original["model.layers.1.mlp.up_proj.weight"].astype(jnp.bfloat16)
    chex.assert_trees_all_equal(linear, quantize_nf4(weight))
    assert loaded.output_weight.dtype == jnp.bfloat16  # embeddings and output projection stay as they are
    drawn = random_model(replace(config_from_hf(raw), quantize="nf4"), dtype=jnp.float32)
    expected = quantize_nf4(original["model.layers.1.mlp.up_proj.weight"])
    chex.assert_trees_all_equal(drawn.layers[1].mlp.up_proj.weight.get_value(), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 96}, "--quantize nf4 needs multiples of 64, got hidden_size=96: leave it out"),
        ({"num_attention_heads": 6}, r"got num_attention_heads × head_dim=96"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
            "experts",
        ),
    ],
)
def test_sizes_unfit_for_nf4_are_refused(raw, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(config_from_hf({**raw, **changes}), quantize="nf4")
