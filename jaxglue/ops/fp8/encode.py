"""Quantization of activations and cotangents by row."""

from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_capability, check_triton
from jaxglue.ops.quant.fp8 import encode_rows, quantize_rows

FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 tensor cores (Ada Lovelace)."""


class EncodeBackend(Protocol):
    """A kernel that passes over the rows once."""

    def encode(self, x, columns, scales) -> tuple[Array, Array]:
        """See `encode`."""


def _check(capability: Capability | None, dtype) -> None:
    check_triton(capability, dtype)
    check_capability(capability, FIRST_CAPABILITY)


def _load(capability: Capability, dtype) -> EncodeBackend:
    from jaxglue.ops.fp8.triton import TritonEncode

    return TritonEncode.of(capability)


ENCODE = Operation(
    name="FP8 quantization",
    backends={"triton": Backend(check=_check, load=_load, advantage="rows are read once, at memory speed")},
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
    if (kernels := ENCODE.load(x.dtype)) is not None:
        return kernels.encode(x, columns, scales)
    values = x if columns is None else x.astype(jnp.float32) * columns
    return quantize_rows(values) if scales is None else encode_rows(values, scales)
