"""FP8 products of frozen weights with their adapters: scales are applied where both are added."""

from collections.abc import Sequence

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.fp8.encode import encode
from jaxglue.ops.fp8.products import dot, input_products
from jaxglue.ops.fp8.rows import Rows, as_matrix, coded, cotangent, without_codes
from jaxglue.ops.fp8.vjp import shared_scales
from jaxglue.ops.lora import (
    Quantizer,
    ScaledProduct,
    first_ranks,
    lora_expand_gradients,
    lora_expand_gradients_and_codes,
    lora_expand_onto,
    shrink,
    shrink_gradient,
)
from jaxglue.ops.quant.fp8 import FP8Weight


def project_adapted_fp8(
    x: Float[Array, "*B in"] | Rows,
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
    rows = coded(x)
    outputs = _project(as_matrix(rows), tuple(weights), down, tuple(ups))
    return [y.reshape(*rows.values.shape[:-1], -1) for y in outputs]


@jax.custom_vjp
def _project(rows: Rows, weights: tuple[FP8Weight, ...], down, ups: tuple[Array, ...]) -> tuple[Array, ...]:
    return _forward(rows, weights, down, ups)[0]


def _forward(rows: Rows, weights, down, ups):
    hidden = checkpoint_name(rows.shrink(down), names.LORA_HIDDEN)
    products = (dot(rows.codes, weight.codes, 1, hidden.dtype) for weight in weights)
    outputs = tuple(
        lora_expand_onto(ScaledProduct(product, rows.scales, weight.scales), hidden, up, first)
        for product, weight, up, first in zip(products, weights, ups, first_ranks(ups), strict=True)
    )
    return outputs, (without_codes(rows), hidden, weights, down, ups)


def _backward(residuals, cotangents):
    rows, hidden, weights, down, ups = residuals
    scales = shared_scales(cotangents, weights)
    quantizers = [Quantizer(weight.scales, scales) for weight in weights]
    dhidden, dups, codes = lora_expand_gradients_and_codes(hidden, ups, cotangents, quantizers)
    dx = adapted_input_gradient(codes, weights, scales, dhidden, down)
    return cotangent(rows, dx), None, rows.shrink_gradient(dhidden), dups


def adapted_input_gradient(
    codes: Sequence[Float[Array, "M out"]],
    weights: Sequence[FP8Weight],
    scales: Float[Array, "M 1"],
    dhidden: Float[Array, "M ranks"],
    down: Float[Array, "ranks in"],
) -> Float[Array, "M in"]:
    """Compute Σ dy·W + dhidden·down from codes of dy·(W's scales), whose rows' scales are applied on reading."""
    base = ScaledProduct(input_products(codes, weights, dhidden.dtype), scales)
    return lora_expand_onto(base, dhidden, down.T.astype(dhidden.dtype))


_project.defvjp(_forward, _backward)


def add_adapted_fp8(
    stream: Float[Array, "*B out"],
    x: Float[Array, "*B in"],
    weight: FP8Weight,
    down: Float[Array, "R in"],
    up: Float[Array, "out R"],
) -> Float[Array, "*B out"]:
    """Compute stream + x·Wᵀ + x·downᵀ·upᵀ, rounded once; see `project_adapted_fp8`."""
    rows = (array.reshape(-1, array.shape[-1]) for array in (stream, x))
    return _add(*rows, weight, down, up).reshape(stream.shape)


@jax.custom_vjp
def _add(stream, x, weight: FP8Weight, down, up) -> Array:
    return _add_forward(stream, x, weight, down, up)[0]


def _add_forward(stream, x, weight, down, up):
    hidden = checkpoint_name(shrink(x, down), names.LORA_HIDDEN)
    return add_product(stream, *encode(x), weight, hidden, up), (x, hidden, weight, down, up)


def _add_backward(residuals, dout):
    x, hidden, weight, down, up = residuals
    codes, scales = encode(dout, weight.scales)
    dhidden, (dup,) = lora_expand_gradients(hidden, (up,), (dout,))
    dx = adapted_input_gradient((codes,), (weight,), scales, dhidden, down)
    return dout, dx, None, shrink_gradient(x, dhidden), dup


def add_product(stream, codes, scales, weight: FP8Weight, hidden, up) -> Float[Array, "M out"]:
    """Compute stream + (codes · scales)·Wᵀ + hidden·upᵀ in one pass after the matmul."""
    product = ScaledProduct(dot(codes, weight.codes, 1, stream.dtype), scales, weight.scales)
    return lora_expand_onto(product, hidden, up, addend=stream)


_add.defvjp(_add_forward, _add_backward)
