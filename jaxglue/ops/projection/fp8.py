"""Products of activations and weights in FP8, twice the rate of bfloat16 on tensor cores that have it.

Rows are quantized by row to e4m3 values; XLA calls cuBLAS for the products. Weights are frozen, or train.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_capability, check_triton
from jaxglue.ops.projection.lora import shrink_gradient
from jaxglue.ops.quant.fp8 import E4M3, LARGEST, FP8Weight, encode_rows, quantize_rows, row_scales

if TYPE_CHECKING:
    from jaxglue.ops.projection.triton import TritonEncode

FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 tensor cores (Ada Lovelace)."""


def check_fp8(capability: Capability | None) -> None:
    """Raise ValueError for a GPU without FP8 tensor cores."""
    try:
        check_capability(capability, FIRST_CAPABILITY)
    except NotImplementedError as reason:
        raise ValueError(f"--matmul fp8: {reason}, the first with FP8 tensor cores: use --matmul bf16") from None


def check_fp8_kernels(capability: Capability | None, dtype) -> None:
    """Raise NotImplementedError unless Triton kernels serve a call of this dtype, on a GPU with FP8 tensor cores."""
    check_triton(capability, dtype)
    check_capability(capability, FIRST_CAPABILITY)


@dataclass(frozen=True, kw_only=True)
class EncodeCall:
    """Meaning of a quantization of rows to e4m3."""

    dtype: jnp.dtype


def _check(capability: Capability | None, call: EncodeCall) -> None:
    check_fp8_kernels(capability, call.dtype)


def _load(capability: Capability, call: EncodeCall) -> "TritonEncode":
    from jaxglue.ops.projection.triton import TritonEncode

    return TritonEncode.of(capability)


ENCODE = Operation(
    name="FP8 quantization",
    backends={
        "triton": Backend(
            check=_check,
            load=_load,
            advantage="rows are read once, at memory speed",
            reads={EncodeCall: ("dtype",)},
        )
    },
)


def encode(
    x: Float[Array, "*B n"], columns: Float[Array, " n"] | None = None, scales: Float[Array, "*B 1"] | None = None
) -> tuple[Float[Array, "*B n"], Float[Array, "*B 1"]]:
    """Return (e4m3 values, float32 scales) of x · columns.

    Args:
        x: rows, each quantized by one scale.
        columns: factors of the columns, float32; None for none.
        scales: known ones, none smaller than the rows' largest magnitudes / 448; by default exactly these.
    """
    if (kernels := ENCODE.load(EncodeCall(dtype=x.dtype))) is not None:
        return kernels.encode(x, columns, scales)
    values = x if columns is None else x.astype(jnp.float32) * columns
    return quantize_rows(values) if scales is None else encode_rows(values, scales)


def dot(rows: Float[Array, "*B n"], matrix: Float[Array, "a b"], dimension: int, dtype) -> Float[Array, "*B m"]:
    """Contract the last axis of e4m3 rows with a dimension of an e4m3 matrix; round the float32 sums to `dtype`."""
    contracting = (((rows.ndim - 1,), (dimension,)), ((), ()))
    return jax.lax.dot_general(rows, matrix, contracting, preferred_element_type=dtype)


def e4m3_factor(count: int) -> float:
    """Return the power of two by which `dot_to_e4m3` multiplies sums of so many products."""
    return 2.0 ** -round(math.log2(count * LARGEST / 4))


def dot_to_e4m3(rows: Float[Array, "*B n"], matrix: Float[Array, "m n"]) -> tuple[Float[Array, "*B m"], float]:
    """Return (e4m3 values, factor) of products along last axes, which are these values times the one factor.

    A quarter of the largest sum of n products is the largest e4m3 value: real sums do not reach it, and rows without
    outliers still have all bits of e4m3, a floating-point format. cuBLAS rounds to e4m3 itself.
    """
    shrink = e4m3_factor(rows.shape[-1])
    return jnp.clip(dot(rows, matrix, 1, jnp.float32) * shrink, -LARGEST, LARGEST).astype(E4M3), 1 / shrink


