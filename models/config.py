"""A decoder's shape, read from Hugging Face's config.json."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxglue.ops.quant.formats import Quantize, check_format
from jaxglue.ops.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The feed-forward of a decoder's sparse layers: a few of many experts for each token."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """F of one expert."""
    sparse_layers: tuple[bool, ...]
    """Whether each layer has experts; the others have a dense feed-forward."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts sum to one."""
    mxfp4: bool = False
    """Whether the experts' matrices are kept in MXFP4, which cannot be trained."""

    def __post_init__(self):
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be between 1 and num_experts={self.num_experts}"
            )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder-only transformer; the fields carry Hugging Face's names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    layer_windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens, None for full attention."""
    moe: MoeConfig | None = None
    """None when every layer is dense."""
    quantize: Quantize = "none"
    """How the decoder layers' linear layers are stored; embeddings, norms, routers and lm_head never are quantized."""

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs of dimensions")
        assert len(self.layer_windows) == self.num_hidden_layers
        assert self.moe is None or len(self.moe.sparse_layers) == self.num_hidden_layers
        self._check_quantize()

    def _check_quantize(self) -> None:
        if self.quantize != "none" and self.moe and not self.moe.mxfp4:
            raise ValueError(
                f"--quantize {self.quantize} is not supported for experts that are not in MXFP4: leave it out"
            )
        heads = {"num_attention_heads × head_dim": self.num_attention_heads * self.head_dim}
        sizes = {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}
        check_format(self.quantize, sizes | heads)

    def quantized(self, how: Quantize) -> "DecoderConfig":
        """The same model with its linear layers in this format; `none` leaves them as its folder has them.

        Raises:
            ValueError: the format cannot hold them, or the folder has them in another.
        """
        if how == "none" or how == self.quantize:
            return self
        if self.quantize != "none":
            raise ValueError(
                f"--quantize {how}: the model's folder is quantized to {self.quantize} already; "
                "leave it out, or name the folder of the original"
            )
        return replace(self, quantize=how)

    @property
    def embedding_values(self) -> int:
        """V · D."""
        return self.vocab_size * self.hidden_size

    @property
    def expanded(self) -> "DecoderConfig":
        """The same model with its experts in the dtype of its other weights."""
        return replace(self, moe=replace(self.moe, mxfp4=False)) if self.moe else self


def require_fields(raw: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError when config.json lacks a field."""
    if missing := [name for name in names if raw.get(name) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")


def layer_windows(raw: Mapping[str, Any], types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of every layer of these types, Hugging Face's `layer_types`.

    Raises:
        ValueError: another type, or not one type for each layer.
    """
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"layer_types {', '.join(unknown)} are not supported: only full_attention, sliding_attention are"
        )
    if len(types) != raw["num_hidden_layers"]:
        raise ValueError(f"layer_types has {len(types)} entries for num_hidden_layers={raw['num_hidden_layers']}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def decoder_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that all families read alike from config.json.

    Raises:
        ValueError: a needed field is missing, or the activation or rope type is not supported.
    """
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    require_fields(raw, needed)
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported for {raw['model_type']}: only 'silu' is")
    heads = raw["num_attention_heads"]
    return {
        **{name: raw[name] for name in needed},
        "model_type": raw["model_type"],
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "max_position_embeddings": raw.get("max_position_embeddings", 2048),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "attention_bias": raw.get("attention_bias", False),
        "mlp_bias": raw.get("mlp_bias", False),
        "initializer_range": raw.get("initializer_range", 0.02),
        "rope": RopeConfig.from_hf(raw),
        "quantize": _stored_format(raw),
    }


def _stored_format(raw: Mapping[str, Any]) -> Quantize:
    """How the folder holds its linear layers, by bitsandbytes' part of config.json.

    Raises:
        ValueError: quantized by another tool, in another format of bitsandbytes, or only in part.
    """
    stored = raw.get("quantization_config") or {}
    if not stored or raw["model_type"] == "gpt_oss":
        return "none"
    remedy = "use the folder of the original model, with --quantize nf4 or int8"
    if stored.get("quant_method") != "bitsandbytes":
        raise ValueError(f"quant_method {stored.get('quant_method')!r} in config.json is not supported: {remedy}")
    skipped = stored.get("llm_int8_skip_modules") or []
    if within := [name for name in skipped if name not in ("lm_head", "embed_tokens", "model.embed_tokens")]:
        raise ValueError(f"config.json leaves {', '.join(within[:3])} unquantized, which is not supported: {remedy}")
    if stored.get("load_in_8bit"):
        return "int8"
    kind = stored.get("bnb_4bit_quant_type", "fp4"), stored.get("bnb_4bit_use_double_quant", False)
    if kind != ("nf4", True):
        raise ValueError(f"config.json says {kind[0]}, double quantization {kind[1]}; only nf4, True is read: {remedy}")
    return "nf4"
