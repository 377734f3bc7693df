"""Weights that are served in few bits with their adapter merged: a matrix, and the grid on which the merge will lie.

Training multiplies by the merge rounded to the grid. The grid is the base's own: scales are those of the matrix without
its adapter, so that a step moves values between levels and never the levels themselves, and an export finds the same.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, UInt8

from jaxglue.ops.choices import served_storage
from jaxglue.ops.quant.blocks import midpoints
from jaxglue.ops.quant.formats import Quantized, WeightFormat, register
from jaxglue.ops.quant.fp8 import E4M3
from jaxglue.ops.quant.k_quants import SUPER_BLOCK, TOP_LEVELS, Grid, KQuant, fit_grid, pack_levels
from jaxglue.ops.quant.mxfp4 import decode_e2m1, encode_e2m1
from jaxglue.ops.quant.nf4 import BLOCK as NF4_BLOCK
from jaxglue.ops.quant.nf4 import VALUES, block_scales, decode_nf4, quantize_nf4
from jaxglue.ops.quant.nvfp4 import BLOCK as NVFP4_BLOCK
from jaxglue.ops.quant.nvfp4 import NVFP4

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SENSITIVE = ("v_proj.weight", "down_proj.weight", "experts.down_proj")
"""Ends of the names of matrices that llama.cpp's mixtures give more bits in some layers."""
_Q6_BLOCK = 16
"""Values of a sub-block of q6_k; q4_k's have 32."""


class Levels(NamedTuple):
    """Levels of a matrix's blocks: a value is step · level − low."""

    step: Float[Array, "out blocks"]
    """Float32; 0 where a block holds one value."""
    low: Float[Array, "out blocks"] | None = None
    """Float32; None where levels are around zero."""
    top: UInt8[Array, " out"] | None = None
    """Highest level of each row, where levels are integers from 0."""


