"""llama.cpp's architectures: its names and metadata for each family, and where it computes otherwise."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxglue.hf.gguf.mamba import find_mamba
from jaxglue.models.config import DecoderConfig, LayerKind
from jaxglue.models.delta_net import DeltaConfig
from jaxglue.models.falcon_h1 import Factors
from jaxglue.models.family import find_family
from jaxglue.models.latent import LatentConfig
from jaxglue.models.short_conv import ShortConvConfig
from jaxglue.ops.rope import RopeConfig, Rotary

_LOCAL_THETA = 10_000.0
"""Rotary base of Gemma 3's windows, which its files do not say."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""Layers by which llama.cpp knows the models whose scores have another scale."""


def _nothing(_config: DecoderConfig) -> dict[str, Any]:
    return {}


def _all_attended(config: DecoderConfig) -> str | None:
    return "sliding windows" if any(window is not None for window in _windows(config)) else None


def _windows(config: DecoderConfig) -> list[int | None]:
    """Return the layers' windows; those of all positions are none."""
    limit = config.max_position_embeddings
    return [None if window is None or window >= limit else window for window in config.layer_windows]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A family in llama.cpp."""

    name: str
    """Its name in `gguf.MODEL_ARCH`."""
    permuted: bool = False
    """Rows of queries and keys are stored in the order in which rotary pairs are neighbors."""
    metadata: Callable[[DecoderConfig], dict[str, Any]] = _nothing
    """Further entries of the file, without the architecture's name in front."""
    obstacle: Callable[[DecoderConfig], str | None] = _all_attended
    """Return a part that llama.cpp would compute otherwise, in words; None without one."""
    factors: bool = False
    """It reads divisors of rotary frequencies."""
    own_output: bool = False
    """Its files hold an output projection, also where it is the embedding."""
    names: tuple[tuple[str, str], ...] = ()
    """Patterns of parts of names here, and those by which the gguf package knows them."""
    flat: tuple[str, ...] = ()
    """Ends of the names of tensors whose axes of size 1 its files leave out."""

    def renamed(self, name: str) -> str:
        """Return a tensor's name as the gguf package knows it."""
        for ours, theirs in self.names:
            name = re.sub(ours, theirs, name)
        return name


def _granite(config: DecoderConfig) -> dict[str, Any]:
    return {
        "attention.scale": float(config.attention.scale or 1.0),
        "embedding_scale": float(config.scales.embedding),
        "residual_scale": float(config.scales.residual),
        "logit_scale": float(config.scales.logit_divisor),
    }


def _qwen3(config: DecoderConfig) -> str | None:
    return "biases in Qwen3's attention" if config.attention_bias else _all_attended(config)


def _qwen3_moe(config: DecoderConfig) -> str | None:
    assert config.moe is not None
    if not all(config.moe.sparse_layers):
        return "dense layers between sparse ones"
    return _all_attended(config) if config.moe.norm_topk_prob else "norm_topk_prob=false"


def _gpt_oss(config: DecoderConfig) -> str | None:
    every_second = all((window is None) == bool(layer % 2) for layer, window in enumerate(config.layer_windows))
    return None if every_second else "GPT-OSS with other layers in windows than every second"


def _unbiased(config: DecoderConfig) -> str | None:
    return "biases in attention" if config.attention_bias else _all_attended(config)


def _whole_square(config: DecoderConfig) -> str | None:
    return _all_attended(config) or _square_heads(config)


def _olmo2(config: DecoderConfig) -> str | None:
    return _unbiased(config) or _square_heads(config)


def _smollm3(config: DecoderConfig) -> str | None:
    turns = [kind.rope is not None for kind in config.layer_kinds]
    if turns != [bool((layer + 1) % 4) for layer in range(len(turns))]:
        return "SmolLM3 with other layers without rotary embeddings than every fourth"
    return _all_attended(config)


def _gemma_scale(config: DecoderConfig) -> str | None:
    large = config.num_hidden_layers == _LAYERS_OF_27B[config.model_type]
    width = config.hidden_size / config.num_attention_heads if large else config.head_dim
    scale = config.attention.scale or 0.0
    return None if abs(scale * width**0.5 - 1) < 1e-6 else f"query_pre_attn_scalar other than {width:g}"


