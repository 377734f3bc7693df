"""GGUF files in a real llama.cpp: they load, render our template, and give our tokens and stops."""

import json
import shutil
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cpp import ask
from safetensors.numpy import load_file, save_file
from selection import repeat, repeats, repeats_parts_of, thorough
from split_texts import MARKS, PIECES, split_texts
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jaxglue.commands import main
from jaxglue.data.questions import read_questions, read_state
from jaxglue.data.template import ChatTemplate
from jaxglue.data.text_rows import end_texts
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.generation.config import AssistantConfig, SamplingConfig
from jaxglue.generation.drafts import Drafting
from jaxglue.generation.engine import Engine
from jaxglue.generation.reading import LoadedModel, PartReader, decisions, probabilities, texts, vectors
from jaxglue.generation.scoring import PromptScorer
from jaxglue.hf.adapter import load_adapter, save_adapter
from jaxglue.hf.checkpoint import open_checkpoint, save_tensors
from jaxglue.hf.draft import load_draft
from jaxglue.hf.experts import checkpoint_layout
from jaxglue.hf.export_check import TRAINED_FILE, trained_rows
from jaxglue.hf.gguf.drafts import find_gguf_draft
from jaxglue.hf.gguf.export import export_gguf, export_gguf_lora
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import load_model, random_model
from jaxglue.hf.merge import MergedTensors, export_adapter
from jaxglue.hf.reading import read_record, write_record
from jaxglue.models import config_from_hf
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from tests.draft_folders import add_draft

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install '.[test]'")
pytest.importorskip("xllamacpp", reason="needs xllamacpp: pip install '.[test]'")

