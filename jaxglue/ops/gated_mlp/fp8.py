"""A SwiGLU or GeGLU feed-forward on frozen FP8 weights; scales are applied where products are read.

Between adapters, gate and up are e4m3 without their scales: the kernels multiply them on reading, and return each row's
largest magnitude, by which their outputs are quantized for the next matmul without another pass. Without adapters or
gradients, as in decoding, nothing needs the outputs: one kernel writes them as e4m3 values.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.backend import Backend, Capability, Operation
from jaxglue.ops.gated_mlp.swiglu import (
    ACTIVATIONS,
    LORA_SWIGLU,
    Activation,
    Matrices,
    ScaledProducts,
    SwigluCall,
    reference_lora_swiglu,
)
from jaxglue.ops.projection.fp8 import check_fp8_kernels, dot, dot_to_e4m3, encode, rescale
from jaxglue.ops.projection.fp8_adapters import (
    FP8Rows,
    adapted_input_gradient,
    add_product,
    as_matrix,
    cotangent,
    quantized,
    without_fp8_values,
)
from jaxglue.ops.projection.lora import lora_expand_gradients, lora_expand_gradients_in_fp8
from jaxglue.ops.quant.fp8 import FP8Weight, Quantizer, quantize_rows, row_scales

if TYPE_CHECKING:
    from jaxglue.ops.gated_mlp.triton import TritonGate

GatedWeights = tuple[FP8Weight, FP8Weight, FP8Weight]
"""gate, up and down."""


class ScaledSwigluBackend(Protocol):
    """Kernels of a forward and backward pass over rows of unscaled products; hashable."""

    def scaled_forward(
        self, products: ScaledProducts, low_rank, matrices: Matrices, activation: Activation
    ) -> tuple[Array, Array, Array]:
        """Return y and y·downᵀ of `lora_swiglu`, and each row's largest |y|, float32 [M, 1]."""

    def scaled_backward(
        self,
        products: ScaledProducts,
        low_rank,
        matrices: Matrices,
        dout,
        dout_scales: Float[Array, "M 1"],
        ddown_low_rank,
        activation: Activation,
    ) -> tuple[Array, Array, Array, Array]:
        """Return the gradients to scaled gate and up and to down, from dout without its scales.

        The last result is each row's largest |gradient · column scale|, float32 [M, 1].
        """


class ReferenceScaledSwiglu:
    """`ScaledSwigluBackend` by XLA."""

    def scaled_forward(self, products, low_rank, matrices, activation):
        """See `ScaledSwigluBackend`."""
        y, down_low_rank = reference_lora_swiglu(*_scaled(products, low_rank.dtype), low_rank, matrices, activation)
        return y, down_low_rank, _absmax(y)

    def scaled_backward(self, products, low_rank, matrices, dout, dout_scales, ddown_low_rank, activation):
        """See `ScaledSwigluBackend`."""
        reference = partial(reference_lora_swiglu, activation=activation)
        _, vjp = jax.vjp(reference, *_scaled(products, low_rank.dtype), low_rank, matrices)
        dgate, dup, _, (_, _, ddown) = vjp((rescale(dout, dout_scales), ddown_low_rank))
        absmax = jnp.maximum(_absmax(dgate * products.gate_scales), _absmax(dup * products.up_scales))
        return dgate, dup, ddown, absmax


def _scaled(products: ScaledProducts, dtype) -> tuple[Array, Array]:
    return (
        rescale(products.gate, products.row_scales, products.gate_scales, dtype=dtype),
        rescale(products.up, products.row_scales, products.up_scales, dtype=dtype),
    )


def _absmax(x) -> Float[Array, "M 1"]:
    return jnp.abs(x.astype(jnp.float32)).max(axis=-1, keepdims=True)


@dataclass(frozen=True, kw_only=True)
class GateCall:
    """Meaning of an activation whose output is quantized."""

    dtype: jnp.dtype
    activation: Activation = "silu"


def _check_gate(capability: Capability | None, call: GateCall) -> None:
    check_fp8_kernels(capability, call.dtype)


def _load_gate(capability: Capability, call: GateCall) -> "TritonGate":
    from jaxglue.ops.gated_mlp.triton import TritonGate

    return TritonGate.of(capability)


GATE_FP8 = Operation(
    name="activation and FP8 quantization",
    backends={
        "triton": Backend(
            check=_check_gate,
            load=_load_gate,
            advantage="products are read once",
            reads={GateCall: {"dtype": None, "activation": ("silu", "gelu_tanh")}},
        )
    },
)
"""Backends of the activation in `gate_fp8`."""


