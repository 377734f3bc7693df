"""Checkpoints and adapters of mixture-of-experts models; goldens by tests/goldens/make_moe*.py."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from selection import repeats, repeats_parts_of

from jaxglue.hf.adapter import load_adapter, save_adapter
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.export import quantize_folder, save_model
from jaxglue.hf.loading import add_adapter, load_model, random_model
from jaxglue.hf.merge import export_adapter
from jaxglue.models import config_from_hf
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.ops.quant.mxfp4 import quantize_mxfp4
from jaxglue.ops.segments import pack_segments

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = ["qwen3_moe", "gpt_oss", "gpt_oss_mxfp4"]
BLOCKS = "model.layers.0.mlp.experts.down_proj_blocks"
ONE_EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@nnx.jit
def forward(model, tokens, segments):
    return model(tokens, segments)


def assert_logits(model, golden):
    tokens, lengths = golden["tokens"][None], golden["lengths"].tolist()
    logits = forward(model, tokens, pack_segments([lengths], seq_len=tokens.shape[1]))[0]
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)


def parameters(model):
    return flatten_names(split_model(model, nnx.Param)[1])


@pytest.fixture
def changed(tmp_path):
    """Copy a golden model with changed tensors."""

    def make(name, change):
        folder = shutil.copytree(GOLDENS / name, tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.mark.parametrize("expand", [False, True])
def test_mxfp4_matches_transformers_in_blocks_and_expanded(expand):
    model = load_model(GOLDENS / "gpt_oss_mxfp4", dtype=jnp.float32, expand_experts=expand)
    dtypes = {array.dtype for name, array in parameters(model).items() if "experts.down_proj" in name}
    assert dtypes == ({jnp.dtype("float32")} if expand else {jnp.dtype("uint8"), jnp.dtype("float32")})
    assert_logits(model, load_file(GOLDENS / "gpt_oss_mxfp4/golden.safetensors"))


@repeats_parts_of("test_mxfp4_matches_transformers_in_blocks_and_expanded")
@pytest.mark.parametrize("name", repeats(NAMES, "qwen3_moe", "gpt_oss"))
def test_merged_folder_gives_transformers_logits(name, tmp_path):
    export_adapter(GOLDENS / f"{name}_adapter", GOLDENS / name, tmp_path / "merged")
    assert "quantization_config" not in read_config(tmp_path / "merged")
    model = load_model(tmp_path / "merged", dtype=jnp.float32)
    assert_logits(model, load_file(GOLDENS / f"{name}_adapter/merged.safetensors"))


def test_adapter_on_blocks_matches_merged_folder_in_bfloat16():
    model = load_model(GOLDENS / "gpt_oss_mxfp4", dtype=jnp.float32)
    add_adapter(model, GOLDENS / "gpt_oss_mxfp4_adapter")
    golden = load_file(GOLDENS / "gpt_oss_mxfp4_adapter/merged.safetensors")
    tokens = golden["tokens"][None]
    logits = forward(model, tokens, pack_segments([golden["lengths"].tolist()], seq_len=tokens.shape[1]))[0]
    assert np.linalg.norm(logits - golden["logits"]) < 0.03 * np.linalg.norm(golden["logits"])


def test_adapter_of_attention_alone_leaves_the_blocks_in_place(tmp_path):
    adapter = load_adapter(GOLDENS / "gpt_oss_mxfp4_adapter")
    config, tensors = adapter.config, adapter.tensors
    attention = {name: tensor for name, tensor in tensors.items() if "experts" not in name}
    save_adapter(tmp_path / "adapter", attention, config, "gpt_oss_mxfp4")
    export_adapter(tmp_path / "adapter", GOLDENS / "gpt_oss_mxfp4", tmp_path / "merged")
    before, after = (load_file(path / "model.safetensors") for path in (GOLDENS / "gpt_oss_mxfp4", tmp_path / "merged"))
    assert before.keys() == after.keys()
    np.testing.assert_array_equal(after[BLOCKS], before[BLOCKS])
    assert "quantization_config" in read_config(tmp_path / "merged")


def test_merged_experts_are_written_as_mxfp4_again(tmp_path):
    base = GOLDENS / "gpt_oss_mxfp4"
    export_adapter(base.with_name(f"{base.name}_adapter"), base, tmp_path / "plain")
    check = export_adapter(base.with_name(f"{base.name}_adapter"), base, tmp_path / "merged", experts="mxfp4")
    assert check.kl <= check.limit <= 0.05
    before, plain, after = (
        load_file(path / "model.safetensors") for path in (base, tmp_path / "plain", tmp_path / "merged")
    )
    assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in before.items()}
    name = BLOCKS.removesuffix("_blocks")
    expected = quantize_mxfp4(jnp.asarray(plain[name]).mT)
    np.testing.assert_array_equal(after[BLOCKS], expected.blocks)
    assert (after[BLOCKS] != before[BLOCKS]).any()
    assert config_from_hf(read_config(tmp_path / "merged")).moe.quantize == "mxfp4"


def test_experts_are_quantized_to_mxfp4_and_keep_values_in_it(tmp_path):
    model = load_model(GOLDENS / "gpt_oss_mxfp4", dtype=jnp.float32, expand_experts=True)
    save_model(tmp_path / "plain", parameters(model), GOLDENS / "gpt_oss_mxfp4")
    quantize_folder(tmp_path / "plain", tmp_path / "mxfp4", "mxfp4")
    again = load_model(tmp_path / "mxfp4", dtype=jnp.float32)
    assert again.config.moe.quantize == "mxfp4"
    assert_logits(again, load_file(GOLDENS / "gpt_oss_mxfp4/golden.safetensors"))
    with pytest.raises(ValueError, match="mxfp4 is for GPT-OSS's experts, not for qwen3_moe"):
        quantize_folder(GOLDENS / "qwen3_moe", tmp_path / "other", "mxfp4")


@pytest.mark.parametrize("name", NAMES)
def test_written_adapter_equals_the_golden(name, tmp_path):
    folder = GOLDENS / f"{name}_adapter"
    adapter = load_adapter(folder)
    config, tensors = adapter.config, adapter.tensors
    save_adapter(tmp_path / "adapter", tensors, config, name)
    assert (tmp_path / "adapter/adapter_config.json").read_bytes() == (folder / "adapter_config.json").read_bytes()
    ours, golden = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "adapter", folder))
    assert ours.keys() == golden.keys()
    for name, array in golden.items():
        np.testing.assert_array_equal(ours[name], array)


def test_trained_experts_are_saved_one_by_one_and_load_again(tmp_path):
    model = load_model(GOLDENS / "qwen3_moe_mixed", dtype=jnp.float32)
    save_model(tmp_path / "model", parameters(model), GOLDENS / "qwen3_moe_mixed")
    saved, golden = (
        load_file(path / "model.safetensors") for path in (tmp_path / "model", GOLDENS / "qwen3_moe_mixed")
    )
    assert saved.keys() == golden.keys()
    for name, array in golden.items():
        np.testing.assert_array_equal(saved[name], array)


def test_mixtral_keeps_the_names_of_its_files(tmp_path):
    raw = {"model_type": "mixtral", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "head_dim": 8}
    raw |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(raw))
    weights = parameters(random_model(config_from_hf(raw), dtype=jnp.float32))
    save_model(tmp_path / "saved", weights, base)
    stored, inside = load_file(tmp_path / "saved" / "model.safetensors"), "model.layers.0.block_sparse_moe"
    gate_up = weights["model.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(stored[f"{inside}.gate.weight"], weights["model.layers.0.mlp.gate.weight"])
    np.testing.assert_array_equal(stored[f"{inside}.experts.2.w1.weight"], gate_up[2, :20])
    np.testing.assert_array_equal(stored[f"{inside}.experts.2.w3.weight"], gate_up[2, 20:])
    model = load_model(tmp_path / "saved", dtype=jnp.float32)
    assert_equal(parameters(model), weights)
    add_lora(model, config := LoraConfig(rank=2), rngs=nnx.Rngs(0))
    adapter = {name: x + 0.1 for name, x in flatten_names(split_model(model, nnx.LoRAParam)[1]).items()}
    save_adapter(tmp_path / "adapter", adapter, config, tmp_path / "saved")
    export_adapter(tmp_path / "adapter", tmp_path / "saved", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == stored.keys()
    down = "model.layers.0.mlp.experts.down_proj"
    delta = config.scale * adapter[f"{down}.lora_B"][1] @ adapter[f"{down}.lora_A"][1]
    name = f"{inside}.experts.1.w2.weight"
    np.testing.assert_allclose(merged[name], stored[name] + delta, atol=1e-5)


def test_glm_keeps_its_router_in_float32_and_layers_that_predict_further_tokens(tmp_path):
    raw = {"model_type": "glm4_moe", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "head_dim": 8}
    raw |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_nextn_predict_layers": 1}
    raw |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    base, gate = tmp_path / "base", "model.layers.1.mlp.gate"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(raw))
    weights = flatten_names(split_model(random_model(config_from_hf(raw)), ...)[1])
    weights = {name: np.asarray(x) for name, x in weights.items()}
    weights[f"{gate}.e_score_correction_bias"] = np.float32([0.1, 1.001, 0, 0])
    save_file(weights | {"model.layers.2.eh_proj.weight": np.ones((16, 32))}, base / "model.safetensors")
    model = load_model(base, dtype=jnp.bfloat16)
    loaded = flatten_names(split_model(model, ...)[1])
    float32 = {name for name, x in loaded.items() if x.dtype == jnp.float32}
    assert float32 == {f"{gate}.weight", f"{gate}.e_score_correction_bias"}
    assert_equal(loaded, weights)
    save_model(tmp_path / "saved", parameters(model), base)
    saved, stored = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", base))
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in saved
    kept = ("model.layers.2.eh_proj.weight", f"{gate}.weight", f"{gate}.e_score_correction_bias")
    assert_equal({name: saved[name] for name in kept}, {name: stored[name] for name in kept})


def assert_equal(ours, expected):
    assert ours.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


def test_expanded_experts_save_without_quantization_config(tmp_path):
    model = load_model(GOLDENS / "gpt_oss_mxfp4", dtype=jnp.float32, expand_experts=True)
    save_model(tmp_path / "model", parameters(model), GOLDENS / "gpt_oss_mxfp4")
    again = load_model(tmp_path / "model", dtype=jnp.float32)
    assert_logits(again, load_file(GOLDENS / "gpt_oss_mxfp4/golden.safetensors"))


def test_a_missing_expert_is_named(changed):
    folder = changed("qwen3_moe", lambda tensors: tensors.pop(ONE_EXPERT))
    with pytest.raises(ValueError, match=f"1 missing: {ONE_EXPERT}"):
        load_model(folder)


def test_truncated_blocks_are_named(changed):
    folder = changed("gpt_oss_mxfp4", lambda tensors: tensors.update({BLOCKS: tensors[BLOCKS][:, :-1].copy()}))
    with pytest.raises(ValueError, match=rf"of another shape: {BLOCKS} in .* is \[3, 31, 1, 16\].* \[3, 32, 1, 16\]"):
        load_model(folder)


def test_random_blocks_have_the_scale_of_other_weights():
    config = config_from_hf({**read_config(GOLDENS / "gpt_oss_mxfp4"), "initializer_range": 0.02})
    assert config.moe.quantize == "mxfp4"
    blocks = parameters(random_model(config))
    experts = random_model(config.expanded)
    assert BLOCKS in blocks and BLOCKS not in parameters(experts)
    values = load_values(random_model(config))
    assert 0.01 < values.std() < 0.04


def load_values(model):
    from jaxglue.ops.quant.mxfp4 import dequantize_mxfp4

    return np.asarray(dequantize_mxfp4(model.layers[0].mlp.experts.gate_up_proj.projection.weight, jnp.float32))


def test_all_linear_means_attention_and_experts():
    model = load_model(GOLDENS / "gpt_oss", dtype=jnp.float32)
    add_lora(model, LoraConfig(rank=2), rngs=nnx.Rngs(0))
    names = {name.split(".")[-2] for name in flatten_names(split_model(model, nnx.LoRAParam)[1])}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("base", "config", "message"),
    [
        ("qwen3_tied", LoraConfig(targets=("gate_up_proj",)), "targets gate_up_proj do not exist in this model"),
        ("gpt_oss", LoraConfig(targets=("router",)), "targets router do not exist in this model: use .*gate_up_proj"),
        ("gpt_oss", LoraConfig(dropout=0.1), r"dropout=0.1 is not supported for the adapters of experts"),
    ],
)
def test_impossible_targets_are_refused(base, config, message):
    model = load_model(GOLDENS / base, dtype=jnp.float32)
    with pytest.raises(ValueError, match=message):
        add_lora(model, config, rngs=nnx.Rngs(0))


def test_an_adapter_of_experts_does_not_fit_a_dense_model(tmp_path):
    with pytest.raises(ValueError, match=r"it adapts model\.layers\.0\.mlp\.experts\.\S+, .*, missing from the base"):
        add_adapter(load_model(GOLDENS / "qwen3_tied", dtype=jnp.float32), GOLDENS / "qwen3_moe_adapter")
    with pytest.raises(ValueError, match=r"it adapts model\.layers\.0\.mlp\.experts\.\S+, .*, missing from the base"):
        export_adapter(GOLDENS / "qwen3_moe_adapter", GOLDENS / "qwen3_tied", tmp_path / "merged")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_parameters": []}, "adapts experts, but target_parameters names no"),
        ({"r": 7}, r"has shape \[12, 16\], expected \[experts · 7, in\]"),
    ],
)
def test_an_adapter_whose_config_does_not_fit_is_refused(change, message, tmp_path):
    folder = shutil.copytree(GOLDENS / "gpt_oss_adapter", tmp_path / "adapter")
    raw = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message):
        load_adapter(folder)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_live_transformers_and_peft_load_written_folders(name, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder = GOLDENS / f"{name}_adapter"
    export_adapter(folder, GOLDENS / name, tmp_path / "merged")
    adapter = load_adapter(folder)
    config, tensors = adapter.config, adapter.tensors
    save_adapter(tmp_path / "adapter", tensors, config, name)
    base, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (GOLDENS / name, tmp_path / "merged"))
    golden = load_file(folder / "golden.safetensors")
    document = torch.tensor(golden["tokens"][: golden["lengths"][0]])[None].long()
    for model in (peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), merged):
        logits = model.eval()(document).logits[0].detach().numpy()
        np.testing.assert_allclose(logits, golden["logits"][: len(logits)], rtol=0, atol=1e-4)


def test_adapters_of_experts_alone_leave_dense_layers_of_the_same_names(tmp_path):
    rng, base, experts = np.random.default_rng(0), GOLDENS / "qwen3_moe_mixed", "model.layers.1.mlp.experts.down_proj"
    shapes = {"lora_A": (4, 2, 12), "lora_B": (4, 16, 2)}
    tensors = {f"{experts}.{name}": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_adapter(tmp_path / "adapter", tensors, LoraConfig(rank=2, targets=(experts,)), base)
    model = load_model(base, dtype=jnp.float32)
    assert add_adapter(model, tmp_path / "adapter").config.targets == (experts,)
    assert model.layers[0].mlp.down_proj.lora_A is None


@pytest.mark.parametrize(
    ("layers", "targets"),
    [((1,), ("all-linear",)), ((1,), ("down_proj",)), ((), ("0.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"))],
)
def test_adapters_of_the_experts_of_some_layers_load_again(tmp_path, layers, targets):
    base = GOLDENS / "qwen3_moe"
    config = LoraConfig(rank=2, layers=layers, targets=targets)
    model, other = load_model(base, dtype=jnp.float32), load_model(base, dtype=jnp.float32)
    add_lora(model, config, rngs=nnx.Rngs(0))
    trained = flatten_names(split_model(model, nnx.LoRAParam)[1])
    save_adapter(tmp_path / "adapter", trained, config, base)
    adapter = add_adapter(other, tmp_path / "adapter")
    assert adapter.tensors.keys() == trained.keys()
    for name, tensor in trained.items():
        np.testing.assert_array_equal(adapter.tensors[name], tensor, err_msg=name)
    again = load_model(base, dtype=jnp.float32)
    add_lora(again, load_adapter(tmp_path / "adapter").config, rngs=nnx.Rngs(0))
    assert flatten_names(split_model(again, nnx.LoRAParam)[1]).keys() == trained.keys()
