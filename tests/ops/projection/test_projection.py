"""The form that a projection takes, and its sum with the residual stream."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, outputs_and_gradients

from jaxglue.ops.projection import (
    PROJECTION,
    RESIDUAL_SUM,
    LowRankAdapter,
    Projection,
    ProjectionCall,
    ResidualSumCall,
    adapted_projection,
)
from jaxglue.ops.quant.fp8 import quantize_fp8
from jaxglue.ops.quant.nf4 import quantize_nf4

KEY = jax.random.key(0)


class Conditions(NamedTuple):
    dropout_key: jax.Array | None = None
    fp8: bool = True


def random_projection(**adapter):
    """Return a projection with an adapter."""
    W, A, B = (jax.random.normal(key, shape) for key, shape in zip(jax.random.split(KEY, 3), SHAPES, strict=True))
    return Projection(weight=W, adapter=LowRankAdapter(A=A, B=B, scale=0.5, **adapter))


SHAPES = (24, 16), (3, 16), (24, 3)
PLAIN = random_projection()
FP8 = replace(PLAIN, weight=quantize_fp8(PLAIN.weight))
BIASED = replace(PLAIN, bias=jnp.arange(24.0))
DORA, DROPPING = random_projection(magnitude=jnp.ones(24)), random_projection(dropout=0.1)


def in_fp8(projection):
    return replace(projection, weight=FP8.weight)


FP8_OBSTACLES = {
    "not stored for FP8": (PLAIN, Conditions()),
    "weights are not stored for FP8 products": (replace(FP8, weight=replace(FP8.weight, expand=True)), Conditions()),
    "in the activations' dtype": (FP8, Conditions(fp8=False)),
    "no adapter": (replace(FP8, adapter=None), Conditions()),
    "DoRA": (in_fp8(DORA), Conditions()),
    "an input of its own": (in_fp8(DROPPING), Conditions(KEY)),
}


@pytest.mark.parametrize("reason", FP8_OBSTACLES)
def test_obstacles_to_fp8_are_named(reason):
    projection, conditions = FP8_OBSTACLES[reason]
    choice = PROJECTION.choose(None, ProjectionCall.of([projection], conditions))
    assert choice.name == "reference" and reason in choice.reason


@pytest.mark.parametrize("projection", [FP8, in_fp8(DROPPING), in_fp8(BIASED)])
def test_frozen_fp8_weights_with_adapters_take_one_pass(projection):
    assert PROJECTION.choose(None, ProjectionCall.of([projection], Conditions())).name == "fp8"


SUM_OBSTACLES = {
    "no adapter": replace(PLAIN, adapter=None),
    "a bias": BIASED,
    "DoRA": DORA,
    "weights for FP8": FP8,
    "weights for FP8 are added": replace(PLAIN, trains_in_fp8=True),
}


@pytest.mark.parametrize("reason", SUM_OBSTACLES)
def test_obstacles_to_one_rounding_are_named(reason):
    choice = RESIDUAL_SUM.choose(None, ResidualSumCall(projection=SUM_OBSTACLES[reason]))
    assert choice.name == "reference" and reason in choice.reason


def test_dropout_does_not_keep_products_from_being_added_at_once():
    assert RESIDUAL_SUM.choose(None, ResidualSumCall(projection=DROPPING)).name == "lora"


@pytest.mark.parametrize("projection", [PLAIN, BIASED, replace(BIASED, adapter=None)])
def test_sums_with_the_stream_match_the_definition(projection):
    stream, x = jnp.ones((2, 5, 24)), jax.random.normal(KEY, (2, 5, 16))
    (got,) = adapted_projection(x, [projection], Conditions(), stream=stream)
    expected = stream + x @ projection.weight.T
    if projection.adapter is not None:
        expected += 0.5 * x @ projection.adapter.A.T @ projection.adapter.B.T
    assert_close([got], [expected if projection.bias is None else expected + projection.bias], 1e-5)


def test_dropout_keeps_a_share_of_the_input_and_its_mean():
    x = jnp.arange(1.0, 4001.0)
    dropped = replace(DROPPING.adapter, dropout=0.25).drop(x, KEY)
    kept = dropped != 0
    assert jnp.abs(kept.mean() - 0.75) < 0.03
    np.testing.assert_allclose(dropped[kept], x[kept] / 0.75, rtol=1e-6)
    assert (replace(DROPPING.adapter, dropout=0.25, salt=1).drop(x, KEY) != dropped).any()
    assert DROPPING.adapter.drop(x, None) is x


@pytest.mark.parametrize(
    ("projection", "conditions"),
    [(PLAIN, Conditions()), (BIASED, Conditions()), (DROPPING, Conditions(KEY)), (DORA, Conditions())],
)
def test_parts_of_a_projection_give_its_outputs_and_gradients(projection, conditions):
    def apply(split, x, A, B):
        whole = replace(projection, adapter=replace(projection.adapter, A=A, B=B))
        projections = whole.split(10, 15) if split else [whole]
        assert len(projections) == (3 if split else 1)
        return jnp.concatenate(adapted_projection(x, projections, conditions), axis=-1)

    inputs = jax.random.normal(KEY, (2, 7, 16)), projection.adapter.A, projection.adapter.B
    cotangent = jax.random.normal(KEY, (2, 7, 24))
    got, expected = (outputs_and_gradients(partial(apply, split), inputs, cotangent) for split in (True, False))
    assert_close(got, expected, 1e-5)


def test_rows_of_fp8_weights_are_split_and_those_of_others_are_not():
    whole = FP8.weight.dequantize(jnp.float32)
    parts = [part.weight.dequantize(jnp.float32) for part in FP8.split(10, 15)]
    np.testing.assert_array_equal(jnp.concatenate(parts), whole)
    for weight, adapter in ((quantize_nf4(jnp.ones((24, 64))), PLAIN.adapter), (PLAIN.weight, None)):
        alone = Projection(weight=weight, adapter=adapter)
        assert alone.split(10) == [alone]
