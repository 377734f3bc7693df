"""The decoder: embedding, a family's layers, norm, and output projection or, in reward models, score."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.family import Parts
from jaxglue.models.linear import Linear
from jaxglue.models.residual import Norm
from jaxglue.models.vocabulary import Embedding, extended_matrix, output_matrix, with_low_rank
from jaxglue.ops.cross_entropy import cap_logits
from jaxglue.ops.projection import project
from jaxglue.ops.segments import PackedSegments, pack_segments
from jaxglue.vision.rows import Images, token_positions


class CausalLM(nnx.Module):
    """Embedding, decoder layers, final norm and output projection (None when tied to the embedding).

    A reward model has `score` [1, D] in place of the projection, a classifier `score` [C, D].
    """

    def __init__(self, config: DecoderConfig, parts: Parts, make_layer: Callable[[int], nnx.Module], *, dtype, rngs):
        self.config = config
        self.embed_tokens = Embedding(config, parts, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([make_layer(index) for index in range(config.num_hidden_layers)])
        factor = 1.0 if config.scores else 1.0 / config.scales.logit_divisor
        self.norm = Norm(
            config.hidden_size, config.rms_norm_eps, style=parts.final_norm or parts.norm, factor=factor, dtype=dtype
        )
        D, V, std = config.hidden_size, config.vocab_size, config.initializer_range
        without = config.tie_word_embeddings or config.scores
        self.lm_head = None if without else Linear(D, V, bias=False, std=std, dtype=dtype, rngs=rngs)
        self.score = Linear(D, config.labels, bias=False, std=std, dtype=dtype, rngs=rngs) if config.scores else None

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segments: PackedSegments | None = None,
        *,
        dtype=jnp.float32,
        images: Images | None = None,
        backend: str = "auto",
    ) -> Float[Array, "B T V"]:
        """Compute float32 logits, or scores [B, T, C], of packed rows; without segments each row is one document.

        Raises:
            ValueError: tokens that are no integers [B, T], or segments of other rows.
        """
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers [B, T], got {tokens.shape} of {tokens.dtype}")
        if segments is not None and segments.segment_ids.shape != tokens.shape:
            raise ValueError(f"segments are of rows {segments.segment_ids.shape}, and tokens of {tokens.shape}")
        if segments is None:
            segments = pack_segments([[tokens.shape[1]]] * tokens.shape[0], seq_len=tokens.shape[1])
        context = packed_context(self.config, segments, images, backend=backend)
        x, seen = self.embed_tokens.see(self.embed_tokens(tokens, dtype), images, backend=backend)
        inputs = self.embed_tokens.layer_inputs(tokens, x) or seen
        contexts = context.each(inputs, self.config.layer_segments(segments, images))
        for layer, own in zip(self.layers, contexts, strict=True):
            x = layer(x, own)
        hidden, matrix = with_low_rank(self._output, self.norm(x)), extended_matrix(self._output)
        return cap_logits(project(hidden, matrix, jnp.float32), self.config.scales.logit_softcap)

    @property
    def output_weight(self) -> Float[Array, "V D"]:
        """Return the output projection, tied or not, without an adapter's product, or the score's weight [C, D]."""
        return output_matrix(self._output)

    @property
    def _output(self) -> nnx.Module:
        return next(module for module in (self.score, self.lm_head, self.embed_tokens) if module is not None)


def packed_context(
    config: DecoderConfig, segments: PackedSegments, images: Images | None = None, *, backend: str = "auto"
) -> PackedContext:
    """Build the context shared by all layers of a batch."""
    rope = config.rope_tables(token_positions(segments, images), segments.ends - segments.starts)
    return PackedContext(segments=segments, rope=rope, backend=backend)
