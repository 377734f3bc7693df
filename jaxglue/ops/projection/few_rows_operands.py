"""Operands of a projection of few rows, for its kernels, and how many rows are few."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float, UInt8

MOST_ROWS = 256
"""Rows up to which reading the weights takes longer than multiplying by them."""
MOST_WIDE_ROWS, MOST_ADAPTED_ROWS = 64, 128
"""The same for one or two weights in 16 bits or for FP8 products, and in 16 bits with adapters."""
MOST_MANY_ROWS = 512
"""Rows up to which kernels of many rows were measured."""
MANY_WEIGHT_ROWS = 128
MANY_GATE_ROWS = MANY_WEIGHT_ROWS, 64
"""Rows of weights in a program of many rows of x, and of gate and up in its two matmuls."""
MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200."""


class FewRowsAdapters(NamedTuple):
    """Adapters of the weights that share a launch."""

    source: Float[Array, "M K"]
    """Their input, or that of the norm before them."""
    norm_weight: Float[Array, " K"] | None
    inverse_rms: Float[Array, " M"] | None
    """The norm's, where `source` is its input."""
    downs: tuple[Float[Array, "R K"], ...]
    ups: tuple[Float[Array, "N R"], ...]
    factors: tuple[float, ...]
    used: UInt8[Array, "M R"] | None = None
    """Whether a row uses a rank (not zero); None where all use all."""


class NF4Scales(NamedTuple):
    """Scales of weights in NF4, whose codes are the weights."""

    blocks: tuple[UInt8[Array, "N K/64"], ...]
    groups: tuple[Float[Array, " groups"], ...]
    offsets: tuple[Float[Array, ""], ...]


class FewRows(NamedTuple):
    """Operands of a launch."""

    dtype: Any
    """Dtype of the products."""
    x: Float[Array, "M K"]
    x_scales: Float[Array, " M"] | None
    """float32, of e4m3 values."""
    weights: tuple[Array, ...]
    """[N, K] each, of x's dtype or of one byte."""
    scales: tuple[Float[Array, " N"], ...] | None
    """float32 factors of the weights' rows, times `factor`."""
    factor: float
    nf4: NF4Scales | None
    biases: tuple[Float[Array, " N"], ...] | None
    low_rank: FewRowsAdapters | None
