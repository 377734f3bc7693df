"""The token embedding and the output projection: single rows, growth and values that train beside adapters."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import LLAMA_PARTS, Parts
from jaxglue.models.linear import Linear
from jaxglue.models.lora_config import PATHS, LoraConfig, VocabularyModule
from jaxglue.models.per_layer import PerLayerEmbedding
from jaxglue.models.tower import place_features
from jaxglue.ops.norm_rope import reference_norm
from jaxglue.ops.projection import LowRankAdapter
from jaxglue.ops.rows import take_rows
from jaxglue.vision.rows import Images

EMBEDDING: VocabularyModule = "embed_tokens"
HEAD: VocabularyModule = "lm_head"
ROWS = "trainable_tokens_delta"
"""PEFT's name of the values of single rows."""
Rows = tuple[Float[Array, "n D"], Int[Array, " n"]]
"""Values that replace rows of a matrix [V, D], and the rows' sorted indices."""


class Embedding(nnx.Module):
    """Token embeddings, weight [V, D], times a multiplier, or normed."""

    def __init__(self, config: DecoderConfig, parts: Parts = LLAMA_PARTS, *, dtype, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * config.initializer_range)
        self.multiplier, self.shared_width = config.scales.embedding, config.shared_width
        self.lora_A: nnx.LoRAParam | None = nnx.data(None)
        self.lora_B: nnx.LoRAParam | None = nnx.data(None)
        self.lora_scale = 0.0
        self.norm_eps = config.rms_norm_eps if parts.embedding_norm else None
        makes = {"dtype": dtype, "rngs": rngs}
        self.per_layer = None if config.per_layer is None else PerLayerEmbedding(config, parts.norm, **makes)
        self.vision = None if config.vision is None else config.vision.make(config, **makes)

    def add_lora(self, *, rank: int, scale: float, rngs: nnx.Rngs) -> None:
        """Add a float32 adapter with zero initial output, as PEFT does: A [R, V] zero, B [D, R] normal."""
        V, D = self.weight.shape
        self.lora_A = nnx.LoRAParam(jnp.zeros((rank, V)))
        self.lora_B = nnx.LoRAParam(jax.random.normal(rngs.params(), (D, rank)))
        self.lora_scale = scale

    def __call__(self, tokens: Int[Array, "B T"], dtype, ids: Int[Array, "B T"] | None = None) -> Float[Array, "B T W"]:
        """Look up the tokens' embeddings in `dtype`, with zeros in columns that layers share.

        Args:
            tokens: rows of the table.
            dtype: of the result.
            ids: the tokens, where `tokens` are rows of a table that holds only those needed.
        """
        x = take_rows(self.weight[...], tokens).astype(dtype)
        ids = tokens if ids is None else ids
        if (rows := replaced_rows(self)) is not None:
            values, indices = rows
            slots = jnp.minimum(jnp.searchsorted(indices, ids), len(indices) - 1)
            x = jnp.where((indices[slots] == ids)[..., None], take_rows(values, slots).astype(dtype), x)
        if self.lora_A is not None and self.lora_B is not None:
            low_rank, B = take_rows(self.lora_A[...].T, ids), self.lora_B[...]
            product = jnp.matmul(low_rank.astype(dtype), B.T.astype(dtype), preferred_element_type=jnp.float32)
            x = (x + self.lora_scale * product).astype(dtype)
        x = x if self.multiplier == 1.0 else x * jnp.asarray(self.multiplier, dtype)
        x = x if self.norm_eps is None else reference_norm(x, jnp.ones(x.shape[-1], dtype), self.norm_eps)
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.shared_width))) if self.shared_width else x

    def see(
        self, x: Float[Array, "B T W"], images: Images | None, *, backend: str = "auto"
    ) -> tuple[Float[Array, "B T W"], list[Float[Array, "B T D"]]]:
        """Return tokens' embeddings with images' features in their places, and what the first layers' outputs get."""
        if images is None:
            return x, []
        features = images.features
        if features is None:
            assert self.vision is not None and images.patches is not None
            features = self.vision(images.patches, x.dtype, backend=backend)
            if images.clips is not None:
                heard = self.vision(images.clips, x.dtype, backend=backend)
                features = jnp.concatenate([features, heard], axis=1)
        D = self.weight.shape[1]
        first, *others = (features[..., start : start + D] for start in range(0, features.shape[-1], D))
        none = jnp.zeros((*x.shape[:2], D), x.dtype)
        added = [place_features(none, part, images) for part in others]
        return place_features(x, first, images), added

    def layer_inputs(
        self, tokens: Int[Array, "B T"] | None, x: Float[Array, "B T W"]
    ) -> list[Float[Array, "B T P"]] | None:
        """Return each layer's own embeddings of the tokens, rows of their table, whose embeddings are x.

        None in models without.
        """
        if self.per_layer is None:
            return None
        assert tokens is not None
        return self.per_layer(tokens, x[..., : self.weight.shape[1]])


def replaced_rows(module: Any) -> Rows | None:
    """Return the rows of an embedding or output projection that other values replace; None if there are none."""
    values = getattr(module, ROWS, None)
    return None if values is None else (values[...], jnp.asarray(np.array(module.token_indices, np.int32)))


def output_matrix(module: Any) -> Float[Array, "V D"]:
    """Return the weight of an embedding or output projection, with replaced rows in place."""
    weight = module.weight[...]
    if (rows := replaced_rows(module)) is None:
        return weight
    values, indices = rows
    return weight.at[indices].set(values.astype(weight.dtype))