def rescale(product: Float[Array, "*B n"], *scales: Float[Array, "..."], dtype=None) -> Float[Array, "*B n"]:
    """Multiply a product by its scales in float32 and round to `dtype`, by default its own."""
    total = product.astype(jnp.float32)
    for factor in scales:
        total *= factor
    return total.astype(dtype or product.dtype)


def input_products(
    fp8_cotangents: Sequence[Float[Array, "*B out"]], weights: Sequence[FP8Weight], dtype
) -> Float[Array, "*B in"]:
    """Compute Σ dy·W from e4m3 values of dy·(W's scales), without their rows' shared scales: matmuls accumulate."""
    total, *others = (dot(dy, weight.values, 0, dtype) for dy, weight in zip(fp8_cotangents, weights, strict=True))
    for other in others:
        total = other + total
    return total


def project_fp8(
    x: Float[Array, "*B in"], weights: Sequence[FP8Weight] | Sequence[Float[Array, "out in"]]
) -> list[Float[Array, "*B out"]]:
    """Compute x·Wᵀ of several weights in x's dtype, from e4m3 values with float32 accumulation.

    Quantize x once, with a scale for each token. Backward, fold the weights' scales into the cotangents and quantize
    these with a scale for each token that all share: so one copy of the weights serves both directions.

    Args:
        x: the inputs.
        weights: matrices [out, in]: quantized ones, which get no gradient, or ones that train, quantized on every call;
            their gradients are products in x's dtype, summed in float32.

    Raises:
        ValueError: a weight whose rows are not as long as x's.
    """
    for weight in weights:
        if weight.shape[1] != x.shape[-1]:
            raise ValueError(f"weights must be [out, {x.shape[-1]}] to fit x, got {list(weight.shape)}")
    frozen = tuple(weight for weight in weights if isinstance(weight, FP8Weight))
    return list(_project_frozen(x, frozen) if frozen else _project_trained(x, tuple(weights)))


@jax.custom_vjp
def _project_frozen(x: Float[Array, "*B in"], weights: tuple[FP8Weight, ...]) -> tuple[Float[Array, "*B out"], ...]:
    fp8_values, scales = encode(x)
    return tuple(rescale(dot(fp8_values, weight.values, 1, x.dtype), scales, weight.scales) for weight in weights)


def _frozen_forward(x, weights):
    return _project_frozen(x, weights), weights


def _frozen_backward(weights, cotangents):
    if len(weights) == 1:
        single, scales = encode(cotangents[0], weights[0].scales)
        fp8_cotangents = [single]
    else:
        scales = shared_scales(cotangents, weights)
        fp8_cotangents = [encode(dy, weight.scales, scales)[0] for dy, weight in zip(cotangents, weights, strict=True)]
    return rescale(input_products(fp8_cotangents, weights, cotangents[0].dtype), scales), None


def shared_scales(
    cotangents: tuple[Float[Array, "*B out"], ...], weights: tuple[FP8Weight, ...]
) -> Float[Array, "*B 1"]:
    """Return one scale for each row of all cotangents times their weights' scales."""
    folded = [dy.astype(jnp.float32) * weight.scales for dy, weight in zip(cotangents, weights, strict=True)]
    return row_scales(jnp.stack([jnp.abs(dy).max(axis=-1, keepdims=True) for dy in folded]).max(axis=0))


_project_frozen.defvjp(_frozen_forward, _frozen_backward)


@jax.custom_vjp
def _project_trained(
    x: Float[Array, "*B in"], weights: tuple[Float[Array, "out in"], ...]
) -> tuple[Float[Array, "*B out"], ...]:
    return _project_frozen(x, tuple(map(_quantize, weights)))


def _quantize(weight: Float[Array, "out in"]) -> FP8Weight:
    fp8_values, scales = encode(weight)
    return FP8Weight(values=fp8_values, scales=scales[:, 0], dtype=weight.dtype)


def _trained_forward(x, weights):
    return _project_trained(x, weights), (x, weights)


def _trained_backward(residuals, cotangents):
    x, weights = residuals
    dx, _ = _frozen_backward(tuple(map(_quantize, weights)), cotangents)
    return dx, tuple(
        shrink_gradient(x, dy).astype(weight.dtype) for dy, weight in zip(cotangents, weights, strict=True)
    )


_project_trained.defvjp(_trained_forward, _trained_backward)
