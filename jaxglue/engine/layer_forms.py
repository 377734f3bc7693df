"""The forms in which a decoder layer runs: its stages by tiles of the rows, all as one small layer, or as they are.

A model says what its stages compute; this file decides how.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.models.context import LayerContext, PackedContext, RouterLosses
from jaxglue.models.family import NormNames
from jaxglue.models.latent import LatentAttention
from jaxglue.models.layers import Attention, DecoderLayer, FusedMLP, GatedMLP
from jaxglue.models.parameters import Params, merge_module
from jaxglue.ops import names
from jaxglue.ops.backend import BackendChoice, Capability, Operation, Reads, compute_capability, form
from jaxglue.ops.collectives import psum_batch
from jaxglue.ops.gated_mlp import GATED_MLP, GatedCall
from jaxglue.ops.norm_rope import LLAMA_NORM
from jaxglue.ops.projection import PROJECTION, Projection, ProjectionCall, StaticConditions
from jaxglue.ops.rope import RopeTables
from jaxglue.ops.small_layer import SMALL_LAYER, LayerNorms, LayerSpec, SmallLayerCall, small_layer

_PRE_NORMS = NormNames()


def run_layer(layer: Any, x: Float[Array, "B T D"], context: PackedContext) -> Float[Array, "B T D"]:
    """Return a layer's output in the form of `LAYER_FORM`; modules that are no decoder layers have one form."""
    x = checkpoint_name(x, names.LAYER_INPUT)
    run = None
    if isinstance(layer, DecoderLayer):
        run = LAYER_FORM.load(LayerCall(layer=layer, x=x, context=context))
    return layer(x, context) if run is None else run(layer, x, context)


def explain_forms(
    graphdef: nnx.GraphDef, trainable: Params, frozen: Params, x: Any, context: PackedContext
) -> dict[str, BackendChoice]:
    """Return the forms of a layer and of its projections in training, by title, with reasons, from shapes alone."""
    choices: dict[str, BackendChoice] = {}

    def look(*arguments):
        layer, x, context = merge_module(graphdef, *arguments[:2]), *arguments[2:]
        context, capability = replace(context, dropout_key=jax.random.key(0)), compute_capability()
        choices["layers"] = LAYER_FORM.choose(capability, LayerCall(layer=layer, x=x, context=context))
        choices["projections"] = PROJECTION.choose(capability, ProjectionCall.of(layer.token_mixer.inputs, context))
        if isinstance(layer.ffn, GatedMLP | FusedMLP) and (parts := layer.ffn.parts) is not None:
            call = GatedCall.of(parts, context, layer.ffn.activation)
            choices["feed-forward"] = GATED_MLP.choose(capability, call)

    jax.eval_shape(look, trainable, frozen, x, context)
    if choices["layers"].name == "reference":
        choices["layers"] = replace(choices["layers"], name="stage by stage")
    return choices


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCall:
    """Meaning of a decoder layer."""

    layer: DecoderLayer
    x: Float[Array, "B T D"]
    context: PackedContext


def _check_tiles(_capability: Capability | None, call: LayerCall) -> None:
    if call.context.tile is None:
        raise NotImplementedError("rows pass whole (--tile)")
    if not call.layer.in_stages:
        raise NotImplementedError("layers share keys and values, or have embeddings of their own")


def by_tiles(
    layer: DecoderLayer, x: Float[Array, "B T D"], context: PackedContext, rows: LayerContext | None = None
) -> Float[Array, "B T D"]:
    """Apply the layer with only attention on whole rows, in the context `rows` if it is another."""

    def before(context, x):
        return layer.before_attention(x, context)

    def after(context, x, attended, gate=None):
        return layer.after_attention(x, attended, gate, context)

    attention_out = context.attention_out
    if attention_out is not None and not layer.token_mixer.gated:
        return map_tiles(after, context, x, attention_out)
    values, gate = map_tiles(before, context, x)
    values = tuple(map(checkpoint_name, values, layer.token_mixer.value_names))
    attended = layer.token_mixer.attend(values, rows or context) if attention_out is None else attention_out
    # In the shape of q XLA would make the gradients' zeros for both loops at once, and hold them from the first on.
    return map_tiles(after, context, x, attended.reshape(*x.shape[:2], -1), *(() if gate is None else (gate,)))


