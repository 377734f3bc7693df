"""Make benchmark inputs: a Hugging Face folder of random weights in a published shape, and generated chats.

python benchmarks/inputs.py --shape qwen3-8b --output /dev/shm/qwen3-8b --chats 10000
"""

import argparse
import json
import math
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from jaxglue.atomic import atomic_folder
from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.experts import checkpoint_layout, part_shape
from jaxglue.hf.tensor_files import INDEX, plan_shards, write_file
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import find_family
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import abstract_parameters, hf_name
from jaxglue.ops.quant.mxfp4 import mxfp4_scale

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131072,
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "attention_bias": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}
_QWEN3_MOE = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 28,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 256000,
    "head_dim": 256,
    "num_key_value_heads": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_key_value_heads": 8,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
_OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "vocab_size": 100278,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "sliding_window": 4096,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}
_SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "vocab_size": 128256,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5_000_000.0,
    "use_sliding_window": False,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}
_GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "vocab_size": 49159,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000_000.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 100352,
    "num_key_value_heads": 10,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 250_000.0,
    "sliding_window": None,
    "pad_token_id": 100349,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
_GLM4 = {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "vocab_size": 151552,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 16,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
_LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_DEEPSEEK_V2_LITE = {
    **_LATENT,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 163840,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}
_MOONLIGHT = {
    **_LATENT,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50_000.0,
    "max_position_embeddings": 8192,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
}
_GLM4_MOE_LITE = {
    **_LATENT,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "vocab_size": 154880,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 202752,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}


def _shape(base: dict, hidden: int, intermediate: int, layers: int, heads: int, **more) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return {**base, **sizes, "num_attention_heads": heads, **more}


SHAPES = {
    "tiny": _shape(_QWEN3, 128, 256, 2, 8, head_dim=16, vocab_size=2048, tie_word_embeddings=True),
    "qwen3-0.6b": _shape(_QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-1.7b": _shape(_QWEN3, 2048, 6144, 28, 16, tie_word_embeddings=True),
    "qwen3-8b": _shape(_QWEN3, 4096, 12288, 36, 32),
    "qwen3-14b": _shape(_QWEN3, 5120, 17408, 40, 40),
    "qwen3-32b": _shape(_QWEN3, 5120, 25600, 64, 64),
    "llama-3.2-1b": _shape(
        _LLAMA, 2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True, rope_scaling={**_LLAMA3_ROPE, "factor": 32.0}
    ),
    "llama-3.1-8b": _shape(_LLAMA, 4096, 14336, 32, 32, head_dim=128, rope_scaling={**_LLAMA3_ROPE, "factor": 8.0}),
    "tiny-llama": _shape(_LLAMA, 128, 256, 4, 8, head_dim=16, vocab_size=2048, rope_scaling=None),
    "llama-3.3-70b": _shape(_LLAMA, 8192, 28672, 80, 64, head_dim=128, rope_scaling={**_LLAMA3_ROPE, "factor": 8.0}),
    "mistral-7b": _shape(_MISTRAL, 4096, 14336, 32, 32),
    "qwen2.5-7b": _shape(_QWEN2, 3584, 18944, 28, 28, num_key_value_heads=4),
    "gemma-3-12b": _shape(_GEMMA3, 3840, 15360, 48, 16, num_key_value_heads=8),
    "gemma-2-9b": _shape(_GEMMA2, 3584, 14336, 42, 16),
    "gemma-4-26b-a4b": _shape(
        _GEMMA4,
        *(2816, 2112, 30, 16),
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "olmo-3-7b": _shape(_OLMO3, 4096, 11008, 32, 32, num_key_value_heads=32),
    "smollm3-3b": _shape(_SMOLLM3, 2048, 11008, 36, 16),
    "granite-3.3-8b": _shape(_GRANITE, 4096, 12800, 40, 32),
    "phi-4": _shape(_PHI3, 5120, 17920, 40, 40),
    "glm-4-9b": _shape(_GLM4, 4096, 13696, 40, 32),
    "tiny-gemma-3": _shape(_GEMMA3, 128, 256, 4, 4, head_dim=32, num_key_value_heads=2, vocab_size=2048),
    "qwen3.5-9b": _shape(_QWEN3_5, 4096, 12288, 32, 16, linear_num_value_heads=32),
    "qwen3.5-27b": _shape(_QWEN3_5, 5120, 17408, 64, 24, linear_num_value_heads=48),
    "tiny-gemma-4-moe": _shape(
        _GEMMA4,
        *(128, 128, 6, 4),
        **{"head_dim": 32, "global_head_dim": 64, "num_key_value_heads": 2, "vocab_size": 2048},
        **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    ),
    "qwen3.5-35b-a3b": _shape(
        {**_QWEN3_5, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"},
        *(2048, 512, 40, 16),
        num_key_value_heads=2,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "tiny-qwen3.5": _shape(
        _QWEN3_5,
        *(128, 256, 4, 4),
        head_dim=32,
        num_key_value_heads=2,
        vocab_size=2048,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "deepseek-v2-lite": _shape(_DEEPSEEK_V2_LITE, 2048, 10944, 27, 16, num_key_value_heads=16),
    "moonlight-16b-a3b": _shape(_MOONLIGHT, 2048, 11264, 27, 16, num_key_value_heads=16),
    "glm-4.7-flash": _shape(_GLM4_MOE_LITE, 2048, 10240, 47, 20, num_key_value_heads=20),
    "tiny-deepseek": _shape(
        {**_MOONLIGHT, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        *(128, 256, 3, 4),
        **{"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16},
        **{"v_head_dim": 16, "vocab_size": 2048},
    ),
    "tiny-moe": _shape(_GPT_OSS, 64, 64, 4, 8, head_dim=16, vocab_size=2048, num_local_experts=8),
    "gpt-oss-20b": _shape(_GPT_OSS, 2880, 2880, 24, 64, num_local_experts=32),
    "gpt-oss-120b": _shape(_GPT_OSS, 2880, 2880, 36, 64, num_local_experts=128),
    "qwen3-30b-a3b": _shape(_QWEN3_MOE, 2048, 6144, 48, 32),
    "tiny-qwen3-moe": _shape(
        _QWEN3_MOE, 64, 128, 4, 8, head_dim=16, vocab_size=2048, num_experts=8, moe_intermediate_size=64
    ),
}
"""config.json of published models and of tiny ones."""

_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_COMMON = "the a one of to in is it that this for with on as by from at an be are was or and not we you they he she"


def make_model(folder: Path, config: dict) -> None:
    """Write config.json, bf16 weights (normal, σ = 0.02, unit norms) or MXFP4, and a byte-level BPE tokenizer."""
    unit = 1 - find_family(config["model_type"]).parts.norm.offset
    model = config_from_hf(config)
    parameters = abstract_parameters(nnx.eval_shape(lambda: build_model(model, rngs=nnx.Rngs(0))))
    layout = checkpoint_layout({name: spec.shape for name, spec in parameters.items()}, config)
    specs = {
        name: jax.ShapeDtypeStruct(part_shape(parameters[parameter].shape, index), parameters[parameter].dtype)
        for name, (parameter, index) in layout.items()
    }
    block = (np.random.default_rng(0).standard_normal(2**24, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    largest = max(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())
    pool = np.resize(
        block, largest // block.itemsize + 4096
    )  # every matrix is a slice of one pool, so only writing takes time

    def weight(name: str) -> np.ndarray:
        spec = specs[name]
        if name.endswith(("linear_attn.norm.weight", "linear_attn.dt_bias")):
            return np.ones(spec.shape, spec.dtype)
        if name.endswith("bias"):
            return np.zeros(spec.shape, spec.dtype)
        if name.endswith("_scales"):
            return np.full(spec.shape, mxfp4_scale(0.02), spec.dtype)
        if len(spec.shape) == 1:
            return np.full(spec.shape, unit, spec.dtype)
        start = zlib.crc32(name.encode()) % 4096  # a different offset per matrix
        if spec.dtype == np.float32:
            return pool[start : start + math.prod(spec.shape)].astype(spec.dtype).reshape(spec.shape)
        values = pool[start:].view(spec.dtype)[: math.prod(spec.shape)].reshape(spec.shape)
        return values * embedding_scale(model) if name.endswith("embed_tokens.weight") else values

    with atomic_folder(folder) as temporary:
        _write_description(temporary, config)
        _write_files(temporary, specs, weight)


def _write_files(folder: Path, specs: dict[str, jax.ShapeDtypeStruct], weight: Callable[[str], np.ndarray]) -> None:
    """Write safetensors files side by side, and their index: one thread fills memory at 1 GB/s on some machines."""
    shards = plan_shards(specs, 2 * 10**9)
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]

    def write(file: str, names: list[str]) -> dict[str, str]:
        write_file(folder / file, {name: specs[name] for name in names}, weight)
        return dict.fromkeys(names, file)

    with ThreadPoolExecutor(16) as pool:
        written = list(pool.map(write, files, shards))
    weight_map = {name: file for names in written for name, file in names.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def embedding_scale(config: DecoderConfig) -> ml_dtypes.bfloat16:
    """Return the factor that makes tokens as unlike each other as routers of trained models find them, 1 without any.

    With small embeddings hidden states are a row's mean and the biases, and all tokens go to the same experts.
    """
    alike = config.moe is not None and not config.tie_word_embeddings
    return ml_dtypes.bfloat16(1 / config.initializer_range if alike else 1)


def make_description(folder: Path, config: dict) -> None:
    """Write config.json and the tokenizer alone, for `--random-weights`."""
    with atomic_folder(folder) as temporary:
        _write_description(temporary, config)


def _write_description(folder: Path, config: dict) -> None:
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2))
    _tokenizer().save_pretrained(folder)


def make_adapter(folder: Path, config: dict, lora: LoraConfig) -> None:
    """Write an initial adapter: A uniform within ±1/√in, B zero."""

    def build():
        model = build_model(config_from_hf(config), rngs=nnx.Rngs(0))
        add_lora(model, lora, rngs=nnx.Rngs(0))
        return model

    variables = nnx.to_flat_state(nnx.state(nnx.eval_shape(build), nnx.LoRAParam))
    shapes = {hf_name(".".join(map(str, path))): variable.shape for path, variable in variables}
    rng = np.random.default_rng(0)

    def matrix(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("lora_B"):
            return np.zeros(shape, np.float32)
        bound = shape[-1] ** -0.5
        return rng.uniform(-bound, bound, shape).astype(np.float32)

    save_adapter(
        folder, {name: matrix(name, shape) for name, shape in shapes.items()}, lora, "", model_type=config["model_type"]
    )


def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # slow, and not for shapes
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([message["content"] for chat in _chats(200, seed=1) for message in chat], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def make_chats(path: Path, count: int, seed: int = 0) -> None:
    """Write chats of one to four exchanges, 64 to about 1,000 tokens each, as JSONL."""
    lines = (json.dumps({"messages": chat}) + "\n" for chat in _chats(count, seed))
    path.write_text("".join(lines), encoding="utf-8")


def _chats(count: int, seed: int):
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnoprstuvw"))
    own = ["".join(rng.choice(letters, rng.integers(3, 10))) for _ in range(800)]
    vocabulary = np.array(_COMMON.split() * 12 + own)
    for _ in range(count):
        exchanges, words = int(rng.integers(1, 5)), int(rng.integers(16, 330))
        asked, told = 2 + words // (4 * exchanges), 2 + words * 3 // (4 * exchanges)
        texts = [[" ".join(rng.choice(vocabulary, n)) for n in (asked, told)] for _ in range(exchanges)]
        yield [
            {"role": role, "content": text}
            for pair in texts
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--layers", type=int, help="decoder layers, by default the published number")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--no-weights", action="store_true", help="config.json and tokenizer alone")
    parser.add_argument("--chats", type=int, default=0, help="chats to write to OUTPUT/../chats.jsonl")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    config = {**SHAPES[args.shape], **({"num_hidden_layers": args.layers} if args.layers else {})}
    (make_description if args.no_weights else make_model)(args.output, config)
    if args.chats:
        make_chats(args.output.parent / "chats.jsonl", args.chats)


if __name__ == "__main__":
    main()
