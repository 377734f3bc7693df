"""Mesh shapes are parsed from text and checked against devices, batch and model."""

import pytest
from jax.sharding import PartitionSpec

from jaxglue.models import config_from_hf
from jaxglue.sharding.mesh import MeshShape, make_mesh
from jaxglue.sharding.rules import Layout


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("data=8", (8, 1, 1, 1, 1)), ("fsdp=4, data=2", (2, 4, 1, 1, 1)), ("expert=2,context=3", (1, 1, 2, 3, 1))],
)
def test_mesh_is_parsed(text, sizes):
    shape = MeshShape.parse(text)
    assert tuple(shape.sizes.values()) == sizes
    assert MeshShape.parse(str(shape)) == shape


@pytest.mark.parametrize("text", ["", "data", "data=2,data=4", "rows=8", "data=two", "data=2;fsdp=2"])
def test_invalid_mesh_is_refused(text):
    with pytest.raises(ValueError, match=r"--mesh .* is not understood; expected auto, or sizes of data, fsdp"):
        MeshShape.parse(text)


@pytest.mark.parametrize(
    ("mesh", "batch_size", "message"),
    [
        ("data=4", 4, r"--mesh data=4 is for 4 devices, and there are 8"),
        ("data=2,fsdp=4", 12, r"--batch-size 12 does not divide among the 8 parts of .*: use --batch-size 16"),
        ("data=2,expert=4", 8, "qwen3 has no experts; use data or fsdp"),
        ("tensor=8", 1, "num_attention_heads=4 does not divide by 8"),
        ("data=2,tensor=4", 2, "num_key_value_heads=2 does not divide by 4"),
        ("data=0", 1, "an axis has at least 1 device"),
        ("data=2,context=4", 2, "rows of 1022 tokens do not divide among 4 GPUs: use --seq-len 1024"),
    ],
)
def test_unfitting_mesh_is_refused_with_the_remedy(tiny_config, mesh, batch_size, message):
    config = config_from_hf({**tiny_config, "model_type": "qwen3"})
    with pytest.raises(ValueError, match=message):
        MeshShape.parse(mesh).check(config, batch_size=batch_size, devices=8, seq_len=1022)


@pytest.mark.parametrize("model_type", ["phi3", "glm4", "olmo2"])
def test_tensor_meshes_refuse_what_they_cannot_split(tiny_config, model_type):
    config = config_from_hf({**tiny_config, "model_type": model_type, "attention_bias": False})
    with pytest.raises(ValueError, match=f"fused projections, or norms of whole .* as {model_type} has; use data or"):
        MeshShape.parse("tensor=2").check(config, batch_size=1, devices=2)


@pytest.mark.parametrize("name", ["self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight.codes"])
def test_fused_projections_are_split_between_fsdp_devices(name):
    assert Layout(None).rule(f"model.layers.0.{name}") == PartitionSpec("fsdp")


def test_default_mesh_is_one_device():
    assert make_mesh(MeshShape()).size == 1
