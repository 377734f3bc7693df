"""GGUF files in a real llama.cpp: they load, render our template, and give our tokens and stops."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cpp import ask

from jaxglue.data.template import ChatTemplate
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.generate import Generator
from jaxglue.hf.checkpoint import save_tensors
from jaxglue.hf.gguf.export import export_gguf
from jaxglue.hf.gguf.source import FolderTensors
from jaxglue.hf.loading import load_model, random_model
from jaxglue.models import config_from_hf
from jaxglue.models.parameters import flatten_names, split_model

pytest.importorskip("gguf", reason="needs gguf: pip install 'jaxglue[test]'")
pytest.importorskip("xllamacpp", reason="needs xllamacpp: pip install 'jaxglue[test]'")

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
FAMILIES = {
    "llama": {"model_type": "llama", "rope_scaling": LLAMA3, "rms_norm_eps": 1e-5},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 32, "rope_theta": 500000.0},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **SPARSE},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}
SEEDS = dict.fromkeys(FAMILIES, 1)
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
        seed = seed[family] if isinstance(seed, dict) else seed
        folder = tmp_path_factory.mktemp(family) / "model"
        model = random_model(config_from_hf(raw), dtype=jnp.float32, seed=seed)
        tensors = flatten_names(split_model(model, nnx.Param)[1])
        rng = np.random.default_rng(0)
        tensors = {
            name: (np.asarray(value) + (rng.normal(size=value.shape) * 0.1 if value.ndim == 1 else 0)).astype(
                np.float16
            )
            for name, value in tensors.items()
        }
        save_tensors(folder, tensors)
        (folder / "config.json").write_text(json.dumps(raw))
        make_tokenizer("plain").save_pretrained(folder)
        return folder

    return make


def parts(folder):
    model = load_model(folder, dtype=jnp.float32)
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    return Generator(graphdefs, model.config, dtype=jnp.float32), trainable, frozen, model.config


def generate(folder, prompts, stops=(), tokens=12):
    """Return our greedy tokens after each prompt."""
    generator, trainable, frozen, _ = parts(folder)
    sampling = SamplingConfig(temperature=0, max_tokens=tokens)
    return [list(generator.stream(trainable, frozen, prompt, sampling, stops)) for prompt in prompts]


def export(folder, kind, output, tokenizer, stops):
    raw = json.loads((folder / "config.json").read_text())
    return export_gguf(FolderTensors(folder), config_from_hf(raw), tokenizer, stops, kind, output)


@pytest.mark.parametrize("family", FAMILIES)
def test_f16_gives_our_tokens_stops_and_template(family, make_folder, make_tokenizer, tmp_path):
    folder, tokenizer = make_folder(family), make_tokenizer("plain")
    template = ChatTemplate(tokenizer)
    encoded = [template.encode(template.render_prompt(chat, None)) for chat in CHATS]
    free = generate(folder, encoded)
    stop = next(token for token in free[0][4:] if token not in free[0][:4])
    ours = generate(folder, encoded, {stop})
    assert len(ours[0]) < len(free[0])
    file = export(folder, "f16", tmp_path / "out", tokenizer, {stop, tokenizer.eos_token_id})
    theirs = ask(model=file, prompts=encoded, chats=CHATS)
    assert [chat["tokens"] for chat in theirs["chats"]] == encoded
    for found, expected in zip(theirs["prompts"], ours, strict=True):
        tokens = found["tokens"]
        assert [token for token in tokens if token != stop] == expected
        assert found["stop_type"] == ("eos" if len(expected) < 12 else "limit")
