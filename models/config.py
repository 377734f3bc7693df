"""The decoder's architecture: sizes, kinds of layers, and how weights are stored."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxglue.models.tower_config import TowerConfig
from jaxglue.models.wrapper import BESIDE_VISION, TEXT_PATH, WRAPPERS
from jaxglue.ops.backend import BackendChoice
from jaxglue.ops.choices import SERVED, STORED, Storage
from jaxglue.ops.gated_mlp import Activation
from jaxglue.ops.moe import ONE_GROUP, Groups
from jaxglue.ops.paged_attention import KVPages, make_pages
from jaxglue.ops.quant.formats import FORMATS, find_format
from jaxglue.ops.rope import RopeConfig, RopeTables, Rotary
from jaxglue.ops.segments import PackedSegments
from jaxglue.vision.rows import Images, spanned


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
    latent_size: int = field(default=0, repr=False)
    """Width of the experts' inputs and outputs, between two projections; 0 for the model's."""

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
class PerLayerShape:
    """Sizes of the embeddings that each layer has of its own."""

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


class Mixer:
    """A layer's part in which tokens see others: its sizes, and answers to planner, caches, meshes and files.

    Each kind is a frozen dataclass in its part's file; `GroupedAttention` is that of layers without another.
    """

    title: ClassVar[str]
    """In words."""
    module: ClassVar[str] = "self_attn"
    """Its name in the layer."""
    recurrent: ClassVar[bool] = False
    """A state of fixed size stands for the tokens before, and follows one continuation of them."""
    extends: ClassVar[bool] = False
    """Keys and values of all tokens are in pages, so that several tokens at once can follow them."""
    splits_heads: ClassVar[bool] = False
    """Devices along `tensor` can have some of its heads each."""
    record: ClassVar[str | None] = None
    """Name under which adapters record its sizes; None where the tensors' shapes tell them."""

    def make(self, config: "DecoderConfig", parts: Any, kind: "LayerKind", *, dtype: Any, rngs: nnx.Rngs) -> Any:
        """Return its module; None for the layer's own attention."""
        raise NotImplementedError

    @property
    def attends(self) -> bool:
        """Return whether queries see the keys of tokens before."""
        return not self.recurrent

    def weights(self, config: "DecoderConfig", kind: "LayerKind") -> int:
        """Return the number of weights that a token is multiplied with."""
        raise NotImplementedError

    def attended(self, heads: int, head_dim: int) -> tuple[int, int]:
        """Return the heads of its output and the size of each, from those of queries."""
        return heads, head_dim

    def make_cache(self, kind: "LayerKind", sizes: "CacheSizes") -> Any:
        """Return a layer's empty cache."""
        raise NotImplementedError

    def token_bytes(self, kind: "LayerKind", dtype: Any) -> int:
        """Return a token's bytes in a layer's cache, whose float8 values have scales."""
        return 0

    def state_bytes(self, dtype: Any) -> int:
        """Return a sequence's bytes in a layer's cache, however long it is, with activations of this dtype."""
        return 0

    def step_values(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return what a token gives to the mixer's states, with activations of this dtype, where it is recurrent."""
        raise NotImplementedError

    @property
    def prefill_values(self) -> int:
        """Return the values of a token in the prefill of a layer, beside those of attention."""
        return 0

    @property
    def exchanged(self) -> int:
        """Return the values of a token that devices exchange where they split rows."""
        return 0

    def why_not_split(self, devices: int) -> str | None:
        """Return why so many devices cannot split rows, in words; None where they can."""
        return f"states of {self.title} pass from token to token" if self.recurrent else None

    def initial(self, name: str, key: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array | None:
        """Return a random value of the named parameter, where it is not drawn as those of all layers."""
        return None

    def backends(self, capability: Any, dtype: Any) -> dict[str, BackendChoice]:
        """Return the backends of its own operations, by title."""
        return {}


@dataclass(frozen=True)
class GroupedAttention(Mixer):
    """Grouped-query attention, whose sizes are the layer's."""

    title = "attention"
    extends = splits_heads = True

    def make(self, config: Any, parts: Any, kind: Any, *, dtype: Any, rngs: Any) -> None:
        """Leave the module to the layer."""

    def weights(self, config: "DecoderConfig", kind: "LayerKind") -> int:
        """See `Mixer`."""
        shape = kind.shape
        made = 0 if shape.shares == "takes" else shape.kv_heads * (1 if shape.keys_as_values else 2)
        return config.hidden_size * shape.head_dim * (2 * config.num_attention_heads + made)

    def make_cache(self, kind: "LayerKind", sizes: "CacheSizes") -> KVPages:
        """See `Mixer`."""
        return make_pages(sizes.pages, kind.shape.kv_heads, sizes.page, kind.head_dim, sizes.dtype, sizes.device)

    def token_bytes(self, kind: "LayerKind", dtype: Any) -> int:
        """See `Mixer`."""
        return 2 * kind.shape.kv_heads * vector_bytes(kind.head_dim, dtype)


ATTENTION = GroupedAttention()


class CacheSizes(NamedTuple):
    """Sizes of a layer's cache."""

    pages: int
    page: int
    """Tokens of a page."""
    slots: int
    """Sequences with states."""
    dtype: Any
    """Of keys and values."""
    activations: Any
    """Of activations."""
    device: Any
    """Device or sharding."""


def vector_bytes(size: int, dtype: Any) -> int:
    """Return the bytes of a vector in a cache: in float8 with its scale."""
    dtype = jnp.dtype(dtype)
    return size * dtype.itemsize + (4 if dtype == jnp.float8_e4m3fn else 0)


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
    mixer: Mixer = ATTENTION
    """Part in which tokens see others."""
    sees: bool = False
    """Features of images are added to its output."""

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.shape.head_dim

    @property
    def rotary(self) -> Rotary | None:
        """Return the rotary embedding of the heads."""
        return None if self.rope is None else Rotary(self.rope, self.head_dim)


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Settings of attention that few families have."""

    output_bias: bool | None = None
    """Whether the output projection has a bias; None: as `attention_bias` says of all four projections."""
    head_norms: bool = True
    """Queries and keys have the norms that the family has for them."""
    scale: float | None = None
    """Factor of the scores; None for 1 / √head_dim."""
    softcap: float | None = None
    """Bound c of the scores, c·tanh(score / c)."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors and bounds of values outside attention and feed-forwards."""

    embedding: float = 1.0
    """Factor of the embeddings, rounded to their dtype."""
    residual: float = 1.0
    """Factor of what attention and feed-forward add to the residual stream."""
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    """Bound c of the logits, c·tanh(logit / c)."""


class FamilyShape:
    """Settings that one family alone has; a subclass is a frozen dataclass in the family's file."""

    layer_shapes: tuple[LayerShape, ...] = ()
    """Sizes of each layer; empty where all are alike."""
    shared_width: int = 0
    """Columns of the residual stream that hold keys and values of some layers for later ones."""
    per_layer: PerLayerShape | None = None
    """None without embeddings for each layer."""

    def with_layers(self, indices: Sequence[int]) -> "FamilyShape":
        """Return the settings of a model that has only these layers."""
        return self

    @property
    def recorded(self) -> dict[str, object]:
        """Return what adapters record: settings that change outputs, and that the tensors' shapes do not tell."""
        return {"family_shape": self}


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
    attention: AttentionOptions = field(default=AttentionOptions(), repr=False)
    scales: Scales = field(default=Scales(), repr=False)
    mixers: tuple[Mixer, ...] = field(default=(), repr=False)
    """Part of each layer in which tokens see others; empty where all have `GroupedAttention`."""
    family_shape: FamilyShape | None = field(default=None, repr=False)
    """Settings of the family alone."""
    wrapper: str | None = field(default=None, repr=False)
    """Model type around it, such as one with a vision tower; see `jaxglue.models.wrapper`."""
    vision: TowerConfig | None = field(default=None, repr=False)
    """Tower of a model that sees images in this run; None for text alone."""
    layer_sees: tuple[bool, ...] = field(default=(), repr=False)
    """Whether features of images are added to each layer's output; empty for none."""
    scores: bool = False
    """Score every token in place of projecting it to the vocabulary, as reward models and classifiers do."""
    labels: int = field(default=1, repr=False)
    """Scores of a token where it is scored: one for each label of a classifier."""
    bidirectional: bool = field(default=False, repr=False)
    """Tokens see those after them, too, as of models of embeddings: others refuse it (`require_causal`)."""
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
        assert not self.mixers or len(self.mixers) == self.num_hidden_layers
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
        if how in SERVED:
            return replace(self._served(how), **products)
        if self.quantize != "none" and (how, self.quantize) != ("fp8", "fp8_stored"):
            raise ValueError(
                f"{find_format(how).flag}: the model folder is already quantized to {FORMATS[self.quantize].label}; "
                "leave out the flag, or name the original folder"
            )
        experts = self.moe
        if experts and experts.quantize == "none" and FORMATS[how].weight:
            experts = replace(experts, quantize=how)
        return replace(self, quantize=how, moe=experts, layer_unquantized=(), **products)

    def _served(self, how: Storage) -> "DecoderConfig":
        """Return the config with weights on the grid of a format, in which the folder may hold them already."""
        made, moe = FORMATS[how], self.moe
        if made.label == "mxfp4" and not (moe and moe.quantize == "mxfp4"):
            raise ValueError(
                f"{made.flag} needs experts in MXFP4: write the folder so (jaxglue export --quantize mxfp4 --base)"
            )
        if made.label == "nf4" and moe:
            raise ValueError(f"{made.flag}: no folder holds experts in NF4: use --serve-as nvfp4 or q4_k_m")
        if (label := FORMATS[self.quantize].label) not in ("none", made.label):
            raise ValueError(f"{made.flag}: the model folder is in {label}: serve it as {label}, or name the original")
        if how in STORED.values() and self.quantize == "none":
            raise ValueError(f"the adapter was trained on weights in {made.label}, and the model folder's are not")
        how = STORED[how] if self.quantize != "none" and how in STORED else how
        unquantized = self.layer_unquantized if self.quantize != "none" else ()
        experts = replace(moe, quantize=how) if moe else None
        return replace(self, quantize=how, moe=experts, layer_unquantized=unquantized)

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
        return 1.0 if self.attention.scale is None else self.attention.scale * math.sqrt(head_dim)

    def attended(self, index: int) -> tuple[int, int]:
        """Return the heads of a layer's attention, linear or not, and the size of each one's output."""
        kind = self.layer_kinds[index]
        return kind.mixer.attended(self.num_attention_heads, kind.head_dim)

    @property
    def value_dim(self) -> int:
        """Return the size of values of attention where a head of keys has `head_dim`."""
        mixer = next((mixer for mixer in self.mixers if mixer.attends), ATTENTION)
        return mixer.attended(self.num_attention_heads, self.head_dim)[1]

    @property
    def mixer_kinds(self) -> tuple[Mixer, ...]:
        """Return the kinds of mixers among the layers, each once."""
        return tuple(dict.fromkeys(self.mixers or (ATTENTION,)))

    def mixer_of[Kind: Mixer](self, kind: type[Kind]) -> Kind | None:
        """Return the first mixer of a class among the layers; None without."""
        return next((mixer for mixer in self.mixer_kinds if isinstance(mixer, kind)), None)

    @property
    def recurrent(self) -> str | None:
        """Return the title of the layers whose states follow one continuation of a text; None without."""
        return next((mixer.title for mixer in self.mixer_kinds if mixer.recurrent), None)

    @property
    def text_path(self) -> str:
        """Return the path of the decoder among the modules that PEFT adapts."""
        if self.vision is not None or (self.scores and self.wrapper):  # which are loaded with the parts around them
            return BESIDE_VISION
        return WRAPPERS[self.wrapper].text_path if self.wrapper else TEXT_PATH

    def require_causal(self, name: object) -> None:
        """Raise ValueError for a model whose tokens see those after them."""
        if self.bidirectional:
            raise ValueError(
                f"{name} attends to later tokens (is_causal in its config.json), as models of embeddings do: train it "
                "with --objective embed --bidirectional, or use another"
            )

    def scored(self, labels: int = 1) -> "DecoderConfig":
        """Return the config of a reward model or classifier: scores in place of the output projection.

        Raises:
            ValueError: a text model inside a model whose tower is not read.
        """
        if self.wrapper and WRAPPERS[self.wrapper].tower is None:
            raise ValueError(
                f"reward models of {self.wrapper} are not supported: use a folder of {self.model_type}, its text model"
            )
        return replace(self, scores=True, labels=labels, tie_word_embeddings=False)

    @property
    def stream_width(self) -> int:
        """Return the width of the residual stream between layers, with keys and values that these share."""
        return self.hidden_size + self.shared_width

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """Return the sizes of each layer; empty where all are alike."""
        return () if self.family_shape is None else self.family_shape.layer_shapes

    @property
    def shared_width(self) -> int:
        """Return the columns of the residual stream that hold keys and values of some layers for later ones."""
        return 0 if self.family_shape is None else self.family_shape.shared_width

    @property
    def per_layer(self) -> PerLayerShape | None:
        """Return the sizes of the embeddings that each layer has of its own; None without."""
        return None if self.family_shape is None else self.family_shape.per_layer

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
        mixers = self.mixers or (ATTENTION,) * self.num_hidden_layers
        sees = self.layer_sees or (False,) * self.num_hidden_layers
        kinds = zip(self.shapes, self.layer_windows, ropes, sparse, unquantized, mixers, sees, strict=True)
        return tuple(LayerKind(*kind) for kind in kinds)

    @cached_property
    def first_of_kind(self) -> tuple[int, ...]:
        """Return for each layer the index of the first layer of the same kind."""
        return tuple(map(self.layer_kinds.index, self.layer_kinds))

    @cached_property
    def rotaries(self) -> tuple[Rotary, ...]:
        """Return the rotary embeddings among the layers, each once."""
        return tuple(dict.fromkeys(kind.rotary for kind in self.layer_kinds if kind.rotary))

    def layer_segments(self, segments: PackedSegments, images: Images | None) -> list[PackedSegments]:
        """Return each layer's segments: where images are, tokens of some layers see later ones of the same image."""
        seen = spanned(segments, images)
        spans = "none" if self.vision is None else self.vision.spans
        return [
            seen if spans == "all" or (spans == "windows" and kind.window is not None) else segments
            for kind in self.layer_kinds
        ]

    def rope_tables(self, positions: Int[Array, "B T *axes"], lengths: Int[Array, "B T"] | None = None) -> RopeTables:
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

        def some[Item](layers: tuple[Item, ...]) -> tuple[Item, ...]:
            return tuple(layers[index] for index in indices) if layers else ()

        return replace(
            self,
            num_hidden_layers=len(indices),
            moe=self.moe and replace(self.moe, sparse_layers=some(self.moe.sparse_layers)),
            layer_windows=some(self.layer_windows),
            layer_ropes=some(self.layer_ropes),
            layer_unquantized=some(self.layer_unquantized),
            mixers=some(self.mixers),
            layer_sees=some(self.layer_sees),
            family_shape=self.family_shape and self.family_shape.with_layers(indices),
        )

    @property
    def expanded(self) -> "DecoderConfig":
        """Return the config with experts in the dtype of the other weights."""
        return replace(self, moe=replace(self.moe, quantize="none")) if self.moe else self


LAYER_LINEARS = [
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
    *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.qkv_proj", "mlp.gate_up_proj"),
    *("per_layer_input_gate", "per_layer_projection"),
    *(f"mlp.{shared}.{name}_proj" for shared in ("shared_expert", "shared_experts") for name in ("gate", "up", "down")),
]
"""Linear layers of decoder layers; families that have others add these (`Family.linears`)."""


def linears_by_layer(modules: Iterable[str], layers: int) -> tuple[tuple[str, ...], ...]:
    """Return the linear layers of each layer among modules; empty where none has any."""
    named = set(modules)
    found = tuple(tuple(x for x in LAYER_LINEARS if f"model.layers.{layer}.{x}" in named) for layer in range(layers))
    return found if any(found) else ()


def describe_as_earlier(text: str) -> str:
    """Return a config's text as versions wrote it that knew MXFP4 experts alone, by a switch; digests of it remain."""
    return re.sub(r", quantize='(\w+)'\)", lambda match: f", mxfp4={match[1] == 'mxfp4'})", text)
