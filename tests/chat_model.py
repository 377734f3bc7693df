"""Fixtures of chats: the quickstart's tokenizer, and a small model with an adapter."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.checkpoint import save_tensors
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model

LORA = LoraConfig(rank=4, alpha=16)


@pytest.fixture(scope="session")
def quickstart(request):
    return request.config.rootpath / "scripts" / "quickstart" / "model"


@pytest.fixture(scope="session")
def tokenizer(quickstart):
    return load_tokenizer(quickstart)


@pytest.fixture(scope="session")
def base(quickstart):
    """A small model's config.json and its module."""
    raw = json.loads((quickstart / "config.json").read_text())
    raw |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "initializer_range": 0.3}
    return raw, random_model(config_from_hf(raw), dtype=jnp.float32, seed=5)


@pytest.fixture(scope="session")
def adapted(base):
    """(graphdefs, adapter, frozen) of a model with a random adapter."""
    model = nnx.clone(base[1])
    add_lora(model, LORA, rngs=nnx.Rngs(1))
    graphdefs, adapter, frozen = split_model(model, nnx.LoRAParam)
    rng = np.random.default_rng(7)
    return graphdefs, jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape, np.float32), adapter), frozen


@pytest.fixture(scope="session")
def folders(tmp_path_factory, quickstart, base, adapted):
    """A model folder, and an adapter folder without a tokenizer."""
    folder = tmp_path_factory.mktemp("chat")
    raw, model = base
    save_tensors(folder / "model", flatten_names(split_model(model, nnx.Param)[1]))
    (folder / "model" / "config.json").write_text(json.dumps(raw))
    for path in set(quickstart.iterdir()) - {quickstart / "config.json"}:
        shutil.copy(path, folder / "model")
    save_adapter(folder / "adapter", flatten_names(adapted[1]), LORA, folder / "model")
    return folder / "model", folder / "adapter"
