"""Gated feed-forwards against their definition, and the form that each one takes."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, outputs_and_gradients

from jaxglue.ops.gated_mlp import ACTIVATIONS, GATED_MLP, GatedCall, GatedParts, gated_mlp, gated_mlp_reads_fp8
from jaxglue.ops.projection import LowRankAdapter, Projection
from jaxglue.ops.quant.fp8 import quantize_fp8

D, F = 16, 24


class Conditions(NamedTuple):
    dropout_key: jax.Array | None = None
    fp8: bool = True


def random_parts(ranks=(3, 3, 3)):
    """Return gate, up and down with adapters."""
    rng = np.random.default_rng(0)

    def part(out, size, rank):
        shapes = (out, size), (rank, size), (out, rank)
        W, A, B = (jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for shape in shapes)
        return Projection(weight=W, adapter=LowRankAdapter(A=A, B=B, scale=0.5))

    return GatedParts(*(part(*shape) for shape in zip((F, F, D), (D, D, F), ranks, strict=True)))


def by_definition(stream, x, parts, activation):
    def apply(x, part):
        return x @ part.weight.T + 0.5 * x @ part.adapter.A.T @ part.adapter.B.T

    return stream + apply(ACTIVATIONS[activation](apply(x, parts.gate)) * apply(x, parts.up), parts.down)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ranks", [(3, 3, 3), (2, 3, 4)])
def test_outputs_and_gradients_match_the_definition(activation, ranks):
    parts = random_parts(ranks)
    stream, x = jax.random.normal(jax.random.key(1), (2, 2, 7, D))

    def with_matrices(matrices):
        adapters = (replace(part.adapter, A=A, B=B) for part, (A, B) in zip(parts, matrices, strict=True))
        return GatedParts(*(replace(part, adapter=adapter) for part, adapter in zip(parts, adapters, strict=True)))

    def apply(stream, x, matrices):
        return gated_mlp(x, with_matrices(matrices), Conditions(), stream=stream, activation=activation)

    def definition(stream, x, matrices):
        return by_definition(stream, x, with_matrices(matrices), activation)

    arguments = (stream, x, [(part.adapter.A, part.adapter.B) for part in parts]), jnp.cos(x)
    assert_close(outputs_and_gradients(apply, *arguments), outputs_and_gradients(definition, *arguments), 1e-5)


def changed(name, **changes):
    """Return a feed-forward's parts with changes to one of them, or to its adapter."""
    parts = random_parts()
    part = getattr(parts, name)
    if "bias" not in changes:
        changes = {"adapter": replace(part.adapter, **changes)}
    return parts._replace(**{name: replace(part, **changes)})


KEY = jax.random.key(0)
OBSTACLES = {
    "one rank, got 3, 2, 3": (random_parts((3, 2, 3)), Conditions(), "silu"),
    "biases are added before": (changed("gate", bias=jnp.zeros(F)), Conditions(), "silu"),
    "magnitudes (DoRA)": (changed("gate", magnitude=jnp.ones(F)), Conditions(), "silu"),
    "an input of its own": (changed("down", dropout=0.1), Conditions(KEY), "silu"),
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_obstacles_to_the_fused_form_are_named(reason):
    choice = GATED_MLP.choose(None, GatedCall.of(*OBSTACLES[reason]))
    assert choice.name == "reference" and reason in choice.reason


def test_fp8_takes_frozen_weights_with_adapters_alone():
    parts = GatedParts(*(replace(part, weight=quantize_fp8(part.weight)) for part in random_parts()))
    assert gated_mlp_reads_fp8(parts, Conditions(), "silu")
    assert not gated_mlp_reads_fp8(parts, Conditions(fp8=False), "silu")
    biased = parts._replace(down=replace(parts.down, bias=jnp.zeros(D)))
    assert GATED_MLP.choose(None, GatedCall.of(biased, Conditions(), "silu")).name == "lora_swiglu"
