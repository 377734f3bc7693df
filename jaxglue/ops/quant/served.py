"""Weights that are served in few bits with their adapter merged: a matrix, and the grid on which the merge will lie.

Training multiplies by the merge rounded to the grid. The grid is the base's own: scales are those of the matrix without
its adapter, so that a step moves values between levels and never the levels themselves, and an export finds the same.

A delta of a hundredth of a step should move one value in a hundred by a whole one: on average the merge moves by
the delta. That takes values evenly spread over the cells of their levels, and matrices are not: scales of least error
leave few values near the ends of cells, those at the last levels have nowhere to go on one side, and a matrix that is
stored on the grid has all values on levels, of which such a delta would move none. So values are laid at places of
their own in their cells: in the order in which they lay there, or without one at random (`dither`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int8, Int32, UInt8

from jaxglue.ops.choices import STORED, served_storage
from jaxglue.ops.quant.blocks import midpoints
from jaxglue.ops.quant.formats import FORMATS, Quantized, Shape, Specs, WeightFormat, register
from jaxglue.ops.quant.k_quants import SUPER_BLOCK, TOP_LEVELS, Grid, KQuant, fit_grid, pack_levels
from jaxglue.ops.quant.mxfp4 import BLOCK as MXFP4_BLOCK
from jaxglue.ops.quant.mxfp4 import MXFP4, MXFP4Format, block_factors, decode_e2m1, encode_e2m1
from jaxglue.ops.quant.nf4 import BLOCK as NF4_BLOCK
from jaxglue.ops.quant.nf4 import NF4, VALUES, block_scales, decode_nf4, quantize_nf4
from jaxglue.ops.quant.nvfp4 import BLOCK as NVFP4_BLOCK
from jaxglue.ops.quant.nvfp4 import NVFP4, fit_scales
from jaxglue.ops.quant.stack import Stack

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


_encode_e2m1 = partial(encode_e2m1, to_even=True)


def _encode_nf4(units: Float[Array, "out in"]) -> UInt8[Array, "out in"]:
    bounds = midpoints(np.array(VALUES, np.float32))
    return sum((units > bound).astype(jnp.uint8) for bound in bounds)


class Codes(NamedTuple):
    """Codes of a format of four bits, and the distances between their values."""

    block: int
    """Values that share a step."""
    values: Float[np.ndarray, "16"]
    """Float32, by code."""
    encode: Callable[[Array], Array]
    high_first: bool
    """The first of two codes is in a byte's high half."""

    @property
    def cells(self) -> Float[np.ndarray, "3 16"]:
        """Return by code the middle of its values' places, and the distances from −½ and to ½ of them, doubled.

        Places reach half of the way to the next values. At both ends they are in the inner half alone, where they are
        twice as close: deltas outward move no value.
        """
        ascending = np.unique(self.values)
        apart, index = np.diff(ascending), np.searchsorted(ascending, self.values)
        below, above = np.pad(apart, (1, 0), "edge")[index], np.pad(apart, (0, 1), "edge")[index]
        outward = (index == len(apart)) * 1 - (index == 0) * 1
        halved = np.where(outward == 0, 1, 0.5)
        middle = self.values - outward * np.where(outward > 0, below, above) / 4
        return np.stack([middle, below * halved, above * halved]).astype(np.float32)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_CODES = Codes(0, np.concatenate([_E2M1, -_E2M1]), _encode_e2m1, high_first=False)
CODES: dict[type[Quantized], Codes] = {
    NVFP4: _E2M1_CODES._replace(block=NVFP4_BLOCK),
    MXFP4: _E2M1_CODES._replace(block=MXFP4_BLOCK),
    NF4: Codes(NF4_BLOCK, np.array(VALUES, np.float32), _encode_nf4, high_first=True),
}
"""Of each format in which a matrix may be stored while adapters train for it."""
_BINS = 4096
"""Bins of the shares of a cell by which values are ordered."""
_SHARES = 12
"""Bits of a share of a cell: enough for deltas of 1/4096 of a step, few enough to keep away from the cell's ends."""


