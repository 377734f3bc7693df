"""The executor on a user's own layers: losses and gradients are those of plain JAX."""

import importlib.util
from functools import cache
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from jax.ad_checkpoint import checkpoint_name
from selection import repeats_parts_of

from jaxglue import LayerStack


@cache
def example():
    path = Path(__file__).parents[2] / "examples/vision_transformer.py"
    spec = importlib.util.spec_from_file_location("vision_transformer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_vision_transformer_gradients_are_those_of_jax():
    images = [example().draw_images(np.random.default_rng(seed), 6) for seed in range(2)]
    entry, block, loss, params = example().make_model(2)
    stack = LayerStack(entry, [block] * 2, loss, policy="offload")

    def whole(params):
        total = 0.0
        for batch in images:
            x, _ = entry(params["entry"], batch, None)
            for layer in params["layers"]:
                x = block(layer, x, None, None)
            total += loss(params["head"], x, batch)
        return total / 12

    expected = jax.jit(jax.value_and_grad(whole))(params)
    chex.assert_trees_all_close(stack.loss_and_gradients(params, images, 12), expected, rtol=1e-4, atol=1e-6)


@repeats_parts_of("test_vision_transformer_gradients_are_those_of_jax")
def test_vision_transformer_learns():
    losses = example().train(40, depth=3)
    assert np.mean(losses[-5:]) < 0.5 * losses[0]


def entry(params, batch, key):
    return batch["x"] * params["scale"], {"mask": batch["mask"]}


def layer(params, x, context, key):
    hidden = checkpoint_name(jnp.tanh(x @ params["w"] + params["low"]["a"]), "gate")
    if key is not None:
        hidden *= jax.random.bernoulli(key, 0.5, hidden.shape)
    return x + context["mask"][:, None] * hidden


def head(params, x, batch):
    return jnp.sum((x @ params["out"]) ** 2)


def make_params():
    keys = iter(jax.random.split(jax.random.key(0), 9))
    layers = [{"w": jax.random.normal(next(keys), (8, 8))} for _ in range(4)]
    frozen = {"layers": [{"low": {"a": jax.random.normal(next(keys), (8,))}} for _ in range(4)]}
    return {"entry": {"scale": jnp.ones(8)}, "layers": layers, "head": {"out": jnp.ones((8, 2))}}, frozen


BATCH = {"x": np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8), "mask": np.float32([1, 0, 1])}


@pytest.mark.parametrize("policy", ["none", "offload:layer_input,gate", "2 x full + 2 x dots"])
def test_context_frozen_parameters_and_policies(policy):
    (params, frozen), stack = make_params(), LayerStack(entry, [layer] * 4, head, policy=policy)

    def whole(params):
        x, context = entry(params["entry"], BATCH, None)
        for own, rest in zip(params["layers"], frozen["layers"], strict=True):
            x = layer(own | rest, x, context, None)
        return head(params["head"], x, BATCH)

    expected = jax.value_and_grad(whole)(params)
    got = stack.loss_and_gradients(params, [BATCH], 1, frozen=frozen)
    assert_close(*map(jax.tree.leaves, (got, expected)), 5e-6)
    np.testing.assert_allclose(stack.loss(params, BATCH, frozen=frozen), expected[0], rtol=1e-5)


def test_dropout_differs_between_layers_and_follows_its_key():
    (params, frozen), stack = make_params(), LayerStack(entry, [layer] * 4, head)
    losses = [
        float(stack.loss_and_gradients(params, [BATCH], 1, frozen=frozen, key=jax.random.key(seed))[0])
        for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_other_parameters_are_refused():
    params, _ = make_params()
    with pytest.raises(ValueError, match="params must be entry, head and 3 layers; got entry, 4 layers, head"):
        LayerStack(entry, [layer] * 3, head).loss(params, BATCH)
    with pytest.raises(ValueError, match="frozen has 'layer': its parts are entry, layers and head"):
        LayerStack(entry, [layer] * 4, head).loss(params, BATCH, frozen={"layer": []})
    with pytest.raises(ValueError, match="is for 2 layers"):
        LayerStack(entry, [layer] * 3, head, policy="1 x full + 1 x none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": BATCH}, "batches must be a list of micro-batches"),
        ({"batches": []}, "batches must be a list of micro-batches"),
        ({"total": 0}, "total must be the number of terms"),
        ({"entry": lambda params, batch, key: entry(params, batch, key)[0]}, "entry must return two values"),
        ({"layer": lambda params, x, context, key: (x, x)}, "a layer must return an array, .*, got tuple"),
    ],
)
def test_other_batches_and_results_are_refused(changes, message):
    parts = {"entry": entry, "layer": layer, "batches": [BATCH], "total": 1, **changes}
    params, frozen = make_params()
    stack = LayerStack(parts["entry"], [parts["layer"]] * 4, head)
    with pytest.raises(ValueError, match=message):
        stack.loss_and_gradients(params, parts["batches"], parts["total"], frozen=frozen)


def test_layers_may_return_another_shape():
    def halve(params, x, context, key):
        return params["w"] * x[..., ::2]

    params = {"entry": {}, "layers": [{"w": jnp.float32(2)}, {"w": jnp.float32(3)}], "head": {}}
    stack = LayerStack(lambda params, batch, key: (batch, None), [halve] * 2, lambda params, x, batch: jnp.sum(x))
    loss, gradients = stack.loss_and_gradients(params, [jnp.ones((1, 2, 8))], 1.0)
    assert (loss, [layer["w"] for layer in gradients["layers"]]) == (24, [12, 8])