def gate_fp8(
    stream: Float[Array, "*B D"],
    x: Float[Array, "*B D"] | FP8Rows,
    gate: FP8Weight,
    up: FP8Weight,
    down: FP8Weight,
    activation: Activation = "silu",
) -> Float[Array, "*B D"]:
    """Return stream + y·downᵀ of y = activation(x·gateᵀ) · (x·upᵀ), products in FP8; there are no gradients.

    Args:
        stream: the residual stream.
        x: the feed-forward's input.
        gate, up: weights [F, D].
        down: a weight [D, F].
        activation: of the gate.
    """
    rows = as_matrix(quantized(x))
    products = ScaledProducts(
        gate=dot(rows.fp8_values, gate.values, 1, stream.dtype),
        up=dot(rows.fp8_values, up.values, 1, stream.dtype),
        row_scales=rows.scales.reshape(-1, 1),
        gate_scales=gate.scales,
        up_scales=up.scales,
    )
    if (kernels := GATE_FP8.load(GateCall(dtype=stream.dtype, activation=activation))) is not None:
        fp8_values, scales = kernels.gate(products, activation)
    else:
        gated, raised = _scaled(products, stream.dtype)
        fp8_values, scales = quantize_rows(ACTIVATIONS[activation](gated) * raised)
    product = rescale(dot(fp8_values, down.values, 1, stream.dtype), scales, down.scales)
    return stream + product.reshape(stream.shape)


def swiglu_fp8(
    stream: Float[Array, "*B D"],
    x: Float[Array, "*B D"] | FP8Rows,
    weights: GatedWeights,
    first: Float[Array, "ranks D"],
    matrices: Matrices,
    last: Float[Array, "D R"],
    activation: Activation = "silu",
) -> Float[Array, "*B D"]:
    """Compute stream + y·Wᵀ + y·downᵀ·lastᵀ of y = `lora_swiglu` of x's FP8 products with gate and up.

    Args:
        stream: the residual stream.
        x: the feed-forward's input.
        weights: gate and up [F, D], and down W [D, F]; frozen.
        first: the first matrices of gate's and up's adapters, one below the other, float32.
        matrices: see `lora_swiglu`.
        last: the second matrix of down's adapter, scaled, float32.
        activation: of the gate.
    """
    call = SwigluCall(dtype=stream.dtype, rank=matrices[0].shape[1], activation=activation)
    backend: Any = LORA_SWIGLU.load(call) or _REFERENCE
    rows = stream.reshape(-1, stream.shape[-1]), as_matrix(quantized(x))
    return _feed_forward(backend, activation, *rows, weights, first, matrices, last).reshape(stream.shape)


_REFERENCE = ReferenceScaledSwiglu()


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _feed_forward(
    backend: ScaledSwigluBackend,
    activation: Activation,
    stream,
    rows: FP8Rows,
    weights: GatedWeights,
    first,
    matrices: Matrices,
    last,
) -> Array:
    return _forward(backend, activation, stream, rows, weights, first, matrices, last)[0]


def _forward(
    backend: ScaledSwigluBackend,
    activation,
    stream,
    rows: FP8Rows,
    weights: GatedWeights,
    first,
    matrices: Matrices,
    last,
):
    gate, up, down = weights
    low_rank = checkpoint_name(rows.shrink(first), names.LOW_RANK)
    (gated, factor), (raised, _) = (dot_to_e4m3(rows.fp8_values, weight.values) for weight in (gate, up))
    products = ScaledProducts(
        gate=_named(gated, names.GATE),
        up=_named(raised, names.UP),
        row_scales=checkpoint_name(rows.scales * factor, names.GATE),
        gate_scales=gate.scales,
        up_scales=up.scales,
    )
    y, down_low_rank, absmax = backend.scaled_forward(products, low_rank, matrices, activation)
    down_low_rank = checkpoint_name(down_low_rank, names.LOW_RANK)
    out = add_product(stream, *encode(y, scales=row_scales(absmax)), down, down_low_rank, last)
    return out, (products, without_fp8_values(rows), low_rank, down_low_rank, weights, first, matrices, last)


def _named(fp8_values: Float[Array, "M F"], name: str) -> Float[Array, "M F"]:
    """Name e4m3 values as bytes: `jax.checkpoint` rounds saved floats as IEEE does, where e4m3 ends at 240."""
    named = checkpoint_name(jax.lax.bitcast_convert_type(fp8_values, jnp.uint8), name)
    return jax.lax.bitcast_convert_type(named, fp8_values.dtype)


def _backward(backend: ScaledSwigluBackend, activation, residuals, dout):
    products, rows, low_rank, down_low_rank, (gate, up, down), first, matrices, last = residuals
    fp8_cotangent, scales = encode(dout, down.scales)
    ddown_low_rank, (dlast,) = lora_expand_gradients(down_low_rank, (last,), (dout,))
    dy = dot(fp8_cotangent, down.values, 0, dout.dtype)
    dgate, dup, ddown, absmax = backend.scaled_backward(
        products, low_rank, matrices, dy, scales, ddown_low_rank, activation
    )
    shared = row_scales(absmax)
    quantizers = [Quantizer(weight.scales, shared) for weight in (gate, up)]
    dlow_rank, dsecond, fp8_cotangents = lora_expand_gradients_in_fp8(low_rank, matrices[:2], (dgate, dup), quantizers)
    dx = adapted_input_gradient(fp8_cotangents, (gate, up), shared, dlow_rank, first)
    return dout, cotangent(rows, dx), None, rows.shrink_gradient(dlow_rank), (*dsecond, ddown), dlast


_feed_forward.defvjp(_forward, _backward)