def _check_small(capability: Capability | None, call: LayerCall) -> None:
    """Raise NotImplementedError for a layer that `small_layer` does not compute."""
    layer, context = call.layer, call.context
    attention, mlp = layer.token_mixer, layer.ffn
    if not isinstance(attention, Attention) or isinstance(attention, LatentAttention) or attention.gated:
        raise NotImplementedError("attention is linear, latent or gated")
    rotary = attention.rotary
    if context.attention_out is not None:
        raise NotImplementedError("attention's output is known")
    if not isinstance(mlp, GatedMLP) or mlp.activation != "silu":
        raise NotImplementedError("the feed-forward is not SwiGLU")
    if attention.sinks is not None or attention.softcap is not None or attention.query_factor != 1.0:
        raise NotImplementedError("attention has sinks, a cap or a scale")
    if rotary is None or not rotary.turns_whole_halves or rotary.config.query_scale is not None:
        raise NotImplementedError("not both halves of each head turn, or queries are scaled by their positions")
    if (
        layer.norms != _PRE_NORMS
        or layer.factor != 1.0
        or layer.norm_style != LLAMA_NORM
        or attention.norms_full_width
        or attention.norms_turned
    ):
        raise NotImplementedError("norms are not Llama's, or outputs are scaled")
    conditions = StaticConditions.of(context)
    small = SmallLayerCall(x=call.x, spec=_spec(layer), projections=_projections(layer), conditions=conditions)
    if SMALL_LAYER.load(small) is None:
        raise NotImplementedError(SMALL_LAYER.choose(capability, small).reason)


def _as_small(layer: DecoderLayer, x: Float[Array, "B T D"], context: PackedContext) -> Float[Array, "B T D"]:
    """Apply the layer as one operation that is differentiated by hand."""
    before, after = layer.norm_named(_PRE_NORMS.before_attention), layer.norm_named(_PRE_NORMS.before_mlp)
    assert before is not None and after is not None
    norms = LayerNorms(before.weight[...], after.weight[...], layer.token_mixer.head_norms)
    y = small_layer(_spec(layer), x, norms, _projections(layer), context)
    assert y is not None
    return y


def _spec(layer: DecoderLayer) -> LayerSpec:
    norm, attention, mlp = layer.norm_named(_PRE_NORMS.before_attention), layer.token_mixer, layer.ffn
    assert norm is not None and attention.rotary is not None and isinstance(mlp, GatedMLP)
    return LayerSpec(
        rotary=attention.rotary, eps=norm.eps, window=attention.window, style=norm.style, activation=mlp.activation
    )


def _projections(layer: DecoderLayer) -> list[Projection]:
    assert isinstance(layer.ffn, GatedMLP)
    return [linear.projection for linear in (*layer.token_mixer.linears, *layer.ffn.linears)]


_READS: Reads = {LayerCall: ("layer", "x", "context"), PackedContext: None}
"""The operations within a layer check its context."""

LAYER_FORM = Operation(
    name="layer",
    backends={
        "tiles": form(_check_tiles, by_tiles, "temporary values are a tile's", _READS),
        "small": form(_check_small, _as_small, SMALL_LAYER.backends["triton"].advantage, _READS),
    },
)
"""Forms of a decoder layer beside its stages one by one."""


def map_tiles(function: Callable, context: PackedContext, *arrays: Array) -> Any:
    """Apply a function of (context, *arrays [B, T, …]) that treats each token by itself, `context.tile` at a time.

    The backward pass computes each tile again and sums the parameters' gradients over the tiles in their own dtype.

    Returns:
        The function's arrays [B, T, …].

    Raises:
        ValueError: the tile does not divide the tokens.
    """
    B, T = arrays[0].shape[:2]
    count, rest = divmod(B * T, context.tile or B * T)
    if rest:
        raise ValueError(f"a tile of {context.tile} tokens does not divide {B} × {T} tokens: use a divisor")
    ranks = None if context.ranks is None or len(context.ranks.shape) == 2 else context.ranks
    by_token = context.rope, context.segments.segment_ids, ranks
    tiled = jax.checkpoint(function, prevent_cse=False)

    def step(_, inputs):
        index, values, tiles = inputs
        return None, tiled(_tile_context(context, index, *values), *tiles)

    inputs = jnp.arange(count), *jax.tree.map(lambda a: _split(a, count), (by_token, arrays))
    _, results = lax.scan(step, None, inputs)
    return jax.tree.map(lambda a: a.reshape(B, T, *a.shape[3:]), results)


def _split(array: Array, count: int) -> Array:
    """Return tiles [count, 1, tokens, …] of an array [B, T, …]; the tokens stay where they are."""
    return array.reshape(count, 1, -1, *array.shape[2:])


def _tile_context(
    context: PackedContext, index: Array, rope: RopeTables, segment_ids: Array, ranks: Array | None
) -> PackedContext:
    """Return the context of a tile: with its tokens' values, and dropout of its own."""
    segments = replace(context.segments, segment_ids=segment_ids)
    key = None if context.dropout_key is None else jax.random.fold_in(context.dropout_key, index)
    tile = replace(context, segments=segments, rope=rope, dropout_key=key, attention_out=None, tile=None)
    tile = tile if ranks is None else replace(tile, ranks=ranks)
    return tile if context.router_losses is None else replace(tile, router_losses=_tile_losses(context, tile))


def _tile_losses(context: PackedContext, tile: PackedContext) -> RouterLosses:
    """Weight the z-loss of a tile, a mean over its tokens, by its share of all tokens."""
    assert context.router_losses is not None
    tokens, every = (psum_batch(part.token_mask.sum(dtype=jnp.float32)) for part in (tile, context))
    return context.router_losses._replace(z=context.router_losses.z * tokens / jnp.maximum(every, 1.0))