def _gemma2(config: DecoderConfig) -> str | None:
    if any((window is None) != bool(layer % 2) for layer, window in enumerate(config.layer_windows)):
        return "Gemma 2 with other layers in windows than every second"
    if not config.tie_word_embeddings:
        return "Gemma 2 with an output projection apart from the embedding"
    if config.attention.softcap is None or config.scales.logit_softcap is None:
        return "Gemma 2 without caps of scores and logits"
    return _gemma_scale(config)


def _gemma2_metadata(config: DecoderConfig) -> dict[str, Any]:
    assert config.attention.softcap and config.scales.logit_softcap
    caps = {"attn_logit_softcapping": config.attention.softcap, "final_logit_softcapping": config.scales.logit_softcap}
    return {name: float(value) for name, value in caps.items()}


def _gemma3(config: DecoderConfig) -> str | None:
    kinds = config.layer_kinds
    if any((kind.window is None) != ((layer + 1) % 6 == 0) for layer, kind in enumerate(kinds)):
        return "Gemma 3 with other layers in windows than five of six"
    local = [kind.rope for kind in kinds if kind.window is not None]
    if any(rope is None or rope.rope_type != "default" or rope.rope_theta != _LOCAL_THETA for rope in local):
        return f"rotary embeddings of windows other than with base {_LOCAL_THETA:g}"
    return "a cap of logits" if config.scales.logit_softcap is not None else _gemma_scale(config)


def _olmo3(config: DecoderConfig) -> str | None:
    kinds, windows = config.layer_kinds, _windows(config)
    if any(windows) and any((window is None) != ((layer + 1) % 4 == 0) for layer, window in enumerate(windows)):
        return "OLMo 3 with other layers in windows than three of four"
    sliding = [kind.rope for kind, window in zip(kinds, windows, strict=True) if window is not None]
    if any(
        rope is None or rope.rope_type != "default" or rope.rope_theta != config.rope.rope_theta for rope in sliding
    ):
        return "rotary embeddings of windows with another base than those of full attention, or scaled"
    return "biases in attention" if config.attention_bias else _square_heads(config)


def _square_heads(config: DecoderConfig) -> str | None:
    """Return an obstacle where heads are not as wide as the model together: llama.cpp reads no other width of these."""
    width = config.num_attention_heads * config.head_dim
    return None if width == config.hidden_size else f"heads that are {width} wide together, not hidden_size"


def _ministral3(config: DecoderConfig) -> dict[str, Any]:
    assert config.rope.query_scale is not None
    scale, length = config.rope.query_scale
    return {
        "attention.temperature_scale": scale,
        "rope.scaling.original_context_length": length,
        **({"rope.scaling.yarn_log_multiplier": 1.0} if config.rope.rope_type == "yarn" else {}),
    }


def _ministral3_rope(config: DecoderConfig) -> str | None:
    rope = config.rope
    if rope.rope_type == "yarn" and (rope.attention_factor or (rope.mscale, rope.mscale_all_dim) != (1.0, 1.0)):
        return "Ministral's YaRN with other factors than mscale and mscale_all_dim of 1"
    return _all_attended(config)


def _qwen2_moe(config: DecoderConfig) -> str | None:
    assert config.moe is not None
    if not all(config.moe.sparse_layers):
        return "dense layers between sparse ones"
    return (
        "norm_topk_prob=true in Qwen2-MoE"
        if config.moe.norm_topk_prob
        else _all_attended(config) or _square_heads(config)
    )


def _qwen2_moe_metadata(config: DecoderConfig) -> dict[str, Any]:
    assert config.moe is not None
    return {"expert_shared_feed_forward_length": config.moe.shared_size}


def _glm4_moe(config: DecoderConfig) -> str | None:
    assert config.moe is not None
    if config.moe.groups.total > 1:
        return "experts in groups"
    return "GLM without shared experts" if not config.moe.shared_size else _all_attended(config)


