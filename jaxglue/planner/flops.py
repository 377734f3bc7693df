"""Floating-point operations of a model, for MFU and estimates."""

from jaxtyping import Int
from numpy import ndarray

from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import find_family


def matmul_parameters(config: DecoderConfig) -> int:
    """Count the weights that a token is multiplied with: linear layers and output projection, not the embedding.

    In a mixture of experts, only as many experts as serve one token count, and shared ones.
    """
    D = config.hidden_size
    mixers = sum(kind.mixer.weights(config, kind) for kind in config.layer_kinds)
    layers = sum(_feed_forward(config, layer) for layer in range(config.num_hidden_layers))
    parts, attending = find_family(config.model_type).parts, (k for k in config.layer_kinds if k.mixer.attends)
    if parts.gate is not None:
        layers += sum(D * config.num_attention_heads * (1 if parts.gate_per_head else k.head_dim) for k in attending)
    inputs = 2 * D * config.per_layer.size * config.num_hidden_layers if config.per_layer else 0
    return mixers + layers + inputs + D * (config.labels if config.scores else config.vocab_size)


def _feed_forward(config: DecoderConfig, layer: int) -> int:
    D, moe, parts = config.hidden_size, config.moe, find_family(config.model_type).parts
    matrices = 2 if parts.experts.activation == "relu2" else 3
    if moe is None or not moe.sparse_layers[layer]:
        return matrices * D * config.shapes[layer].intermediate_size
    gate = parts.experts.shared_gate and moe.shared_size > 0
    around = D * (moe.num_experts + gate) + 2 * D * moe.latent_size
    return around + _routed(config) + matrices * D * moe.shared_size


def _routed(config: DecoderConfig) -> int:
    """Count the weights of a token's experts in a layer."""
    moe, matrices = config.moe, 2 if find_family(config.model_type).parts.experts.activation == "relu2" else 3
    assert moe is not None
    return matrices * (moe.latent_size or config.hidden_size) * moe.num_experts_per_tok * moe.intermediate_size


def routed_parameters(config: DecoderConfig) -> int:
    """Count those of `matmul_parameters` that are experts', but for shared ones."""
    return 0 if config.moe is None else sum(config.moe.sparse_layers) * _routed(config)


def training_flops_per_token(
    config: DecoderConfig, *, visible_keys: float, weight_gradients: bool, has_logits: bool = True
) -> float:
    """Return a token's FLOPs of forward and backward, without recomputation (Chowdhery et al. 2022, appendix B).

    Args:
        config: the model's shape.
        visible_keys: mean number of keys that a query attends to (see `mean_visible_keys`).
        weight_gradients: all weights train; frozen ones need no gradient, which leaves two thirds of the work.
        has_logits: every token meets the output projection; else few do, which are not counted.
    """
    projection = 0 if has_logits else config.hidden_size * (config.labels if config.scores else config.vocab_size)
    weights = (6 if weight_gradients else 4) * (matmul_parameters(config) - projection)
    scored = (layer for layer, kind in enumerate(config.layer_kinds) if kind.mixer.attends)
    widths = sum((config.layer_kinds[layer].head_dim + config.attended(layer)[1]) / 2 for layer in scored)
    return weights + 12 * config.num_attention_heads * widths * visible_keys


def mean_visible_keys(lengths: Int[ndarray, " documents"]) -> float:
    """Return the mean number of keys per token in causal attention inside documents of these lengths."""
    lengths = lengths.astype(float)
    return float((lengths * (lengths + 1) / 2).sum() / lengths.sum())
