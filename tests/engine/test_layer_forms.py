"""The form of a layer and its reason are known from shapes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxglue.engine.layer_forms import explain_forms
from jaxglue.models.decoder import packed_context
from jaxglue.ops.backend import tracing_for
from jaxglue.ops.segments import pack_segments

H100 = (9, 0)


@pytest.mark.parametrize(
    ("kind", "gpu", "tile", "name", "reason"),
    [
        ("lora", H100, None, "small", "not tiles: rows pass whole"),
        ("lora", H100, 4, "tiles", "temporary values are a tile's"),
        ("lora", None, None, "stage by stage", "no NVIDIA GPU"),
        ("full", H100, None, "stage by stage", "not small: not triton: a projection has no adapter"),
    ],
)
def test_form_is_chosen_with_a_reason(split_parts, kind, gpu, tile, name, reason):
    parts = split_parts(kind)
    segments = pack_segments([[8]], seq_len=8)
    context = replace(packed_context(parts.config, segments), tile=tile)
    x = jax.ShapeDtypeStruct((1, 8, parts.config.hidden_size), jnp.bfloat16)
    with tracing_for(gpu):
        weights = (tree["layers"][0] for tree in parts[2:])
        choice = explain_forms(parts.graphdefs.layers[0], *weights, x, context)["layers"]
    assert choice.name == name
    assert reason in choice.reason