_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's numbers of routers."""


def _glm4_moe_metadata(config: DecoderConfig) -> dict[str, Any]:
    return _partial(config) | _routed(config)


def _routed(config: DecoderConfig) -> dict[str, Any]:
    """Return the metadata of routed experts beside shared ones, after dense layers."""
    moe = config.moe
    assert moe is not None
    softmax = find_family(config.model_type).parts.experts.order == "softmax_topk"
    return {
        "expert_shared_count": moe.shared_size // moe.intermediate_size,
        "leading_dense_block_count": moe.sparse_layers.count(False),
        "expert_weights_scale": float(moe.routed_scale),
        "expert_weights_norm": moe.norm_topk_prob,
        "expert_gating_func": _SOFTMAX if softmax else _SIGMOID,
    }


_LAYERS_OF_LITE = (26, 27)
"""Layers by which llama.cpp knows models whose queries come from no latent vector, such as DeepSeek-V2-Lite."""


def _latent(config: DecoderConfig) -> str | None:
    moe, rope, latent = config.moe, config.rope, config.mixer_of(LatentConfig)
    assert moe is not None and latent is not None
    if latent.query_rank is None and config.num_hidden_layers not in _LAYERS_OF_LITE:
        return "queries without a latent vector in a model of other than 26 or 27 layers"
    dense = moe.sparse_layers.count(False)
    if any(moe.sparse_layers[:dense]):
        return "dense layers between sparse ones"
    if not moe.shared_size:
        return "latent attention without shared experts"
    if moe.groups.total > 1 and config.model_type == "deepseek_v2":
        return "groups of experts by their best one"
    if config.attention_bias:
        return "biases in latent attention"
    if not rope.interleaved:
        return "latent attention whose pairs are halves apart"
    return "YaRN with other factors for rotation and scale" if rope.mscale != rope.mscale_all_dim else None


def _latent_metadata(config: DecoderConfig) -> dict[str, Any]:
    """Return the metadata of attention to latents: all heads have one key, a latent and what turns."""
    latent, moe, rope = config.mixer_of(LatentConfig), config.moe, config.rope
    assert latent is not None and moe is not None
    found: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent.rank,
        "attention.key_length": latent.rank + latent.rope_dim,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": config.head_dim,
        "attention.value_length_mla": latent.value_dim,
        "rope.dimension_count": latent.rope_dim,
    }
    if latent.query_rank is not None:
        found["attention.q_lora_rank"] = latent.query_rank
    if moe.groups.total > 1:
        found |= {"expert_group_count": moe.groups.total, "expert_group_used_count": moe.groups.kept}
    if rope.rope_type == "yarn" and rope.mscale_all_dim:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope.mscale_all_dim
    return found | _routed(config)


def _gemma4(config: DecoderConfig) -> str | None:
    kinds, own = config.layer_kinds, config.per_layer
    sliding, full = ([kind for kind in kinds if (kind.window is not None) is slides] for slides in (True, False))
    if not sliding or not full:
        return "Gemma 4 with layers of one kind"
    if any(len({part(kind) for kind in each}) > 1 for each in (sliding, full) for part in (_rope_of, _head_of)):
        return "Gemma 4 with layers of one kind that differ"
    if sliding[0].rope is None or sliding[0].rope.rope_type != "default":
        return "scaled rotary embeddings of windows"
    first = len(kinds) - _taking(config)
    if first < len(kinds) and (kinds[first - 1].window is not None or kinds[first - 2].window is None):
        return "keys and values of other layers than the last two that have some, of which the last attends to all"
    if own is not None and own.vocab_size != config.vocab_size:
        return "embeddings for each layer of another vocabulary"
    return "biases in attention" if config.attention_bias else None


def _rope_of(kind: LayerKind) -> RopeConfig | None:
    return kind.rope


def _head_of(kind: LayerKind) -> int:
    return kind.head_dim


def _taking(config: DecoderConfig) -> int:
    """Return the number of layers that read others' keys and values."""
    return sum(shape.shares == "takes" for shape in config.shapes)