def dither(seeds: Int32[Array, " out"], columns: int) -> Float[Array, "out columns"]:
    """Return a number in (−½, ½) for each value of a matrix: always the same, without a pattern.

    Args:
        seeds: of the rows.
        columns: of the matrix.
    """
    mixed = seeds.astype(jnp.uint32)[:, None] * jnp.uint32(0x9E3779B1) ^ jnp.arange(
        columns, dtype=jnp.uint32
    ) * jnp.uint32(0x85EBCA77)
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        mixed = (mixed ^ mixed >> shift) * jnp.uint32(factor)
    share = (mixed ^ mixed >> 15) >> (32 - _SHARES)
    return (share.astype(jnp.float32) + 0.5) / 2**_SHARES - 0.5


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

    def cells(self, codes: UInt8[Array, "out in"]) -> tuple[Array, Array, Array]:
        """Return `Codes.cells` of each value."""
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

    def part(self, rows: slice) -> Self:
        """Return some of the rows."""
        return jax.tree.map(lambda array: array[rows], self)

    def of_dtype(self, dtype) -> Self:
        """Return the same as of an original of this dtype."""
        return replace(self, matrix=self.matrix.astype(dtype))  # type: ignore[type-var]

    def dequantize(self, dtype) -> Float[Array, "out in"]:
        """Compute the values of the matrix without an adapter on its grid."""
        return self.merged(None, dtype)

    def original(self, dtype) -> Float[Array, "out in"]:
        """Return the matrix as its folder has it."""
        return self.matrix.astype(dtype)

    def codes(
        self, delta: Float[Array, "out in"] | None, gain: Float[Array, " out"] | None = None
    ) -> UInt8[Array, "out in"]:
        """Return the codes of the levels nearest to the matrix plus a delta, times a gain of each row."""
        values = self.matrix.astype(jnp.float32)
        values = values if delta is None else values + delta
        return self.encode(self.units(values if gain is None else values * gain[:, None]))

    def units(self, values: Float[Array, "out in"]) -> Float[Array, "out in"]:
        """Return values in units of their steps."""
        step, low, _ = self.levels
        values = values.reshape(*step.shape, self.block)
        values = values if low is None else values + low[..., None]
        return (jnp.where(step != 0, 1 / jnp.where(step != 0, step, 1), 0)[..., None] * values).reshape(self.shape)

    def merged(
        self, delta: Float[Array, "out in"] | None, dtype, gain: Float[Array, " out"] | None = None
    ) -> Float[Array, "out in"]:
        """Compute the matrix plus a delta, times a gain, on the grid: in float32, rounded once to `dtype`."""
        return self.values(self.decode(self.codes(delta, gain))).astype(dtype)

    def values(self, units: Float[Array, "out in"]) -> Float[Array, "out in"]:
        """Return the values of units of their steps, float32."""
        step, low, _ = self.levels
        values = units.reshape(*step.shape, self.block) * step[..., None]
        return (values if low is None else values - low[..., None]).reshape(self.shape)

    def spread(self) -> Self:
        """Return the same with values spread evenly over the cells of their levels, in the order of their distances.

        They are in bfloat16's precision, so that matrices of every dtype have the same.
        """
        return replace(self, matrix=_spread(self))  # type: ignore[type-var]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ServedNVFP4(Served):
    """A matrix and the scales of its blocks of 16 in NVFP4. A pytree."""

    matrix: Float[Array, "out in"]
    scales: Float[Array, "out in/16"]
    """float8_e4m3fn."""
    divisors: Float[Array, " out"]
    """Divisor of the row's scales, float32."""
    block: ClassVar[int] = NVFP4_BLOCK

    @property
    def levels(self) -> Levels:
        """Return the levels of each block."""
        return Levels(self.scales.astype(jnp.float32) / self.divisors[:, None])

    def cells(self, codes: UInt8[Array, "out in"]) -> tuple[Array, Array, Array]:
        """Return `Codes.cells` of each value."""
        return _look_up(CODES[NVFP4], codes)

    def encode(self, units: Float[Array, "out in"]) -> UInt8[Array, "out in"]:
        """Return e2m1 codes."""
        return _encode_e2m1(units)

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
    scales: UInt8[Array, "out in/64"]
    """As of `NF4`, like the following."""
    scale_absmax: Float[Array, " groups"]
    scale_offset: Float[Array, ""]
    block: ClassVar[int] = NF4_BLOCK

    @property
    def levels(self) -> Levels:
        """Return the levels of each block."""
        return Levels(block_scales(self._with(self.scales)))

    def _with(self, codes: UInt8[Array, "out in/2"]) -> NF4:
        parts = {"scales": self.scales, "scale_absmax": self.scale_absmax, "scale_offset": self.scale_offset}
        return NF4(codes=codes, **parts, dtype=self.dtype)

    def cells(self, codes: UInt8[Array, "out in"]) -> tuple[Array, Array, Array]:
        """Return `Codes.cells` of each value."""
        return _look_up(CODES[NF4], codes)

    def encode(self, units: Float[Array, "out in"]) -> UInt8[Array, "out in"]:
        """Return NF4 codes."""
        return _encode_nf4(units)

    def decode(self, codes: UInt8[Array, "out in"]) -> Float[Array, "out in"]:
        """Return the values of NF4 codes."""
        return decode_nf4(codes)

    def pack(self, codes: UInt8[Array, "out in"]) -> Any:
        """Return a matrix of these codes, with the base's own quantized scales."""
        return self._with(codes[:, ::2] << 4 | codes[:, 1::2])


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

    def cells(self, codes: UInt8[Array, "out in"]) -> tuple[Array, Array, Array]:
        """Return `Codes.cells` of each value."""
        outward = (codes == self.top[:, None]).astype(jnp.float32) - (codes == 0).astype(jnp.float32)
        room = jnp.where(outward == 0, 1, 0.5)
        return self.decode(codes) - outward / 4, room, room

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ServedStored(Served):
    """A matrix that is stored in the format in which it is served. A pytree.

    Each value is laid at a place of its own between its level and half of the way to the next, so that a delta moves as
    many values to another level as it is large, and on average the merge by the delta; without a delta all stay.
    """

    stored: Any
    """`NVFP4`, `NF4` or `MXFP4`."""
    seeds: Int32[Array, " out"]
    """Of the places in each row."""

    @classmethod
    def of(cls, stored: Any, rows: int | None = None) -> "ServedStored":
        """Return a stored matrix, or matrices below one another of as many rows each."""
        seeds = jnp.arange(stored.shape[0], dtype=jnp.int32)
        return cls(stored=stored, seeds=seeds % rows if rows else seeds)

    @property
    def coding(self) -> Codes:
        """Return the codes of the format."""
        return CODES[type(self.stored)]

    @property
    def block(self) -> int:  # type: ignore[override]
        """Return the values that share a step."""
        return self.coding.block

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the matrix."""
        return self.stored.shape

    @property
    def dtype(self) -> Any:
        """Return the dtype of the original matrix."""
        return self.stored.dtype

    def of_dtype(self, dtype) -> "ServedStored":
        """Return the same as of an original of this dtype."""
        return self if isinstance(self.stored, MXFP4) else replace(self, stored=self.stored.of_dtype(dtype))

    @property
    def packed(self) -> UInt8[Array, "out in/2"]:
        """Return the codes, two in a byte."""
        stored = self.stored
        return stored.blocks.reshape(len(stored.blocks), -1) if isinstance(stored, MXFP4) else stored.codes

    @property
    def levels(self) -> Levels:
        """Return the levels of each block."""
        stored = self.stored
        if isinstance(stored, NVFP4):
            return Levels(stored.scales.astype(jnp.float32) / stored.divisors[:, None])
        return Levels(block_factors(stored) if isinstance(stored, MXFP4) else block_scales(stored))

    @property
    def matrix(self) -> Float[Array, "out in"]:  # type: ignore[override]
        """Return the values, each at its place in its cell, float32."""
        halves = self.packed >> 4, self.packed & 0xF
        codes = jnp.stack(halves if self.coding.high_first else halves[::-1], axis=-1).reshape(self.shape)
        return self.values(_at_places(self.cells(codes), dither(self.seeds, self.shape[1])))

    def cells(self, codes: UInt8[Array, "out in"]) -> tuple[Array, Array, Array]:
        """Return `Codes.cells` of each value."""
        return _look_up(self.coding, codes)

    def original(self, dtype) -> Float[Array, "out in"]:
        """Return the matrix as its folder has it."""
        return self.stored.dequantize(dtype)

    def dequantize(self, dtype) -> Float[Array, "out in"]:
        """Compute the values of the matrix without an adapter, which are its folder's."""
        return self.original(dtype)

    def encode(self, units: Float[Array, "out in"]) -> UInt8[Array, "out in"]:
        """Return the codes of the levels nearest to values in units of their steps."""
        return self.coding.encode(units)

    def decode(self, codes: UInt8[Array, "out in"]) -> Float[Array, "out in"]:
        """Return the levels of codes, float32."""
        return jnp.asarray(self.coding.values)[codes]

    def pack(self, codes: UInt8[Array, "out in"]) -> Any:
        """Return a matrix of these codes, with the scales of the stored one."""
        first, second = codes[:, ::2], codes[:, 1::2]
        packed = first << 4 | second if self.coding.high_first else first | second << 4
        if isinstance(self.stored, MXFP4):
            return replace(self.stored, blocks=packed.reshape(self.stored.blocks.shape))
        return replace(self.stored, codes=packed)


