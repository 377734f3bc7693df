"""Embeddings that each layer has of its own (Gemma 4), computed beside the tokens' embeddings."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxglue.models.config import DecoderConfig
from jaxglue.models.residual import Norm
from jaxglue.ops.norm_rope import NormStyle
from jaxglue.ops.projection import project
from jaxglue.ops.rows import take_rows


class Matrix(nnx.Module):
    """A table, or a projection without an adapter."""

    def __init__(self, shape: tuple[int, int], std: float, *, dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * std)


class PerLayerEmbedding(nnx.Module):
    """Σ / √2 of a table's rows, and of a normed projection of the tokens' embeddings, for each layer."""

    def __init__(self, config: DecoderConfig, norm: NormStyle, *, dtype, rngs: nnx.Rngs):
        shape, D, std = config.per_layer, config.hidden_size, config.initializer_range
        assert shape is not None
        width = shape.layers * shape.size
        self.embedding = Matrix((shape.vocab_size, width), std, dtype=dtype, rngs=rngs)
        self.projection = Matrix((width, D), std, dtype=dtype, rngs=rngs)
        self.norm = Norm(shape.size, config.rms_norm_eps, style=norm, dtype=dtype)
        self.shape, self.width = shape, D

    def __call__(self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]) -> list[Float[Array, "B T P"]]:
        """Return the embeddings of all layers from the tokens and their scaled embeddings, in the dtype of these."""
        P = self.shape.size
        rows = take_rows(self.embedding.weight[...], tokens).astype(x.dtype) * jnp.asarray(P**0.5, x.dtype)
        return self._halved(x, rows.reshape(*tokens.shape, self.shape.layers, P))

    def projected(self, x: Float[Array, "B T D"]) -> list[Float[Array, "B T P"]]:
        """Return the part of the embeddings of all layers that depends on the tokens' embeddings."""
        return self._halved(x, jnp.zeros((), x.dtype))

    def _halved(self, x: Float[Array, "B T D"], rows: Float[Array, "*shape"]) -> list[Float[Array, "B T P"]]:
        """Return (the normed projection of x + rows) / √2, layer by layer."""
        projected = (project(x, self.projection.weight[...]) * self.width**-0.5).astype(x.dtype)
        projected = projected.reshape(*x.shape[:2], self.shape.layers, self.shape.size)
        sums = (self.norm(projected) + rows) * 2.0**-0.5
        return [sums[:, :, layer].astype(x.dtype) for layer in range(self.shape.layers)]