def _gemma4_metadata(config: DecoderConfig) -> dict[str, Any]:
    """Return the metadata of two kinds of layers, under names of their own where they slide."""
    kinds, own = config.layer_kinds, config.per_layer
    full = next(kind for kind in kinds if kind.window is None)
    sliding = next(kind for kind in kinds if kind.window is not None)
    assert full.rope is not None and sliding.rope is not None
    found: dict[str, Any] = {
        "feed_forward_length": [shape.intermediate_size for shape in config.shapes],
        "attention.head_count_kv": [shape.kv_heads for shape in config.shapes],
        "attention.sliding_window": sliding.window,
        "attention.sliding_window_pattern": [kind.window is not None for kind in kinds],
        "attention.shared_kv_layers": _taking(config),
        "embedding_length_per_layer_input": 0 if own is None else own.size,
    }
    for suffix, kind in (("", full), ("_swa", sliding)):
        found |= {f"attention.{part}_length{suffix}": kind.head_dim for part in ("key", "value")}
        found[f"rope.dimension_count{suffix}"] = kind.head_dim
        found[f"rope.freq_base{suffix}"] = float(kind.rope.rope_theta) if kind.rope else 0.0
    return found | (
        {"final_logit_softcapping": float(config.scales.logit_softcap)} if config.scales.logit_softcap else {}
    )


def _partial(config: DecoderConfig) -> dict[str, Any]:
    return {"rope.dimension_count": Rotary(config.rope, config.head_dim).dims}


def _linear_attention(config: DecoderConfig) -> str | None:
    delta = config.mixer_of(DeltaConfig)
    if delta is None:
        return "models of this type without layers of linear attention"
    if delta.key_dim != delta.value_dim:
        return "keys and values of linear attention of different sizes"
    if _interval(config) is None:
        return "layers of linear attention in another order than all but every so many-th"
    return _unbiased(config)


def _interval(config: DecoderConfig) -> int | None:
    """Return the number of layers of which the last is not of linear attention; None where there is none."""
    layers = tuple(mixer.recurrent for mixer in config.mixers)
    interval = layers.index(False) + 1 if False in layers else len(layers) + 1
    return interval if layers == tuple(bool((i + 1) % interval) for i in range(len(layers))) else None


def _linear_attention_metadata(config: DecoderConfig) -> dict[str, Any]:
    delta, pairs = config.mixer_of(DeltaConfig), Rotary(config.rope, config.head_dim).dims // 2
    assert delta is not None
    thirds = (pairs + 2) // 3, (pairs + 1) // 3, pairs // 3
    found = {
        "ssm.conv_kernel": delta.conv_width,
        "ssm.inner_size": delta.value_width,
        "ssm.state_size": delta.key_dim,
        "ssm.time_step_rank": delta.num_value_heads,
        "ssm.group_count": delta.num_key_heads,
        "full_attention_interval": _interval(config),
        # Positions in time, height and width take turns, and those of text are alike.
        "rope.dimension_sections": [*(config.rope.sections or thirds), 0],
        **_partial(config),
    }
    return found | ({"expert_shared_feed_forward_length": config.moe.shared_size} if config.moe else {})


def _plain_biases(config: DecoderConfig) -> str | None:
    return "biases of linear layers" if config.attention_bias or config.mlp_bias else _all_attended(config)


def _seed_oss(config: DecoderConfig) -> str | None:
    return "biases of attention's output" if config.attention.output_bias else _all_attended(config)


_LAYERS_OF_32B = 64
"""Layers by which llama.cpp knows the EXAONE 4 that has windows."""


def _exaone4(config: DecoderConfig) -> str | None:
    slides = [window is not None for window in config.layer_windows]
    if not any(slides):
        return None
    if len(slides) != _LAYERS_OF_32B or slides != [bool((layer + 1) % 4) for layer in range(len(slides))]:
        return f"EXAONE 4 with windows in other layers than three of four of {_LAYERS_OF_32B}"
    return None