SIZES = {
    "vocab_size": 420,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
LINEAR = {
    **{"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.7}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_expand": 2}
FAMILIES = {
    "llama": {"model_type": "llama", "rope_scaling": LLAMA3, "rms_norm_eps": 1e-5},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 32, "rope_theta": 500000.0},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **SPARSE},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "qwen2": {"model_type": "qwen2"},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "granite": {
        "model_type": "granite",
        **{"attention_multiplier": 0.1, "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        **{"model_type": "olmo3", "sliding_window": 16},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
        },
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **{"model_type": "qwen2_moe", **SPARSE, "norm_topk_prob": False, "shared_expert_intermediate_size": 512},
    },
    "glm4_moe": {
        **{"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
        **{"n_shared_experts": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True},
    },
    "deepseek_v2": {
        **{
            "model_type": "deepseek_v2",
            "q_lora_rank": None,
            "num_hidden_layers": 27,
            "kv_lora_rank": 64,
            "n_routed_experts": 4,
        },
        **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4, "head_dim": 32},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **MSCALES},
    },
    "deepseek_v3": {
        **{"model_type": "deepseek_v3", "q_lora_rank": 96, "kv_lora_rank": 64, "n_routed_experts": 8},
        **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_key_value_heads": 4, "head_dim": 32},
        **{"num_experts_per_tok": 3, "moe_intermediate_size": 256, "first_k_dense_replace": 1},
        **{"n_group": 4, "topk_group": 2},
    },
    "smollm3": {"model_type": "smollm3"},
    "gemma2": {
        **{"model_type": "gemma2", "sliding_window": 16, "query_pre_attn_scalar": 64, "initializer_range": 0.03}
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **{"num_hidden_layers": 6, "sliding_window": 16, "query_pre_attn_scalar": 64, "initializer_range": 0.03},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma4": {
        **{"model_type": "gemma4_text", "num_hidden_layers": 6, "sliding_window": 16, "initializer_range": 0.05},
        **{"global_head_dim": 128, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        **{"layer_types": ["sliding_attention", "full_attention"] * 3},
        **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 420, "final_logit_softcapping": 20.0},
    },
    "gemma4_experts": {
        **{"model_type": "gemma4_text", "num_hidden_layers": 3, "sliding_window": 16, "initializer_range": 0.05},
        **{"global_head_dim": 128, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "hidden_size_per_layer_input": 0},
        **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 256},
    },
    "glm4": {"model_type": "glm4"},
    "granite_hybrid": {
        **{"model_type": "granitemoehybrid", **MAMBA, "layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 512},
        **{"attention_multiplier": 0.1, "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    },
    "granite_hybrid_dense": {
        **{"model_type": "granitemoehybrid", **MAMBA, "layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
        **{"num_local_experts": 0, "shared_intermediate_size": 512, "attention_multiplier": 0.1},
    },
    "nemotron_h": {
        **{"model_type": "nemotron_h", "hybrid_override_pattern": "M-*", "num_hidden_layers": 3, "hidden_act": None},
        **{"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 2},
    },
    "nemotron_h_moe": {
        **{"model_type": "nemotron_h", "hybrid_override_pattern": "ME*E", "num_hidden_layers": 4, "hidden_act": None},
        **{"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 2, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 512},
    },
    "falcon_h1": {
        **{"model_type": "falcon_h1", **MAMBA, "mamba_d_ssm": 512, "mlp_multipliers": [0.9, 0.5]},
        **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.7, "ssm_in_multiplier": 1.3},
        **{"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "ssm_out_multiplier": 0.6},
        "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **LINEAR},
    "qwen3_5_moe": {**{"model_type": "qwen3_5_moe_text", **LINEAR, **SPARSE, "shared_expert_intermediate_size": 256}},
    "phi3": {"model_type": "phi3", "partial_rotary_factor": 0.75},
    "phi3_longrope": {
        **{"model_type": "phi3", "max_position_embeddings": 1024, "original_max_position_embeddings": 512},
        "rope_scaling": {"type": "longrope", "short_factor": [1.1] * 32, "long_factor": [2.0] * 32},
    },
}
SEEDS = {"llama": 29, "llama_tied": 28, "qwen3": 10, "qwen3_moe": 1, "gpt_oss": 33}
SEEDS |= {"qwen2": 11, "mistral": 13, "granite": 20, "olmo2": 15, "smollm3": 11, "glm4": 4, "phi3": 17}
SEEDS |= {"phi3_longrope": 3, "gemma2": 13, "gemma3": 19, "qwen3_5": 2, "qwen3_5_moe": 3, "olmo3": 24, "ministral3": 2}
SEEDS |= {
    "deepseek_v2": 2,
    "deepseek_v3": 4,
    "gemma4": 16,
    "gemma4_experts": 15,
    "mixtral": 22,
    **{"granite_hybrid": 1, "granite_hybrid_dense": 1, "nemotron_h": 1, "nemotron_h_moe": 1, "falcon_h1": 1},
    "qwen2_moe": 3,
    "glm4_moe": 7,
}
"""Of models whose greedy tokens are likelier than others by 0.03 at least, which no rounding decides."""
ENDS = (0, 2)
"""Tokens of the tokenizer that llama.cpp knows as ends by their names, whatever the file says."""
CHATS = [
    [{"role": "user", "content": "What is 3 plus 4?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 3 plus 4?"},
        {"role": "assistant", "content": "It is 7."},
        {"role": "user", "content": "  And\n\n  5 plus 12 — naïve, 日本? "},
    ],
]


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory, make_tokenizer):
    """Write a small random model of a family with a tokenizer."""

    def make(family, seed=SEEDS, **changes):
        raw = SIZES | FAMILIES[family] | changes
        seed = seed.get(family, 1) if isinstance(seed, dict) else seed
        folder = tmp_path_factory.mktemp(family) / "model"
        model = random_model(config_from_hf(raw), dtype=jnp.float32, seed=seed)
        _, weights, buffers = split_model(model, nnx.Param)
        tensors = flatten_names(weights) | flatten_names(buffers)
        rng = np.random.default_rng(0)
        tensors = {
            name: (np.asarray(value) + (rng.normal(size=value.shape) * 0.1 if value.ndim == 1 else 0)).astype(
                np.float16
            )
            for name, value in tensors.items()
        }
        layout = checkpoint_layout({name: value.shape for name, value in tensors.items()}, raw)
        save_tensors(folder, {name: tensors[parameter][index] for name, (parameter, index) in layout.items()})
        (folder / "config.json").write_text(json.dumps(raw))
        make_tokenizer("plain").save_pretrained(folder)
        return folder

    return make


@lru_cache(maxsize=1)
def parts(folder):
    """Return an engine of a folder, its weights and the model's shape."""
    model = load_model(folder, dtype=jnp.float32)
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    return Engine(graphdefs, model.config, dtype=jnp.float32), trainable, frozen, model.config


def generate(folder, prompts, stops=(), tokens=12):
    """Return our greedy tokens after each prompt."""
    engine, trainable, frozen, _ = parts(folder)
    sampling = SamplingConfig(temperature=0, max_tokens=tokens)
    return [list(engine.stream(trainable, frozen, prompt, sampling, stops)) for prompt in prompts]


def export(folder, kind, output, tokenizer, stops):
    raw = json.loads((folder / "config.json").read_text())
    return export_gguf(MergedTensors(folder), config_from_hf(raw), tokenizer, stops, kind, output)


OTHERS = ("qwen2", "mistral", "olmo2", "smollm3", "gemma2", "glm4", "phi3", "mixtral", "olmo3", "qwen2_moe", "qwen3_5")
OTHERS += (
    "llama",
    "qwen3",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gemma4",
    "gemma4_experts",
    "qwen3_moe",
    "qwen3_5_moe",
    "gpt_oss",
    "granite",
    "granite_hybrid_dense",
    "llama_tied",
    "nemotron_h",
    "gemma3",
    "nemotron_h_moe",
)
"""Families whose parts in llama.cpp those of the others have, too, or the test of adapters runs."""


@pytest.mark.parametrize("family", repeats(SEEDS, *OTHERS))
def test_f16_gives_our_tokens_stops_and_template(family, make_folder, make_tokenizer, tmp_path):
    folder, tokenizer = make_folder(family), make_tokenizer("plain")
    template = ChatTemplate(tokenizer)
    encoded = [template.encode(template.render_prompt(chat, None)) for chat in CHATS]
    free = generate(folder, encoded)
    stop = next(token for token in free[0][4:] if token not in free[0][:4])
    stops = {stop, *ENDS}
    ours = generate(folder, encoded, stops)
    assert len(ours[0]) < len(free[0])
    file = export(folder, "f16", tmp_path / "out", tokenizer, stops)
    theirs = ask(model=file, prompts=encoded, chats=CHATS)
    assert [chat["tokens"] for chat in theirs["chats"]] == encoded
    for found, expected in zip(theirs["prompts"], ours, strict=True):
        tokens = found["tokens"]
        assert [token for token in tokens if token not in stops] == expected
        assert found["stop_type"] == ("eos" if len(expected) < 12 else "limit")


@pytest.mark.parametrize("family", ["qwen3_5", repeat("qwen3_5_moe")])
def test_llama_cpp_drafts_by_our_head(family, make_folder, make_tokenizer, tmp_path):
    folder, tokenizer = make_folder(family), make_tokenizer("plain")
    add_draft(folder)
    stored = load_file(folder / "model.safetensors")
    # Layers that add little let each token follow from the last one, which a head that passes its embedding on knows.
    last = "o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj"
    quiet = {name: tensor * np.float16(0.001) for name, tensor in stored.items() if name.endswith(last)}
    passes = np.eye(*stored["mtp.fc.weight"].shape).astype(np.float16)
    save_file(stored | quiet | {"mtp.fc.weight": passes}, folder / "model.safetensors")
    config, tensors = config_from_hf(json.loads((folder / "config.json").read_text())), MergedTensors(folder)
    draft = find_gguf_draft(tensors, config, folder, None)
    file = export_gguf(tensors, config, tokenizer, {2}, "f16", tmp_path / "out", draft=draft)
    names = {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    assert {"blk.4.nextn.eh_proj.weight", "blk.4.attn_q.weight", "blk.4.nextn.shared_head_norm.weight"} <= names
    expected = generate(folder, PROMPTS, {2}, tokens=24)
    answered = ask(model=file, prompts=PROMPTS, drafts=2, tokens=24)["prompts"]
    assert [[token for token in each["tokens"] if token != 2] for each in answered] == expected
    made, accepted = (sum(each["timings"][name] for each in answered) for name in ("draft_n", "draft_n_accepted"))
    head = load_draft(folder, config, dtype=jnp.float32)
    graphdef, state = nnx.split(head)
    graphdefs, trainable, frozen = split_model(load_model(folder, dtype=jnp.float32), nnx.LoRAParam)
    engine = Engine(graphdefs, config, dtype=jnp.float32, drafting=Drafting(graphdef, 2))
    trees = {**trainable, "draft": {}}, {**frozen, "draft": nnx.to_pure_dict(state)}
    sampling = SamplingConfig(temperature=0, max_tokens=24)
    ours = [list(engine.stream(*trees, prompt, sampling, {2})) for prompt in PROMPTS]
    assert ours == expected
    assert accepted > 0.2 * made > 0 and engine.drafts.accepted > 0.2 * engine.drafts.made


@repeats_parts_of("test_f16_gives_our_tokens_stops_and_template")
@pytest.mark.parametrize("family", repeats(["olmo2", "gpt_oss", "qwen2_moe"], "gpt_oss", "qwen2_moe"))
def test_embeddings_are_also_output_projections_where_llama_cpp_needs_one(
    family, make_folder, make_tokenizer, tmp_path
):
    folder = make_folder(family, tie_word_embeddings=True)
    file = export(folder, "f16", tmp_path / "out", make_tokenizer("plain"), {2})
    assert max(differences(folder, file, PROMPTS)) < 0.1


@pytest.mark.parametrize("name", ["marked", "thinking", "closing", "unstable"])
def test_templates_render_in_llama_cpp_as_in_training(name, make_folder, make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(name)
    template = ChatTemplate(tokenizer)
    folder = make_folder("qwen3", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    found = ask(model=export(folder, "f16", tmp_path / "out", tokenizer, {2}), chats=CHATS)["chats"]
    texts = [template.render_prompt(chat, None) for chat in CHATS]
    assert [chat["text"] for chat in found] == texts
    assert [chat["tokens"] for chat in found] == [template.encode(text) for text in texts]


def test_byte_fallback_tokenizer_gives_its_tokens_in_llama_cpp(sentencepiece, make_folder, tmp_path):
    folder = make_folder("qwen3", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    texts = ["hello hell lo", " hello\n", "héllo 日本"]
    file = export(folder, "f16", tmp_path / "out", sentencepiece, {2})
    assert ask(model=file, texts=texts)["texts"] == [sentencepiece.encode(text) for text in texts]


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN = CONTRACTIONS + (r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
UPPER, LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "qwen2": QWEN,
    "llama-bpe": QWEN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?"),
    "qwen35": QWEN.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),
    "gpt-4o": rf"{UPPER}*{LOWER}+{CONTRACTIONS}?|{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}|{REST}",
    "tekken": rf"{UPPER}*{LOWER}+|{UPPER}+{LOWER}*|\p{{N}}|{REST}",
    "gpt-2": None,
    "smollm": None,
}


@pytest.mark.parametrize("name", repeats(SPLITS, "llama-bpe", "qwen35", "gpt-4o", "gpt-2", "smollm"))
def test_texts_are_split_by_llama_cpp_as_by_the_tokenizer(name, make_folder, tmp_path, caplog):
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=SPLITS[name] is None)
    before = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
    before += [pre_tokenizers.Split(Regex(SPLITS[name]), "isolated")] if SPLITS[name] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(split_texts(3000, seed=1), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 700}
    file = export(make_folder("qwen3", **sizes), "f16", tmp_path / "out", fast, {1})
    warns = "separates combining marks" in caplog.text
    texts = split_texts(1000, 2, PIECES if warns else PIECES + MARKS)
    assert ask(model=file, texts=texts)["texts"] == [fast.encode(text) for text in texts]
    assert warns == (name in ("gpt-4o", "tekken"))


KINDS = ("bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0")


@nnx.jit
def log_probs(model, tokens):
    return jax.nn.log_softmax(model(tokens)[0, -1])


def differences(folder, file, prompts, **options):
    """Return the largest difference of llama.cpp's likeliest tokens' log-probabilities from ours, for each prompt."""
    tokenizer = load_tokenizer(folder)
    # The server tells no probabilities of ends and parts of characters.
    hidden = [index for index in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([index])]
    bias = [[index, -100] for index in (*ENDS, *hidden)]
    answer = ask(model=file, prompts=prompts, tokens=1, probs=5, bias=bias, **options)
    tops = [found["completion_probabilities"][0]["top_logprobs"] for found in answer["prompts"]]
    model = load_model(folder, dtype=jnp.float32)
    ours = [np.asarray(log_probs(model, jnp.asarray([prompt]))) for prompt in prompts]
    return [max(abs(one["logprob"] - p[one["id"]]) for one in top) for top, p in zip(tops, ours, strict=True)]


PROMPTS = [list(range(40, 60)), list(range(300, 400, 3))]
FURTHER = {
    "seed_oss": {},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "alpha": 7.0, "factor": 1.0, "rope_theta": 10_000.0}
    },
    "ernie4_5": {},
    "ernie4_5_moe": {
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 256, "moe_num_shared_experts": 2},
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 32},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 16, "logit_scale": 0.5, "hidden_size": 256},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {
        **{"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    },
    "qwen3_next": {**LINEAR, **SPARSE, "full_attention_interval": 4, "shared_expert_intermediate_size": 256},
    "gemma4_unified_text": {
        **{"num_hidden_layers": 3, "sliding_window": 16, "initializer_range": 0.05, "global_head_dim": 128},
        **{"num_global_key_value_heads": 1, "attention_k_eq_v": True},
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    },
}
"""Families whose tokens need no seeds: their probabilities are compared."""
FAMILIES |= {name: {"model_type": name, **fields} for name, fields in FURTHER.items()}


@pytest.mark.parametrize("family", repeats(FURTHER, *(FURTHER.keys() - {"lfm2_moe"})))
def test_f16_of_further_families_gives_our_probabilities(family, make_folder, make_tokenizer, tmp_path):
    folder = make_folder(family, seed=1)
    file = export(folder, "f16", tmp_path / "out", make_tokenizer("plain"), {2})
    assert max(differences(folder, file, PROMPTS)) < 0.1


@repeats_parts_of("test_command_writes_file_and_modelfile")
@pytest.mark.parametrize("kind", repeats(KINDS, *({*KINDS} - {"q4_k_m"})))
def test_llama_cpp_reads_the_values_that_gguf_does(kind, make_folder, make_tokenizer, tmp_path):
    folder = make_folder("qwen3")
    file = export(folder, kind, tmp_path / "out", make_tokenizer("plain"), {2})
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, SIZES["num_hidden_layers"])
    expanded = {}
    for name, info in open_checkpoint(folder).tensors.items():
        tensor = written[names.get_name(name, (".weight",))]
        expanded[name] = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(info.shape)
    save_tensors(tmp_path / "read", expanded)
    for path in (*folder.glob("tokenizer*"), folder / "config.json"):
        shutil.copy(path, tmp_path / "read")
    # llama.cpp rounds activations to eight bits, too
    assert max(differences(tmp_path / "read", file, PROMPTS)) < 0.25
    if kind in ("q5_k_m", "q4_k_m", "q4_0"):
        assert max(differences(folder, file, PROMPTS)) > 0.4


def test_mxfp4_experts_predict_as_the_model(make_folder, make_tokenizer, tmp_path):
    folder = tmp_path / "mxfp4"
    shutil.copytree(make_folder("gpt_oss", num_hidden_layers=1), folder)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        tensors[f"{name}_scales"] = rng.integers(121, 124, (experts, outputs, inputs // 32), dtype=np.uint8)
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(raw))
    file = export(folder, "f16", tmp_path / "out", make_tokenizer("plain"), {2})
    assert {t.tensor_type.name for t in gguf.GGUFReader(file).tensors if "_exps.weight" in t.name} == {"MXFP4"}
    assert max(differences(folder, file, PROMPTS)) < 0.25  # llama.cpp rounds the experts' inputs to eight bits


@pytest.fixture
def make_adapter(tmp_path):
    """Write an adapter of random matrices on some modules of a folder's model."""

    def make(folder, targets):
        model = load_model(folder, dtype=jnp.float32)
        config = LoraConfig(rank=4, alpha=16.0, targets=targets)
        add_lora(model, config, rngs=nnx.Rngs(0))
        rng = np.random.default_rng(3)
        trainable = flatten_names(split_model(model, nnx.LoRAParam)[1])
        tensors = {name: rng.normal(size=v.shape).astype(np.float32) * 0.05 for name, v in trainable.items()}
        save_adapter(tmp_path / "adapter", tensors, config, folder)
        return tmp_path / "adapter"

    return make


TARGETS = {
    "llama": ("q_proj", "k_proj", "v_proj", "down_proj"),
    "qwen3_moe": ("q_proj", "gate_up_proj", "down_proj"),
    "gpt_oss": ("o_proj", "gate_up_proj", "down_proj"),
    "qwen2_moe": ("q_proj", "gate_proj", "down_proj"),
    "phi3": ("qkv_proj", "gate_up_proj"),
    "gemma4": ("q_proj", "v_proj", "down_proj", "per_layer_projection"),
    "qwen3_5": ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj"),
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"),
    "lfm2_moe": ("in_proj", "out_proj", "w1", "w2", "gate_up_proj", "down_proj"),
    "cohere2": ("q_proj", "down_proj"),
}
LEFT = "phi3", "llama", "qwen2_moe", "qwen3_moe", "qwen3_5", "gemma4", "qwen3_next", "lfm2_moe", "cohere2"


@pytest.mark.parametrize("family", repeats(TARGETS, *LEFT))
def test_adapter_alone_and_merged_predict_alike(family, make_folder, make_adapter, make_tokenizer, tmp_path):
    few = {"num_hidden_layers": 2} if family == "gpt_oss" else {}
    folder, tokenizer = make_folder(family, **few), make_tokenizer("plain")
    adapter = make_adapter(folder, TARGETS[family])
    merged = MergedTensors(folder, adapter)
    file = export_gguf(merged, merged.config, tokenizer, {2}, "f16", tmp_path / "merged")
    export_adapter(adapter, folder, tmp_path / "whole")
    near = 0.05 if family.startswith("gemma4") else 0.02  # GELU is of 16 bits there
    assert max(differences(tmp_path / "whole", file, PROMPTS)) < near
    base = export(folder, "f16", tmp_path / "out", tokenizer, {2})
    assert min(differences(tmp_path / "whole", base, PROMPTS)) > 0.1
    lora = export_gguf_lora(merged.adapter, merged.config, tmp_path / "lora")
    assert max(differences(tmp_path / "whole", base, PROMPTS, lora=lora)) < near


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("gemma4_experts", ("gate_up_proj",), "llama.cpp applies no adapter of model.layers.0.experts.gate_up_proj"),
        repeat("deepseek_v3", ("kv_b_proj",), "files hold model.layers.0.self_attn.kv_b_proj in two parts"),
    ],
)
def test_adapters_that_files_have_no_place_for_are_refused(
    family, targets, message, make_folder, make_adapter, tmp_path
):
    folder = make_folder(family)
    merged = MergedTensors(folder, make_adapter(folder, targets))
    with pytest.raises(ValueError, match=message):
        export_gguf_lora(merged.adapter, merged.config, tmp_path / "lora")


def test_command_writes_file_and_modelfile(make_folder, make_tokenizer, tmp_path, capsys):
    folder = make_folder("qwen3")
    main(["export", "--gguf", "q4_k_m", "--base", str(folder), "--output", str(tmp_path / "tuned")])
    assert "llama-server -m" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "tuned").iterdir()) == ["Modelfile", "tuned-q4_k_m.gguf"]
    assert ask(model=tmp_path / "tuned/tuned-q4_k_m.gguf", texts=["What is 3 plus 4?"])["texts"] == [
        make_tokenizer("plain").encode("What is 3 plus 4?")
    ]


def test_rows_that_a_run_kept_or_of_data_weigh_errors_unless_told_not_to(
    make_folder, make_adapter, write_jsonl, chat_rows, tmp_path
):
    adapter, rng = make_adapter(make_folder("qwen3", num_hidden_layers=2), ("q_proj",)), np.random.default_rng(0)
    offsets = np.cumsum([0, *rng.integers(1, 900, 20)])
    kept = trained_rows(rng.integers(0, 420, offsets[-1], dtype=np.int32), offsets)
    assert kept.tokens.shape[1] == 512
    assert int((kept.segments.segment_ids > 0).sum()) == np.minimum(np.diff(offsets), 512).sum(), "all documents"
    kept.save(adapter.parent / TRAINED_FILE)
    flags = ["export", "--gguf", "q4_k_m", "--adapter", str(adapter), "--output"]
    main([*flags, str(tmp_path / "weighed")])
    main([*flags, str(tmp_path / "measured"), "--imatrix", write_jsonl(chat_rows(8))])
    main([*flags, str(tmp_path / "plain"), "--imatrix", "none"])
    weighed, measured, plain = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / name / f"{name}-q4_k_m.gguf").tensors}
        for name in ("weighed", "measured", "plain")
    )
    for one, other in ((weighed, plain), (measured, plain), (measured, weighed)):
        changed = {name for name, tensor in one.items() if (tensor.data != other[name].data).any()}
        assert changed == {name for name in plain if name.startswith("blk.") and "norm" not in name}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gguf", "q8_0", "--imatrix", "rows.jsonl"], "--imatrix weighs the errors of K-quants"),
        (["--gguf", "q8_0", "--quantize", "nf4"], "a further task starts from its output"),
        (["--gguf-lora"], "--gguf-lora writes --adapter"),
        (["--gguf", "q9"], "q4_k_m"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["export", "--base", str(tmp_path), "--output", str(tmp_path / "out"), *flags])
    assert message in capsys.readouterr().err


