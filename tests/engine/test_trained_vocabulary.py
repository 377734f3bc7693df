"""Embedding, head, single rows and DoRA's magnitudes train through the executor; noise on embeddings is training's."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from selection import repeat, repeats

from jaxglue.data.batch import Batch
from jaxglue.engine.executor import Executor
from jaxglue.engine.host_table import embeddings_to_host
from jaxglue.engine.policy import parse_policy
from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.adapter_check import fit_tied
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.loading import load_model, set_adapter
from jaxglue.models import config_from_hf
from jaxglue.models.lora import add_lora
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.ops.segments import pack_segments
from tests.models.test_parity import GOLDENS, PEFT


def golden_batch(golden):
    tokens, segments = (
        golden["tokens"][None],
        pack_segments([golden["lengths"].tolist()], seq_len=len(golden["tokens"])),
    )
    predicted = (segments.ends - 1 > np.arange(tokens.shape[1])) & (segments.segment_ids > 0)
    return Batch(
        tokens=tokens, targets=np.roll(tokens, -1), loss_weights=predicted.astype(np.float32), segments=segments
    )


def split_adapted(name):
    """Return (config, graphdefs, trainable, frozen) of one of PEFT's adapters on its base."""
    folder, adapter = GOLDENS / PEFT[name], load_adapter(GOLDENS / "peft" / name)
    base = config_from_hf(read_config(folder))
    untied = base.tie_word_embeddings and not adapter.adapted(base).tie_word_embeddings
    model = load_model(folder, dtype=jnp.float32, untied=untied)
    adapter = fit_tied(adapter) if model.lm_head is None else adapter
    add_lora(model, adapter.config, rngs=nnx.Rngs(0))
    set_adapter(model, adapter)
    return model.config, *split_model(model, nnx.LoRAParam)


@pytest.mark.parametrize(
    "name", repeats(PEFT, "untied_both", "untied_head", "whole_tied", "vocabulary_tied", "vocabulary", "dora_rows")
)
def test_loss_and_gradients_match_peft(name):
    config, graphdefs, trainable, frozen = split_adapted(name)
    golden = load_file(GOLDENS / "peft" / name / "golden.safetensors")
    batch = golden_batch(golden)
    executor = Executor(graphdefs, config, policy=parse_policy("dots"), dtype=jnp.float32)
    loss, gradients = executor.loss_and_gradients(trainable, frozen, [batch], float(batch.loss_weights.sum()))
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-5)
    for key, gradient in flatten_names(gradients).items():
        expected = golden[f"grad.{key}"]
        assert np.linalg.norm(gradient - expected) <= 1e-3 * np.linalg.norm(expected), key


@pytest.mark.parametrize("name", [repeat("dora_rows"), "vocabulary"])
def test_rows_and_adapters_train_beside_a_table_in_host_memory(name):
    config, graphdefs, trainable, frozen = split_adapted(name)
    batch = golden_batch(load_file(GOLDENS / "peft" / name / "golden.safetensors"))
    executor = Executor(graphdefs, config, policy=parse_policy("full"), dtype=jnp.float32)
    on_device, on_host = (
        executor.loss_and_gradients(trainable, tree, [batch], 1.0) for tree in (frozen, embeddings_to_host(frozen))
    )
    chex.assert_trees_all_equal(on_device, on_host)
