"""Runs on a folder whose text model has a vision tower beside it."""

import json

import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.export import save_model
from jaxglue.hf.loading import random_model
from jaxglue.hf.merge import export_adapter
from jaxglue.models import config_from_hf
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.training.train import train
from tests.training.conftest import SHAPE

VISION = {"vision_tower.patch.weight": np.arange(6, dtype=np.float16).reshape(2, 3)}


def write_weights(folder):
    """Give the model folder a Gemma 3's text model of random weights, and a vision tower."""
    rows = len(AutoTokenizer.from_pretrained(folder))
    text = {name: value for name, value in SHAPE.items() if name not in ("model_type", "tie_word_embeddings")} | {
        "vocab_size": rows
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    model = random_model(config_from_hf(read_config(folder)))
    save_model(folder / "made", flatten_names(split_model(model, nnx.Param)[1]), folder)
    stored = load_file(folder / "made/model.safetensors")
    save_file(stored | VISION, folder / "model.safetensors")
    return stored, rows


def test_text_model_learns_new_tokens_and_merges_beside_the_vision_tower(make_config, model_folder, tmp_path):
    stored, before = write_weights(model_folder)
    (tmp_path / "tokens.txt").write_text("<|note|>\n")
    summary = train(
        make_config(random_weights=False, targets=("all-linear",), steps=4, new_tokens=str(tmp_path / "tokens.txt"))
    )
    assert summary.last_loss < summary.first_loss - 0.1
    export_adapter(tmp_path / "run/adapter", model_folder, tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert merged.keys() == stored.keys() | VISION.keys()
    np.testing.assert_array_equal(merged["vision_tower.patch.weight"], VISION["vision_tower.patch.weight"])
    rows = len(merged["model.language_model.embed_tokens.weight"])
    raw = json.loads((tmp_path / "merged/config.json").read_text())
    assert rows == raw["text_config"]["vocab_size"] > before and "vocab_size" not in raw