class Served(Quantized):
    """Base of matrices [out, in] with the grid of a format; every array has a row for each of the matrix's."""

    matrix: Float[Array, "out in"]
    block: ClassVar[int]
    """Values that share a step."""
    without_kernel: ClassVar[str | None] = "its values are rounded where adapters are merged"

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the matrix."""
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def dtype(self) -> Any:
        """Return the dtype of the matrix, which is not rounded."""
        return self.matrix.dtype

    @property
    def levels(self) -> Levels:
        """Return the levels of each block."""
        raise NotImplementedError

    def encode(self, units: Float[Array, "out in"]) -> UInt8[Array, "out in"]:
        """Return the codes of the levels nearest to values in units of their steps."""
        raise NotImplementedError

    def decode(self, codes: UInt8[Array, "out in"]) -> Float[Array, "out in"]:
        """Return the levels of codes, float32."""
        raise NotImplementedError

    def pack(self, codes: UInt8[Array, "out in"]) -> Any:
        """Return a matrix of these codes as the format stores it."""
        raise NotImplementedError

    def of_dtype(self, dtype) -> Self:
        """Return the same as of an original of this dtype."""
        return replace(self, matrix=self.matrix.astype(dtype))  # type: ignore[type-var]

    def dequantize(self, dtype) -> Float[Array, "out in"]:
        """Compute the values of the matrix without an adapter on its grid."""
        return self.merged(None, dtype)

    def codes(self, delta: Float[Array, "out in"] | None) -> UInt8[Array, "out in"]:
        """Return the codes of the levels nearest to the matrix plus a delta."""
        step, low, _ = self.levels
        values = self.matrix.astype(jnp.float32)
        values = (values if delta is None else values + delta).reshape(*step.shape, self.block)
        values = values if low is None else values + low[..., None]
        units = jnp.where(step != 0, 1 / jnp.where(step != 0, step, 1), 0)[..., None] * values
        return self.encode(units.reshape(self.shape))

    def merged(self, delta: Float[Array, "out in"] | None, dtype) -> Float[Array, "out in"]:
        """Compute the matrix plus a delta on the grid: in float32, rounded once to `dtype`."""
        step, low, _ = self.levels
        values = self.decode(self.codes(delta)).reshape(*step.shape, self.block) * step[..., None]
        values = values if low is None else values - low[..., None]
        return values.reshape(self.shape).astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ServedNVFP4(Served):
    """A matrix and the scales of its blocks of 16 in NVFP4. A pytree."""

    matrix: Float[Array, "out in"]
    scales: Float[Array, "out in/16"]
    """float8_e4m3fn."""
    divisors: Float[Array, " out"]
    """Divisor of the row's scales, float32: a power of two, so that matrices which share one lose nothing by it."""
    block: ClassVar[int] = NVFP4_BLOCK

    @property
    def levels(self) -> Levels:
        """Return the levels of each block."""
        return Levels(self.scales.astype(jnp.float32) / self.divisors[:, None])

    def encode(self, units: Float[Array, "out in"]) -> UInt8[Array, "out in"]:
        """Return e2m1 codes."""
        return encode_e2m1(units)

    def decode(self, codes: UInt8[Array, "out in"]) -> Float[Array, "out in"]:
        """Return the values of e2m1 codes."""
        return decode_e2m1(codes)

    def pack(self, codes: UInt8[Array, "out in"]) -> NVFP4:
        """Return a matrix of these codes."""
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        return NVFP4(codes=packed, scales=self.scales, divisors=self.divisors, dtype=self.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ServedNF4(Served):
    """A matrix and the scales of its blocks of 64 in NF4, which are quantized themselves. A pytree."""

    matrix: Float[Array, "out in"]
    scales: Float[Array, "out in/64"]
    """Float32."""
    block: ClassVar[int] = NF4_BLOCK

    @property
    def levels(self) -> Levels:
        """Return the levels of each block."""
        return Levels(self.scales)

    def encode(self, units: Float[Array, "out in"]) -> UInt8[Array, "out in"]:
        """Return NF4 codes."""
        bounds = midpoints(np.array(VALUES, np.float32))
        return sum((units > bound).astype(jnp.uint8) for bound in bounds)

    def decode(self, codes: UInt8[Array, "out in"]) -> Float[Array, "out in"]:
        """Return the values of NF4 codes."""
        return decode_nf4(codes)

    def pack(self, codes: UInt8[Array, "out in"]) -> Any:
        """Return a matrix of these codes, with the base's own quantized scales."""
        return replace(quantize_nf4(self.matrix), codes=codes[:, ::2] << 4 | codes[:, 1::2])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ServedKQuant(Served):
    """A matrix and its super-blocks' grids in q4_k or q6_k, in sub-blocks of 16. A pytree."""

    matrix: Float[Array, "out in"]
    scale: Float[Array, "out in/256"]
    """Float16, like `minimum`."""
    minimum: Float[Array, "out in/256"]
    scale_levels: Int8[Array, "out in/16"]
    minimum_levels: Int8[Array, "out in/16"]
    top: UInt8[Array, " out"]
    """Highest level: 15 in q4_k, 63 in q6_k. One for all rows, which loops over layers do not have to tell apart."""
    block: ClassVar[int] = _Q6_BLOCK

    @classmethod
    def of(cls, matrix: Float[Array, "out in"], kind: KQuant) -> "ServedKQuant":
        """Fit the grid of a matrix."""
        out = len(matrix)
        grid = fit_grid(matrix.reshape(-1, SUPER_BLOCK), kind)
        repeats = SUPER_BLOCK // _Q6_BLOCK // grid.scale_levels.shape[1]

        def rows(levels: Array) -> Array:
            return jnp.repeat(levels, repeats, axis=1).astype(jnp.int8).reshape(out, -1)

        if grid.minimum is None or grid.minimum_levels is None:
            # scale · (level − 32) = scale · level − 32 · scale, without rounding.
            minimum, minimum_levels = grid.scale * jnp.float16(32), grid.scale_levels
        else:
            minimum, minimum_levels = grid.minimum, grid.minimum_levels
        return cls(
            matrix=matrix,
            scale=grid.scale.reshape(out, -1),
            minimum=minimum.reshape(out, -1),
            scale_levels=rows(grid.scale_levels),
            minimum_levels=rows(minimum_levels),
            top=jnp.full(out, TOP_LEVELS[kind], jnp.uint8),
        )

    @property
    def kind(self) -> KQuant:
        """Return the type in llama.cpp; the arrays must have values."""
        return "q6_k" if int(self.top[0]) == TOP_LEVELS["q6_k"] else "q4_k"

    @property
    def levels(self) -> Levels:
        """Return the levels of each sub-block."""
        return Levels(
            self._sub_blocks(self.scale, self.scale_levels),
            self._sub_blocks(self.minimum, self.minimum_levels),
            self.top,
        )

    def _sub_blocks(self, factor: Float[Array, "out in/256"], levels: Int8[Array, "out in/16"]) -> Array:
        out, count = factor.shape
        products = factor.astype(jnp.float32)[..., None] * levels.reshape(out, count, -1).astype(jnp.float32)
        return products.reshape(levels.shape)

    def encode(self, units: Float[Array, "out in"]) -> UInt8[Array, "out in"]:
        """Return levels as their own codes."""
        return jnp.clip(jnp.round(units), 0, self.top.astype(jnp.float32)[:, None]).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "out in"]) -> Float[Array, "out in"]:
        """Return the levels of codes, which are these themselves."""
        return codes.astype(jnp.float32)

    def pack(self, codes: UInt8[Array, "out in"]) -> UInt8[np.ndarray, "out bytes"]:
        """Return the rows' super-blocks as llama.cpp lays them out."""
        kind, out = self.kind, len(self.matrix)
        levels = self.scale_levels.reshape(-1, 16), self.minimum_levels.reshape(-1, 16)
        if kind == "q6_k":
            grid = Grid(self.scale.ravel(), levels[0])
        else:
            grid = Grid(self.scale.ravel(), levels[0][:, ::2], self.minimum.ravel(), levels[1][:, ::2])
        return np.asarray(pack_levels(grid, codes.reshape(-1, SUPER_BLOCK), kind)).reshape(out, -1)