def _cohere2(config: DecoderConfig) -> str | None:
    slides = [window is not None for window in config.layer_windows]
    if slides != [bool((layer + 1) % 4) for layer in range(len(slides))]:
        return "Cohere 2 with other layers in windows than three of four"
    if not config.tie_word_embeddings:
        return "Cohere 2 with an output projection apart from the embedding"
    return "biases in attention" if config.attention_bias else None


def _cohere2_metadata(config: DecoderConfig) -> dict[str, Any]:
    return {
        "attention.layer_norm_epsilon": float(config.rms_norm_eps),
        "logit_scale": 1 / config.scales.logit_divisor,
    }


def _ernie_moe(config: DecoderConfig) -> str | None:
    assert config.moe is not None
    dense = config.moe.sparse_layers.count(False)
    if any(config.moe.sparse_layers[:dense]):
        return "dense layers between sparse ones"
    return "ERNIE without shared experts" if not config.moe.shared_size else _plain_biases(config)


def _ernie_moe_metadata(config: DecoderConfig) -> dict[str, Any]:
    assert config.moe is not None
    moe = config.moe
    return {
        "expert_shared_count": moe.shared_size // moe.intermediate_size,
        "expert_shared_feed_forward_length": moe.shared_size,
        "leading_dense_block_count": moe.sparse_layers.count(False),
        "interleave_moe_layer_step": 1,
    }


def _minimax_metadata(config: DecoderConfig) -> dict[str, Any]:
    return {**_partial(config), "expert_gating_func": _SIGMOID}


def _short_conv(config: DecoderConfig) -> str | None:
    conv, moe = config.mixer_of(ShortConvConfig), config.moe
    if conv is None or conv.bias:
        return "models of short convolutions without any, or with biases"
    if not config.tie_word_embeddings:
        return "LFM2 with an output projection apart from the embedding"
    if moe and not (moe.norm_topk_prob and moe.routed_scale == 1.0):
        return "weights of experts that are scaled or not normalized"
    return (
        "dense layers between sparse ones" if moe and any(moe.sparse_layers[: moe.sparse_layers.count(False)]) else None
    )


def _short_conv_metadata(config: DecoderConfig) -> dict[str, Any]:
    """Return the metadata of layers without keys, whose number of heads is 0."""
    conv, heads = config.mixer_of(ShortConvConfig), config.num_key_value_heads
    assert conv is not None
    found: dict[str, Any] = {
        "shortconv.l_cache": conv.width,
        "attention.head_count_kv": [0 if mixer.recurrent else heads for mixer in config.mixers],
    }
    if config.moe:
        dense = config.moe.sparse_layers.count(False)
        found |= {"leading_dense_block_count": dense, "expert_gating_func": _SIGMOID}
    return found


_SHORT_CONV_NAMES = (
    (r"model\.norm", "model.embedding_norm"),
    *(
        (rf"feed_forward\.experts\.{ours}", f"mlp.experts.{ours}")
        for ours in ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
    ),
    (r"feed_forward\.gate\.e_score_correction", "feed_forward.expert_bias"),
)


def _mamba(config: DecoderConfig) -> str | None:
    mamba = find_mamba(config)
    if mamba is None or not mamba.conv_bias or mamba.input_bias or mamba.output_bias:
        return "models of Mamba-2 without any, or with other biases than its convolution's"
    if mamba.limits != (0.0, float("inf")):
        return "limits of Mamba-2's step sizes"
    return "norms of Mamba-2's output before its gate" if mamba.norm == "gate_last" else _plain_biases(config)


def _granite_hybrid(config: DecoderConfig) -> str | None:
    return "rotary embeddings beside Mamba-2" if not config.layer_ropes else _mamba(config)


def _nemotron(config: DecoderConfig) -> str | None:
    moe = config.moe
    if moe and (moe.groups[0] > 1 or moe.latent_size or not moe.shared_size):
        return "groups of experts, experts of a width of their own or none that all tokens share"
    if moe and any(shape.intermediate_size for shape in config.shapes):
        return "dense feed-forwards beside experts"
    return _mamba(config)


