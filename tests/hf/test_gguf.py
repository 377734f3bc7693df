"""Contents of GGUF files: types, bytes, vocabulary, Modelfile; and what is refused."""

import builtins
import json
import re
import shutil
import string
from collections import Counter

import jax.numpy as jnp
import jinja2
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from selection import repeat, repeats_parts_of
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxglue.data.decide_rows import DecisionEncoder
from jaxglue.data.questions import read_questions, read_state
from jaxglue.data.template import special_texts
from jaxglue.hf.checkpoint import read_config, save_tensors
from jaxglue.hf.export_check import embed_rows, folder_parts, random_rows
from jaxglue.hf.gguf import writer
from jaxglue.hf.gguf.decisions import decision_template
from jaxglue.hf.gguf.embeddings import embedding_metadata
from jaxglue.hf.gguf.export import export_gguf
from jaxglue.hf.gguf.importance import measure_importance
from jaxglue.hf.gguf.layout import interleaved_rows
from jaxglue.hf.gguf.linear_attention import in_file, inputs_in_file, matrices_in_file
from jaxglue.hf.gguf.modelfile import ollama_template
from jaxglue.hf.gguf.types import Shape, tensor_type
from jaxglue.hf.gguf.vocabulary import vocabulary_metadata
from jaxglue.hf.loading import random_model
from jaxglue.hf.merge import MergedTensors
from jaxglue.models import config_from_hf
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.ops.quant.k_quants import SUPER_BLOCK, quantize_super_blocks
from jaxglue.ops.quant.mxfp4 import MXFP4, dequantize_mxfp4

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install '.[test]'")

RAW = {
    "model_type": "llama",
    "vocab_size": 420,
    "hidden_size": 256,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
KINDS = ["sliding_attention", "full_attention"]
GEMMA4 = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "global_head_dim": 64, "head_dim": 64}
GLM4_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "topk_group": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 64}


@pytest.fixture
def make_folder(tmp_path):
    def make(change=lambda tensors: tensors, **changes):
        raw = RAW | changes
        model = random_model(config_from_hf(raw), dtype=jnp.bfloat16, seed=0)
        tensors = {name: np.array(value) for name, value in flatten_names(split_model(model, nnx.Param)[1]).items()}
        folder = tmp_path / "base"
        save_tensors(folder, change(tensors))
        (folder / "config.json").write_text(json.dumps(raw))
        return folder

    return make


@pytest.fixture
def export(make_tokenizer, tmp_path):
    """Export a folder; return the tensors of the file and its metadata."""

    def run(folder, kind, **options):
        tokenizer = make_tokenizer("plain")
        config = config_from_hf(read_config(folder))
        file = export_gguf(MergedTensors(folder), config, tokenizer, {2}, kind, tmp_path / "out", **options)
        reader = gguf.GGUFReader(file)
        assert reader.tensors
        return {tensor.name: tensor for tensor in reader.tensors}, reader.fields

    return run


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_bytes_are_those_of_the_gguf_package(kind, make_folder, export):
    folder = make_folder()
    tensors, _ = export(folder, kind)
    original = MergedTensors(folder).read("model.layers.1.mlp.down_proj.weight").astype(np.float32)
    expected = gguf.quantize(original, gguf.GGMLQuantizationType[kind.upper()])
    np.testing.assert_array_equal(tensors["blk.1.ffn_down.weight"].data, expected)


