"""The metadata of a GGUF file that describe the model's shape to llama.cpp."""

from typing import Any

from jaxglue.hf.gguf.architectures import architecture_of, find_architecture
from jaxglue.models.config import DecoderConfig
from jaxglue.models.latent import LatentConfig
from jaxglue.ops.rope import inverse_frequencies

_REMEDY = "serve the model folder with transformers or vLLM"


def model_metadata(config: DecoderConfig, vocab_size: int) -> dict[str, Any]:
    """Return a model's metadata, without the architecture's name in front.

    Args:
        config: of the model.
        vocab_size: rows of its embedding.

    Raises:
        ValueError: a model that llama.cpp would compute otherwise.
    """
    _refuse_others(config)
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope.rope_theta),
    }
    if config.moe:
        found |= {
            "expert_count": config.moe.num_experts,
            "expert_used_count": config.moe.num_experts_per_tok,
            "expert_feed_forward_length": config.moe.intermediate_size,
        }
    windows = {window for window in config.layer_windows if window and window < config.max_position_embeddings}
    if windows:
        found["attention.sliding_window"] = windows.pop()
    return found | _rope_metadata(config) | architecture_of(config).metadata(config)


def _rope_metadata(config: DecoderConfig) -> dict[str, Any]:
    """Return the scaling of rotary frequencies; Llama 3.1's is a tensor (`rope_freqs`)."""
    rope = config.rope
    if rope.rope_type == "longrope":
        return {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": rope.original_max_position_embeddings,
            "rope.scaling.attn_factor": inverse_frequencies(rope, config.head_dim)[1],
        }
    if rope.rope_type not in ("linear", "yarn"):
        return {}
    assert rope.factor
    found: dict[str, Any] = {"rope.scaling.type": rope.rope_type, "rope.scaling.factor": float(rope.factor)}
    if rope.rope_type == "yarn":
        found["rope.scaling.original_context_length"] = rope.original_max_position_embeddings
        found["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        found["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    return found


def _refuse_others(config: DecoderConfig) -> None:
    """Raise ValueError for a model that llama.cpp's architecture cannot express."""
    architecture = find_architecture(config)
    if architecture is None:
        found: str | None = f"models of type {config.model_type}"
    else:
        found = "reward models" if config.scores else architecture.obstacle(config)
    scaled = {rotary.config.rope_type for rotary in config.rotaries} & {"llama3", "longrope"}
    if scaled and architecture and not architecture.factors:
        found = f"rotary embeddings of type {min(scaled)} in models of type {config.model_type}"
    if len({rotary.config.rope_type for rotary in config.rotaries} - {"default"}) > 1:
        found = "several scalings of rotary embeddings"
    knows_scale = config.rope.query_scale is not None or config.mixer_of(LatentConfig) is not None
    own_factor = config.rope.attention_factor or (config.rope.mscale and not knows_scale)
    if config.rope.rope_type == "yarn" and own_factor:
        found = "YaRN with an attention factor of its own"
    if found:
        raise ValueError(f"--gguf: llama.cpp does not compute {found}: {_REMEDY}")