@thorough("hf/test_serve_as.py")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_loss_of_a_model_served_in_q4_k_m_is_that_of_our_own_reading(family, make_folder, make_adapter, tmp_path):
    folder = make_folder(family)
    targets = ("q_proj", "v_proj", "down_proj", *(("gate_up_proj",) if family == "qwen3_moe" else ()))
    adapter = make_adapter(folder, targets)
    config, trained = LoraConfig(rank=4, alpha=16.0, targets=targets), load_adapter(adapter)
    recorded = {**identify(folder), "quantize": "served_q4_k_m"}
    save_adapter(adapter, trained.tensors, config, str(folder), recorded)
    main(["export", "--gguf", "q4_k_m", "--adapter", str(adapter), "--output", str(tmp_path / "tuned")])
    file = tmp_path / "tuned/tuned-q4_k_m.gguf"
    merged = MergedTensors(folder, adapter)
    tensors = {name: merged.read(name).astype(np.float32) for name in merged.specs}
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name, of in (("model.embed_tokens.weight", "token_embd.weight"), ("lm_head.weight", "output.weight")):
        tensors[name] = gguf.dequantize(written[of].data, written[of].tensor_type)
    save_tensors(tmp_path / "read", tensors)
    shutil.copytree(folder, tmp_path / "read", ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    main(["export", "--gguf", "f16", "--base", str(tmp_path / "read"), "--output", str(tmp_path / "expanded")])
    tokenizer, (weights, count) = load_tokenizer(folder), (np.zeros(SIZES["vocab_size"], np.float32), 33)
    hidden = [index for index in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([index])]
    weights[[*ENDS, *hidden, *range(len(tokenizer), len(weights))]] = -100  # the server tells no probabilities of these
    row = np.random.default_rng(0).choice(np.flatnonzero(weights == 0), count).tolist()
    prompts = [row[:end] for end in range(1, len(row))]
    bias = [[int(index), -100] for index in np.flatnonzero(weights)]

    def loss(file):
        """Return the mean log-probability of the row's tokens by llama.cpp."""
        answer, found = ask(model=file, prompts=prompts, tokens=1, probs=len(weights), bias=bias), list[float]()
        for of_prompt, target in zip(answer["prompts"], row[1:], strict=True):
            top = of_prompt["completion_probabilities"][0]["top_logprobs"]
            found.append({token["id"]: token["logprob"] for token in top}[target])
        return np.mean(found)

    logits = load_model(tmp_path / "read", dtype=jnp.float32)(jnp.asarray([row]))[0, :-1]  # before biases, like theirs
    ours = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.array(row[1:])[:, None], 1)[:, 0].mean()
    assert loss(tmp_path / "expanded/expanded-f16.gguf") == pytest.approx(float(ours), rel=2e-4)
    # llama.cpp rounds activations to 8 bits before products with K-quants, which random weights' sharp logits show.
    assert loss(file) == pytest.approx(float(ours), rel=5e-3)