def test_experts_are_quantized_to_mxfp4_as_the_gguf_package_does(make_folder, export):
    folder = make_folder(**GPT_OSS)
    tensors, _ = export(folder, "mxfp4")
    experts = MergedTensors(folder).read("model.layers.0.mlp.experts.down_proj").astype(np.float32)
    expected = gguf.quantize(np.ascontiguousarray(experts.swapaxes(1, 2)), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(tensors["blk.0.ffn_down_exps.weight"].data, expected)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_floats_are_rounded_once(kind, make_folder, export):
    folder = make_folder()
    tensors, _ = export(folder, kind)
    original = MergedTensors(folder).read("model.layers.0.mlp.up_proj.weight")
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    written = np.ascontiguousarray(tensors["blk.0.ffn_up.weight"].data).view(dtype).reshape(original.shape)
    np.testing.assert_array_equal(written, original.astype(np.float32).astype(dtype))


def test_rotary_rows_of_llama_become_neighbors(make_folder, export):
    folder = make_folder()
    tensors, _ = export(folder, "bf16")
    original = MergedTensors(folder).read("model.layers.0.self_attn.k_proj.weight")
    written = np.ascontiguousarray(tensors["blk.0.attn_k.weight"].data).view(ml_dtypes.bfloat16)
    heads = original.reshape(2, 2, 32, 256)  # head, half, pair, input
    np.testing.assert_array_equal(written.reshape(2, 32, 2, 256), heads.swapaxes(1, 2))
    assert sorted(interleaved_rows(128, 2)) == list(range(128))


def test_columns_inputs_and_adapters_of_value_heads_move_alike():
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 4}
    config = config_from_hf(RAW | sizes | {"model_type": "qwen3_5_text"})
    weight, inputs = np.random.default_rng(0).normal(size=(3, 24)), np.arange(24.0)
    moved = in_file(config, "model.layers.0.linear_attn.out_proj.weight", weight)
    moved_inputs = inputs_in_file(config, "linear_attn.out_proj", inputs)
    assert moved_inputs[:12].tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7]  # heads 0 and 3, 1 and 4, …
    np.testing.assert_allclose(moved @ moved_inputs, weight @ inputs)
    np.testing.assert_array_equal(inputs_in_file(config, "mlp.down_proj", inputs), inputs)
    for module, out, width in (
        ("linear_attn.out_proj", 3, 24),
        ("linear_attn.in_proj_z", 24, 3),
        ("mlp.up_proj", 3, 3),
    ):
        A, B = np.random.default_rng(1).normal(size=(2, width)), np.random.default_rng(2).normal(size=(out, 2))
        product, (a, b) = B @ A, matrices_in_file(config, f"model.layers.0.{module}", A, B)
        moved = in_file(config, f"model.layers.0.{module}.weight", product)
        np.testing.assert_allclose(b @ a, product if moved is None else moved)


def test_types_fall_back_for_rows_of_other_lengths(make_folder, export):
    tensors, fields = export(make_folder(), "q4_k_m")
    types = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert types["blk.0.ffn_down.weight"] == "Q5_0"  # 288 values
    assert types["blk.1.ffn_down.weight"] == "Q8_0"  # the last layer's would be Q6_K
    assert types["blk.0.attn_q.weight"] == "Q4_K"
    assert types["blk.1.attn_v.weight"] == "Q6_K"
    assert types["output.weight"] == "Q6_K"
    assert types["token_embd.weight"] == "Q4_K"
    assert types["blk.0.attn_norm.weight"] == "F32"
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M


def test_mixture_of_q4_k_m_is_that_of_published_files():
    model = Shape("qwen3", 36, 0, False)  # Qwen3-8B
    names = {"attn_v": (1024, 4096), "ffn_down": (4096, 12288), "ffn_up": (12288, 4096), "attn_k": (1024, 4096)}
    found = {
        name: Counter(tensor_type(f"blk.{layer}.{name}.weight", shape, "q4_k_m", model) for layer in range(36))
        for name, shape in names.items()
    }
    assert found["attn_v"] == found["ffn_down"] == {"q6_k": 18, "q4_k": 18}
    assert found["ffn_up"] == found["attn_k"] == {"q4_k": 36}
    better = [i for i in range(36) if tensor_type(f"blk.{i}.attn_v.weight", (1024, 4096), "q4_k_m", model) == "q6_k"]
    assert better == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 31, 32, 33, 34, 35]


def test_tied_embedding_gets_the_type_of_the_output():
    assert tensor_type("token_embd.weight", (420, 256), "q4_k_m", Shape("llama", 2, 0, True)) == "q6_k"
    assert tensor_type("token_embd.weight", (420, 256), "q8_0", Shape("llama", 2, 0, True)) == "q8_0"


