"""The embedding table in host memory."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat, repeats_parts_of

from jaxglue.engine.host_table import _read, embeddings_to_host, needed_rows
from jaxglue.engine.policy import parse_policy
from jaxglue.engine.transfer import PINNED
from jaxglue.models.lora_config import LoraConfig
from jaxglue.ops.backend import tracing_for
from jaxglue.planner.gpus import find_gpu
from jaxglue.planner.planner import Planner
from jaxglue.planner.workload import Workload


@repeats_parts_of("test_table_of_embeddings_for_each_layer_gives_the_same_step_and_is_left_out_of_the_plan")
@pytest.mark.parametrize("dtype", [repeat(jnp.float32), jnp.bfloat16])
def test_host_table_gives_the_same_step(split_parts, random_batch, dtype):
    parts = split_parts("lora")
    table = parts.frozen["embed_tokens"]["weight"].astype(dtype)
    frozen = {**parts.frozen, "embed_tokens": {"weight": table}}
    host = embeddings_to_host(frozen)
    assert isinstance(host["embed_tokens"]["weight"], np.ndarray)
    assert host["lm_head"]["weight"].sharding.memory_kind == PINNED
    batches, executor = [random_batch([[5, 1, 7], [12]], 14, seed=seed) for seed in range(2)], parts.executor("full")
    expected = executor.loss_and_gradients(parts.trainable, frozen, batches, 1.0)
    chex.assert_trees_all_equal(executor.loss_and_gradients(parts.trainable, host, batches, 1.0), expected)
    assert executor.loss(parts.trainable, host, batches[0]) == executor.loss(parts.trainable, frozen, batches[0])


PER_LAYER = {
    **{"model_type": "gemma4_text", "global_head_dim": 8, "sliding_window": 4},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "tie_word_embeddings": True},
}


def test_table_of_embeddings_for_each_layer_gives_the_same_step_and_is_left_out_of_the_plan(split_parts, random_batch):
    parts = split_parts("lora", num_hidden_layers=2, **PER_LAYER)
    host, batches = embeddings_to_host(parts.frozen), [random_batch([[5, 1, 7], [12]], 14)]
    table = host["embed_tokens"]["per_layer"]["embedding"]["weight"]
    assert isinstance(table, np.ndarray) and isinstance(host["embed_tokens"]["weight"], jax.Array)  # tied to the head
    executor = parts.executor("full")
    expected = executor.loss_and_gradients(parts.trainable, parts.frozen, batches, 1.0)
    chex.assert_trees_all_equal(executor.loss_and_gradients(parts.trainable, host, batches, 1.0), expected)
    work = Workload(config=parts.config, batch_size=1, seq_len=64, lora=LoraConfig(rank=4))
    places = (replace(work, host_embeddings=host) for host in (False, True))
    planners = [Planner(each, find_gpu("H200"), layers_per_program=1) for each in places]
    on_device, on_host = (each.plan(parse_policy("full")).device_bytes for each in planners)
    assert on_device - on_host == 2 * table.size  # in bfloat16


def test_trained_or_tied_table_is_refused(split_parts):
    for parts in (split_parts("full"), split_parts("lora", tie_word_embeddings=True)):
        with pytest.raises(ValueError, match="need a frozen table to which the output projection is not tied"):
            embeddings_to_host(parts.frozen)


def test_planner_leaves_out_a_host_table(split_parts):
    parts = split_parts("lora")
    work = Workload(config=parts.config, batch_size=1, seq_len=64, lora=LoraConfig(rank=4))
    places = (replace(work, host_embeddings=host) for host in (False, True))
    planners = (Planner(each, find_gpu("H200"), layers_per_program=1) for each in places)
    on_device, on_host = (planner.plan(parse_policy("full")).device_bytes for planner in planners)
    table = 2 * parts.config.vocab_size * parts.config.hidden_size
    assert on_device - on_host in (table, 2 * table)  # the head is on the GPU only at the end of the forward pass
    with pytest.raises(ValueError, match="need a frozen table"):
        replace(work, lora=None, host_embeddings=True)


@pytest.mark.parametrize("width", [4096, 5120])
def test_kernel_compiles_for_an_h200(h200, width):
    address, tokens = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=h200)
        for shape, dtype in (((2,), jnp.uint32), ((2, 300), jnp.int32))
    )
    with tracing_for((9, 0)):
        compiled = _read.lower(address, tokens, width=width, dtype=jnp.dtype(jnp.bfloat16)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes == 0
    assert compiled.memory_analysis().argument_size_in_bytes < 4096  # the address, not the table


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 96])
def test_gpu_reads_rows_from_pinned_memory(width):
    table = jax.random.normal(jax.random.key(0), (5000, width), jnp.bfloat16)
    host = embeddings_to_host({"embed_tokens": {"weight": table}, "lm_head": {"weight": table}})["embed_tokens"]
    tokens = np.random.default_rng(0).integers(0, 5000, (2, 300), np.int32)
    rows, (numbers, _) = needed_rows(host, tokens)
    assert host["weight"].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(numbers, np.arange(600).reshape(2, 300))
    np.testing.assert_array_equal(rows["weight"], table[tokens.ravel()])
