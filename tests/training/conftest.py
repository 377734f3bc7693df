"""A model folder, chats and a configuration that train in a second."""

import dataclasses
import json
import os
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxglue.data.config import DataConfig
from jaxglue.hf.checkpoint import read_config, save_tensors
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.rl.config import RolloutConfig
from jaxglue.settings.config import KindSettings
from jaxglue.training.config import ModelConfig, OptimizerConfig, RunConfig, TrainConfig

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 2,  # one type compiles once
    "tie_word_embeddings": False,
}


@pytest.fixture
def model_folder(tmp_path, make_tokenizer):
    """A Hugging Face folder without weights."""
    folder = tmp_path / "model"
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture
def xla_cache(tmp_path):
    """A folder for compiled programs, shared with other tests where these have one."""
    return Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", tmp_path / "xla"))


@pytest.fixture
def moe_folder(model_folder):
    """Turn the model folder into a GPT-OSS with MXFP4 experts."""
    path = model_folder / "config.json"
    raw = json.loads(path.read_text()) | GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(raw))
    return model_folder


@pytest.fixture
def make_config(tmp_path, model_folder, write_jsonl, chat_rows):
    """Build a TrainConfig; any field of any group can be given by name."""
    data = write_jsonl(chat_rows(24))

    def make(**changes):
        groups = {
            "model": (ModelConfig, {"model": str(model_folder), "random_weights": True}),
            "data": (DataConfig, {"data": (data,), "seq_len": 96, "cache_dir": str(tmp_path / "cache"), "workers": 1}),
            "objective": (ObjectiveConfig, {}),
            "rollouts": (RolloutConfig, {}),
            "lora": (LoraConfig, {"rank": 4}),
            "optimizer": (OptimizerConfig, {"learning_rate": 1e-2}),
            "run": (RunConfig, {"output": tmp_path / "run", "compilation_cache": None, "log_every": 1}),
        }
        configs = {}
        for name, (cls, defaults) in groups.items():
            cls = cls.of(changes.get(cls.named_by)) if issubclass(cls, KindSettings) else cls
            own = {field.name for field in dataclasses.fields(cls)}
            given = {key: changes.pop(key) for key in own & changes.keys()}
            configs[name] = cls(**{**defaults, **given})
        assert not changes, f"no such fields: {changes}"
        return TrainConfig(**configs)

    return make


@pytest.fixture
def with_weights(make_config, model_folder):
    """Build a TrainConfig as `make_config`, with weights in the model folder."""
    model = random_model(config_from_hf(read_config(model_folder)), dtype=jnp.float32, seed=1)
    save_tensors(model_folder / "weights", flatten_names(split_model(model, nnx.Param)[1]))
    (model_folder / "weights/model.safetensors").rename(model_folder / "model.safetensors")
    (model_folder / "weights").rmdir()

    def make(**changes) -> TrainConfig:
        return make_config(random_weights=False, **changes)

    return make


@pytest.fixture
def settings(model_folder, tmp_path):
    """Settings of a tiny run, or session, by name."""
    return {
        "model": str(model_folder),
        "random_weights": True,
        "dtype": "float32",
        "seq_len": 96,
        "workers": 1,
        "cache_dir": str(tmp_path / "cache"),
        "compilation_cache": None,
        "sample_prompt": (),
    }