def _falcon(config: DecoderConfig) -> str | None:
    if config.tie_word_embeddings and (config.scales.embedding, config.scales.logit_divisor) != (1.0, 1.0):
        return "factors of an embedding that is the output projection"
    return _mamba(config)


def _mamba_metadata(config: DecoderConfig) -> dict[str, Any]:
    mamba, heads = find_mamba(config), config.num_key_value_heads
    assert mamba is not None
    found: dict[str, Any] = {
        "ssm.conv_kernel": mamba.conv_width,
        "ssm.inner_size": mamba.heads.value_width,
        "ssm.state_size": mamba.heads.state_dim,
        "ssm.time_step_rank": mamba.heads.values,
        "ssm.group_count": mamba.heads.groups,
    }
    if not isinstance(config.family_shape, Factors):
        found["attention.head_count_kv"] = [heads if mixer.attends else 0 for mixer in config.mixers]
    return found


def _granite_hybrid_metadata(config: DecoderConfig) -> dict[str, Any]:
    found = {**_granite(config), **_mamba_metadata(config), "rope.scaling.finetuned": False}
    if moe := config.moe:
        found |= {
            "feed_forward_length": moe.intermediate_size,
            "expert_shared_feed_forward_length": moe.shared_size,
        }
    return found


def _nemotron_metadata(config: DecoderConfig) -> dict[str, Any]:
    found, moe = _mamba_metadata(config), config.moe
    found["attention.layer_norm_epsilon"] = float(config.rms_norm_eps)
    if moe is None:
        return {**found, "feed_forward_length": [shape.intermediate_size for shape in config.shapes]}
    return {
        **found,
        "feed_forward_length": [moe.intermediate_size * sparse for sparse in moe.sparse_layers],
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": moe.shared_size,
        "expert_weights_norm": moe.norm_topk_prob,
        "expert_weights_scale": float(moe.routed_scale),
        "expert_group_count": 1,
    }


