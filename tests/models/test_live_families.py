"""Adapters and merged folders of each family, opened by transformers and PEFT.

They run where JAXGLUE_TORCH names a Python with torch, transformers and peft, which need not have JAX.
"""

import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import add_adapter, load_model
from jaxglue.hf.merge import export_adapter
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from tests.models.test_family_goldens import FAMILIES, drawn, read_golden, write_folder

PYTHON = os.environ.get("JAXGLUE_TORCH")
SCRIPT = Path(__file__).parents[1] / "transformers_logits.py"


@pytest.mark.skipif(PYTHON is None, reason="JAXGLUE_TORCH names no Python with torch")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "muse_glimmer_text"])  # no class for text alone
def test_peft_and_transformers_open_what_is_written(name, tmp_path):
    raw, golden = read_golden(name)
    base, adapter, merged = (tmp_path / folder for folder in ("base", "adapter", "merged"))
    base.mkdir()
    write_folder(base, raw)
    refused = ("out_proj",) if raw["model_type"] in ("falcon_h1", "nemotron_h") else ()
    lora = LoraConfig(rank=2, alpha=3, targets=("all-linear",), exclude=refused)
    model = load_model(base, dtype=jnp.float32)
    add_lora(model, lora, rngs=nnx.Rngs(0))
    shapes = flatten_names(split_model(model, nnx.LoRAParam)[1])
    tensors = {path: drawn(path, leaf.shape) for path, leaf in shapes.items()}
    names = {"tied": model.config.tie_word_embeddings, "model_type": model.config.model_type}
    save_adapter(adapter, tensors, lora, base, identify(base), **names)
    export_adapter(adapter, base, merged)
    np.save(tmp_path / "tokens.npy", golden["tokens"][None, :12].astype(np.int64))
    files = [str(tmp_path / file) for file in ("base", "adapter", "merged", "tokens.npy", "logits.npy")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([PYTHON, SCRIPT, *files], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    ours = load_model(base, dtype=jnp.float32)
    add_adapter(ours, adapter)
    logits = np.asarray(ours(golden["tokens"][None, :12])[0])
    for theirs in np.load(tmp_path / "logits.npy"):
        np.testing.assert_allclose(theirs, logits, rtol=0, atol=2e-4)