def with_low_rank(
    module: Any, hidden: Float[Array, "*B D"], ranks: Bool[Array, "*B R"] | None = None
) -> Float[Array, "*B W"]:
    """Return hidden states with their products with the A of an output projection's adapter beside them, if any.

    Args:
        module: the output projection.
        hidden: states.
        ranks: of the adapter that each state uses; None for all.
    """
    if (adapter := _head_adapter(module)) is None:
        return hidden
    low_rank = jnp.matmul(hidden, adapter.A.T.astype(hidden.dtype), preferred_element_type=jnp.float32)
    if ranks is not None:
        low_rank = jnp.where(ranks, low_rank, 0)
    return jnp.concatenate([hidden, (adapter.scale * low_rank).astype(hidden.dtype)], axis=-1)


def low_rank_columns(module: Any) -> Float[Array, "V R"] | None:
    """Return the B of an output projection's adapter: further columns of its matrix; None without adapter."""
    adapter = _head_adapter(module)
    return None if adapter is None else adapter.B


def extended_matrix(module: Any) -> Float[Array, "V W"]:
    """Return the `output_matrix` with its `low_rank_columns`, to multiply `with_low_rank` states."""
    matrix, columns = output_matrix(module), low_rank_columns(module)
    return matrix if columns is None else jnp.concatenate([matrix, columns.astype(matrix.dtype)], axis=1)


def _head_adapter(module: Any) -> LowRankAdapter | None:
    """Return the adapter of an output projection; that of an embedding tied to it is not one."""
    return module.adapter if isinstance(module, Linear) else None


def vocabulary_modules(model: Any) -> Iterator[tuple[VocabularyModule, Any]]:
    """Yield (name, module) of the embedding and, if it is not tied to that, the output projection."""
    yield EMBEDDING, model.embed_tokens
    if model.lm_head is not None:
        yield HEAD, model.lm_head


def adapt_vocabulary(model: Any, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Add an adapter in place to embedding and output projection, where they are targets.

    Raises:
        ValueError: one that the model does not have apart, whose rows train by themselves, or that has settings of
            decoder layers.
    """
    modules = dict(vocabulary_modules(model))
    for name in config.vocabulary_targets:
        if (module := modules.get(name)) is None:
            raise ValueError(f"LoRA targets {name}, which this model does not have apart from its embedding")
        sizes: dict[str, Any] = {"rank": config.rank_of(PATHS[name]), "scale": config.scale_of(PATHS[name])}
        options: dict[str, Any] = {"rngs": rngs} | (
            {"dropout": config.dropout or 0.0, "name": name} if name == HEAD else {}
        )
        module.add_lora(**sizes, **options)


def untie(model: Any) -> None:
    """Give a tied model an output projection of its own, with the embedding's values, in place."""
    if model.lm_head is None:
        weight = model.embed_tokens.weight.get_value()
        V, D = weight.shape
        head = nnx.eval_shape(lambda: Linear(D, V, bias=False, std=0.0, dtype=weight.dtype, rngs=nnx.Rngs(0)))
        head.weight = nnx.Param(weight)
        model.lm_head = nnx.data(head)
        model.config = model.config.untied


def train_modules(model: Any, names: Sequence[str]) -> None:
    """Make embedding or output projection train whole beside adapters, in float32, in place.

    A tied projection is the embedding.
    """
    wanted = {EMBEDDING if model.lm_head is None else name for name in names}
    for name, module in vocabulary_modules(model):
        if name in wanted and not isinstance(module.weight, nnx.LoRAParam):
            module.weight = nnx.LoRAParam(module.weight.get_value().astype(jnp.float32))


def train_score(model: Any) -> None:
    """Make a reward model's score train whole beside adapters, in float32, in place."""
    if model.score is not None and not isinstance(model.score.weight, nnx.LoRAParam):
        model.score.weight = nnx.LoRAParam(model.score.weight.get_value().astype(jnp.float32))


def train_rows(model: Any, names: Sequence[str], indices: Sequence[int]) -> None:
    """Make single rows train beside adapters, in float32, in place; modules that train whole have no such rows.

    Raises:
        ValueError: an index outside the vocabulary.
    """
    if indices and not 0 <= min(indices) <= max(indices) < (size := model.config.vocab_size):
        raise ValueError(f"trainable_token_indices: expected 0 to {size - 1}, got {min(indices)} to {max(indices)}")
    wanted = {EMBEDDING if model.lm_head is None else name for name in names} if indices else set()
    for name, module in vocabulary_modules(model):
        if name in wanted and not isinstance(module.weight, nnx.LoRAParam):
            module.token_indices = tuple(sorted(set(indices)))
            setattr(module, ROWS, nnx.LoRAParam(_take_rows(module.weight.get_value(), module.token_indices)))


@partial(jax.jit, static_argnums=1)
def _take_rows(weight, indices: tuple[int, ...]) -> Array:
    return weight[np.array(indices)].astype(jnp.float32)


def grow_vocabulary(model: Any, tokens: Sequence[int], size: int) -> None:
    """Give new tokens the mean of the earlier tokens' rows, and the matrices `size` rows, in place.

    Args:
        model: with at least as many rows as the tokenizer had tokens.
        tokens: the new tokens' ids; rows beyond the old matrices are set likewise.
        size: rows afterwards, at least as many as before.
    """
    for _, module in vocabulary_modules(model):
        weight = module.weight.get_value()
        new = sorted({*tokens, *range(weight.shape[0], size)})
        module.weight = nnx.Param(_grow(weight, tuple(new), size) if new else weight)
    model.config = replace(model.config, vocab_size=size)


@partial(jax.jit, static_argnums=(1, 2))
def _grow(weight, new: tuple[int, ...], size: int) -> Array:
    mean = weight[: min(new[0], weight.shape[0])].mean(0, dtype=jnp.float32).astype(weight.dtype)
    grown = jnp.pad(weight, ((0, size - weight.shape[0]), (0, 0)))
    return grown.at[np.array(new)].set(mean)
