"""Residuals of a layer's forward pass."""

import gc
from itertools import combinations

import jax
import numpy as np

from jaxglue.engine.layer import LayerFunctions
from jaxglue.engine.policy import parse_policy
from jaxglue.models.decoder import packed_context


def test_residuals_hold_no_inputs_and_no_duplicates(split_parts, random_batch):
    parts = split_parts("lora")
    x = jax.random.normal(jax.random.key(0), (1, 14, parts.config.hidden_size))
    context = packed_context(parts.config, random_batch([[5, 1, 7]], 14).segments)
    # Norm weights of one would make a norm's output equal its input.
    frozen = jax.tree.map(lambda weight: weight * 1.5, parts.frozen["layers"][0])
    arguments = parts.trainable["layers"][0], frozen, x, context
    _, residuals, _ = LayerFunctions(parts.graphdefs.layers[0], parse_policy("none")).forward(*arguments)
    known = [np.ravel(x), *map(np.ravel, jax.tree.leaves(arguments[:2]))]
    # In the shapes of the residual stream and of the query heads; what the reference of attention keeps is its own.
    kept = [np.ravel(value) for value in residuals.saved if value.size in (x.size, 2 * x.size)]
    assert len(kept) > 8
    assert not any(np.array_equal(a, b) for a in kept for b in known)
    assert not any(np.array_equal(a, b) for a, b in combinations(kept, 2))


def test_values_are_kept_where_the_policy_names_them(split_parts, random_batch):
    parts = split_parts("lora")
    x = jax.random.normal(jax.random.key(0), (1, 14, parts.config.hidden_size))
    context = packed_context(parts.config, random_batch([[5, 1, 7]], 14).segments)
    layer = LayerFunctions(parts.graphdefs.layers[0], parse_policy("offload:gate,lora_hidden; save:up,query"))
    _, residuals, _ = layer.forward(parts.trainable["layers"][0], parts.frozen["layers"][0], x, context)
    wide, (saved, offloaded) = parts.config.intermediate_size, (residuals.saved, residuals.offloaded)
    assert [value.shape[-1] for value in saved].count(wide) == [value.shape[-1] for value in offloaded].count(wide) == 1
    assert all(value.shape[-1] == wide or value.shape[-1] < 16 for value in offloaded)


def test_caches_that_outlive_a_layers_programs_do_not_hold_its_trace(split_parts, random_batch):
    parts = split_parts("lora")
    x = jax.random.normal(jax.random.key(0), (1, 14, parts.config.hidden_size))
    context = packed_context(parts.config, random_batch([[5, 1, 7]], 14).segments)
    layer = LayerFunctions(parts.graphdefs.layers[0], parse_policy("full"))
    arguments = parts.trainable["layers"][0], parts.frozen["layers"][0], x, context
    y, residuals, _ = layer.forward(*arguments)
    layer.backward(residuals, *arguments, y, None)
    form = residuals.form
    assert form() is not None
    del layer, residuals
    gc.collect()
    assert form() is None
