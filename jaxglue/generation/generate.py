"""Token-by-token generation with a key/value cache, run layer by layer.

Prompt and cache are padded to bucketed lengths, so prompts of similar length share programs: one prefill and one decode
step per layer type, whatever the depth.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.sampling import sample_token
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.layers import project
from jaxglue.models.parameters import ModelGraphDefs, Params, merge_module
from jaxglue.models.vocabulary import output_matrix
from jaxglue.ops.moe import Routing
from jaxglue.ops.norm_rope import HeadNorms, rotate_heads
from jaxglue.ops.rope import rope_tables
from jaxglue.ops.segments import pack_segments

_SMALLEST_BUCKET = 128

Cache = tuple[Float[Array, "1 C K H"], Float[Array, "1 C K H"]]
"""Rotated keys and values of a layer by position; C is the cache length."""
Trees = tuple[Params, ...]
"""Trainable and frozen parameters of the model or a part of it."""


class _Inference:
    """Context fields used only in training."""

    dropout_key = router_losses = token_mask = tile = None

    def observe_routing(self, routing: Routing) -> None:
        """Ignore the routing: generation keeps no statistics."""


class PrefillContext(_Inference):
    """Context of a prompt: packed attention that records keys and values."""

    def __init__(self, packed: PackedContext):
        self._packed = packed
        self.rotate = packed.rotate
        self.cache: Cache | None = None

    def attend(self, q, k, v, **options) -> Float[Array, "1 T N H"]:
        """Compute causal attention within the prompt."""
        self.cache = (k, v)
        return self._packed.attend(q, k, v, **options)


class DecodeContext(_Inference):
    """Context of one token: appends its key and value to the cache and attends over it."""

    def __init__(self, cache: Cache, position: Int[Array, ""], cos: Float[Array, "1 1 half"], sin):
        self.cache, self._position, self._tables = cache, position, (cos, sin)

    def rotate(self, q, k, norms: HeadNorms | None = None) -> tuple[Array, Array]:
        """Apply the optional q/k norms and the rotary embedding at the token's position."""
        return rotate_heads(q, k, *self._tables, norms=norms)

    def attend(self, q, k, v, *, window=None, sinks=None) -> Float[Array, "1 1 N H"]:
        """Compute attention over the cache, including the new token."""
        append = partial(jax.lax.dynamic_update_slice_in_dim, start_index=self._position, axis=1)
        self.cache = keys, values = append(self.cache[0], k), append(self.cache[1], v)
        return attend_cache(q, keys, values, self._position, window=window, sinks=sinks)