@thorough("hf/test_gguf.py")
def test_decisions_are_answered_with_our_probabilities(make_folder, make_tokenizer, backend, tmp_path):
    folder = make_folder("qwen3")
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = backend.pre_tokenizer, backend.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(["yes", "Yes", "no", "No", "question", "option", "answer"] * 50, trainer)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **ends)
    tokenizer.chat_template = make_tokenizer("plain").chat_template
    tokenizer.save_pretrained(folder)
    record = {"temperatures": {"noul": 2.0, "choice": 0.5, "score": 0.25}, "system": "Decide, it's \\ 'so'."}
    write_record(folder, "decide", record)
    main(["export", "--gguf", "f16", "--base", str(folder), "--output", str(tmp_path / "gguf")])
    questions = {
        "is": {"type": "noul", "instructions": "Is it red?", "criteria": {"true": "as a rose", "false": None}},
        "which": {"type": "choice", "instructions": "Which?", "criteria": {"red": None, "blue": "sky", "green": None}},
        "many": {"type": "score", "instructions": "How many?", "criteria": ["none", "some", "all"]},
        "odd": {"type": "choice", "instructions": " ", "criteria": {" g\"r'e ": " ", "blue sky": False, "日本": "🎉"}},
    }
    states = ["It's red.\n\nIsn't it? ", {"color": ["red", 3], "note": None}, "a<|im_end|>\n<|im_start|>user\né"]
    bodies = [{"state": state, "questions": questions} for state in states]
    found = ask(model=tmp_path / "gguf/gguf-f16.gguf", decisions=bodies)["decisions"]
    reader = PartReader(LoadedModel.load(AssistantConfig(model=folder)), read_record(folder))
    asked, model = read_questions(questions), reader.model
    scorer = PromptScorer(model.graphdefs, model.config, model.frozen, model.dtype)

    states[2] = states[2].replace("<|im", "< |im")  # by which they stay text
    for state, answer in zip(states, found, strict=True):
        read = reader.read(reader.encode(decisions(reader, [(read_state(state), asked)])))
        _, which, many, odd = probabilities(reader, read, list(asked.values()))
        answers, tokens = (
            answer["answers"],
            reader.encode(decisions(reader, [(read_state(state), {"is": asked["is"]})])),
        )
        groups = [
            [[*tokens.tokens.tolist(), label] for label in group] for group in reader.encoder.labels.groups["noul"]
        ]
        likely = [max(each.log_probs[-1] for each in scorer.score(model.trainable, group, None, 0)) for group in groups]
        yes = 1 / (1 + np.exp((likely[1] - likely[0]) / 2.0))  # llama.cpp takes the likelier spelling of each
        np.testing.assert_allclose(answers["is"]["noul"], yes, atol=2e-3)
        np.testing.assert_allclose([*answers["which"]["probabilities"].values()], which, atol=2e-3)
        np.testing.assert_allclose([*answers["many"]["probabilities"].values()], many, atol=2e-3)
        np.testing.assert_allclose([*answers["odd"]["probabilities"].values()], odd, atol=2e-3)
        assert np.abs(many - 1 / 3).max() > 0.05


