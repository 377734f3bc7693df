"""A recurrent layer in a file of the user's: packed rows, forks, tiles, adapters and answers, with no other file."""

from dataclasses import replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeats_parts_of

from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policies
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Engine
from jaxglue.generation.scheduler import Request
from jaxglue.models import FAMILIES, build_model, config_from_hf
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.ops.segments import copy_beginnings, pack_forks, pack_segments
from jaxglue.sharding.mesh import MeshShape
from tests.models.packed_documents import apart
from tests.models.test_parity import forward

LENGTHS = (1, 4, 2, 6)


@pytest.fixture
def model(tiny_config):
    with FAMILIES.scope():
        exec(compile(Path(__file__).with_name("mixer.py").read_text(), "mixer.py", "exec"), {"__name__": "mixer"})
        raw = {**tiny_config, "model_type": "means", "num_hidden_layers": 3, "initializer_range": 0.3}
        yield build_model(config_from_hf(raw), dtype=jnp.float32, rngs=nnx.Rngs(0))


def test_documents_and_continuations_are_as_apart(model):
    tokens = np.random.default_rng(0).integers(0, 97, sum(LENGTHS))
    packed = forward(model, tokens[None], pack_segments([list(LENGTHS)], seq_len=len(tokens)))[0]
    documents = np.split(tokens, np.cumsum(LENGTHS)[:-1])
    np.testing.assert_allclose(packed, np.concatenate(apart(model, documents)), rtol=0, atol=1e-5)
    forked = forward(model, tokens[None, :9], copy_beginnings(pack_forks([[(4, 2, 3)]], seq_len=9)))[0]
    (second,) = apart(model, [np.concatenate([tokens[:4], tokens[6:9]])])
    np.testing.assert_allclose(forked[6:9], second[4:], rtol=0, atol=1e-5)


@repeats_parts_of("test_tiles_train_as_whole_rows")
def test_adapters_train_by_tiles_as_whole(model, random_batch):
    add_lora(model, LoraConfig(rank=2, targets=("all-linear",)), rngs=nnx.Rngs(1))
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    assert "model.layers.0.means.in_proj.lora_A" in flatten_names(trainable)
    trainable = jax.tree.map(lambda x: x + 0.1, trainable)
    batches, results = [random_batch([[5, 1, 7], [12]], 14)], []
    for policy, tile in (("full", None), ("offload:layer_input,attention_out", 7)):
        policies = parse_policies(policy, 3)
        executor = Executor(graphdefs, model.config, policy=policies, dtype=jnp.float32, tile=tile)
        results.append(executor.loss_and_gradients(trainable, frozen, batches, 13.0))
    chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-5)


@repeats_parts_of("test_greedy_decoding_equals_full_forward_passes")
def test_answers_of_means_follow_the_forward_pass(model):
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    engine, sampling = Engine(graphdefs, model.config, dtype=jnp.float32), SamplingConfig(temperature=0, max_tokens=8)
    requests = [Request(list(range(3, 3 + size)), sampling, index) for index, size in enumerate(LENGTHS)]
    for completion in engine.generate(*trees, requests):
        prompt, answer = requests[completion.number].prompt, completion.tokens.tolist()
        logits = np.asarray(model(jnp.asarray([[*prompt, *answer]]))[0, len(prompt) - 1 : -1])
        np.testing.assert_allclose(logits[np.arange(8), answer], logits.max(-1), rtol=0, atol=1e-3)


def test_meshes_that_cannot_split_it_are_refused(model):
    for mesh, obstacle in (("context=2", "states of means pass from token to token"), ("tensor=2", "split means")):
        with pytest.raises(ValueError, match=obstacle):
            MeshShape.parse(mesh).check(replace(model.config), batch_size=2, devices=2, seq_len=8)
