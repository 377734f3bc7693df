"""Folders of EAGLE-3 heads, under the names of published ones."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxglue.hf.eagle import new_shape
from jaxglue.models.draft import parameter_name
from jaxglue.models.eagle import EagleHead, EagleShape, stored_name
from tests.goldens.drawn import drawn


def head_shapes(shape: EagleShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a head's parameters."""
    state = nnx.state(nnx.eval_shape(lambda: EagleHead(shape, dtype=jnp.float32, rngs=nnx.Rngs(0))))
    return {parameter_name(path): value.shape for path, value in nnx.to_flat_state(state)}


def write_head(folder: Path, model_folder: Path, config, words=None, *, start="midlayer.", **changes) -> dict:
    """Write a drawn head for a model, as its authors do or vLLM's speculators; return its tensors."""
    raw = json.loads((model_folder / "config.json").read_text())
    shape = new_shape(raw, config)
    tensors = {stored_name(name, start): drawn(f"eagle.{name}", size) for name, size in head_shapes(shape).items()}
    count = config.vocab_size if words is None else len(words)
    tensors["lm_head.weight"] = drawn("eagle.lm_head.weight", (count, config.hidden_size))
    if words is not None:
        tensors["d2t"] = np.asarray(words, np.int64) - np.arange(count)
        tensors["t2d"] = np.isin(np.arange(config.vocab_size), words)
    layer = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    layer |= {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    layer |= {"num_hidden_layers": 1, "model_type": "llama", "rms_norm_eps": config.rms_norm_eps}
    layer |= {"rope_theta": config.rope.rope_theta, "max_position_embeddings": config.max_position_embeddings}
    fields = {"draft_vocab_size": count}
    if start == "midlayer.":
        fields |= layer
    else:
        fields |= {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields | changes))
    save_file(tensors, folder / "model.safetensors")
    return tensors
