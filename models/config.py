"""The decoder's architecture: sizes, kinds of layers, and how weights are stored."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from jaxtyping import Array, Int

from jaxglue.models.wrapper import TEXT_PATH, WRAPPERS
from jaxglue.ops.choices import Storage
from jaxglue.ops.gated_mlp import Activation
from jaxglue.ops.moe import ONE_GROUP, Groups
from jaxglue.ops.quant.formats import FORMATS, find_format
from jaxglue.ops.rope import RopeConfig, RopeTables, Rotary


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Shape of the sparse feed-forward layers."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """F of each expert."""
    sparse_layers: tuple[bool, ...]
    """Whether each layer has experts rather than a dense feed-forward."""
    norm_topk_prob: bool = True
    """Normalize each token's expert weights to sum to one."""
    quantize: Storage = "none"
    """Storage of the experts' matrices; quantized ones cannot be trained."""
    shared_size: int = field(default=0, repr=False)
    """F of the shared expert, which serves every token; 0 without one."""
    groups: Groups = field(default=ONE_GROUP, repr=False)
    """Groups of experts, from some of which alone a token chooses."""
    routed_scale: float = field(default=1.0, repr=False)
    """Factor of the weights of routed experts."""

    def __post_init__(self) -> None:
        count, kept = self.groups
        if self.num_experts % count or not 1 <= kept <= count:
            raise ValueError(
                f"n_group={count} and topk_group={kept}: groups must divide the {self.num_experts} experts, and some "
                "or all of them be kept"
            )
        if count > 1 and self.num_experts // count < 2:
            raise ValueError(f"n_group={count} leaves groups of one of {self.num_experts} experts: they need two")
        if kept < count and self.num_experts_per_tok > (most := kept * self.num_experts // count):
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is above the {most} experts of the groups that a "
                f"token keeps (topk_group={kept} of n_group={count})"
            )
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be between 1 and num_experts={self.num_experts}"
            )


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Shape of the layers with linear attention by the gated delta rule."""

    num_key_heads: int
    """Heads of queries and keys."""
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    """Tokens of the convolution before it."""
    layers: tuple[bool, ...]
    """Whether each layer has linear attention."""

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.num_value_heads} must be a multiple of "
                f"linear_num_key_heads={self.num_key_heads}"
            )

    @property
    def key_width(self) -> int:
        """Return the width of all queries, or of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Return the width of all values."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Return the width of queries, keys and values."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Shape of latent attention."""

    query_rank: int | None
    """Size of the queries' latent vector; None where they are projected at once."""
    rank: int
    """Size of the latent vector of keys and values."""
    nope_dim: int
    """Dimensions of each query and key that do not turn."""
    rope_dim: int
    """Dimensions after these that do, those of keys being the same for all heads."""
    value_dim: int

    @property
    def cached_dim(self) -> int:
        """Return the values of a token in the cache: the key's part that turns, and the latent vector."""
        return self.rope_dim + self.rank


@dataclass(frozen=True, kw_only=True)
class PerLayerConfig:
    """Shape of the embeddings that each layer has of its own."""

    size: int
    """P, width of one layer's."""
    vocab_size: int
    layers: int
    """L, of the whole model."""


class LayerShape(NamedTuple):
    """Sizes of a layer's attention and dense feed-forward, and where its keys and values come from."""

    head_dim: int
    kv_heads: int
    intermediate_size: int
    keys_as_values: bool = False
    """One projection gives keys and values."""
    shares: Literal["gives", "takes"] | None = None
    """Keys and values go to later layers, or come from an earlier one."""
    place: int = 0
    """First column of these in the residual stream, after the model's width."""

    @property
    def shared_width(self) -> int:
        """Return the width of keys and values in the residual stream."""
        return 2 * self.kv_heads * self.head_dim


