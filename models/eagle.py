"""EAGLE-3's draft heads, for models that have none of their own (arXiv 2503.01840).

At token t of a document the head reads three hidden states of the model, the inputs of an early, a middle and a late
layer at token t, as h = fc([h1; h2; h3]), and the embedding e of token t + 1. A Llama layer adds to h what attention
over [norm(e); norm(h)] and a feed-forward give; a projection of the head's own, of the norm of that, gives the logits
of token t + 2 among frequent tokens. Further drafts read the layer's output in place of h.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxglue.models.config import ATTENTION, DecoderConfig, LayerKind
from jaxglue.models.context import LayerContext
from jaxglue.models.family import LLAMA_PARTS, Parts, find_family
from jaxglue.models.layers import Attention, DecoderLayer
from jaxglue.models.linear import Linear, layer_linear
from jaxglue.models.residual import Norm
from jaxglue.ops.projection import project

STATES = 3
"""Hidden states of a token that a head reads."""
LAYER = "layer."
"""Beginning of the names of the layer's parameters in a head."""


@dataclass(frozen=True, kw_only=True)
class EagleShape:
    """Sizes of a head, and what it reads of its model."""

    layer: DecoderConfig
    """Architecture of a Llama model of the head's one layer."""
    taps: tuple[int, ...]
    """Layers of the model, in order, whose inputs the head reads."""
    norm_before_residual: bool = False
    """The layer adds to norm(h), not to h."""

    def within(self, model: DecoderConfig) -> DecoderConfig:
        """Return a model's architecture with a further layer after the last: one with the head's keys and values."""
        count = model.num_hidden_layers
        unquantized = model.layer_unquantized and (*model.layer_unquantized, ())
        return replace(
            model,
            num_hidden_layers=count + 1,
            layer_windows=(*model.layer_windows, None),
            layer_ropes=(*(model.layer_ropes or (model.rope,) * count), self.layer.rope),
            layer_unquantized=unquantized,
            layer_sees=model.layer_sees and (*model.layer_sees, False),
            mixers=model.mixers and (*model.mixers, ATTENTION),
            moe=model.moe and replace(model.moe, sparse_layers=(*model.moe.sparse_layers, False)),
        )


class _EagleAttention(Attention):
    """Attention whose queries, keys and values are projected from embedding and state side by side."""

    def __init__(self, config: DecoderConfig, parts: Parts, kind: LayerKind, *, dtype, rngs: nnx.Rngs):
        D, width = config.hidden_size, config.num_attention_heads * kind.head_dim
        super().__init__(replace(config, hidden_size=2 * D), parts, kind, dtype=dtype, rngs=rngs)
        bias = config.attention_bias
        self.o_proj = layer_linear(config, kind, "self_attn.o_proj", width, D, bias=bias, dtype=dtype, rngs=rngs)


class EagleLayer(DecoderLayer):
    """A Llama layer that attends over [norm(e); norm(h)] and adds to h."""

    attention = _EagleAttention

    def __init__(self, shape: EagleShape, *, dtype, rngs: nnx.Rngs):
        config = shape.layer
        super().__init__(config, LLAMA_PARTS, config.layer_kinds[0], dtype=dtype, rngs=rngs)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.norm_before_residual = shape.norm_before_residual

    def read(
        self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"], context: LayerContext
    ) -> Float[Array, "B T D"]:
        """Apply the layer to embeddings and states."""
        before = self.norm_named(self.norms.before_attention)
        assert before is not None
        embedded, normed = before.of(embedded), self.hidden_norm.of(hidden)
        stream = normed if self.norm_before_residual else hidden
        stream = stream + self.token_mixer(jnp.concatenate([embedded, normed], axis=-1), context)
        return self._add_mlp(stream, context)


class EagleHead(nnx.Module):
    """Projection of the states, the layer and its norm; the projection to tokens is apart."""

    def __init__(self, shape: EagleShape, *, dtype, rngs: nnx.Rngs):
        config = shape.layer
        D, std = config.hidden_size, config.initializer_range
        self.fc = Linear(STATES * D, D, bias=False, std=std, dtype=dtype, rngs=rngs)
        self.layer = EagleLayer(shape, dtype=dtype, rngs=rngs)
        self.norm = Norm(D, config.rms_norm_eps, dtype=dtype)

    def combine(self, states: tuple[Float[Array, "*B D"], ...]) -> Float[Array, "*B D"]:
        """Return what the head reads of tokens: h of the inputs of three layers."""
        return project(jnp.concatenate(states, axis=-1), self.fc.weight[...], states[0].dtype)

    def __call__(
        self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"], context: LayerContext
    ) -> Float[Array, "B T D"]:
        """Return the states that further drafts read.

        Args:
            embedded: of the token after each.
            hidden: of `combine`, or this head's own where drafts follow drafts.
            context: of the rows.
        """
        return self.layer.read(embedded, hidden, context)

    def output(self, states: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Return what the projection to tokens reads of states."""
        return self.norm.of(states)


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs a head reads of a model with so many: vLLM's, where these are three."""
    taps = (2, layers // 2, layers - 3)
    return taps if taps[0] < taps[1] < taps[2] else (0, layers // 2, layers - 1)


def why_no_eagle(config: DecoderConfig) -> str | None:
    """Return why a model is drafted by no head of this kind here, in words; None where it is."""
    others = [mixer.title for mixer in config.mixer_kinds if mixer != ATTENTION]
    if others:
        return f"layers of {others[0]}: heads of EAGLE-3's kind are for models whose layers have attention alone"
    if config.family_shape is not None:
        return f"layers of several sizes, as {config.model_type} has: heads of EAGLE-3's kind are for layers all alike"
    if config.scales.embedding != 1.0 or find_family(config.model_type).parts.embedding_norm:
        return "scaled embeddings, which heads of EAGLE-3's kind do not read"
    if config.num_hidden_layers < STATES:
        return f"{config.num_hidden_layers} layers: heads of EAGLE-3's kind read the inputs of {STATES}"
    return None


def stored_name(name: str, layer: str) -> str:
    """Return the name in a folder of a head's parameter, whose layer is stored under `layer`."""
    return layer + name.removeprefix(LAYER) if name.startswith(LAYER) else name


def layer_start(stored: Iterable[str]) -> str:
    """Return the beginning of the layer's names in a folder: vLLM's, or that of the authors' folders."""
    return "midlayer." if any(name.startswith("midlayer.") for name in stored) else "layers.0."
