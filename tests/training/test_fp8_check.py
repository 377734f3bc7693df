"""Layers that FP8 does not suit."""

import jax.numpy as jnp
import pytest

from jaxglue.ops.quant.fp8 import is_multiplied_in_fp8, quantize_fp8
from jaxglue.training.config import ModelConfig
from jaxglue.training.fp8_check import expand_inaccurate


def test_only_inaccurate_layers_are_expanded():
    layer = {"weight": quantize_fp8(jnp.ones((4, 16)))}
    frozen, note = expand_inaccurate({"layers": [layer] * 4, "norm": {}}, [0.05, 0.3, float("nan"), 0.1], 0.2)
    assert [is_multiplied_in_fp8(layer["weight"]) for layer in frozen["layers"]] == [True, False, False, True]
    assert "layers above 20% multiply in the activations' dtype: 1, 2" in note


def test_nothing_changes_below_the_threshold():
    layer = {"weight": quantize_fp8(jnp.ones((4, 16)))}
    frozen, note = expand_inaccurate({"layers": [layer, layer]}, [0.05, 0.07], 0.2)
    assert frozen["layers"] == [layer, layer]
    assert note == "fp8: largest relative error of a layer 7.0%, in layer 1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "nf4"}, "--matmul fp8 stores weights in FP8, not nf4: leave out --quantize"),
        ({"method": "full", "fp8_head": True}, "--fp8-head needs a frozen output projection"),
        ({"matmul": "bf16", "fp8_experts": True}, "--fp8-experts is a part of --matmul fp8, got --matmul bf16"),
    ],
)
def test_flags_that_contradict_fp8_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"model": "model", "matmul": "fp8"} | options)