def test_mxfp4_experts_keep_their_values(make_folder, export):
    rng = np.random.default_rng(0)

    def pack(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = rng.integers(118, 126, blocks.shape[:3], dtype=np.uint8)
        return tensors

    folder = make_folder(pack, **GPT_OSS, quantization_config={"quant_method": "mxfp4"})
    tensors, _ = export(folder, "mxfp4")
    source = MergedTensors(folder)
    path = "model.layers.0.mlp.experts.gate_up_proj"
    stored = MXFP4(blocks=source.read(f"{path}_blocks"), scales=source.read(f"{path}_scales"))
    values = np.asarray(dequantize_mxfp4(stored, jnp.float32))
    for name, rows in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
        tensor = tensors[f"blk.0.ffn_{name}_exps.weight"]
        assert tensor.tensor_type.name == "MXFP4"
        np.testing.assert_array_equal(gguf.dequantize(tensor.data, tensor.tensor_type), values[:, rows])
    assert tensors["blk.0.attn_q.weight"].tensor_type.name == "Q8_0"
    assert tensors["blk.0.ffn_gate_exps.bias"].tensor_type.name == "F32"


def test_values_above_the_range_of_f16_are_refused(make_folder, export, tmp_path):
    def enlarge(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5
        return tensors

    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight: not finite .* in f16; .* --gguf bf16"):
        export(make_folder(enlarge), "f16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["q4_k_m", "q8_0"])
def test_values_that_are_not_finite_are_refused(kind, make_folder, export, tmp_path):
    def spoil(tensors):
        tensors["model.layers.0.self_attn.o_proj.weight"][3, 4] = np.nan
        return tensors

    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.o_proj.weight: not finite"):
        export(make_folder(spoil), kind)
    assert not [path for path in tmp_path.iterdir() if path.name != "base"]


def test_a_full_disk_is_told_before_writing(make_folder, export, monkeypatch):
    folder = make_folder()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ValueError, match=r"out-f16.gguf needs .* GB, and .* has 0.0 GB free: make room"):
        export(folder, "f16")


def test_missing_package_is_named(make_folder, export, monkeypatch):
    folder, imported = make_folder(), builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "gguf":
            raise ImportError("No module named 'gguf'")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=re.escape("pip install '.[gguf]'")):
        export(folder, "f16")


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_importance_is_the_mean_square_of_inputs(model_type, make_folder):
    sparse = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
    folder = make_folder(model_type=model_type, **(sparse if model_type == "qwen3_moe" else {}))
    config = config_from_hf(read_config(folder))
    parts, rows = folder_parts(folder, config, dtype=jnp.float32), random_rows(420)
    found = measure_importance(config, parts, [rows, rows], jnp.float32)
    embedded = np.asarray(embed_rows(parts, rows, jnp.float32)).reshape(-1, 256)
    normed = embedded / np.sqrt((embedded**2).mean(axis=1, keepdims=True) + config.rms_norm_eps)
    for name in ("q", "k", "v"):
        np.testing.assert_allclose(found[f"blk.0.attn_{name}.weight"], (normed**2).mean(axis=0), rtol=1e-2)
    last = {"llama": "ffn_down", "qwen3_moe": "ffn_up_exps"}[model_type]
    assert found[f"blk.1.{last}.weight"].shape == (288 if model_type == "llama" else 256,)
    assert len(found) == (14 if model_type == "llama" else 12)


@repeats_parts_of("test_rows_that_a_run_kept_or_of_data_weigh_errors_unless_told_not_to")
def test_importance_changes_k_quants_alone(make_folder, export, tmp_path):
    folder = make_folder(intermediate_size=512)
    plain, _ = export(folder, "q4_k_m")
    plain = {name: np.array(tensor.data) for name, tensor in plain.items()}
    (tmp_path / "out").rename(tmp_path / "plain")
    weights = np.random.default_rng(0).lognormal(sigma=2, size=512).astype(np.float32)
    weighed, _ = export(folder, "q4_k_m", importance={"blk.0.ffn_down.weight": weights})
    changed = [name for name, tensor in weighed.items() if (tensor.data != plain[name]).any()]
    assert changed == ["blk.0.ffn_down.weight"]
    original = MergedTensors(folder).read("model.layers.0.mlp.down_proj.weight").astype(np.float32)
    kind = weighed["blk.0.ffn_down.weight"].tensor_type

    def error(data):
        return (weights * (gguf.dequantize(data, kind) - original) ** 2).mean()

    assert error(weighed["blk.0.ffn_down.weight"].data) < 0.95 * error(plain["blk.0.ffn_down.weight"])


@repeats_parts_of("test_bytes_are_those_of_the_gguf_package")
@pytest.mark.parametrize("weighed", [repeat(False), True])
def test_matrices_in_portions_are_quantized_as_at_once(weighed, make_folder, export, monkeypatch):
    monkeypatch.setattr(writer, "_CPU_BLOCKS", 192)
    folder = make_folder(intermediate_size=512)
    importance = {"blk.0.ffn_down.weight": np.arange(1, 513, dtype=np.float32)} if weighed else {}
    tensors, _ = export(folder, "q4_k_m", importance=importance)
    original = MergedTensors(folder).read("model.layers.0.mlp.down_proj.weight")  # 512 super-blocks
    weights = (
        jnp.tile(importance["blk.0.ffn_down.weight"].reshape(-1, SUPER_BLOCK), (len(original), 1)) if weighed else None
    )
    expected = quantize_super_blocks(jnp.asarray(original).reshape(-1, SUPER_BLOCK), "q4_k", weights)
    # Sums of another program are rounded otherwise, which now and then decides a level.
    assert np.mean(tensors["blk.0.ffn_down.weight"].data == expected.reshape(len(original), -1)) > 0.99


LATENT = {
    **{"model_type": "deepseek_v2", "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 24, "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 32, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1},
}


def test_projections_from_latents_are_cut_into_heads_and_keys_transposed(make_folder, export):
    folder = make_folder(**LATENT)
    tensors, fields = export(folder, "f16")
    whole = MergedTensors(folder).read("model.layers.1.self_attn.kv_b_proj.weight").reshape(4, 40, 32)
    keys, values = (tensors[f"blk.1.attn_{part}_b.weight"].data for part in "kv")
    np.testing.assert_array_equal(keys, whole[:, :16].swapaxes(1, 2).astype(np.float16))
    np.testing.assert_array_equal(values, whole[:, 16:].astype(np.float16))
    found = {
        name: fields[f"deepseek2.{name}"].contents() for name in ("leading_dense_block_count", "expert_gating_func")
    }
    assert found == {"leading_dense_block_count": 1, "expert_gating_func": 1}
    assert fields["deepseek2.attention.key_length"].contents() == 40


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({**LATENT, "q_lora_rank": None}, "f16", "queries without a latent vector in a model of other than 26"),
        ({**LATENT, "attention_bias": True}, "f16", "biases in latent attention"),
        ({}, "mxfp4", "for the experts of a sparse model"),
        ({"model_type": "qwen3", "attention_bias": True}, "f16", "biases in Qwen3's attention"),
        ({**GPT_OSS, "layer_types": ["full_attention"] * 2}, "f16", "other layers in windows"),
        ({"vocab_size": 300}, "f16", "embedding only 300 rows"),
        ({"model_type": "mistral", "sliding_window": 16}, "f16", "does not compute sliding windows"),
        (
            {"model_type": "qwen3_5_text", "layer_types": ["full_attention"] * 2},
            "f16",
            "without layers of linear attention",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [0, 1]}, "f16", "other layers without rotary embeddings"),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, "f16", "Gemma 2 without caps of scores and"),
        ({"model_type": "gemma2", "head_dim": 64}, "f16", "query_pre_attn_scalar other than 64"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": 5.0}, "f16", "rotary embeddings of windows other"),
        ({"model_type": "olmo2", "attention_bias": True}, "f16", "biases in attention"),
        ({"model_type": "olmo2", "head_dim": 32}, "f16", "heads that are 128 wide together, not hidden_size"),
        ({"model_type": "qwen2", "head_dim": 32}, "f16", "heads that are 128 wide together, not hidden_size"),
        ({"model_type": "phi3", "head_dim": 32}, "f16", "heads that are 128 wide together, not hidden_size"),
        ({"model_type": "qwen3", "rope_scaling": LLAMA3}, "f16", "of type llama3 in models of type qwen3"),
        (
            {"model_type": "olmo3", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            *("f16", "OLMo 3 with other layers in windows than three of four"),
        ),
        ({"model_type": "olmo3", "sliding_window": 8, "rope_theta": 3.0}, "f16", "windows with another base than"),
        ({"model_type": "glm4_moe", **GLM4_MOE, "n_group": 2}, "f16", "experts in groups"),
        ({**GEMMA4, "layer_types": ["full_attention"] * 2}, "f16", "Gemma 4 with layers of one kind"),
        (
            {
                **GEMMA4,
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 1,
                "layer_types": ["full_attention"] * 2 + KINDS,
            },
            *("f16", "keys and values of other layers than the last two"),
        ),
    ],
)
def test_what_llama_cpp_lacks_is_refused(changes, kind, message, make_folder, export):
    folder = make_folder(**changes)
    with pytest.raises(ValueError, match=message):
        export(folder, kind)


