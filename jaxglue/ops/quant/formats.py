"""The formats in which frozen linear layers can be stored, by name."""

from typing import Any, Literal

from jaxtyping import Array, Float

from jaxglue.ops.quant.int8 import Int8Weight, dequantise_int8, quantise_int8
from jaxglue.ops.quant.nf4 import BLOCK, NF4, dequantise, quantise_nf4

Quantise = Literal["none", "nf4", "int8"]
"""How the decoder layers' linear layers are stored: in the model's dtype, in NF4, or in int8."""
Quantised = NF4 | Int8Weight
FORMATS = ("none", "nf4", "int8")


def is_quantised(leaf: object) -> bool:
    """Whether this is a quantised matrix; for `jax.tree.map(…, is_leaf=is_quantised)`."""
    return isinstance(leaf, Quantised)


def quantise_matrix(matrix: Float[Array, "out in"], how: str) -> Any:
    """The matrix in the format of this name."""
    match how:
        case "nf4":
            return quantise_nf4(matrix)
        case "int8":
            return quantise_int8(matrix)
        case _:
            return matrix


def dequantise_matrix(weight: Quantised, dtype) -> Float[Array, "out in"]:
    """The values of a quantised matrix, by XLA."""
    return dequantise(weight, dtype) if isinstance(weight, NF4) else dequantise_int8(weight, dtype)


def check_format(how: str, widths: dict[str, int]) -> None:
    """Refuses what this format cannot hold.

    Args:
        how: the format's name.
        widths: the lengths of rows by name, for the message.

    Raises:
        ValueError: an unknown name, or rows that blocks do not divide.
    """
    if how not in FORMATS:
        raise ValueError(f"quantise must be one of {', '.join(FORMATS)}, got {how!r}")
    for name, width in widths.items():
        if how == "nf4" and width % BLOCK:
            raise ValueError(
                f"--quantise nf4 needs multiples of {BLOCK}, got {name}={width}: leave it out, or use int8"
            )
