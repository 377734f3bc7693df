"""The layer-by-layer executor gives the loss and gradients of the whole model, for every policy."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.lora import LoraConfig, add_lora
from jaxglue.memory.executor import Executor
from jaxglue.memory.policy import PRESETS, parse_policy
from jaxglue.models.decoder import packed_context
from jaxglue.models.layers import project
from jaxglue.parameters import merge_module, split_model

LENGTHS = [[5, 1, 7], [12]]


def with_adapters(model, **options):
    add_lora(model, LoraConfig(rank=4, **options), rngs=nnx.Rngs(1))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == "lora_B":  # zero at the start: the gradient to A would vanish
            variable.set_value(jax.random.normal(jax.random.key(len(path)), variable.shape) * 0.1)
    return model


def whole_model_loss(structure, config, trainable, frozen, batches):
    """The definition: log-softmax of the model's logits, in one program."""

    def module(name):
        return merge_module(getattr(structure, name), trainable[name], frozen[name])

    def one(batch):
        x, context = module("embed_tokens")(batch.tokens, jnp.float32), packed_context(config, batch.segments)
        for i, graph in enumerate(structure.layers):
            x = merge_module(graph, trainable["layers"][i], frozen["layers"][i])(x, context)
        output = module("embed_tokens" if structure.lm_head is None else "lm_head").weight[...]
        log_probs = jax.nn.log_softmax(project(module("norm")(x), output))
        picked = jnp.take_along_axis(log_probs, batch.targets[..., None], axis=-1)[..., 0]
        return -jnp.sum(batch.loss_weights * picked)

    return sum(one(batch) for batch in batches) / sum(batch.loss_weights.sum() for batch in batches)


def total_weight(batches):
    return float(sum(batch.loss_weights.sum() for batch in batches))


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("lora", "none"), ("lora", "dots"), ("lora", "full"), ("full-tied", "dots"), ("full-untied", "full")],
)
def test_loss_and_gradients_match_the_whole_model(tiny_model, random_batch, kind, policy):
    model = tiny_model("qwen3", tie_word_embeddings=kind == "full-tied")
    model = with_adapters(model) if kind == "lora" else model
    structure, trainable, frozen = split_model(model, nnx.LoRAParam if kind == "lora" else nnx.Param)
    batches = [random_batch(LENGTHS, 14, seed=seed) for seed in range(2)]
    executor = Executor(structure, model.config, policy=parse_policy(policy), dtype=jnp.float32)
    loss, gradients = executor.loss_and_gradients(trainable, frozen, batches, total_weight(batches))
    whole = partial(whole_model_loss, structure, model.config)
    expected = jax.jit(jax.value_and_grad(whole))(trainable, frozen, batches)
    chex.assert_trees_all_close((loss, gradients), expected, rtol=1e-5, atol=1e-6)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradients["layers"])) > 1e-4


def test_accumulation_is_the_large_batch(tiny_model, random_batch):
    model = with_adapters(tiny_model())
    structure, trainable, frozen = split_model(model, nnx.LoRAParam)
    executor = Executor(structure, model.config, policy=PRESETS["dots"], dtype=jnp.float32)
    halves = [random_batch([row], 14, seed=seed) for seed, row in enumerate(LENGTHS)]
    whole = jax.tree.map(lambda *rows: np.concatenate(rows), *(_same_slots(half) for half in halves))
    together = executor.loss_and_gradients(trainable, frozen, [whole], total_weight([whole]))
    apart = executor.loss_and_gradients(trainable, frozen, halves, total_weight(halves))
    chex.assert_trees_all_close(together, apart, rtol=1e-5, atol=1e-6)


def _same_slots(batch, slots=5):
    cu_seqlens = np.pad(
        batch.segments.cu_seqlens, [(0, 0), (0, slots - batch.segments.cu_seqlens.shape[1])], mode="edge"
    )
    return dataclasses.replace(batch, segments=dataclasses.replace(batch.segments, cu_seqlens=cu_seqlens))


def test_one_compilation_per_layer_type_whatever_the_depth(tiny_model, random_batch):
    counts = []
    for depth in (2, 6):
        model = with_adapters(tiny_model(num_hidden_layers=depth))
        structure, trainable, frozen = split_model(model, nnx.LoRAParam)
        executor = Executor(structure, model.config, policy=PRESETS["full"], dtype=jnp.float32)
        for seed in range(2):
            batch = random_batch(LENGTHS, 14, seed=seed)
            executor.loss_and_gradients(trainable, frozen, [batch], total_weight([batch]))
        counts.append(executor.compilations())
    assert counts[0] == counts[1]


def test_residuals_hold_what_the_policy_names_and_no_weights(tiny_model, random_batch):
    model = with_adapters(tiny_model())
    structure, trainable, frozen = split_model(model, nnx.LoRAParam)
    batch = random_batch(LENGTHS, 14)
    sizes = {}
    for name, policy in PRESETS.items():
        executor = Executor(structure, model.config, policy=policy, dtype=jnp.float32)
        x, contexts = executor._enter(trainable, frozen, batch, None)
        arguments = (trainable["layers"][0], frozen["layers"][0], x, contexts[0])
        residuals = executor._layers[0].forward(*arguments)[1]
        sizes[name] = sorted(value.shape for value in residuals.values)
        weights = {leaf.shape for leaf in jax.tree.leaves(frozen["layers"][0]) if leaf.ndim == 2}
        assert not weights & set(sizes[name])
    assert sizes["full"] == []
    tokens = batch.tokens.shape
    assert (*tokens, 48) in sizes["dots"] and len(sizes["none"]) > len(sizes["dots"])


def test_dropout_is_reproducible_and_differs_between_layers_and_steps(tiny_model, random_batch):
    model = with_adapters(tiny_model(), dropout=0.5)
    structure, trainable, frozen = split_model(model, nnx.LoRAParam)
    executor = Executor(structure, model.config, policy=PRESETS["dots"], dtype=jnp.float32)
    batch = random_batch(LENGTHS, 14)

    def loss(seed):
        key = None if seed is None else jax.random.key(seed)
        return float(executor.loss_and_gradients(trainable, frozen, [batch], 1.0, key)[0])

    assert loss(0) == loss(0)
    assert len({loss(0), loss(1), loss(None)}) == 3


def test_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="remat policy 'dot' is unknown: use one of none, dots, full"):
        parse_policy("dot")
