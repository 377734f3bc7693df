"""FP8 products of frozen weights that share an input, and their adapters: scales are applied where both are added."""

from collections.abc import Sequence

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.fp8.encode import encode
from jaxglue.ops.fp8.products import dot, input_products
from jaxglue.ops.fp8.vjp import shared_scales
from jaxglue.ops.lora import (
    Quantizer,
    ScaledProduct,
    first_ranks,
    lora_expand_gradients_and_codes,
    lora_expand_onto,
    shrink,
    shrink_gradient,
)
from jaxglue.ops.quant.fp8 import FP8Weight


def project_adapted_fp8(
    x: Float[Array, "*B in"],
    weights: Sequence[FP8Weight],
    down: Float[Array, "ranks in"],
    ups: Sequence[Float[Array, "out R"]],
) -> list[Float[Array, "*B out"]]:
    """Compute x·Wᵢᵀ + (x·downᵀ)ᵢ·upᵢᵀ in x's dtype, the former as `project_fp8` does.

    Args:
        x: the inputs.
        weights: frozen matrices [out, in].
        down: the adapters' first matrices, one below the other, float32.
        ups: their second matrices, scaled, float32.
    """
    outputs = _project(x.reshape(-1, x.shape[-1]), tuple(weights), down, tuple(ups))
    return [y.reshape(*x.shape[:-1], -1) for y in outputs]


@jax.custom_vjp
def _project(x, weights: tuple[FP8Weight, ...], down, ups: tuple[Array, ...]) -> tuple[Array, ...]:
    return _forward(x, weights, down, ups)[0]


def _forward(x, weights, down, ups):
    hidden = checkpoint_name(shrink(x, down), names.LORA_HIDDEN)
    codes, scales = encode(x)
    outputs = tuple(
        lora_expand_onto(ScaledProduct(dot(codes, weight.codes, 1, x.dtype), scales, weight.scales), hidden, up, first)
        for weight, up, first in zip(weights, ups, first_ranks(ups), strict=True)
    )
    return outputs, (x, hidden, weights, down, ups)


def _backward(residuals, cotangents):
    x, hidden, weights, down, ups = residuals
    scales = shared_scales(cotangents, weights)
    quantizers = [Quantizer(weight.scales, scales) for weight in weights]
    dhidden, dups, codes = lora_expand_gradients_and_codes(hidden, ups, cotangents, quantizers)
    dx = adapted_input_gradient(codes, weights, scales, dhidden, down)
    return dx, None, shrink_gradient(x, dhidden), dups


def adapted_input_gradient(
    codes: Sequence[Float[Array, "M out"]],
    weights: Sequence[FP8Weight],
    scales: Float[Array, "M 1"],
    dhidden: Float[Array, "M ranks"],
    down: Float[Array, "ranks in"],
) -> Float[Array, "M in"]:
    """Compute Σ dy·W + dhidden·down from codes of dy·(W's scales), whose rows' scales are applied on reading."""
    base = ScaledProduct(input_products(codes, weights, dhidden.dtype), scales)
    return lora_expand_onto(base, dhidden, down.T)


_project.defvjp(_forward, _backward)
