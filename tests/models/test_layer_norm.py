"""A family with layer norms, in every form of a layer."""

from collections import Counter
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree
from selection import repeats_parts_of

from jaxglue.engine.executor import Executor
from jaxglue.engine.layer_forms import LAYER_FORM, LayerCall
from jaxglue.engine.policy import parse_policy
from jaxglue.models import FAMILIES, Family, build_model, config_from_hf, register
from jaxglue.models.config import DecoderConfig
from jaxglue.models.decoder import packed_context
from jaxglue.models.family import Parts
from jaxglue.models.hf_fields import decoder_fields
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.ops.backend import tracing_for
from jaxglue.ops.equations import equations
from jaxglue.ops.norm_rope import LAYER_NORM

LENGTHS = [[5, 1, 7], [12]]


@pytest.fixture(scope="module")
def config(tiny_config):
    parts = Parts(norm=LAYER_NORM, head_norms="heads")
    read = lambda raw: DecoderConfig(**decoder_fields(raw), layer_windows=(None, None))  # noqa: E731
    with FAMILIES.scope():
        register(Family(model_type="layer_norm", config_from_hf=read, parts=parts))
        yield config_from_hf({**tiny_config, "model_type": "layer_norm", "hidden_size": 64, "num_hidden_layers": 2})


def make(config, dtype=jnp.float32, *, adapted=False):
    """Return a model whose norms have biases and weights of their own."""
    model = build_model(config, dtype=dtype, rngs=nnx.Rngs(0))
    if adapted:
        add_lora(model, LoraConfig(rank=4), rngs=nnx.Rngs(1))
    noise = np.random.default_rng(0)
    few = lambda x: x.ndim == 1 or adapted  # noqa: E731
    state = nnx.state(model, nnx.LoRAParam if adapted else nnx.Param)
    changed = jax.tree.map(lambda x: x + (0.1 * noise.standard_normal(x.shape)).astype(x.dtype) * few(x), state)
    nnx.update(model, changed)
    return model


def loss_and_gradients(model, config, batch, trained, **options):
    graphdefs, trainable, frozen = split_model(model, trained)
    executor = Executor(graphdefs, config, policy=parse_policy("dots"), dtype=jnp.float32, **options)
    return executor.loss_and_gradients(trainable, frozen, [batch], 1.0)


def test_tiles_train_as_whole_rows(config, random_batch):
    model, batch = make(config), random_batch(LENGTHS, 14)
    whole, tiled = (loss_and_gradients(model, config, batch, nnx.Param, tile=tile) for tile in (None, 7))
    chex.assert_trees_all_close(tiled, whole, rtol=1e-4, atol=1e-5)
    bias = whole[1]["layers"][0]["input_layernorm"]["bias"]
    assert bias.shape == (64,) and np.all(np.abs(bias) > 0)


@repeats_parts_of("test_gradients_of_adapters_point_as_in_float32")
def test_adapters_in_fp8_train_as_in_float32(config, random_batch):
    batch, gradients = random_batch(LENGTHS, 14), []
    for storage in ("none", "fp8"):
        own = replace(config, quantize=storage)
        _, trained = loss_and_gradients(make(own, adapted=True), own, batch, nnx.LoRAParam)
        gradients.append(ravel_pytree(trained["layers"])[0])
    expected, got = gradients
    assert expected @ got > 0.9 * np.linalg.norm(expected) * np.linalg.norm(got)


@pytest.mark.parametrize("storage", ["none", "fp8"])
def test_kernels_of_other_norms_stay_out_of_its_programs(config, random_batch, storage):
    pytest.importorskip("jax_triton")
    own = replace(config, quantize=storage)
    model = make(own, jnp.bfloat16, adapted=True)
    context = packed_context(own, random_batch(LENGTHS, 14).segments, backend="reference")
    x = jax.ShapeDtypeStruct((2, 14, 64), jnp.bfloat16)
    graphdef, state = nnx.split(model.layers[0])

    def run(state, x):
        layer = nnx.merge(graphdef, state)
        choices.append(LAYER_FORM.choose((9, 0), LayerCall(layer=layer, x=x, context=context)))
        return layer(x, context)

    choices: list = []
    with tracing_for((9, 0)):
        program = jax.make_jaxpr(run)(state, x)
    launches = [eqn for eqn, _ in equations(program.jaxpr) if eqn.primitive.name == "triton_kernel_call"]
    names = Counter(launch.params["fn"].__name__ for launch in launches)
    assert "norms are not Llama's" in choices[0].reason and choices[0].name == "reference"
    assert sum(count for name, count in names.items() if "norm" in name) == 0
    assert names["encode_kernel"] == (4 if storage == "fp8" else 0)
