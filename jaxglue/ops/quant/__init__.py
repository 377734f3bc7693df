"""Quantized weights: storage formats, their dequantization, and matmuls with frozen quantized matrices.

`formats` has a format's interface; each is a file here that registers itself.
"""

from dataclasses import dataclass
from importlib import import_module

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_capability, check_triton
from jaxglue.ops.quant.formats import Quantized
from jaxglue.ops.quant.fp8 import FP8Weight
from jaxglue.ops.quant.mxfp4 import MXFP4, fp8_codes, fp8_factors, largest_exponents
from jaxglue.ops.quant.nf4 import NF4
from jaxglue.ops.quant.served import ServedStored
from jaxglue.ops.quant.stack import Stack
from jaxglue.ops.quant.vjp import DequantizeBackend, dequantize_with, project

for _format in ("nf4", "int8", "fp8", "mxfp4", "nvfp4", "served"):
    import_module(f"{__name__}.{_format}")

__all__ = ["DEQUANTIZE", "DequantizeCall", "dequantize", "mxfp4_to_fp8", "project_quantized"]


@dataclass(frozen=True, kw_only=True, eq=False)
class DequantizeCall:
    """Meaning of a dequantization."""

    weight: Quantized


def _check(capability: Capability | None, call: DequantizeCall) -> None:
    check_triton(capability)
    if call.weight.without_kernel:
        raise NotImplementedError(call.weight.without_kernel)
    if isinstance(call.weight, FP8Weight):
        check_capability(capability, (8, 9))


def _load(capability: Capability, call: DequantizeCall) -> DequantizeBackend:
    from jaxglue.ops.quant.triton import TritonDequantize

    return TritonDequantize.of(capability)


DEQUANTIZE = Operation(
    name="dequantization",
    backends={
        "triton": Backend(
            check=_check,
            load=_load,
            advantage="XLA takes several times as long",
            reads={
                DequantizeCall: ("weight",),
                NF4: ("codes", "scales", "scale_absmax", "scale_offset", "dtype"),
                FP8Weight: ("values", "scales", "dtype", "expand"),
                MXFP4: ("blocks", "scales"),
            },
        )
    },
)
"""Backends of `dequantize` and `project_quantized`."""


def dequantize(weight: Quantized, dtype=jnp.bfloat16, *, backend: str = "auto") -> Float[Array, "*B out in"]:
    """Return the values of a quantized weight in `dtype`, the same bits from every backend.

    Args:
        weight: in any format.
        dtype: of the result.
        backend: one of `DEQUANTIZE.names`.

    Raises:
        ValueError: a truncated `MXFP4`, or a named backend that cannot serve.
    """
    if isinstance(weight, Stack):
        return dequantize(weight.rows, dtype, backend=backend).reshape(weight.shape)
    weight = _as_stored(weight)
    return dequantize_with(DEQUANTIZE.load(DequantizeCall(weight=weight), backend=backend), weight, dtype)


def mxfp4_to_fp8(
    weight: MXFP4, *, transposed: bool = False, backend: str = "auto"
) -> tuple[Float[Array, "E a b"], Float[Array, " E"]]:
    """Return (e4m3 codes, float32 factors) of matrices in MXFP4, whose values are codes times their matrix's factor.

    Exact for blocks within 2¹⁴ of their matrix's largest; smaller values round to multiples of 2⁻⁹ factors.

    Args:
        weight: matrices [E, N, K].
        transposed: lay the codes out as [E, K, N].
        backend: one of `DEQUANTIZE.names`.

    Raises:
        ValueError: as `dequantize`.
    """
    largest, kernels = (
        largest_exponents(weight.check()),
        DEQUANTIZE.load(DequantizeCall(weight=weight), backend=backend),
    )
    codes = kernels.mxfp4_codes if kernels else fp8_codes
    return codes(weight, largest, transposed=transposed), fp8_factors(largest)


def project_quantized(x: Float[Array, "*B in"], weight: Quantized, *, backend: str = "auto") -> Float[Array, "*B out"]:
    """Return x·Wᵀ in x's dtype. Both passes dequantize the weight, which gets no gradient.

    Args:
        x: the inputs.
        weight: a frozen matrix [out, in].
        backend: as in `dequantize`.

    Raises:
        ValueError: a named backend that cannot serve.
    """
    weight = _as_stored(weight)
    return project(DEQUANTIZE.load(DequantizeCall(weight=weight), backend=backend), x, weight)


def _as_stored(weight: Quantized) -> Quantized:
    """Return a weight without an adapter as its folder has it, for which there may be kernels."""
    return weight.stored if isinstance(weight, ServedStored) else weight