def _look_up(coding: Codes, codes: UInt8[Array, "out in"]) -> tuple[Array, Array, Array]:
    middle, below, above = jnp.asarray(coding.cells)[:, codes]
    return middle, below, above


def _at_places(cells: tuple[Array, Array, Array], places: Float[Array, "out in"]) -> Float[Array, "out in"]:
    middle, below, above = cells
    return middle + places * jnp.where(places < 0, below, above)


@jax.jit
def _spread(weight: Served) -> Float[Array, "out in"]:
    """Return the matrix with values spread over their cells: in their order, at the ends of the grid at random."""
    matrix = weight.matrix
    units, codes = weight.units(matrix.astype(jnp.float32)), weight.codes(None)
    level, cells = weight.decode(codes), weight.cells(codes)
    apart, inner = units - level, cells[0] == level
    share = jnp.where(inner, apart / jnp.where(apart < 0, cells[1], cells[2]), 0)
    at_random = dither(jnp.arange(len(matrix), dtype=jnp.int32), matrix.shape[1])
    spread = weight.values(_at_places(cells, jnp.where(inner, _even_places(share, inner), at_random)))
    return jax.lax.reduce_precision(spread, exponent_bits=8, mantissa_bits=7).astype(matrix.dtype)


def _even_places(share: Float[Array, "out in"], counted: Bool[Array, "out in"]) -> Float[Array, "out in"]:
    """Return the place in (−½, ½) of each share in the order of those that are counted."""
    position = jnp.clip((share + 0.5) * _BINS, 0, _BINS - 1)
    index = position.astype(jnp.int32)
    counts = jnp.zeros(_BINS, jnp.int32).at[index].add(counted.astype(jnp.int32))
    below = (jnp.cumsum(counts) - counts).astype(jnp.float32)
    total = jnp.maximum(counts.sum(), 1)
    return (below[index] + counts[index] * jnp.clip(position - index, 0.01, 0.99)) / total - 0.5


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

    row_wise, recorded, holds_experts = True, True, True
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
        """Fit the scales as NVFP4 does."""
        scales, divisor = fit_scales(matrix)
        return ServedNVFP4(matrix=matrix, scales=scales, divisors=jnp.full(len(matrix), divisor)).spread()


