"""Experts in formats of single matrices: the rows of all experts' matrices as those of one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from selection import repeat

from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.experts import checkpoint_layout
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import load_model, random_model
from jaxglue.hf.merge import export_adapter
from jaxglue.models import abstract_model, config_from_hf
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, hf_name, set_parameters, split_model
from jaxglue.ops.quant import dequantize
from jaxglue.ops.quant.formats import FORMATS, is_quantized
from jaxglue.ops.quant.stack import Stack, hold_matrices
from jaxglue.sharding.mesh import MeshShape
from jaxglue.sharding.rules import Layout

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "initializer_range": 0.2}
FAMILIES = {"qwen3_moe": {}, "qwen2_moe": {"shared_expert_intermediate_size": 64}}
DOWN = "model.layers.0.mlp.experts.down_proj"


def parameters(model):
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {hf_name(".".join(map(str, path))): variable.get_value() for path, variable in flat}


@pytest.fixture
def make_folder(tmp_path, tiny_config):
    """Write a folder whose experts are one by one (qwen3_moe) or stacked (qwen2_moe)."""

    def make(family):
        raw = {**tiny_config, **SIZES, **EXPERTS, **FAMILIES[family], "model_type": family}
        folder = tmp_path / "base"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
        values = {
            name: np.asarray(x) for name, x in parameters(random_model(config_from_hf(raw), dtype=jnp.float32)).items()
        }
        layout = checkpoint_layout({name: x.shape for name, x in values.items()}, raw)
        save_file(
            {name: values[whole][index].copy() for name, (whole, index) in layout.items()}, folder / "model.safetensors"
        )
        return folder

    return make


@nnx.jit
def logits(model, tokens):
    return model(tokens)


@pytest.mark.parametrize(
    ("family", "how"), [("qwen3_moe", "nf4"), repeat("qwen2_moe", "nf4"), repeat("qwen3_moe", "int8")]
)
def test_model_computes_with_the_values_of_the_format(make_folder, family, how):
    folder = make_folder(family)
    model = load_model(folder, dtype=jnp.float32, quantize=how)
    stored = parameters(model)
    assert isinstance(stored[DOWN], Stack) and stored[DOWN].shape == (4, 64, 64)
    values = {name: dequantize(x, jnp.float32) if is_quantized(x) else x for name, x in stored.items()}
    rounded = set_parameters(load_model(folder, dtype=jnp.float32), values)
    tokens = np.arange(40)[None]
    found, expected, plain = (logits(each, tokens) for each in (model, rounded, load_model(folder, dtype=jnp.float32)))
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert not np.allclose(found, plain, atol=2e-2)


@pytest.mark.parametrize("how", ["nf4", "int8", "fp8"])
def test_matrices_of_a_stack_are_those_of_its_format_with_the_bytes_of_it(how):
    matrices = jax.random.normal(jax.random.key(0), (3, 64, 128), jnp.bfloat16)
    stack = hold_matrices(FORMATS[how], matrices)
    assert (stack.shape, stack.dtype) == (matrices.shape, jnp.bfloat16)
    values = dequantize(stack, jnp.float32)
    assert (
        0
        < jnp.linalg.norm(values - matrices)
        < {"nf4": 0.12, "int8": 0.02, "fp8": 0.04}[how] * jnp.linalg.norm(matrices)
    )
    assert sum(x.nbytes for x in jax.tree.leaves(stack)) < {"nf4": 0.54, "int8": 1.05, "fp8": 1.05}[how] * matrices.size


@pytest.mark.parametrize("family", ["qwen3_moe", repeat("qwen2_moe")])
def test_adapters_are_merged_into_the_values_that_they_were_trained_on(make_folder, tmp_path, family):
    base = make_folder(family)
    model, lora = load_model(base, dtype=jnp.float32, quantize="nf4"), LoraConfig(rank=2, targets=("down_proj",))
    values = dequantize(parameters(model)[DOWN], jnp.float32)
    add_lora(model, lora, rngs=nnx.Rngs(0))
    adapters = {name: x + 0.05 for name, x in flatten_names(split_model(model, nnx.LoRAParam)[1]).items()}
    save_adapter(tmp_path / "adapter", adapters, lora, base, {**identify(base), "quantize": "nf4"})
    export_adapter(tmp_path / "adapter", base, tmp_path / "merged")  # compares predictions with the quantized model's
    files = load_file(tmp_path / "merged/model.safetensors")
    merged = files.get(DOWN, [files.get(f"{DOWN.removesuffix('.down_proj')}.{e}.down_proj.weight") for e in range(4)])
    added = lora.alpha / 2 * adapters[f"{DOWN}.lora_B"] @ adapters[f"{DOWN}.lora_A"]
    np.testing.assert_allclose(np.stack(merged), values + added, atol=1e-5)


@pytest.mark.parametrize("how", ["nf4", "int8", "fp8"])
def test_experts_load_where_a_step_takes_them(tiny_config, how):
    raw = {**tiny_config, **SIZES, **EXPERTS, "num_experts": 8, "model_type": "qwen3_moe"}
    model = abstract_model(config_from_hf(raw).quantized(how))
    layout = Layout(MeshShape.parse("fsdp=2,expert=2").abstract)
    experts = split_model(model, nnx.LoRAParam)[2]["layers"][0]["mlp"]["experts"]
    taken = jax.tree.leaves(layout.param_specs({"mlp": {"experts": experts}}))
    loaded = [layout.place(name, x) for name, x in parameters(model).items() if ".experts." in name]
    assert [sharding.spec for sharding in jax.tree.leaves(loaded)] == taken
    assert {spec[0] for spec in taken if spec} <= {("expert", "fsdp"), "expert"} and any(taken)


def test_what_cannot_be_held_or_split_is_refused(tiny_config, tiny_model):
    raw = {**tiny_config, **SIZES, **EXPERTS, "model_type": "qwen3_moe"}
    with pytest.raises(ValueError, match="2 experts of 64 × 64 do not fill the groups in which nf4 stores scales"):
        MeshShape(expert=2).check(config_from_hf(raw).quantized("nf4"), batch_size=2, devices=2)
    MeshShape(expert=2).check(config_from_hf(raw | {"num_experts": 8}).quantized("nf4"), batch_size=2, devices=2)
    MeshShape(expert=2).check(config_from_hf(raw).quantized("int8"), batch_size=2, devices=2)
    with pytest.raises(ValueError, match="multiples of 64, got moe_intermediate_size=48"):
        config_from_hf({**raw, "moe_intermediate_size": 48}).quantized("nf4")
    gpt_oss = config_from_hf({**raw, "model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 3})
    with pytest.raises(ValueError, match="--quantize nf4 needs the experts in MXFP4"):
        random_model(gpt_oss.quantized("nf4"))
