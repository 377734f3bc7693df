"""Differentiation rules of FP8 products with weights that are frozen or train."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.fp8.encode import encode
from jaxglue.ops.fp8.products import dot, input_products, rescale
from jaxglue.ops.lora import shrink_gradient
from jaxglue.ops.quant.fp8 import FP8Weight, row_scales


@jax.custom_vjp
def project_rows(x: Float[Array, "*B in"], weights: tuple[FP8Weight, ...]) -> tuple[Float[Array, "*B out"], ...]:
    """See `project_fp8`."""
    codes, scales = encode(x)
    return tuple(rescale(dot(codes, weight.codes, 1, x.dtype), scales, weight.scales) for weight in weights)


def _forward(x, weights):
    return project_rows(x, weights), weights


def _backward(weights, cotangents):
    if len(weights) == 1:
        single, scales = encode(cotangents[0], weights[0].scales)
        codes = [single]
    else:
        scales = shared_scales(cotangents, weights)
        codes = [encode(dy, weight.scales, scales)[0] for dy, weight in zip(cotangents, weights, strict=True)]
    return rescale(input_products(codes, weights, cotangents[0].dtype), scales), None


def shared_scales(
    cotangents: tuple[Float[Array, "*B out"], ...], weights: tuple[FP8Weight, ...]
) -> Float[Array, "*B 1"]:
    """Return one scale for each row of all cotangents times their weights' scales."""
    folded = [dy.astype(jnp.float32) * weight.scales for dy, weight in zip(cotangents, weights, strict=True)]
    return row_scales(jnp.stack([jnp.abs(dy).max(axis=-1, keepdims=True) for dy in folded]).max(axis=0))


project_rows.defvjp(_forward, _backward)


@jax.custom_vjp
def project_trained(
    x: Float[Array, "*B in"], weights: tuple[Float[Array, "out in"], ...]
) -> tuple[Float[Array, "*B out"], ...]:
    """See `project_fp8`."""
    return project_rows(x, tuple(map(_quantize, weights)))


def _quantize(weight: Float[Array, "out in"]) -> FP8Weight:
    codes, scales = encode(weight)
    return FP8Weight(codes=codes, scales=scales[:, 0], dtype=weight.dtype)


def _trained_forward(x, weights):
    return project_trained(x, weights), (x, weights)


def _trained_backward(residuals, cotangents):
    x, weights = residuals
    dx, _ = _backward(tuple(map(_quantize, weights)), cotangents)
    return dx, tuple(
        shrink_gradient(x, dy).astype(weight.dtype) for dy, weight in zip(cotangents, weights, strict=True)
    )


project_trained.defvjp(_trained_forward, _trained_backward)
