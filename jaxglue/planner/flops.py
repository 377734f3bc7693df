"""Floating-point operations of a model, for MFU and estimates."""

from jaxtyping import Int
from numpy import ndarray

from jaxglue.models.config import DecoderConfig, LayerKind
from jaxglue.models.family import find_family


def matmul_parameters(config: DecoderConfig) -> int:
    """Count the weights that a token is multiplied with: linear layers and output projection, not the embedding.

    In a mixture of experts, only as many experts as serve one token count, and shared ones.
    """
    D = config.hidden_size
    mixers = [_linear_attention(config) if kind.linear else _attention(config, kind) for kind in config.layer_kinds]
    layers = sum(_feed_forward(config, layer) for layer in range(config.num_hidden_layers))
    return sum(mixers) + layers + D * (config.labels if config.scores else config.vocab_size)


def _attention(config: DecoderConfig, kind: LayerKind) -> int:
    N, shape = config.num_attention_heads, kind.shape
    if (latent := config.latent) is not None:
        D, H, rank = config.hidden_size, kind.head_dim, latent.query_rank
        queries = D * N * H if rank is None else rank * (D + N * H)
        keys_values = D * (latent.rank + latent.rope_dim) + latent.rank * N * (latent.nope_dim + latent.value_dim)
        return queries + keys_values + N * latent.value_dim * D
    made = 0 if shape.shares == "takes" else shape.kv_heads * (1 if shape.keys_as_values else 2)
    own = 2 * config.hidden_size * config.per_layer.size if config.per_layer else 0
    return config.hidden_size * shape.head_dim * (2 * N + made) + own


def _linear_attention(config: DecoderConfig) -> int:
    shape = config.delta
    assert shape is not None
    return config.hidden_size * (shape.channels + 2 * shape.value_width + 2 * shape.num_value_heads)


def _feed_forward(config: DecoderConfig, layer: int) -> int:
    D, moe = config.hidden_size, config.moe
    if moe is None or not moe.sparse_layers[layer]:
        return 3 * D * config.shapes[layer].intermediate_size
    gate = find_family(config.model_type).parts.experts.shared_gate and moe.shared_size > 0
    return D * (moe.num_experts + gate) + 3 * D * (moe.num_experts_per_tok * moe.intermediate_size + moe.shared_size)


def training_flops_per_token(config: DecoderConfig, *, visible_keys: float, weight_gradients: bool) -> float:
    """Return a token's FLOPs of forward and backward, without recomputation (Chowdhery et al. 2022, appendix B).

    Args:
        config: the model's shape.
        visible_keys: mean number of keys that a query attends to (see `mean_visible_keys`).
        weight_gradients: all weights train; frozen ones need no gradient, which leaves two thirds of the work.
    """
    weights = (6 if weight_gradients else 4) * matmul_parameters(config)
    heads = sum(_mean_width(config, kind) for kind in config.layer_kinds if not kind.linear)
    return weights + 12 * config.num_attention_heads * heads * visible_keys


def _mean_width(config: DecoderConfig, kind: LayerKind) -> float:
    """Return the mean of a key's and a value's width."""
    return kind.head_dim if config.latent is None else (kind.head_dim + config.latent.value_dim) / 2


def mean_visible_keys(lengths: Int[ndarray, " documents"]) -> float:
    """Return the mean number of keys per token in causal attention inside documents of these lengths."""
    lengths = lengths.astype(float)
    return float((lengths * (lengths + 1) / 2).sum() / lengths.sum())
