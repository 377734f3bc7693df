"""A model in FP8 beside the same one in float32."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.flatten_util import ravel_pytree
from selection import repeats_parts_of

from jaxglue.engine.executor import Executor
from jaxglue.engine.fp8_errors import fp8_errors
from jaxglue.engine.policy import parse_policy
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.decoder import packed_context
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.ops.backend import tracing_for
from jaxglue.ops.quant.fp8 import FP8Weight

LENGTHS = [[5, 1, 7], [12]]


@pytest.fixture(scope="module")
def results(tiny_config, random_batch):
    """Loss, gradients and frozen parameters by storage, and with the head in FP8 too."""
    config = config_from_hf({**tiny_config, "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2})
    batch, results = random_batch(LENGTHS, 14), {}
    for name in ("none", "fp8", "fp8 head"):
        shape = replace(config, quantize=name.split()[0], fp8_head="head" in name)
        model = random_model(shape, dtype=jnp.float32)
        add_lora(model, LoraConfig(rank=4), rngs=nnx.Rngs(1))
        graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
        trainable = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * 0.02, trainable)
        executor = Executor(graphdefs, shape, policy=parse_policy("dots"), dtype=jnp.float32)
        results[name] = *executor.loss_and_gradients(trainable, frozen, [batch], 1.0), frozen
    return results


@pytest.mark.parametrize("name", ["fp8", "fp8 head"])
def test_gradients_of_adapters_point_as_in_float32(results, name):
    expected, got = (ravel_pytree(results[key][1]["layers"])[0] for key in ("none", name))
    assert expected @ got > 0.9 * np.linalg.norm(expected) * np.linalg.norm(got)
    assert abs(results[name][0] / results["none"][0] - 1) < 0.01


def test_a_head_in_fp8_changes_the_loss_a_little(results):
    assert results["fp8 head"][0] != results["fp8"][0]


@repeats_parts_of("test_gradients_of_adapters_point_as_in_float32")
def test_full_fine_tuning_multiplies_in_fp8(tiny_config, random_batch):
    config = config_from_hf({**tiny_config, "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2})
    batch, results = random_batch(LENGTHS, 14), []
    for storage in ("none", "fp8_trained"):
        model = random_model(replace(config, quantize=storage), dtype=jnp.float32)
        graphdefs, trainable, frozen = split_model(model, nnx.Param)
        executor = Executor(graphdefs, config, policy=parse_policy("dots"), dtype=jnp.float32)
        loss, gradients = executor.loss_and_gradients(trainable, frozen, [batch], 1.0)
        results.append((loss, ravel_pytree(gradients)[0]))
    (loss, expected), (in_fp8, got) = results
    assert 0 < abs(in_fp8 / loss - 1) < 0.02
    assert expected @ got > 0.98 * np.linalg.norm(expected) * np.linalg.norm(got)


def test_every_projection_is_stored_in_fp8(results):
    leaves = jax.tree.leaves(results["fp8"][2]["layers"], is_leaf=lambda leaf: isinstance(leaf, FP8Weight))
    assert sum(isinstance(leaf, FP8Weight) for leaf in leaves) == 2 * 7


def make_executor(config, trained):
    model = random_model(config, dtype=jnp.float32)
    if trained is nnx.LoRAParam:
        add_lora(model, LoraConfig(rank=4), rngs=nnx.Rngs(1))
    graphdefs, *weights = split_model(model, trained)
    return Executor(graphdefs, config, policy=parse_policy("dots"), dtype=jnp.float32), *weights


@pytest.mark.parametrize(("storage", "trained"), [("fp8", nnx.LoRAParam), ("fp8_trained", nnx.Param)])
def test_errors_are_those_of_the_products(tiny_config, random_batch, storage, trained):
    config = config_from_hf({**tiny_config, "model_type": "qwen3", "num_hidden_layers": 2})
    config = replace(config, quantize=storage, fp8_head=storage == "fp8")
    executor, *weights = make_executor(config, trained)
    batch = random_batch(LENGTHS, 14)
    errors = fp8_errors(executor, *weights, batch)
    assert len(errors.layers) == 2 and all(0.01 < error < 0.2 for error in errors.layers)
    assert (errors.head is None) == (storage != "fp8") and 0 < (errors.head or 0.01) < 0.1
    in_fp8 = executor.loss(*weights, batch)
    executor.multiply_in_fp8([False, False], head=False)
    assert fp8_errors(executor, *weights, batch) == ([0.0, 0.0], None)
    assert executor.loss(*weights, batch) != in_fp8


def test_experts_in_fp8_need_mxfp4(tiny_config):
    with pytest.raises(ValueError, match="--fp8-experts needs experts in MXFP4"):
        config_from_hf({**tiny_config, "model_type": "qwen3"}).quantized("fp8", fp8_experts=True)


def kernel_names(jaxpr):
    """Return the names of the kernels that a program launches."""
    names = [eqn.params["fn"].__name__ for eqn in jaxpr.eqns if eqn.primitive.name == "triton_kernel_call"]
    inner = (sub for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params))
    return names + [name for sub in inner for name in kernel_names(sub)]


def test_norms_are_written_as_codes_and_products_added_to_the_stream(tiny_config, random_batch):
    pytest.importorskip("jax_triton", reason="needs jax-triton and triton: pip install '.[test]'")
    config = replace(config_from_hf({**tiny_config, "model_type": "qwen3"}), quantize="fp8")
    model = random_model(config, dtype=jnp.bfloat16)
    add_lora(model, LoraConfig(rank=4), rngs=nnx.Rngs(1))
    context = packed_context(config, random_batch(LENGTHS, 14).segments, backend="reference")
    x = jax.ShapeDtypeStruct((2, 14, config.hidden_size), jnp.bfloat16)
    graphdef, state = nnx.split(model.layers[0])
    with tracing_for((9, 0)):
        program = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x, context))(state, x)
    names = Counter(kernel_names(program.jaxpr))
    assert names["fp8_norm_kernel"] == names["encode_kernel"] == 2  # the outputs of attention and SwiGLU
    assert names["norm_kernel"] == 0 and names["product_kernel"] == 3 + 2
