"""Any replaced tensor is noticed: by the fingerprint of a run, and by the identity that adapters record."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from selection import repeat

from jaxglue.hf.identity import changed_settings, difference, identify, weights_digest

SHAPES = {
    "model.embed_tokens.weight": (64, 16),
    "model.norm.weight": (16,),
    **{f"model.layers.{i}.self_attn.q_proj.weight": (8192, 16) for i in range(300)},
    **{f"model.layers.{i}.mlp.experts.{e}.up_proj.weight": (2, 16) for i in range(3) for e in range(4)},
    "model.layers.3.mlp.experts.gate_up_proj_blocks": (4, 64, 2, 16),
    "model.layers.4.mlp.experts.down_proj": (4, 600, 8),
}


CONFIG = json.loads((Path(__file__).parents[1] / "goldens/qwen3_moe/config.json").read_text())


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 256, shape, dtype=np.uint8)
        if name.endswith("blocks")
        else rng.normal(size=shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }


@pytest.fixture
def base(tmp_path, tensors):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "name",
    [
        *list(SHAPES)[:1],
        *map(repeat, list(SHAPES)[1:2]),
        *list(SHAPES)[177:179],
        *map(repeat, list(SHAPES)[-6:-2]),
        *list(SHAPES)[-2:],
    ],
)
def test_every_replaced_tensor_is_noticed(base, tensors, name):
    digest, identity = weights_digest(base), identify(base)
    save_file({**tensors, name: tensors[name][::-1].copy()}, base / "model.safetensors")
    assert weights_digest(base) != digest
    assert difference(identity, identify(base))


def test_another_layout_of_the_experts_is_the_same_base(base, tensors):
    identity = identify(base)
    fused = np.stack([tensors[f"model.layers.0.mlp.experts.{e}.up_proj.weight"] for e in range(4)])
    kept = {name: tensor for name, tensor in load_file(base / "model.safetensors").items() if ".0.mlp" not in name}
    save_file({**kept, "model.layers.0.mlp.experts.up_proj": fused}, base / "model.safetensors")
    assert difference(identity, identify(base)) is None


def test_bfloat16_copy_is_the_same_base_but_other_weights(base, tensors):
    digest, identity = weights_digest(base), identify(base)
    narrow = {n: t if t.dtype == np.uint8 else t.astype(ml_dtypes.bfloat16) for n, t in tensors.items()}
    save_file(narrow, base / "model.safetensors")
    assert difference(identity, identify(base)) is None
    assert weights_digest(base) != digest


def test_settings_that_change_what_is_computed_are_told(base):
    before = identify(base)
    (base / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5.0, "rope_parameters": None}))
    assert difference(before, identify(base)) is None
    assert '"rope_theta": 5.0' in changed_settings(before, identify(base))