class _NF4(ServedFormat):
    def quantize(self, matrix: Float[Array, "out in"]) -> ServedNF4:
        """Fit the scales as bitsandbytes does."""
        fitted = quantize_nf4(matrix)
        scales = {"scales": fitted.scales, "scale_absmax": fitted.scale_absmax, "scale_offset": fitted.scale_offset}
        return ServedNF4(matrix=matrix, **scales).spread()


class _Q4KM(ServedFormat):
    def quantize(self, matrix: Float[Array, "out in"]) -> ServedKQuant:
        """Fit the grids of q4_k."""
        return ServedKQuant.of(matrix, "q4_k").spread()

    def hold(self, matrix: Any, *, sensitive: bool = False) -> Any:
        """Fit the grids of q6_k where a matrix is sensitive, as llama.cpp's mixture does, else of q4_k."""
        if isinstance(matrix, Quantized):
            return matrix
        return ServedKQuant.of(matrix, "q6_k" if sensitive else "q4_k").spread()


class StoredFormat(ServedFormat):
    """Storage of matrices that a folder holds in the format to which merges are rounded: four bits in memory, too."""

    def __init__(self, stored: WeightFormat):
        super().__init__(stored.name, ServedStored, 1)
        self.name, self.stored = STORED.get(self.name, self.name), stored

    def check(self, widths: Mapping[str, int]) -> None:
        """Raise ValueError for rows that blocks do not divide."""
        self.stored.check(widths)

    def accepts(self, weight: Quantized) -> bool:
        """Return whether a weight is in the format."""
        return super().accepts(weight) or isinstance(weight, self.stored.weight or ())

    def quantize(self, matrix: Float[Array, "out in"]) -> ServedStored:
        """Convert a matrix, which a folder does not hold in the format."""
        return ServedStored.of(self.stored.quantize(matrix))

    def hold(self, matrix: Any, *, sensitive: bool = False) -> Any:
        """Return a matrix as it is stored, with places in its cells."""
        if isinstance(matrix, Stack):
            return Stack(rows=self.hold(matrix.rows), out=matrix.out)
        if isinstance(matrix, Served):
            return matrix
        return ServedStored.of(matrix) if isinstance(matrix, Quantized) else self.quantize(matrix)