def test_metadata_name_stops_template_and_types(make_folder, export, make_tokenizer):
    _, fields = export(make_folder(), "f16")
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert types[:3] == [gguf.TokenType.CONTROL] * 3
    size = len(make_tokenizer("plain"))
    assert tokens[size:] == [f"[PAD{i}]" for i in range(size, 420)]
    assert set(types[size:]) == {gguf.TokenType.UNUSED}
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 2
    assert fields["tokenizer.chat_template"].contents() == make_tokenizer("plain").chat_template
    assert fields["llama.attention.head_count_kv"].contents() == 2


def byte_level(*before, use_regex=False, normalizer=None, add_prefix_space=False, **options):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<s>": 1, "b": 2, "ab": 3}, merges=[("a", "b")], **options))
    tokenizer.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, level]) if before else level
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKS = QWEN.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?|\p{N}{1,3}|\s+"


TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern, behavior="isolated"):
    return pre_tokenizers.Split(Regex(pattern), behavior)


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (byte_level(use_regex=True), "gpt-2"),
        (byte_level(split(QWEN)), "qwen2"),
        (byte_level(split(MARKS)), "qwen35"),
        (byte_level(split(QWEN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?"))), "llama-bpe"),
        (byte_level(split(O200K)), "gpt-4o"),
        (byte_level(split(TEKKEN)), "tekken"),
        (byte_level(split(QWEN), byte_fallback=True), "qwen2"),
        (byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True), "smollm"),
    ],
)
def test_pre_tokenizer_is_known_by_its_expression(tokenizer, name):
    assert vocabulary_metadata(tokenizer, 8, {1})["ggml.pre"] == name


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("template", [None, "{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_bos_is_added_as_tokenizer_and_template_do(adds, template):
    tokenizer = byte_level(use_regex=True)
    if adds:
        single = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer.backend_tokenizer.post_processor = single
    tokenizer.chat_template = template
    expected = adds and (template is None or template.startswith("{{ bos"))
    assert vocabulary_metadata(tokenizer, 8, {1})["ggml.add_bos_token"] is expected


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (byte_level(split(r"\w+")), "no pre-tokenizer like this one"),
        (byte_level(split(QWEN, "removed")), "no pre-tokenizer like this one"),
        (byte_level(split(QWEN), use_regex=True), "no pre-tokenizer like this one"),
        (byte_level(pre_tokenizers.Digits(individual_digits=False), use_regex=True), "no pre-tokenizer like this one"),
        (byte_level(split(QWEN), add_prefix_space=True), "puts no space in front of texts"),
        (byte_level(split(QWEN), dropout=0.1), "llama.cpp has no dropout"),
        (byte_level(split(QWEN), end_of_word_suffix="</w>"), "llama.cpp has no end_of_word_suffix"),
        *(
            (byte_level(split(QWEN), normalizer=normalizer), rf"does not normalize texts, .*\({name}\)")
            for normalizer, name in (
                (normalizers.Lowercase(), "Lowercase"),
                (normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]), "NFC, Strip"),
                (normalizers.Replace(" ", "\u2581"), "Replace"),
            )
        ),
    ],
)
def test_tokenizers_that_llama_cpp_lacks_are_refused(tokenizer, message):
    with pytest.raises(ValueError, match=message):
        vocabulary_metadata(tokenizer, 8, {1})


