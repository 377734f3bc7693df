"""Compiled programs of generation: layers over a paged cache, sampling of the next tokens, steps of all layers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from jaxglue.generation.cache import Cursor, DecodeContext, Pages, Places, PrefillContext, Slots, places_of
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import ModelGraphDefs, Params, merge_module
from jaxglue.models.vocabulary import output_matrix
from jaxglue.ops.cross_entropy import cap_logits
from jaxglue.ops.projection import project
from jaxglue.ops.segments import PackedSegments

NOT_FINITE = -2
"""In place of a token whose logits are infinite or NaN."""
Trees = tuple[Params, ...]
"""Trainable and frozen parameters of the model or a part of it."""


def request_key(seed: int, index: int) -> UInt32[Array, " words"]:
    """Return the data of the random key of the prompt at this index; what else is answered does not change it."""
    return jax.random.key_data(jax.random.fold_in(jax.random.key(seed), index))


@jax.jit
def sample_tokens(
    logits: Float[Array, "S V"],
    keys: UInt32[Array, "S words"],
    positions: Int[Array, " S"],
    temperatures: Float[Array, " S"],
    top_ps: Float[Array, " S"],
) -> Int[Array, " S"]:
    """Sample the token at each row's position from float32 logits.

    Args:
        logits: of S prompts.
        keys: of the prompts, from `request_key`.
        positions: of the tokens to sample.
        temperatures, top_ps: of the prompts, as in `SamplingConfig`.
    """
    likeliest = jnp.argmax(logits, axis=-1)

    def draw():
        at_position = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys), positions)
        return jnp.where(temperatures > 0, jax.vmap(sample_token)(logits, at_position, temperatures, top_ps), likeliest)

    return jax.lax.cond((temperatures > 0).any(), draw, lambda: likeliest)


def sample_token(logits: Float[Array, " V"], key: PRNGKeyArray, temperature, top_p) -> Int[Array, ""]:
    """Sample a token from float32 logits at a temperature above 0."""
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)
    kept = _in_nucleus(jax.nn.softmax(logits), top_p) | (top_p >= 1)  # rounding would drop the least likely tokens
    return jax.random.categorical(key, jnp.where(kept, logits, -jnp.inf))


def _in_nucleus(probabilities: Float[Array, " V"], top_p) -> Bool[Array, " V"]:
    """Return a mask of the most likely tokens until they reach `top_p`, at least one; ties are all in or out.

    Bisect the bits of the least probability whose more likely tokens do not reach `top_p`: sorting takes much longer.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)
        falls_short = jnp.where(probabilities > threshold, probabilities, 0.0).sum() < top_p
        return jnp.where(falls_short, low, middle), jnp.where(falls_short, middle, high)

    one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
    _, bits = jax.lax.fori_loop(0, 31, halve, (jnp.int32(-1), one))
    return probabilities >= jax.lax.bitcast_convert_type(bits, jnp.float32)


class CachedLayer:
    """The compiled prefill and decode step of one layer type; both update the cache in place."""

    def __init__(self, graphdef: nnx.GraphDef):
        self._graphdef = graphdef
        self.prefill = jax.jit(self._prefill, donate_argnames="cache")
        self.decode = jax.jit(self._decode, donate_argnames="cache")

    def _prefill(self, weights: Trees, x, cache: Pages, packed: PackedContext, places: Places):
        context = PrefillContext(packed, cache, places)
        return merge_module(self._graphdef, *weights)(x, context), context.cache

    def _decode(self, weights: Trees, x, cache: Pages, cursor: Cursor):
        context = DecodeContext(cache, cursor)
        return merge_module(self._graphdef, *weights)(x, context), context.cache


