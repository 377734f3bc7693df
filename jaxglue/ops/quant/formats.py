"""Storage formats of frozen linear layers, by name."""

from typing import Any

from jaxtyping import Array, Float

from jaxglue.ops.quant.fp8 import FP8Weight, expand_products, multiplied_in_fp8, quantize_fp8
from jaxglue.ops.quant.int8 import Int8Weight, quantize_int8
from jaxglue.ops.quant.nf4 import BLOCK, NF4, quantize_nf4

Quantized = NF4 | Int8Weight | FP8Weight
FORMATS = ("none", "nf4", "int8", "fp8")
"""Formats that a user may name."""
_WITHIN = ("fp8_stored", "fp8_trained")


def is_quantized(leaf: object) -> bool:
    """Return whether this is a quantized matrix, for `jax.tree.map(…, is_leaf=is_quantized)`."""
    return isinstance(leaf, Quantized)


def quantize_matrix(matrix: Float[Array, "out in"], how: str) -> Any:
    """Convert a matrix to the named format."""
    match how:
        case "nf4":
            return quantize_nf4(matrix)
        case "int8":
            return quantize_int8(matrix)
        case "fp8":
            return quantize_fp8(matrix)
        case "fp8_stored":
            return expand_products(quantize_fp8(matrix))
        case _:
            return matrix


def in_format(matrix: Any, how: str) -> Any:
    """Return a matrix as a model of this format holds it: quantized, unless its folder has it so."""
    if not is_quantized(matrix):
        return quantize_matrix(matrix, how)
    return multiplied_in_fp8(matrix) if how == "fp8" else matrix


def format_flag(how: str) -> str:
    """Return the flag that asks for a format."""
    own = {"fp8": "--matmul fp8", "fp8_trained": "--matmul fp8", "fp8_stored": "FP8 in the model folder"}
    return own.get(how, f"--quantize {how}")


def format_name(how: str) -> str:
    """Return a format's name in messages: that of folders in FP8 is `fp8`."""
    return how.partition("_")[0]


def check_format(how: str, widths: dict[str, int]) -> None:
    """Check that a format exists and can hold rows of these lengths.

    Args:
        how: name of the format.
        widths: row lengths, by a name for the message.

    Raises:
        ValueError: an unknown format, or a row length that its blocks do not divide.
    """
    if how not in (*FORMATS, *_WITHIN):
        raise ValueError(f"quantize must be one of {', '.join(FORMATS)}, got {how!r}")
    for name, width in widths.items():
        if how == "nf4" and width % BLOCK:
            raise ValueError(
                f"--quantize nf4 needs multiples of {BLOCK}, got {name}={width}: leave it out, or use int8"
            )