_DT_BIAS = (r"mamba\.dt_bias", "mamba.dt_proj.bias")
_GRANITE_DENSE = Architecture(
    name="GRANITE_HYBRID",
    permuted=True,
    metadata=_granite_hybrid_metadata,
    obstacle=_granite_hybrid,
    names=(
        *((r"shared_mlp\.output_linear", "mlp.down_proj"), (r"shared_mlp\.", "mlp.")),
        _DT_BIAS,
    ),
)
_NEMOTRON_DENSE = Architecture(
    name="NEMOTRON_H",
    metadata=_nemotron_metadata,
    obstacle=_nemotron,
    names=(
        (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"mixer\.((in|out)_proj|conv1d|dt_bias|A_log|D|norm)\b", r"mamba.\1"),
        *((r"mixer\.([qkvo]_proj)", r"self_attn.\1"), (r"mixer\.", "mlp.")),
        _DT_BIAS,
    ),
)
ARCHITECTURES = {
    "llama": Architecture(name="LLAMA", permuted=True, factors=True),
    "mistral": Architecture(name="LLAMA", permuted=True, factors=True),
    "ministral": Architecture(name="LLAMA", permuted=True, factors=True),
    "qwen2": Architecture(name="QWEN2", obstacle=_whole_square),
    "qwen3": Architecture(name="QWEN3", obstacle=_qwen3),
    "qwen3_moe": Architecture(name="QWEN3MOE", obstacle=_qwen3_moe),
    "gpt_oss": Architecture(name="GPT_OSS", obstacle=_gpt_oss, own_output=True),
    "granite": Architecture(name="GRANITE", permuted=True, metadata=_granite, factors=True),
    "olmo2": Architecture(name="OLMO2", obstacle=_olmo2, own_output=True),
    "olmo3": Architecture(name="OLMO2", obstacle=_olmo3, own_output=True),
    "ministral3": Architecture(
        name="MISTRAL3", permuted=True, metadata=_ministral3, obstacle=_ministral3_rope, factors=True
    ),
    "mixtral": Architecture(name="LLAMA", permuted=True, factors=True),
    "qwen2_moe": Architecture(name="QWEN2MOE", metadata=_qwen2_moe_metadata, obstacle=_qwen2_moe, own_output=True),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        Architecture(name="DEEPSEEK2", metadata=_latent_metadata, obstacle=_latent),
    ),
    "glm4_moe": Architecture(name="GLM4_MOE", metadata=_glm4_moe_metadata, obstacle=_glm4_moe),
    "seed_oss": Architecture(name="SEED_OSS", obstacle=_seed_oss),
    "exaone4": Architecture(name="EXAONE4", obstacle=_exaone4, factors=True),
    "hunyuan_v1_dense": Architecture(name="HUNYUAN_DENSE", obstacle=_plain_biases),
    "ernie4_5": Architecture(name="ERNIE4_5", obstacle=_plain_biases),
    "ernie4_5_moe": Architecture(
        name="ERNIE4_5_MOE",
        metadata=_ernie_moe_metadata,
        obstacle=_ernie_moe,
        flat=("e_score_correction_bias",),
    ),
    "minimax_m2": Architecture(name="MINIMAXM2", metadata=_minimax_metadata),
    "cohere2": Architecture(name="COHERE2", metadata=_cohere2_metadata, obstacle=_cohere2),
    **{
        model_type: Architecture(
            name=name,
            metadata=_short_conv_metadata,
            obstacle=_short_conv,
            names=_SHORT_CONV_NAMES,
            flat=("conv.conv.weight",),
        )
        for model_type, name in (("lfm2", "LFM2"), ("lfm2_moe", "LFM2MOE"))
    },
    "gemma4_unified_text": Architecture(name="GEMMA4", metadata=_gemma4_metadata, obstacle=_gemma4, factors=True),
    "granitemoehybrid": _GRANITE_DENSE,
    "granitemoehybrid with experts": replace(
        _GRANITE_DENSE,
        names=(
            *((r"block_sparse_moe\.router", "mlp.gate"), (r"block_sparse_moe\.", "mlp.")),
            *((r"shared_mlp\.output_linear", "mlp.shared_expert.down_proj"), (r"shared_mlp\.", "mlp.shared_expert.")),
            _DT_BIAS,
        ),
    ),
    "nemotron_h": _NEMOTRON_DENSE,
    "nemotron_h with experts": replace(_NEMOTRON_DENSE, name="NEMOTRON_H_MOE"),
    "falcon_h1": Architecture(
        name="FALCON_H1",
        metadata=_mamba_metadata,
        obstacle=_falcon,
        names=((r"feed_forward\.", "mlp."), _DT_BIAS),
    ),
    "smollm3": Architecture(name="SMOLLM3", permuted=True, obstacle=_smollm3),
    "gemma2": Architecture(name="GEMMA2", metadata=_gemma2_metadata, obstacle=_gemma2),
    "gemma4_text": Architecture(name="GEMMA4", metadata=_gemma4_metadata, obstacle=_gemma4, factors=True),
    "gemma3_text": Architecture(name="GEMMA3", obstacle=_gemma3),
    "glm4": Architecture(name="GLM4", metadata=_partial),
    "phi3": Architecture(name="PHI3", metadata=_partial, factors=True, obstacle=_whole_square),
    "qwen3_next": Architecture(name="QWEN3NEXT", metadata=_linear_attention_metadata, obstacle=_linear_attention),
    "qwen3_5_text": Architecture(name="QWEN35", metadata=_linear_attention_metadata, obstacle=_linear_attention),
    "qwen3_5_moe_text": Architecture(name="QWEN35MOE", metadata=_linear_attention_metadata, obstacle=_linear_attention),
}
"""Families of llama.cpp by Hugging Face's `model_type`."""


def find_architecture(config: DecoderConfig) -> Architecture | None:
    """Return a model's architecture, of some families another with experts; None for those that llama.cpp lacks."""
    dense = ARCHITECTURES.get(config.model_type)
    return ARCHITECTURES.get(f"{config.model_type} with experts", dense) if config.moe else dense


def architecture_of(config: DecoderConfig) -> Architecture:
    """Return the architecture of a model that has one."""
    found = find_architecture(config)
    assert found is not None
    return found
