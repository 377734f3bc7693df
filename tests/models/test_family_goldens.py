"""Families compared with transformers; their weights are drawn here as they were there (`goldens/drawn.py`)."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from selection import repeat, repeats

from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.loading import add_adapter, load_model
from jaxglue.hf.merge import export_adapter
from jaxglue.models import abstract_model, config_from_hf
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import abstract_parameters, flatten_names, split_model
from jaxglue.models.wrapper import find_names
from tests.models.test_parity import assert_logits, assert_parity

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILIES = sorted(path.stem for path in (GOLDENS / "families").glob("*.safetensors"))
OTHERS = "gemma4_text", "glm4_moe", "glm4_moe_lite", "mistral", "mixtral", "olmo3", "phi3", "qwen2", "qwen2_moe"
OTHERS += (
    "bailing_hybrid",
    "cohere2",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "falcon_h1_plain",
    "gemma4_unified_text",
    "granite",
    "granitemoehybrid_dense",
    "lfm2",
    "lfm2_moe",
    "minimax_m2",
    "olmo_hybrid_nope",
    "qwen3_5_moe_text",
    "seed_oss",
)
"""Families whose parts the others and those of test_parity.py have, too."""
DIFFERENTIATED = ["deepseek_v3", "gemma4_text_experts", "lfm3", "nemotron_h"]
"""Families whose layers are of all operations that the others have."""
sys.path.append(str(GOLDENS))
from drawn import drawn, unpacked  # noqa: E402


def read_golden(name):
    with safe_open(GOLDENS / "families" / f"{name}.safetensors", "numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return json.loads(file.metadata()["config"]), unpacked(tensors)


def write_folder(folder, raw):
    shapes, names = abstract_parameters(abstract_model(config_from_hf(raw))), find_names(raw)
    (folder / "config.json").write_text(json.dumps(raw))
    spelled = {name: name if names is None or ".experts." in name else names.names(()).stored(name) for name in shapes}
    tensors = {spelled[name]: drawn(name, spec.shape) for name, spec in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", repeats(FAMILIES, *({*FAMILIES} - {*DIFFERENTIATED})))
def test_logits_loss_and_gradients_match_transformers(name, tmp_path):
    raw, golden = read_golden(name)
    assert_parity(load_model(write_folder(tmp_path, raw), dtype=jnp.float32), golden, nnx.Param)


@pytest.mark.parametrize("name", repeats(FAMILIES, *OTHERS, *DIFFERENTIATED))
def test_logits_match_transformers(name, tmp_path):
    raw, golden = read_golden(name)
    assert_logits(load_model(write_folder(tmp_path, raw), dtype=jnp.float32), golden)


@pytest.mark.parametrize("name", ["phi3", repeat("qwen2_moe")])
def test_adapters_match_peft_and_are_written_under_its_names(name, tmp_path):
    folder, (raw, _) = GOLDENS / "family_adapters" / name, read_golden(name)
    model = load_model(write_folder(tmp_path, raw), dtype=jnp.float32)
    adapter = add_adapter(model, folder)
    golden = unpacked(load_file(folder / "golden.safetensors"))
    assert_parity(model, golden, nnx.LoRAParam)
    save_adapter(tmp_path / "adapter", adapter.tensors, adapter.config, name)
    ours, theirs = (load_file(each / "adapter_model.safetensors") for each in (tmp_path / "adapter", folder))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(ours[key], tensor, err_msg=key)
    export_adapter(tmp_path / "adapter", tmp_path, tmp_path / "merged")
    assert_logits(load_model(tmp_path / "merged", dtype=jnp.float32), golden)


@pytest.mark.parametrize("family", ["qwen2_moe", repeat("qwen3_5_moe_text")])
def test_experts_stored_as_one_tensor_are_merged(family, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    write_folder(base, read_golden(family)[0])
    model, lora = load_model(base, dtype=jnp.float32), LoraConfig(rank=2, alpha=3, targets=("down_proj",))
    add_lora(model, lora, rngs=nnx.Rngs(0))
    shapes = flatten_names(split_model(model, nnx.LoRAParam)[1])
    save_adapter(tmp_path / "adapter", {path: drawn(path, leaf.shape) for path, leaf in shapes.items()}, lora, base)
    export_adapter(tmp_path / "adapter", base, tmp_path / "merged")  # compares predictions
    name = "model.layers.0.mlp.experts.down_proj"
    before, after = (load_file(folder / "model.safetensors")[name] for folder in (base, tmp_path / "merged"))
    added = (
        1.5
        * drawn(f"{name}.lora_B", shapes[f"{name}.lora_B"].shape)
        @ drawn(f"{name}.lora_A", shapes[f"{name}.lora_A"].shape)
    )
    np.testing.assert_allclose(after, before + added, rtol=0, atol=1e-5)
