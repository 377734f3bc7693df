"""Weights of some layers are streamed: places are parsed, and gradients stay the same to the bit."""

from functools import partial

import chex
import jax
import numpy as np
import pytest
from selection import repeats

from jaxglue.engine import transfer
from jaxglue.engine.residency import format_weights, parse_weights
from jaxglue.models.file_param import FileParam
from jaxglue.ops.quant.formats import is_quantized

D, H, M = "device", "host", "mapped"


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("device", (D, D, D, D)),
        ("host", (D, H, H, H)),
        ("1 x device + 2 x host + 1 x device", (D, H, H, D)),
        ("2 x device & 2 x host", (D, H, D, H)),
        ("mapped", (D, M, M, M)),
        ("1 x device & 2 x host & 1 x mapped", (D, H, H, M)),
        ("2 x device & 1 x host & 1 x mapped", (D, H, D, M)),
        ("3 x device & 1 x host", (D, D, D, H)),
        ("2 x [1 x host + 1 x device]", (H, D, H, D)),
    ],
)
def test_places_are_parsed_and_formatted(text, places):
    assert parse_weights(text, 4) == places
    assert parse_weights(format_weights(places), 4) == places


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu", "weights 'gpu' is unknown: use device, host, mapped or auto, or counts such as"),
        ("2 x device & 3 x host", "weights '2 x device & 3 x host' is for 5 layers, the model has 4"),
        ("2 x device + host", "'host' must be COUNT x PLACE"),
        ("1 x [" * 5000 + "1 x host" + "]" * 5000, "groups nest more than 64 levels deep"),
        ("99999999999 x host", "is for more than 10,000 layers"),
        ("9999 x [9999 x [9999 x host]]", "is for more than 10,000 layers"),
        ("1" * 5000 + " x host", "is for more than 10,000 layers"),
        ("1 x [1 x device] & 3 x host & 1 x host", "must spread one place's layers among another's"),
    ],
)
def test_invalid_places_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_weights(text, 4)


EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 4}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "nf4": {"hidden_size": 64, "intermediate_size": 64, "quantize": "nf4"},
    "fp8": {"quantize": "fp8"},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "intermediate_size": 32,
        "layer_types": ("sliding_attention",) * 4,  # one type compiles once
        "quantization_config": {"quant_method": "mxfp4"},
        **EXPERTS,
    },
}


def in_file(layer):
    """Stand in for a layer's parameters in files, quantized ones whole."""

    def stored(leaf):
        read = partial(jax.tree.map, np.asarray, leaf)
        return FileParam(shape=leaf.shape, dtype=leaf.dtype, nbytes=0, read=read)

    return jax.tree.map(stored, layer, is_leaf=is_quantized)


@pytest.mark.parametrize("family", repeats(FAMILIES, "llama", "qwen3_moe", "nf4", "fp8"))
def test_partly_streamed_weights_change_no_bit(split_parts, random_batch, family):
    parts = split_parts("lora", num_hidden_layers=4, **FAMILIES[family])
    batches = [random_batch([[5, 1, 7], [12]], 14)]
    resident = parts.executor("offload").loss_and_gradients(parts.trainable, parts.frozen, batches, 13.0)
    move = {D: lambda layer: layer, H: transfer.to_host, M: in_file}
    places = parse_weights("1 x device + 1 x host + 1 x device + 1 x mapped", 4)
    layers = [move[place](layer) for layer, place in zip(parts.frozen["layers"], places, strict=True)]
    executor = parts.executor("offload", stream_weights=True)
    streamed = executor.loss_and_gradients(parts.trainable, {**parts.frozen, "layers": layers}, batches, 13.0)
    chex.assert_trees_all_equal(streamed, resident)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prefetch_counts_only_what_moves(depth):
    moving = [False, True, False, True, True, False, True]
    requested: list[int] = []
    ahead = transfer.requested_ahead(tuple(moving), depth)
    fetches = [lambda i=i: requested.append(i) or i for i in range(len(moving))]
    for index, item in enumerate(transfer.prefetch(fetches, depth, moving)):
        assert item == index
        assert len(requested) == ahead[index]
        assert sum(moving[index + 1 : len(requested)]) <= depth
    assert jax.tree.leaves(requested) == list(range(len(moving)))