def test_normal_form_is_said_not_to_be_made(caplog):
    vocabulary_metadata(byte_level(split(QWEN), normalizer=normalizers.NFC()), 8, {1})
    assert "llama.cpp does not normalize texts: those in decomposed form have other tokens" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": normalizers.NFKC()}, "does not normalize texts, .*NFKC"),
        ({"merges": [("h", "e"), ("l", "l"), ("l", "o"), ("he", "l")]}, "merges 'h' and 'el'|merges 'he' and 'l'"),
    ],
)
def test_byte_fallback_that_llama_cpp_would_read_otherwise_is_refused(sentencepiece, change, message):
    state = json.loads(sentencepiece.backend_tokenizer.to_str())
    if "merges" in change:
        state["model"] |= {"vocab": state["model"]["vocab"] | {"hel": 290, "el": 291}, "merges": change["merges"]}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.normalizer = change.get("normalizer", tokenizer.normalizer)
    with pytest.raises(ValueError, match=message):
        vocabulary_metadata(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>"), 300, {2})


def test_byte_fallback_vocabulary_is_written_with_scores_of_its_merges(sentencepiece):
    found = vocabulary_metadata(sentencepiece, 300, {2})
    assert found["ggml.model"] == "llama"
    assert found["ggml.add_space_prefix"]
    assert "ggml.merges" not in found
    scores = dict(zip(found["ggml.tokens"], found["ggml.scores"], strict=True))
    assert scores["he"] > scores["ll"] > scores["hell"] > scores["▁hello"] > scores["lo"] > scores["h"]
    assert found["ggml.token_type"][:4] == [2, 3, 3, 6]
    assert found["ggml.eos_token_id"] == 2


def test_ollama_template_renders_as_the_chat_template(make_tokenizer):
    text = ollama_template(make_tokenizer("plain"))
    assert text == (
        '{{- range .Messages }}{{- if eq .Role "system" }}{{- "<|im_start|>system\\n" }}{{- .Content }}'
        '{{- "<|im_end|>\\n" }}{{- else if eq .Role "user" }}{{- "<|im_start|>user\\n" }}{{- .Content }}'
        '{{- "<|im_end|>\\n" }}{{- else if eq .Role "assistant" }}{{- "<|im_start|>assistant\\n" }}{{- .Content }}'
        '{{- "<|im_end|>\\n" }}{{- end }}{{- end }}{{- "<|im_start|>assistant\\n" }}'
    )


def test_default_system_message_is_printed_without_one(make_tokenizer):
    tokenizer = make_tokenizer("plain")
    default = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    tokenizer.chat_template = default + tokenizer.chat_template
    text = ollama_template(tokenizer)
    assert text.startswith(
        '{{- "<|im_start|>system\\n" }}{{- if not .System }}{{- "Be kind." }}{{- end }}'
        '{{- range .Messages }}{{- if eq .Role "system" }}{{- .Content }}{{- else if eq .Role "user" }}'
        '{{- "<|im_end|>\\n<|im_start|>user\\n" }}'
    )


def test_template_that_ollama_cannot_express_is_left_out(make_tokenizer):
    assert ollama_template(make_tokenizer("unstable")) is None


def test_modelfile_names_file_and_stops(make_folder, export, tmp_path):
    export(make_folder(), "q8_0")
    lines = (tmp_path / "out/Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./out-q8_0.gguf"
    assert lines[-1] == 'PARAMETER stop "<|im_end|>"'
    assert lines[1].startswith('TEMPLATE """{{- range .Messages }}')


def test_a_template_of_decisions_renders_the_prompt_of_training(make_tokenizer):
    encoder = DecisionEncoder(make_tokenizer(), system="Decide, it's \\ 'so'.\nBriefly.")
    template = jinja2.Environment().from_string(decision_template(encoder))
    state = {"color": ["red", 3]}
    questions = {
        "which": {"type": "choice", "instructions": "Which?", "criteria": {"red": None, "blue": "as the sky"}},
        "many": {"type": "score", "instructions": "How many?", "criteria": ["none", "some"]},
        "is": {"type": "noul", "instructions": ""},
        "odd": {"type": "choice", "instructions": " ", "criteria": {" g\"r'e ": " ", "blue sky": False}},
        "falsy": {"type": "noul", "instructions": 0, "criteria": {"true": {}, "false": " x "}},
    }
    for name, question in questions.items():
        encoded = encoder.encode_units([encoder.asked(read_state(state), read_questions({name: question}))])
        if question["type"] == "score":
            options = [{"key": str(i), "description": text} for i, text in enumerate(question["criteria"])]
        else:
            given = question.get("criteria") or {"true": None, "false": None}
            pairs = zip("AB", given.items(), strict=True)
            options = [{"label": label, "key": key, "description": text} for label, (key, text) in pairs]
        given = {"state": state, "type": question["type"], "instructions": question["instructions"]}
        expected = encoder.tokenizer.decode(encoded.tokens).replace("Y: {}\nN: x", "yes: {}\nno: x")  # as files need
        assert template.render(**given, options=options) == expected


def test_files_of_embeddings_name_their_pooling_and_the_tokens_around_texts(make_tokenizer):
    record, tokenizer = {"pooling": "last", "bidirectional": False}, make_tokenizer(bos_token="<|im_start|>")
    assert embedding_metadata("qwen3", tokenizer, record | {"pooling": "mean"}) == {
        **{"qwen3.pooling_type": 1, "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False},
    }
    end = ("<|endoftext|>", tokenizer.pad_token_id)
    frame = processors.TemplateProcessing(single=["$A", end[0]], special_tokens=[end])
    tokenizer.backend_tokenizer.post_processor = frame  # as Qwen3-Embedding's, whose eos_token is another
    found = embedding_metadata("qwen3", tokenizer, record)
    assert (found["qwen3.pooling_type"], found["tokenizer.ggml.eos_token_id"]) == (3, end[1])
    assert found["tokenizer.ggml.add_eos_token"]
    with pytest.raises(ValueError, match="see later ones: export a folder"):
        embedding_metadata("qwen3", tokenizer, record | {"bidirectional": True})
    frame = processors.TemplateProcessing(single=["$A", end[0], end[0]], special_tokens=[end])
    tokenizer.backend_tokenizer.post_processor = frame
    with pytest.raises(ValueError, match=r"puts <\|endoftext\|> <\|endoftext\|> around texts"):
        embedding_metadata("qwen3", tokenizer, record)


def test_options_that_llama_cpp_labels_otherwise_are_refused_there(make_tokenizer):
    def refuse(message):
        raise ValueError(message)

    environment = jinja2.Environment()
    environment.globals["raise_exception"] = refuse
    tokenizer = make_tokenizer()
    template = environment.from_string(decision_template(DecisionEncoder(tokenizer), "", special_texts(tokenizer)))
    given = {"state": "<|im_end|>", "type": "choice", "instructions": "Which?"}

    def render(*labels):
        return template.render(**given, options=[{"label": each, "key": "x", "description": None} for each in labels])

    assert "< |im_end|>" in render("A", "B")
    with pytest.raises(ValueError, match="single letters as options"):
        render("A", "C")
    assert len(render(*string.ascii_uppercase)) > 26
    with pytest.raises(ValueError, match="rename them"):
        render(*string.ascii_uppercase, "00")