def attend_cache(
    q: Float[Array, "1 1 N H"],
    keys: Float[Array, "1 C K H"],
    values: Float[Array, "1 C K H"],
    position: Int[Array, ""],
    *,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "1 1 N H"]:
    """Compute attention of the query at `position` over the cache up to and including it; softmax in float32."""
    _, C, K, H = keys.shape
    N = q.shape[2]
    index = jnp.arange(C)
    visible = index <= position
    if window is not None:
        visible &= index > position - window
    grouped = q.reshape(K, N // K, H)
    scores = jnp.einsum("kgh,ckh->kgc", grouped, keys[0], preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores * H**-0.5, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(K, N // K, 1)
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :C].astype(values.dtype)
    out = jnp.einsum("kgc,ckh->kgh", weights, values[0], preferred_element_type=jnp.float32)
    return out.reshape(1, 1, N, H).astype(q.dtype)


class CachedLayer:
    """The compiled prefill and decode step of one layer type."""

    def __init__(self, graphdef: nnx.GraphDef):
        self._graphdef = graphdef
        self.prefill = jax.jit(self._prefill, static_argnames="cache_length")
        self.decode = jax.jit(self._decode, donate_argnames="cache")

    def _prefill(self, weights: Trees, x, packed: PackedContext, *, cache_length: int):
        """Return (y, the prompt's cache padded to `cache_length`)."""
        context = PrefillContext(packed)
        y = merge_module(self._graphdef, *weights)(x, context)
        room = ((0, 0), (0, cache_length - x.shape[1]), (0, 0), (0, 0))
        return y, jax.tree.map(lambda array: jnp.pad(array, room), context.cache)

    def _decode(self, weights: Trees, x, cache: Cache, position, cos, sin):
        """Return (y, the cache with the token appended)."""
        context = DecodeContext(cache, position, cos, sin)
        y = merge_module(self._graphdef, *weights)(x, context)
        return y, context.cache


class Generator:
    """Token generator for a model split by `split_model`.

    Args:
        graphdefs: the modules.
        config: the model's shape.
        dtype: the dtype of activations, matmuls and cache.
        attention: the attention backend for prompts.
    """

    def __init__(
        self, graphdefs: ModelGraphDefs, config: DecoderConfig, *, dtype=jnp.bfloat16, attention: str = "auto"
    ):
        self._graphdefs, self._config, self._dtype, self._attention = graphdefs, config, dtype, attention
        layer_types = {graphdef: CachedLayer(graphdef) for graphdef in graphdefs.layers}
        self._layers = [layer_types[graphdef] for graphdef in graphdefs.layers]
        self._output_name = "embed_tokens" if graphdefs.lm_head is None else "lm_head"
        self._embed = jax.jit(self._embed_and_rope)
        self._project_output = jax.jit(self._project)

    def stream(
        self,
        trainable: Params,
        frozen: Params,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        stop: Collection[int] = (),
    ) -> Iterator[int]:
        """Yield new tokens up to a stop token (excluded), `max_tokens` or the model's limit.

        Raises:
            ValueError: an empty prompt, one reaching the model's limit, or a token outside its vocabulary.
        """
        end = min(len(prompt) + sampling.max_tokens, self._checked_limit(prompt))
        trees, key = (trainable, frozen), jax.random.key(sampling.seed)
        logits, caches = self._prefill(trees, prompt, cache_length=_bucket(end))
        for position in range(len(prompt), end):
            token = int(sample_token(logits, jax.random.fold_in(key, position), sampling.temperature, sampling.top_p))
            if token in stop:
                return
            yield token
            if position + 1 < end:
                logits = self._decode(trees, token, position, caches)

    def compilations(self) -> int:
        """Return the number of compiled programs."""
        functions: list[Any] = [self._embed, self._project_output]
        for layer in set(self._layers):
            functions += [layer.prefill, layer.decode]
        return sum(function._cache_size() for function in functions)

    def _checked_limit(self, prompt: Sequence[int]) -> int:
        """Return the model's position limit after checking the prompt against it."""
        limit, vocabulary = self._config.max_position_embeddings, self._config.vocab_size
        if not 0 < len(prompt) < limit:
            raise ValueError(f"the prompt has {len(prompt):,} tokens: expected 1 to {limit - 1:,}, the model's limit")
        if max(prompt) >= vocabulary:
            raise ValueError(f"the prompt holds token id {max(prompt)}, but the model's vocabulary has {vocabulary}")
        return limit

    def _prefill(self, trees: Trees, prompt: Sequence[int], *, cache_length: int) -> tuple[Array, list[Cache]]:
        """Return (logits after the prompt, caches of all layers)."""
        tokens = np.zeros((1, _bucket(len(prompt))), np.int32)
        tokens[0, : len(prompt)] = prompt
        segments = pack_segments([[len(prompt)]], seq_len=tokens.shape[1])
        x, cos, sin = self._embed(_part(trees, "embed_tokens"), tokens, segments.positions)
        context = PackedContext(segments=segments, cos=cos, sin=sin, backend=self._attention)
        caches = []
        for layer, weights in zip(self._layers, zip(*_part(trees, "layers"), strict=True), strict=True):
            x, cache = layer.prefill(weights, x, context, cache_length=cache_length)
            caches.append(cache)
        return self._logits(trees, x, len(prompt) - 1), caches

    def _decode(self, trees: Trees, token: int, position: int, caches: list[Cache]) -> Array:
        """Return the logits after this token, appending it to the caches in place."""
        tokens, positions = np.array([[token]], np.int32), np.array([[position]], np.int32)
        x, cos, sin = self._embed(_part(trees, "embed_tokens"), tokens, positions)
        for i, (layer, weights) in enumerate(zip(self._layers, zip(*_part(trees, "layers"), strict=True), strict=True)):
            x, caches[i] = layer.decode(weights, x, caches[i], positions[0, 0], cos, sin)
        return self._logits(trees, x, 0)

    def _logits(self, trees: Trees, x: Float[Array, "1 T D"], index: int) -> Float[Array, " V"]:
        return self._project_output(_part(trees, "norm"), _part(trees, self._output_name), x, np.int32(index))

    def _embed_and_rope(self, weights: Trees, tokens: Int[Array, "1 T"], positions: Int[Array, "1 T"]):
        x = merge_module(self._graphdefs.embed_tokens, *weights)(tokens, self._dtype)
        return x, *rope_tables(positions, self._config.rope, self._config.head_dim)

    def _project(self, norm_weights: Trees, output_weights: Trees, x: Float[Array, "1 T D"], index: Int[Array, ""]):
        """Compute float32 logits at one position."""
        norm = merge_module(self._graphdefs.norm, *norm_weights)
        output = merge_module(self._graphdefs.output, *output_weights)
        return project(norm(x[0, index]), output_matrix(output), jnp.float32)


def _part(trees: Trees, name: str) -> Any:
    return tuple(tree[name] for tree in trees)


def _bucket(length: int) -> int:
    """Return the padded length for `length` tokens, a power of two."""
    return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
