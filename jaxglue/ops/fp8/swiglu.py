"""A SwiGLU feed-forward on frozen FP8 weights between adapters; scales are applied where products are read.

gate and up are e4m3 without their scales: the kernels multiply them on reading, and return each row's largest
magnitude, by which their outputs are quantized for the next matmul without another pass.
"""

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.fp8.adapted import adapted_input_gradient, add_product
from jaxglue.ops.fp8.encode import encode
from jaxglue.ops.fp8.products import dot, dot_to_e4m3, rescale
from jaxglue.ops.fp8.rows import Rows, as_matrix, coded, cotangent, without_codes
from jaxglue.ops.lora import Quantizer, lora_expand_gradients, lora_expand_gradients_and_codes
from jaxglue.ops.lora_swiglu import LORA_SWIGLU, Matrices
from jaxglue.ops.lora_swiglu.reference import reference_lora_swiglu
from jaxglue.ops.lora_swiglu.vjp import ScaledProducts
from jaxglue.ops.quant.fp8 import FP8Weight, row_scales

Weights = tuple[FP8Weight, FP8Weight, FP8Weight]
"""gate, up and down."""


class ScaledSwigluBackend(Protocol):
    """Kernels of a forward and backward pass over rows of unscaled products; hashable."""

    def scaled_forward(self, products: ScaledProducts, hidden, matrices: Matrices) -> tuple[Array, Array, Array]:
        """Return y and y·downᵀ of `lora_swiglu`, and each row's largest |y|, float32 [M, 1]."""

    def scaled_backward(
        self, products: ScaledProducts, hidden, matrices: Matrices, dout, dout_scales: Float[Array, "M 1"], dranks
    ) -> tuple[Array, Array, Array, Array]:
        """Return the gradients to scaled gate and up and to down, from dout without its scales.

        The last result is each row's largest |gradient · column scale|, float32 [M, 1].
        """


class ReferenceScaledSwiglu:
    """`ScaledSwigluBackend` by XLA."""

    def scaled_forward(self, products, hidden, matrices):
        """See `ScaledSwigluBackend`."""
        y, low = reference_lora_swiglu(*_scaled(products, hidden.dtype), hidden, matrices)
        return y, low, _absmax(y)

    def scaled_backward(self, products, hidden, matrices, dout, dout_scales, dranks):
        """See `ScaledSwigluBackend`."""
        _, vjp = jax.vjp(reference_lora_swiglu, *_scaled(products, hidden.dtype), hidden, matrices)
        dgate, dup, _, (_, _, ddown) = vjp((rescale(dout, dout_scales), dranks))
        absmax = jnp.maximum(_absmax(dgate * products.gate_scales), _absmax(dup * products.up_scales))
        return dgate, dup, ddown, absmax


def _scaled(products: ScaledProducts, dtype) -> tuple[Array, Array]:
    return (
        rescale(products.gate, products.row_scales, products.gate_scales, dtype=dtype),
        rescale(products.up, products.row_scales, products.up_scales, dtype=dtype),
    )


def _absmax(x) -> Float[Array, "M 1"]:
    return jnp.abs(x.astype(jnp.float32)).max(axis=-1, keepdims=True)


def swiglu_fp8(
    stream: Float[Array, "*B D"],
    x: Float[Array, "*B D"] | Rows,
    weights: Weights,
    first: Float[Array, "ranks D"],
    matrices: Matrices,
    last: Float[Array, "D R"],
) -> Float[Array, "*B D"]:
    """Compute stream + y·Wᵀ + y·downᵀ·lastᵀ of y = `lora_swiglu` of x's FP8 products with gate and up.

    Args:
        stream: the residual stream.
        x: the feed-forward's input.
        weights: gate and up [F, D], and down W [D, F]; frozen.
        first: the first matrices of gate's and up's adapters, one below the other, float32.
        matrices: see `lora_swiglu`.
        last: the second matrix of down's adapter, scaled, float32.
    """
    backend: Any = LORA_SWIGLU.load(stream.dtype, matrices[0].shape[1]) or _REFERENCE
    rows = stream.reshape(-1, stream.shape[-1]), as_matrix(coded(x))
    return _feed_forward(backend, *rows, weights, first, matrices, last).reshape(stream.shape)


_REFERENCE = ReferenceScaledSwiglu()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _feed_forward(
    backend: ScaledSwigluBackend, stream, rows: Rows, weights: Weights, first, matrices: Matrices, last
) -> Array:
    return _forward(backend, stream, rows, weights, first, matrices, last)[0]


def _forward(backend: ScaledSwigluBackend, stream, rows: Rows, weights: Weights, first, matrices: Matrices, last):
    gate, up, down = weights
    hidden = checkpoint_name(rows.shrink(first), names.LORA_HIDDEN)
    (gated, factor), (raised, _) = (dot_to_e4m3(rows.codes, weight.codes) for weight in (gate, up))
    products = ScaledProducts(
        gate=_named(gated, names.GATE),
        up=_named(raised, names.UP),
        row_scales=checkpoint_name(rows.scales * factor, names.GATE),
        gate_scales=gate.scales,
        up_scales=up.scales,
    )
    y, low, absmax = backend.scaled_forward(products, hidden, matrices)
    low = checkpoint_name(low, names.LORA_HIDDEN)
    out = add_product(stream, *encode(y, scales=row_scales(absmax)), down, low, last)
    return out, (products, without_codes(rows), hidden, low, weights, first, matrices, last)


def _named(codes: Float[Array, "M F"], name: str) -> Float[Array, "M F"]:
    """Name e4m3 codes as bytes: `jax.checkpoint` rounds saved floats as IEEE does, where e4m3 ends at 240."""
    named = checkpoint_name(jax.lax.bitcast_convert_type(codes, jnp.uint8), name)
    return jax.lax.bitcast_convert_type(named, codes.dtype)


def _backward(backend: ScaledSwigluBackend, residuals, dout):
    products, rows, hidden, low, (gate, up, down), first, matrices, last = residuals
    codes, scales = encode(dout, down.scales)
    dlow, (dlast,) = lora_expand_gradients(low, (last,), (dout,))
    dy = dot(codes, down.codes, 0, dout.dtype)
    dgate, dup, ddown, absmax = backend.scaled_backward(products, hidden, matrices, dy, scales, dlow)
    shared = row_scales(absmax)
    quantizers = [Quantizer(weight.scales, shared) for weight in (gate, up)]
    dhidden, dsecond, dcodes = lora_expand_gradients_and_codes(hidden, matrices[:2], (dgate, dup), quantizers)
    dx = adapted_input_gradient(dcodes, (gate, up), shared, dhidden, first)
    return dout, cotangent(rows, dx), None, rows.shrink_gradient(dhidden), (*dsecond, ddown), dlast


_feed_forward.defvjp(_forward, _backward)
