"""The formats in which frozen linear layers can be stored, by name."""

from typing import Any, Literal

from jaxtyping import Array, Float

from jaxglue.ops.quant.int8 import Int8Weight, dequantize_int8, quantize_int8
from jaxglue.ops.quant.nf4 import BLOCK, NF4, dequantize, quantize_nf4

Quantize = Literal["none", "nf4", "int8"]
"""How the decoder layers' linear layers are stored: in the model's dtype, in NF4, or in int8."""
Quantized = NF4 | Int8Weight
FORMATS = ("none", "nf4", "int8")


def is_quantized(leaf: object) -> bool:
    """Whether this is a quantized matrix; for `jax.tree.map(…, is_leaf=is_quantized)`."""
    return isinstance(leaf, Quantized)


def quantize_matrix(matrix: Float[Array, "out in"], how: str) -> Any:
    """The matrix in the format of this name."""
    match how:
        case "nf4":
            return quantize_nf4(matrix)
        case "int8":
            return quantize_int8(matrix)
        case _:
            return matrix


def dequantize_matrix(weight: Quantized, dtype) -> Float[Array, "out in"]:
    """The values of a quantized matrix, by XLA."""
    return dequantize(weight, dtype) if isinstance(weight, NF4) else dequantize_int8(weight, dtype)


def check_format(how: str, widths: dict[str, int]) -> None:
    """Refuses what this format cannot hold.

    Args:
        how: the format's name.
        widths: the lengths of rows by name, for the message.

    Raises:
        ValueError: an unknown name, or rows that blocks do not divide.
    """
    if how not in FORMATS:
        raise ValueError(f"quantize must be one of {', '.join(FORMATS)}, got {how!r}")
    for name, width in widths.items():
        if how == "nf4" and width % BLOCK:
            raise ValueError(
                f"--quantize nf4 needs multiples of {BLOCK}, got {name}={width}: leave it out, or use int8"
            )