class _StoredMXFP4(StoredFormat):
    """Storage of GPT-OSS's experts in MXFP4; linear layers of their models are in 16 bits, also as served."""

    parts = MXFP4Format.parts

    def __init__(self, stored: WeightFormat):
        super().__init__(stored)
        self.weight = None

    def quantize(self, matrix: Float[Array, "out in"]) -> Any:
        """Return the matrix of a linear layer as it is."""
        return matrix

    def hold(self, matrix: Any, *, sensitive: bool = False) -> Any:
        """Return the matrix of a linear layer as it is."""
        return matrix

    def part_specs(self, shape: Shape) -> Specs:
        """Return those of MXFP4."""
        return self.stored.part_specs(shape)

    def random_part(self, part: str, key: Array, spec: jax.ShapeDtypeStruct, std: float) -> Array:
        """Return that of MXFP4."""
        return self.stored.random_part(part, key, spec, std)

    def join(self, parts: Mapping[str, Any]) -> Stack:
        """Return experts' matrices, whose places in their cells are those of every other expert."""
        E, out, *_ = parts["scales"].shape
        rows = {name: jnp.reshape(part, (E * out, *part.shape[2:])) for name, part in parts.items()}
        return Stack(rows=ServedStored.of(MXFP4(**rows), out), out=out)


SERVE_AS = {"nvfp4": _NVFP4("nvfp4", ServedNVFP4, NVFP4_BLOCK), "nf4": _NF4("nf4", ServedNF4, NF4_BLOCK)}
SERVE_AS["q4_k_m"] = _Q4KM("q4_k_m", ServedKQuant, SUPER_BLOCK)
"""Formats for folders in 16 bits by the value of --serve-as."""
for _made in (*SERVE_AS.values(), *(StoredFormat(FORMATS[name]) for name in ("nvfp4", "nf4"))):
    register(_made)
register(_StoredMXFP4(FORMATS["mxfp4"]))
