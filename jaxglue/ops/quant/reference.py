"""Dequantization by XLA."""

from jaxtyping import Array, Float

from jaxglue.ops.quant.formats import Quantized
from jaxglue.ops.quant.fp8 import FP8Weight, dequantize_fp8
from jaxglue.ops.quant.int8 import Int8Weight, dequantize_int8
from jaxglue.ops.quant.mxfp4 import MXFP4, dequantize_mxfp4
from jaxglue.ops.quant.nf4 import dequantize_nf4


def reference_dequantize(weight: Quantized | MXFP4, dtype) -> Float[Array, "*B out in"]:
    """Compute the values of a quantized weight in `dtype`."""
    if isinstance(weight, MXFP4):
        return dequantize_mxfp4(weight, dtype)
    if isinstance(weight, FP8Weight):
        return dequantize_fp8(weight, dtype)
    return dequantize_int8(weight, dtype) if isinstance(weight, Int8Weight) else dequantize_nf4(weight, dtype)
