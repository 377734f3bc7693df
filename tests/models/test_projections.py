"""Fused projections of one input and their adapters."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeats_parts_of

from jaxglue.engine.compiler import STEP_OPTIONS
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.context import PackedContext
from jaxglue.models.linear import Linear, project_together
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.ops.gated_mlp import GATED_MLP, GatedCall

RANKS = (3, None, 5)
OUT = (12, 4, 8)


@pytest.fixture
def linears():
    """Three linear layers of one input; the second without adapter, the third with bias."""
    made, rngs = [], nnx.Rngs(0)
    for out, rank in zip(OUT, RANKS, strict=True):
        linear = Linear(16, out, bias=out == OUT[2], std=0.2, dtype=jnp.float32, rngs=rngs)
        if rank:
            linear.add_lora(rank=rank, scale=0.5, dropout=0.1, name=str(out), rngs=rngs)
            linear.lora_B = nnx.LoRAParam(jax.random.normal(rngs.params(), (out, rank)))
        made.append(linear)
    made[2].bias = nnx.Param(jnp.arange(8.0))
    return made


def context(key=None):
    return PackedContext(segments=None, rope=None, dropout_key=key)


def by_definition(linear, x):
    y = x @ linear.weight[...].T
    if linear.lora_A is not None:
        y += 0.5 * (x @ linear.lora_A[...].T) @ linear.lora_B[...].T
    return y if linear.bias is None else y + linear.bias[...]


def outputs_and_gradients(linears, x, function):
    """Return the outputs, and the gradients to x and all parameters."""
    graph, state = nnx.split(linears)

    @jax.jit
    def run(state, x):
        outputs, pull = jax.vjp(lambda state, x: function(nnx.merge(graph, state), x), state, x)
        return outputs, pull([jnp.cos(y) for y in outputs])

    return run(state, x)


def test_outputs_and_gradients_match_the_definition(linears):
    x = jax.random.normal(jax.random.key(1), (2, 7, 16))
    got = outputs_and_gradients(linears, x, lambda linears, x: project_together(linears, x, context()))
    expected = outputs_and_gradients(linears, x, lambda linears, x: [by_definition(linear, x) for linear in linears])
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)


def test_each_adapter_has_its_own_dropout(linears):
    x = jax.random.normal(jax.random.key(1), (2, 7, 16))
    dropping = context(jax.random.key(2))
    together = project_together(linears, x, dropping)
    chex.assert_trees_all_close(together, [linear(x, dropping) for linear in linears], rtol=1e-5, atol=1e-5)
    same = [bool(jnp.allclose(a, b)) for a, b in zip(together, project_together(linears, x, context()), strict=True)]
    assert same == [False, True, False]


def test_gpu_matmuls_accumulate_onto_each_other(h200, monkeypatch):
    """Only matmuls write arrays as large as x or an output."""
    monkeypatch.setattr("jaxglue.ops.projection.ordered.compute_capability", lambda: (9, 0))  # no kernels are taken
    M, D = 1024, 512

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=h200)

    def build():
        made, rngs = [Linear(D, 256, bias=False, std=1.0, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)) for _ in "qkv"], None
        for linear in made:
            linear.add_lora(rank=16, scale=1.0, dropout=0.0, name="", rngs=rngs or nnx.Rngs(0))
        return nnx.split(made, nnx.LoRAParam, ...)

    graph, adapters, weights = nnx.eval_shape(build)

    def step(adapters, weights, x, dy):
        y, pull = jax.vjp(
            lambda adapters, x: project_together(nnx.merge(graph, adapters, weights), x, context()), adapters, x
        )
        return y, pull(dy)

    trees = jax.tree.map(lambda leaf: shaped(*leaf.shape, dtype=leaf.dtype), (adapters, weights))
    lowered = jax.jit(step, compiler_options=STEP_OPTIONS).lower(*trees, shaped(1, M, D), [shaped(1, M, 256)] * 3)
    text = lowered.compile().as_text()
    assert not re.search(r"bf16\[(1,)?1024,(512|256)\]\S* (fusion|add)\(", text[text.index("ENTRY") :])
    assert text.count("__cublas$lt$matmul") == 3 + 3 + 1 + 3 + 1 + 3 + 1 + 3  # three, or one, of each kind


class _Neighbor:
    """Context in which each token attends to its predecessor."""

    dropout_key = router_losses = None
    fp8 = False

    def rotate(self, q, k, rotary, norms, factor):
        return q, k

    def attend(self, q, k, v, *, window, sinks, softcap):
        return jnp.repeat(jnp.roll(v, 1, axis=1), q.shape[2] // v.shape[2], axis=2)


@repeats_parts_of("test_outputs_and_gradients_match_the_definition")
def test_small_products_of_adapters_reach_the_residual_stream(tiny_model):
    """Added on their own, bfloat16 products would be rounded away."""
    model = tiny_model("llama", dtype=jnp.bfloat16, initializer_range=0.03)
    add_lora(model, LoraConfig(rank=4), rngs=nnx.Rngs(1))
    graph, state = nnx.split(model.layers[0])

    def change(dtype):
        layer = nnx.merge(graph, jax.tree.map(lambda a: a.astype(dtype) if a.dtype == jnp.bfloat16 else a, state))
        x = jax.random.normal(jax.random.key(2), (1, 4096, 32), jnp.bfloat16).astype(dtype)
        without = layer(x, _Neighbor())
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            shape = linear.lora_B[...].shape
            linear.lora_B = nnx.LoRAParam(0.001 * jax.random.normal(jax.random.key(3), shape))
        return (layer(x, _Neighbor()).astype(jnp.float32) - without).ravel()

    got, exact = change(jnp.bfloat16), change(jnp.float32)
    assert jnp.std(exact) < 2**-9  # half of what numbers around 1 are apart
    np.testing.assert_allclose(got @ exact / (exact @ exact), 1.0, atol=0.1)


@pytest.mark.parametrize("adapts", [False, True])
def test_fused_projections_are_split_where_they_have_adapters(adapts):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    others = {"model_type": "phi3", "vocab_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 32}
    model = build_model(config_from_hf({**sizes, **others}), rngs=nnx.Rngs(0))
    if adapts:
        add_lora(model, LoraConfig(rank=2), rngs=nnx.Rngs(0))
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    assert [part.weight.shape[0] for part in attention.inputs] == ([16, 8, 8] if adapts else [32])
    assert (mlp.parts is not None) == adapts
    if mlp.parts is not None:
        assert GATED_MLP.choose(None, GatedCall.of(mlp.parts, context(), "silu")).name == "lora_swiglu"