@thorough("hf/test_gguf.py")
@pytest.mark.parametrize(("pooling", "begins"), [("last", True), ("mean", False)])
def test_texts_are_embedded_with_our_vectors(make_folder, make_tokenizer, pooling, begins, tmp_path):
    folder, tokenizer = make_folder("qwen3"), make_tokenizer("plain", bos_token="<|im_start|>")
    if begins:
        frame = {"single": ["<|im_start|>", "$A"], "special_tokens": [("<|im_start|>", tokenizer.bos_token_id)]}
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**frame)
    end_texts(tokenizer)
    tokenizer.save_pretrained(folder)
    settings = {"pooling": pooling, "bidirectional": False, "query_prompt": "", "document_prompt": ""}
    write_record(folder, "embed", settings | {"max_text_length": 64, "similarity_scale": 20.0, "matryoshka_dims": []})
    main(["export", "--gguf", "f16", "--base", str(folder), "--output", str(tmp_path / "gguf")])
    odd = ["What is 3 plus 4?", " ", "\n\n", "naïve 日本 🎉", "<|im_end|>", "a b " * 10]
    found = ask(model=tmp_path / "gguf/gguf-f16.gguf", embed=odd)["vectors"]
    reader = PartReader(LoadedModel.load(AssistantConfig(model=folder)), read_record(folder))
    ours = vectors(reader.read(reader.encode(texts(reader, odd, query=False))))
    np.testing.assert_allclose(found, ours, atol=2e-3)