def is_sensitive(name: str, layers: int) -> bool:
    """Tell whether a matrix of a model with this many layers has more bits in llama.cpp's mixtures."""
    layer = _LAYER.search(name)
    return name.endswith(_SENSITIVE) and layer is not None and takes_more_bits(int(layer[1]), layers)


def k_quant_of(name: str, layers: int) -> KQuant:
    """Return the type in llama.cpp of a matrix served in q4_k_m, in a model with this many layers."""
    return "q6_k" if is_sensitive(name, layers) else "q4_k"


def takes_more_bits(layer: int, layers: int) -> bool:
    """Tell whether a layer is among the first and last eighth, or every third between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


class ServedFormat(WeightFormat):
    """Storage of matrices whose merges are rounded to another format: in memory alone."""

    row_wise, recorded = True, True
    served: str
    """Value of --serve-as."""

    def __init__(self, served: str, weight: type[Served], multiple: int):
        self.served, self.weight, self._multiple = served, weight, multiple
        self.name, self.label = served_storage(served), served
        self.flag, self.description = f"--serve-as {served}", f"rounded with their adapters to {served}"

    def check(self, widths: Mapping[str, int]) -> None:
        """Raise ValueError for rows that blocks do not divide."""
        for name, width in widths.items():
            if width % self._multiple:
                raise ValueError(f"{self.flag} needs multiples of {self._multiple}, got {name}={width}: leave it out")

    def config(self, unquantized: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        """Raise ValueError: no folder holds it."""
        raise ValueError(f"{self.flag} rounds merged adapters: no folder is in it")


class _NVFP4(ServedFormat):
    def quantize(self, matrix: Float[Array, "out in"]) -> ServedNVFP4:
        """Fit the scales: each block's largest magnitude to 6 times its scale, the largest scale to 224 … 448."""
        absmax = jnp.abs(matrix.astype(jnp.float32)).reshape(matrix.shape[0], -1, NVFP4_BLOCK).max(axis=-1)
        divisor = jnp.exp2(jnp.floor(jnp.log2(6 * 448 / jnp.maximum(absmax.max(), 2.0**-100))))
        scales = jnp.clip(absmax / 6 * divisor, 0, 448).astype(E4M3)
        return ServedNVFP4(matrix=matrix, scales=scales, divisors=jnp.full(len(matrix), divisor))


class _NF4(ServedFormat):
    def quantize(self, matrix: Float[Array, "out in"]) -> ServedNF4:
        """Fit the scales as bitsandbytes does."""
        return ServedNF4(matrix=matrix, scales=block_scales(quantize_nf4(matrix)))


class _Q4KM(ServedFormat):
    def quantize(self, matrix: Float[Array, "out in"]) -> ServedKQuant:
        """Fit the grids of q4_k."""
        return ServedKQuant.of(matrix, "q4_k")

    def hold(self, matrix: Any, *, sensitive: bool = False) -> Any:
        """Fit the grids of q6_k where a matrix is sensitive, as llama.cpp's mixture does, else of q4_k."""
        return matrix if isinstance(matrix, Quantized) else ServedKQuant.of(matrix, "q6_k" if sensitive else "q4_k")


SERVE_AS = {"nvfp4": _NVFP4("nvfp4", ServedNVFP4, NVFP4_BLOCK), "nf4": _NF4("nf4", ServedNF4, NF4_BLOCK)}
SERVE_AS["q4_k_m"] = _Q4KM("q4_k_m", ServedKQuant, SUPER_BLOCK)
for _made in SERVE_AS.values():
    register(_made)