class LayerKind(NamedTuple):
    """Differences between the layers of one model; those of one kind share compiled programs."""

    shape: LayerShape
    window: int | None
    """Tokens visible to a query, itself included; None for all."""
    rope: RopeConfig | None
    """None without positions."""
    sparse: bool
    """Experts rather than a dense feed-forward."""
    unquantized: tuple[str, ...] = ()
    """Linear layers in the model's dtype, where the others are quantized."""
    linear: bool = False
    """Linear attention by the gated delta rule."""

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.shape.head_dim

    @property
    def rotary(self) -> Rotary | None:
        """Return the rotary embedding of the heads."""
        return None if self.rope is None else Rotary(self.rope, self.head_dim)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder-only transformer, in Hugging Face's field names."""

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
    """Sliding window of each layer in tokens; None for full attention."""
    layer_ropes: tuple[RopeConfig | None, ...] = field(default=(), repr=False)
    """Rotary embedding of each layer, None for none; empty where all have `rope`."""
    moe: MoeConfig | None = None
    """None for dense models."""
    quantize: Storage = "none"
    """Storage of the decoder layers' linear layers; embeddings, norms, routers and lm_head stay unquantized."""
    layer_unquantized: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    """Linear layers of each layer that are not in this format, such as mlp.up_proj; empty where all are."""
    activation: Activation = field(default="silu", repr=False)
    """Activation of the gate of dense feed-forwards."""
    attention_output_bias: bool | None = field(default=None, repr=False)
    """Whether attention's output projection has a bias; None: as `attention_bias` says of all four projections."""
    head_norms: bool = field(default=True, repr=False)
    """Queries and keys have the norms that the family has for them."""
    attention_scale: float | None = field(default=None, repr=False)
    """Factor of the scores; None for 1 / √head_dim."""
    attention_softcap: float | None = field(default=None, repr=False)
    """Bound c of the scores, c·tanh(score / c)."""
    embedding_multiplier: float = field(default=1.0, repr=False)
    """Factor of the embeddings, rounded to their dtype."""
    residual_multiplier: float = field(default=1.0, repr=False)
    """Factor of what attention and feed-forward add to the residual stream."""
    logit_divisor: float = field(default=1.0, repr=False)
    logit_softcap: float | None = field(default=None, repr=False)
    """Bound c of the logits, c·tanh(logit / c)."""
    layer_shapes: tuple[LayerShape, ...] = field(default=(), repr=False)
    """Sizes of each layer; empty where all have those above."""
    shared_width: int = field(default=0, repr=False)
    """Columns of the residual stream that hold keys and values of some layers for later ones."""
    per_layer: PerLayerConfig | None = field(default=None, repr=False)
    """None without embeddings for each layer."""
    latent: LatentConfig | None = field(default=None, repr=False)
    """None without latent attention."""
    delta: DeltaConfig | None = field(default=None, repr=False)
    """None without layers of linear attention."""
    wrapper: str | None = field(default=None, repr=False)
    """Model type around it, such as one with a vision tower; see `jaxglue.models.wrapper`."""
    scores: bool = False
    """Score every token in place of projecting it to the vocabulary, as reward models and classifiers do."""
    labels: int = field(default=1, repr=False)
    """Scores of a token where it is scored: one for each label of a classifier."""
    fp8_head: bool = False
    """Multiply the frozen output projection in FP8 in training."""
    fp8_experts: bool = False
    """Multiply experts in MXFP4 in FP8."""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} must be even and above 0: rotary positions turn pairs of dimensions"
            )
        if 0 in self.layer_windows:
            raise ValueError("sliding_window in config.json: expected at least 1 token, the query itself, got 0")
        assert len(self.layer_windows) == self.num_hidden_layers
        assert not self.layer_ropes or len(self.layer_ropes) == self.num_hidden_layers
        assert not self.layer_shapes or len(self.layer_shapes) == self.num_hidden_layers
        assert not self.layer_unquantized or len(self.layer_unquantized) == self.num_hidden_layers
        assert self.moe is None or len(self.moe.sparse_layers) == self.num_hidden_layers
        assert self.delta is None or len(self.delta.layers) == self.num_hidden_layers
        self._check_quantize()

    def _check_quantize(self) -> None:
        made = find_format(self.quantize)
        experts_in_dtype = self.moe is not None and self.moe.quantize == "none"
        if self.quantize != "none" and not made.holds_experts and experts_in_dtype:
            raise ValueError(f"{made.flag} needs the experts in MXFP4: leave it out")
        shared = {"shared_expert_intermediate_size": self.moe.shared_size} if self.moe and self.moe.shared_size else {}
        if self.moe and self.moe.quantize == self.quantize:
            shared |= {"moe_intermediate_size": self.moe.intermediate_size}
        heads = {"num_attention_heads × head_dim": self.num_attention_heads * self.head_dim}
        sizes = {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}
        made.check(sizes | shared | heads)

    def quantized(self, how: Storage, *, fp8_head: bool = False, fp8_experts: bool = False) -> "DecoderConfig":
        """Return the config with linear layers, and experts that are in no format, in this one; `none` changes nothing.

        Args:
            how: the format.
            fp8_head: multiply the output projection in FP8 too.
            fp8_experts: and experts in MXFP4.

        Raises:
            ValueError: no experts in MXFP4, a format that cannot hold the layers, or a folder quantized to another.
        """
        if fp8_experts and not (self.moe and self.moe.quantize == "mxfp4"):
            raise ValueError("--fp8-experts needs experts in MXFP4: leave it out")
        products: dict[str, Any] = {"fp8_head": fp8_head, "fp8_experts": fp8_experts}
        if how == "none" or how == self.quantize:
            return replace(self, **products)
        if self.quantize != "none" and (how, self.quantize) != ("fp8", "fp8_stored"):
            raise ValueError(
                f"{find_format(how).flag}: the model folder is already quantized to {FORMATS[self.quantize].label}; "
                "leave out the flag, or name the original folder"
            )
        experts = self.moe
        if experts and experts.quantize == "none" and FORMATS[how].weight:
            experts = replace(experts, quantize=how)
        return replace(self, quantize=how, moe=experts, layer_unquantized=(), **products)

    def leaving(self, modules: Iterable[str]) -> "DecoderConfig":
        """Return the config with these modules, and no others, unquantized."""
        return replace(self, layer_unquantized=linears_by_layer(modules, self.num_hidden_layers))

    @property
    def unquantized(self) -> list[str]:
        """Return the linear layers that are not in the format of the others."""
        named = enumerate(self.layer_unquantized)
        return [f"model.layers.{layer}.{linear}" for layer, linears in named for linear in linears]

    def query_factor(self, head_dim: int) -> float:
        """Return the factor of queries that gives attention's scores, over √head_dim, their scale."""
        return 1.0 if self.attention_scale is None else self.attention_scale * math.sqrt(head_dim)

    def attended(self, index: int) -> tuple[int, int]:
        """Return the heads of a layer's attention, linear or not, and the size of each one's output."""
        linear = self.layer_kinds[index].linear and self.delta
        size = self.layer_kinds[index].head_dim if self.latent is None else self.latent.value_dim
        heads = self.num_attention_heads, size
        return (linear.num_value_heads, linear.value_dim) if linear else heads

    @property
    def text_path(self) -> str:
        """Return the path of the decoder among the modules that PEFT adapts."""
        return WRAPPERS[self.wrapper].text_path if self.wrapper else TEXT_PATH

    def scored(self, labels: int = 1) -> "DecoderConfig":
        """Return the config of a reward model or classifier: scores in place of the output projection.

        Raises:
            ValueError: a text model inside another model.
        """
        if self.wrapper:
            raise ValueError(
                f"reward models of {self.wrapper} are not supported: use a folder of {self.model_type}, its text model"
            )
        return replace(self, scores=True, labels=labels, tie_word_embeddings=False)

    @property
    def stream_width(self) -> int:
        """Return the width of the residual stream between layers, with keys and values that these share."""
        return self.hidden_size + self.shared_width

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Return the sizes of each layer."""
        alike = LayerShape(self.head_dim, self.num_key_value_heads, self.intermediate_size)
        return self.layer_shapes or (alike,) * self.num_hidden_layers

    @property
    def untied(self) -> "DecoderConfig":
        """Return the config of a model whose output projection is apart from the embedding."""
        return replace(self, tie_word_embeddings=False)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kind of each layer."""
        sparse = self.moe.sparse_layers if self.moe else (False,) * self.num_hidden_layers
        ropes = self.layer_ropes or (self.rope,) * self.num_hidden_layers
        unquantized = self.layer_unquantized or ((),) * self.num_hidden_layers
        linear = self.delta.layers if self.delta else (False,) * self.num_hidden_layers
        kinds = zip(self.shapes, self.layer_windows, ropes, sparse, unquantized, linear, strict=True)
        return tuple(LayerKind(*kind) for kind in kinds)

    @cached_property
    def first_of_kind(self) -> tuple[int, ...]:
        """Return for each layer the index of the first layer of the same kind."""
        return tuple(map(self.layer_kinds.index, self.layer_kinds))

    @cached_property
    def rotaries(self) -> tuple[Rotary, ...]:
        """Return the rotary embeddings among the layers, each once."""
        return tuple(dict.fromkeys(kind.rotary for kind in self.layer_kinds if kind.rotary))

    def rope_tables(self, positions: Int[Array, "B T"], lengths: Int[Array, "B T"] | None = None) -> RopeTables:
        """Compute a batch's rotary tables, which all layers share; see `jaxglue.ops.rope.rope_tables`."""
        return RopeTables.at(positions, self.rotaries, lengths)

    @property
    def max_generated_positions(self) -> int:
        """Return the most tokens of a generated text: longrope would turn those before otherwise in longer ones."""
        ropes = (rotary.config for rotary in self.rotaries if rotary.config.rope_type == "longrope")
        originals = (rope.original_max_position_embeddings or 0 for rope in ropes)
        return min((self.max_position_embeddings, *originals))

    def with_layers(self, indices: Sequence[int]) -> "DecoderConfig":
        """Return the config of a model that has only these layers."""
        moe = self.moe and replace(self.moe, sparse_layers=tuple(self.moe.sparse_layers[index] for index in indices))
        windows = tuple(self.layer_windows[index] for index in indices)
        ropes = tuple(self.layer_ropes[index] for index in indices if self.layer_ropes)
        skips = tuple(self.layer_unquantized[index] for index in indices if self.layer_unquantized)
        shapes = tuple(self.layer_shapes[index] for index in indices if self.layer_shapes)
        delta = self.delta and replace(self.delta, layers=tuple(self.delta.layers[index] for index in indices))
        layers: dict[str, Any] = {"layer_windows": windows, "layer_ropes": ropes, "layer_unquantized": skips}
        layers["layer_shapes"] = shapes
        return replace(self, num_hidden_layers=len(indices), moe=moe, delta=delta, **layers)

    @property
    def expanded(self) -> "DecoderConfig":
        """Return the config with experts in the dtype of the other weights."""
        return replace(self, moe=replace(self.moe, quantize="none")) if self.moe else self


LAYER_LINEARS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
    *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.qkv_proj", "mlp.gate_up_proj"),
    *("per_layer_input_gate", "per_layer_projection"),
    *(f"mlp.{shared}.{name}_proj" for shared in ("shared_expert", "shared_experts") for name in ("gate", "up", "down")),
)
"""Linear layers of decoder layers."""


def linears_by_layer(modules: Iterable[str], layers: int) -> tuple[tuple[str, ...], ...]:
    """Return the linear layers of each layer among modules; empty where none has any."""
    named = set(modules)
    found = tuple(tuple(x for x in LAYER_LINEARS if f"model.layers.{layer}.{x}" in named) for layer in range(layers))
    return found if any(found) else ()


def describe_as_earlier(text: str) -> str:
    """Return a config's text as versions wrote it that knew MXFP4 experts alone, by a switch; digests of it remain."""
    return re.sub(r", quantize='(\w+)'\)", lambda match: f", mxfp4={match[1] == 'mxfp4'})", text)