class Programs:
    """The programs of a model; arguments as in `Generator`."""

    def __init__(self, graphdefs: ModelGraphDefs, config: DecoderConfig, dtype, attention: str):
        self._graphdefs, self._config, self._dtype, self._attention = graphdefs, config, dtype, attention
        layer_types = {graphdef: CachedLayer(graphdef) for graphdef in graphdefs.layers}
        self._layers = [layer_types[graphdef] for graphdef in graphdefs.layers]
        self._output_name = graphdefs.output_name
        self._embed_prompts = jax.jit(self._embed_packed)
        self._embed_slots = jax.jit(self._embed_last)
        self._advance = jax.jit(self._sample_next)
        self._take = jax.jit(lambda x, index: x[:, index])
        self._run = jax.jit(self._while_live, static_argnames="steps", donate_argnames="caches")

    def prefill(
        self, trees: Trees, tokens: Int[Array, "1 T"], segments: PackedSegments, places: Places, caches: list[Pages]
    ) -> Float[Array, "1 T D"]:
        """Return the last hidden states of packed prompts, whose keys and values are written to the caches."""
        x, packed = self._embed_prompts(_part(trees, "embed_tokens"), tokens, segments)
        for i, (layer, weights) in enumerate(self._layer_weights(trees)):
            x, caches[i] = layer.prefill(weights, x, caches[i], packed, places)
        return x

    def first(
        self, trees: Trees, x: Float[Array, "1 T D"], index: Int[Array, " S"], slots: Slots, stops: Int[Array, " n"]
    ) -> Int[Array, " S"]:
        """Return the first new token of each live slot, whose prompt's last token is at `index`; -1 for the others."""
        return self._advance(*self._output(trees), self._take(x, index), slots, stops)[1]

    def step(
        self, trees: Trees, slots: Slots, caches: Sequence[Pages], stops: Int[Array, " n"]
    ) -> tuple[Slots, list[Pages], Int[Array, " S"]]:
        """Decode one token of every slot, layer by layer; return (slots, caches, new tokens, -1 in idle slots)."""
        x, cursor = self._embed_slots(_part(trees, "embed_tokens"), slots)
        caches = list(caches)
        for i, (layer, weights) in enumerate(self._layer_weights(trees)):
            x, caches[i] = layer.decode(weights, x, caches[i], cursor)
        slots, tokens = self._advance(*self._output(trees), x, slots, stops)
        return slots, caches, tokens

    def run(
        self, trees: Trees, slots: Slots, caches: Sequence[Pages], stops: Int[Array, " n"], *, steps: int
    ) -> tuple[Slots, list[Pages], Int[Array, "S steps"]]:
        """Decode up to `steps` tokens of every slot in one program; see `step`."""
        return self._run(trees, slots, list(caches), stops, steps=steps)

    def compilations(self) -> int:
        """Return the number of compiled programs."""
        functions: list[Any] = [self._embed_prompts, self._embed_slots, self._advance, self._take, self._run]
        for layer in set(self._layers):
            functions += [layer.prefill, layer.decode]
        return sum(function._cache_size() for function in functions)

    def _while_live(self, trees: Trees, slots: Slots, caches: list[Pages], stops, *, steps: int):
        def goes_on(carry):
            return (carry[0] < steps) & carry[1].live.any()

        def body(carry):
            i, slots, caches, out = carry
            # or XLA would expand all quantized weights once, before the loop
            weights, i = jax.lax.optimization_barrier((trees, i))
            slots, caches, tokens = self.step(weights, slots, caches, stops)
            return i + 1, slots, caches, out.at[:, i].set(tokens)

        out = jnp.full((slots.tokens.shape[0], steps), -1)
        return jax.lax.while_loop(goes_on, body, (jnp.int32(0), slots, caches, out))[1:]

    def _layer_weights(self, trees: Trees):
        return zip(self._layers, zip(*_part(trees, "layers"), strict=True), strict=True)

    def _output(self, trees: Trees) -> tuple[Trees, Trees]:
        return _part(trees, "norm"), _part(trees, self._output_name)

    def _embed_packed(self, weights: Trees, tokens, segments: PackedSegments):
        x, rope = self._embed(weights, tokens, segments.positions)
        return x, PackedContext(segments=segments, rope=rope, backend=self._attention)

    def _embed_last(self, weights: Trees, slots: Slots) -> tuple[Float[Array, "1 S D"], Cursor]:
        x, rope = self._embed(weights, slots.tokens[None], slots.positions[None])
        places = places_of(slots.tables, jnp.arange(len(slots.positions)), slots.positions)
        return x, Cursor(places=places, tables=slots.tables, positions=slots.positions, rope=rope)

    def _embed(self, weights: Trees, tokens: Int[Array, "1 T"], positions: Int[Array, "1 T"]):
        x = merge_module(self._graphdefs.embed_tokens, *weights)(tokens, self._dtype)
        return x, self._config.rope_tables(positions)

    def _sample_next(self, norm_weights: Trees, output_weights: Trees, x: Float[Array, "1 S D"], slots: Slots, stops):
        """Return (slots after their next tokens, these tokens)."""
        norm = merge_module(self._graphdefs.norm, *norm_weights)
        output = merge_module(self._graphdefs.output, *output_weights)
        logits = project(norm(x[0]), output_matrix(output), jnp.float32)
        logits, positions = cap_logits(logits, self._config.logit_softcap), slots.positions + 1
        tokens = sample_tokens(logits, slots.keys, positions, slots.temperatures, slots.top_ps).astype(jnp.int32)
        finite = jnp.isfinite(logits).all(-1)
        live = slots.live & finite & ~jnp.isin(tokens, stops) & (positions + 1 < slots.ends)
        after = replace(slots, tokens=tokens, positions=jnp.where(live, positions, slots.positions), live=live)
        return after, jnp.where(slots.live, jnp.where(finite, tokens, NOT_FINITE), -1)


def _part(trees: Trees, name: str) -> Any:
    return tuple(tree[name] for tree in trees)
