"""FP8 products of frozen weights with their adapters: scales are applied where both are added.

Inputs come as they are, and are quantized here, or from a norm that wrote e4m3 values alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.norm_rope import LLAMA_NORM, NormStyle, fp8_stream_norm
from jaxglue.ops.projection.fp8 import dot, encode, input_products, shared_scales
from jaxglue.ops.projection.lora import (
    first_ranks,
    lora_expand_gradients,
    lora_expand_gradients_in_fp8,
    lora_expand_onto,
    shrink,
    shrink_gradient,
)
from jaxglue.ops.quant.fp8 import FP8Weight, Quantizer, ScaledProduct


class QuantizedRows(NamedTuple):
    """Rows as they are, and as e4m3 values times a float32 scale each; gradients belong to the former."""

    values: Float[Array, "*B n"]
    fp8_values: Float[Array, "*B n"]
    scales: Float[Array, "*B 1"]

    def shrink(self, down: Float[Array, "ranks n"]) -> Float[Array, "*B ranks"]:
        """Compute rows·downᵀ from the values."""
        return shrink(self.values, down)

    def shrink_gradient(self, dlow_rank: Float[Array, "*B ranks"]) -> Float[Array, "ranks n"]:
        """Compute the gradient of `shrink` to its matrix, in float32."""
        return shrink_gradient(self.values, dlow_rank)


class NormedRows(NamedTuple):
    """A norm's output as e4m3 values alone: adapters read its input, and scale their few ranks.

    The gradient of `values` is by convention that to the norm's output.
    """

    values: Float[Array, "*B n"]
    """The norm's input."""
    fp8_values: Float[Array, "*B n"]
    scales: Float[Array, "*B 1"]
    inverse_rms: Float[Array, "*B 1"]
    weight: Float[Array, " n"]

    def shrink(self, down: Float[Array, "ranks n"]) -> Float[Array, "*B ranks"]:
        """Compute rows·downᵀ."""
        x, matrix = self.values, (down * self.weight).astype(self.values.dtype)
        contract_last = (((x.ndim - 1,), (1,)), ((), ()))
        wide = jax.lax.dot_general(x, matrix, contract_last, preferred_element_type=jnp.float32)
        return (wide * self.inverse_rms).astype(x.dtype)

    def shrink_gradient(self, dlow_rank: Float[Array, "*B ranks"]) -> Float[Array, "ranks n"]:
        """Compute the gradient of `shrink` to its matrix, in float32."""
        scaled = (dlow_rank * self.inverse_rms).astype(dlow_rank.dtype)
        return shrink_gradient(self.values, scaled) * self.weight


FP8Rows = QuantizedRows | NormedRows
"""Inputs of FP8 products."""


def quantized(x: Float[Array, "*B n"] | FP8Rows) -> FP8Rows:
    """Return rows with their e4m3 values, made in a pass of its own where they have none."""
    return x if isinstance(x, FP8Rows) else QuantizedRows(x, *encode(jax.lax.stop_gradient(x)))


def residual_norm_fp8(
    x: Float[Array, "*B n"], weight: Float[Array, " n"], eps: float, style: NormStyle = LLAMA_NORM
) -> tuple[Float[Array, "*B n"], NormedRows]:
    """Return a residual stream x and its norm for FP8 products; see `stream_norm`."""
    stream, values, fp8_values, scales, inverse_rms = fp8_stream_norm(x, weight, eps, style)
    inverse_rms = checkpoint_name(inverse_rms, names.LOW_RANK)  # kept, the pass is not run again for it
    factors = style.offset + jax.lax.stop_gradient(weight).astype(jnp.float32)
    return stream, NormedRows(values, fp8_values, scales, inverse_rms, factors)


def as_matrix(rows: FP8Rows) -> FP8Rows:
    """Return the rows with all leading axes joined."""
    return jax.tree.map(lambda array: array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array, rows)


def cotangent(rows: FP8Rows, values: Float[Array, "*B n"]) -> Any:
    """Return the gradient of rows from that of their values."""
    none: Any = None
    return type(rows)(values, *(none for _ in rows[1:]))


def without_fp8_values(rows: FP8Rows) -> Any:
    """Return the residuals of rows: gradients need no e4m3 values of the inputs."""
    none: Any = None
    return rows._replace(fp8_values=none, scales=none)


def project_adapted_fp8(
    x: Float[Array, "*B in"] | FP8Rows,
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
    rows = quantized(x)
    outputs = _project(as_matrix(rows), tuple(weights), down, tuple(ups))
    return [y.reshape(*rows.values.shape[:-1], -1) for y in outputs]


@jax.custom_vjp
def _project(rows: FP8Rows, weights: tuple[FP8Weight, ...], down, ups: tuple[Array, ...]) -> tuple[Array, ...]:
    return _forward(rows, weights, down, ups)[0]


def _forward(rows: FP8Rows, weights, down, ups):
    low_rank = checkpoint_name(rows.shrink(down), names.LOW_RANK)
    products = (dot(rows.fp8_values, weight.values, 1, low_rank.dtype) for weight in weights)
    outputs = tuple(
        lora_expand_onto(ScaledProduct(product, rows.scales, weight.scales), low_rank, up, first)
        for product, weight, up, first in zip(products, weights, ups, first_ranks(ups), strict=True)
    )
    return outputs, (without_fp8_values(rows), low_rank, weights, down, ups)


def _backward(residuals, cotangents):
    rows, low_rank, weights, down, ups = residuals
    scales = shared_scales(cotangents, weights)
    quantizers = [Quantizer(weight.scales, scales) for weight in weights]
    dlow_rank, dups, fp8_cotangents = lora_expand_gradients_in_fp8(low_rank, ups, cotangents, quantizers)
    dx = adapted_input_gradient(fp8_cotangents, weights, scales, dlow_rank, down)
    return cotangent(rows, dx), None, rows.shrink_gradient(dlow_rank), dups


def adapted_input_gradient(
    fp8_cotangents: Sequence[Float[Array, "M out"]],
    weights: Sequence[FP8Weight],
    scales: Float[Array, "M 1"],
    dlow_rank: Float[Array, "M ranks"],
    down: Float[Array, "ranks in"],
) -> Float[Array, "M in"]:
    """Compute Σ dy·W + dlow_rank·down from e4m3 values of dy·(W's scales); apply rows' scales on reading."""
    base = ScaledProduct(input_products(fp8_cotangents, weights, dlow_rank.dtype), scales)
    return lora_expand_onto(base, dlow_rank, down.T.astype(dlow_rank.dtype))


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
    low_rank = checkpoint_name(shrink(x, down), names.LOW_RANK)
    return add_product(stream, *encode(x), weight, low_rank, up), (x, low_rank, weight, down, up)


def _add_backward(residuals, dout):
    x, low_rank, weight, down, up = residuals
    fp8_cotangent, scales = encode(dout, weight.scales)
    dlow_rank, (dup,) = lora_expand_gradients(low_rank, (up,), (dout,))
    dx = adapted_input_gradient((fp8_cotangent,), (weight,), scales, dlow_rank, down)
    return dout, dx, None, shrink_gradient(x, dlow_rank), dup


def add_product(stream, fp8_values, scales, weight: FP8Weight, low_rank, up) -> Float[Array, "M out"]:
    """Compute stream + (fp8_values · scales)·Wᵀ + low_rank·upᵀ in one pass after the matmul."""
    product = ScaledProduct(dot(fp8_values, weight.values, 1, stream.dtype), scales, weight.scales)
    return lora_expand_onto(product, low_rank, up, addend=stream)


_add.defvjp(_add_forward, _add_backward)
