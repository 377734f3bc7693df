"""Launches of the kernels in `kernels.py`, and their tile sizes, measured on an H200."""

import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.gated_mlp import kernels
from jaxglue.ops.kernel_cost import KernelCost, KernelKind, turns
from jaxglue.ops.launch import Launcher
from jaxglue.ops.projection.triton import LoraTiles, block_constants
from jaxglue.ops.quant.fp8 import E4M3

_GATE_VALUES = 2048
"""Values of a row per warp, where a program has whole rows."""


@dataclass(frozen=True, kw_only=True)
class LoraSwigluTiles(LoraTiles):
    """A program covers `length` columns forward, or rows backward, in tiles of block_m rows and block_n columns."""

    block_m: int = 64
    block_n: int = 64
    length: int
    num_warps: int = 4
    num_stages: int = 3


FORWARD_TILES = LoraSwigluTiles(length=1024)
BACKWARD_TILES = LoraSwigluTiles(block_m=32, length=1024)


@dataclass(frozen=True, kw_only=True)
class TritonLoraSwiglu(Launcher):
    """`LoraSwigluBackend` and `ScaledSwigluBackend` by our own kernels."""

    forward_tiles: LoraSwigluTiles = FORWARD_TILES
    backward_tiles: LoraSwigluTiles = BACKWARD_TILES
    in_order: bool = False
    """Add the parts of down's ranks one after another; XLA's reductions have an order by the number of rows."""

    def forward(self, gate, up, low_rank, matrices, activation):
        """See `LoraSwigluBackend`."""
        out, parts = self._forward(gate, up, low_rank, matrices, (None, None, None), activation)
        down_ranks = reduce(operator.add, jnp.unstack(parts)) if self.in_order else parts.sum(axis=0)
        return out, down_ranks.astype(out.dtype)

    @property
    def part(self) -> int:
        """See `LoraSwigluBackend`."""
        return self.forward_tiles.length

    def scaled_forward(self, products, low_rank, matrices, activation):
        """See `ScaledSwigluBackend`."""
        arrays = products.gate, products.up, low_rank, matrices, products.scales
        out, down_ranks, absmax = self._forward(*arrays, activation)
        return out, down_ranks.sum(axis=0).astype(out.dtype), absmax.max(axis=0)[:, None]

    def _forward(self, gate, up, low_rank, matrices, scales, activation):
        (M, F), R, tiles = gate.shape, matrices[0].shape[1], self.forward_tiles
        parts, scaled = triton.cdiv(F, tiles.length), scales[0] is not None
        out_type = [jax.ShapeDtypeStruct((M, F), low_rank.dtype), jax.ShapeDtypeStruct((parts, M, R), jnp.float32)]
        if scaled:
            out_type.append(jax.ShapeDtypeStruct((parts, M), jnp.float32))
        constants = _constants(gate, low_rank, R, tiles) | {"COLUMNS": tiles.length, "ACTIVATION": activation}
        constants |= _absent(absmax=scaled)
        passed = turns(min(tiles.length, F), tiles.block_n)
        cost = KernelCost(kind=KernelKind.ROWS, flops=6 * M * F * R, turns=passed)
        arrays = gate, up, low_rank, *_rounded(matrices, low_rank.dtype), *scales
        grid = triton.cdiv(M, tiles.block_m), parts
        compiled = tiles.num_warps, tiles.num_stages
        return self._launch(kernels.swiglu_kernel, arrays, tuple(out_type), grid, constants, *compiled, cost=cost)

    def backward(self, gate, up, low_rank, matrices, dout, ddown_ranks, activation):
        """See `LoraSwigluBackend`."""
        scales = None, None, None, None
        dgate, dup, ddown = self._backward(gate, up, low_rank, matrices, dout, ddown_ranks, scales, activation)
        return dgate, dup, ddown.sum(axis=0).T

    def scaled_backward(self, products, low_rank, matrices, dout, dout_scales, ddown_ranks, activation):
        """See `ScaledSwigluBackend`."""
        arrays, scales = (products.gate, products.up, low_rank), (*products.scales, dout_scales)
        dgate, dup, ddown, absmax = self._backward(*arrays, matrices, dout, ddown_ranks, scales, activation)
        return dgate, dup, ddown.sum(axis=0).T, absmax.max(axis=0)[:, None]

    def _backward(self, gate, up, low_rank, matrices, dout, ddown_ranks, scales, activation):
        (M, F), R, tiles = gate.shape, matrices[0].shape[1], self.backward_tiles
        parts, blocks, scaled = triton.cdiv(M, tiles.length), triton.cdiv(F, tiles.block_n), scales[0] is not None
        wide, sums = jax.ShapeDtypeStruct((M, F), low_rank.dtype), jax.ShapeDtypeStruct((parts, F, R), jnp.float32)
        out_type = [wide, wide, sums]
        if scaled:
            out_type.append(jax.ShapeDtypeStruct((blocks, M), jnp.float32))
        constants = _constants(gate, low_rank, R, tiles) | {"OUT_RANKS": R, "ROWS": tiles.length}
        constants |= {"ACTIVATION": activation} | _absent(absmax=scaled, dlow_rank=False, dgate_b=False, dup_b=False)
        passed = turns(min(tiles.length, M), tiles.block_m)
        cost = KernelCost(kind=KernelKind.ROWS, flops=8 * M * F * R, turns=passed)
        matrices = _rounded(matrices, low_rank.dtype)
        arrays, grid = (gate, up, low_rank, *matrices, dout, ddown_ranks, *scales), (blocks, parts)
        compiled = tiles.num_warps, tiles.num_stages
        return self._launch(
            kernels.swiglu_gradient_kernel, arrays, tuple(out_type), grid, constants, *compiled, cost=cost
        )


@dataclass(frozen=True, kw_only=True)
class TritonGate(Launcher):
    """The activation of `gate_fp8` by our own kernel."""

    def gate(self, products, activation):
        """Return e4m3 values of activation(gate)·up [M, F], and their rows' scales [M, 1]."""
        M, F = products.gate.shape
        block = triton.next_power_of_2(F)
        out_type = jax.ShapeDtypeStruct((M, F), E4M3), jax.ShapeDtypeStruct((M,), jnp.float32)
        constants = {"F": F, "BLOCK": block, "ACTIVATION": activation}
        arrays = products.gate, products.up, products.row_scales.reshape(M), products.gate_scales, products.up_scales
        warps, cost = min(max(block // _GATE_VALUES, 1), 16), KernelCost(kind=KernelKind.ROWS)
        values, scales = self._launch(kernels.gate_fp8_kernel, arrays, out_type, (M,), constants, warps, cost=cost)
        return values, scales[:, None]


def _rounded(matrices, dtype) -> tuple:
    """Return the matrices as tensor cores read them: so they are copied to shared memory while others are used."""
    return tuple(matrix.astype(dtype) for matrix in matrices)


def _constants(gate, low_rank, R: int, tiles: LoraSwigluTiles) -> dict[str, Any]:
    M, F = gate.shape
    sizes = {"M": M, "F": F, "R": R, "WIDTH": F, "RANKS": 2 * R, "OUT": F, "STAGES": tiles.num_stages}
    return sizes | block_constants(tiles, R, low_rank.dtype)


def _absent(**present: bool) -> dict[str, None]:
    """Return arguments that tell a kernel which outputs it has not."""
    return {name: None for name, is_given in present.items() if not is_given}
