"""Launches of the kernels in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.gated_mlp import kernels
from jaxglue.ops.gated_mlp.tiles import (
    BACKWARD_TILES,
    FORWARD_TILES,
    SCALED_FORWARD_TILES,
    LoraSwigluTiles,
)
from jaxglue.ops.kernel_cost import KernelCost, KernelKind, turns
from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.projection.tiles import block_constants


@dataclass(frozen=True, kw_only=True)
class TritonLoraSwiglu(Launcher):
    """`LoraSwigluBackend` by our own kernels."""

    forward_tiles: LoraSwigluTiles = FORWARD_TILES
    scaled_forward_tiles: LoraSwigluTiles = SCALED_FORWARD_TILES
    backward_tiles: LoraSwigluTiles = BACKWARD_TILES

    def forward(self, gate, up, hidden, matrices):
        """See `LoraSwigluBackend`."""
        (M, F), R, tiles = gate.shape, matrices[0].shape[1], self.forward_tiles
        parts = triton.cdiv(F, tiles.length)
        out_type = shape_dtype_of(gate), jax.ShapeDtypeStruct((parts, M, R), jnp.float32)
        grid, length = (triton.cdiv(M, tiles.block_m), parts), {"COLUMNS": tiles.length}
        arrays = gate, up, hidden, *matrices
        cost = _forward_cost(M, F, R, tiles)
        out, ranks = self._call(kernels.forward_kernel, arrays, out_type, grid, tiles, length, cost)
        return out, ranks.sum(axis=0).astype(gate.dtype)

    def scaled_forward(self, products, hidden, matrices):
        """See `ScaledSwigluBackend`."""
        (M, F), R, tiles = products.gate.shape, matrices[0].shape[1], self.scaled_forward_tiles
        parts = triton.cdiv(F, tiles.length)
        partials = jax.ShapeDtypeStruct((parts, M, R), jnp.float32), jax.ShapeDtypeStruct((parts, M), jnp.float32)
        out_type = jax.ShapeDtypeStruct((M, F), hidden.dtype), *partials
        grid, length = (triton.cdiv(M, tiles.block_m), parts), {"COLUMNS": tiles.length}
        arrays = products.gate, products.up, hidden, *matrices, *products.scales
        kernel, cost = kernels.scaled_forward_kernel, _forward_cost(M, F, R, tiles)
        out, ranks, absmax = self._call(kernel, arrays, out_type, grid, tiles, length, cost)
        return out, ranks.sum(axis=0).astype(out.dtype), absmax.max(axis=0)[:, None]

    def scaled_backward(self, products, hidden, matrices, dout, dout_scales, dranks):
        """See `ScaledSwigluBackend`."""
        (M, F), R, tiles = products.gate.shape, matrices[0].shape[1], self.backward_tiles
        parts, blocks = triton.cdiv(M, tiles.length), triton.cdiv(F, tiles.block_n)
        partials = jax.ShapeDtypeStruct((parts, F, R), jnp.float32), jax.ShapeDtypeStruct((blocks, M), jnp.float32)
        out_type = *(jax.ShapeDtypeStruct((M, F), hidden.dtype) for _ in range(2)), *partials
        arrays = products.gate, products.up, hidden, *matrices, dout, dranks, *products.scales, dout_scales
        kernel, length, cost = kernels.scaled_backward_kernel, {"ROWS": tiles.length}, _backward_cost(M, F, R, tiles)
        dgate, dup, ddown, absmax = self._call(kernel, arrays, out_type, (blocks, parts), tiles, length, cost)
        return dgate, dup, ddown.sum(axis=0).T, absmax.max(axis=0)[:, None]

    def backward(self, gate, up, hidden, matrices, dout, dranks):
        """See `LoraSwigluBackend`."""
        (M, F), R, tiles = gate.shape, matrices[0].shape[1], self.backward_tiles
        parts = triton.cdiv(M, tiles.length)
        out_type = shape_dtype_of(gate), shape_dtype_of(up), jax.ShapeDtypeStruct((parts, F, R), jnp.float32)
        grid, length = (triton.cdiv(F, tiles.block_n), parts), {"ROWS": tiles.length}
        arrays = gate, up, hidden, *matrices, dout, dranks
        cost = _backward_cost(M, F, R, tiles)
        dgate, dup, ddown = self._call(kernels.backward_kernel, arrays, out_type, grid, tiles, length, cost)
        return dgate, dup, ddown.sum(axis=0).T

    def _call(self, kernel, arrays, out_type, grid, tiles: LoraSwigluTiles, length: dict[str, int], cost: KernelCost):
        (M, F), R = arrays[0].shape, arrays[3].shape[1]
        sizes = {"M": M, "F": F, "R": R} | length
        return self._compile(kernel, arrays, out_type, grid, tiles, sizes, cost, arrays[2].dtype)

    def _compile(self, kernel, arrays, out_type, grid, tiles: LoraSwigluTiles, sizes, cost: KernelCost, dtype=None):
        blocks = block_constants(tiles, sizes["R"], dtype or arrays[0].dtype)
        constants = sizes | {"STAGES": tiles.num_stages} | blocks
        return self._launch(kernel, arrays, out_type, grid, constants, tiles.num_warps, tiles.num_stages, cost=cost)


def _forward_cost(M: int, F: int, R: int, tiles: LoraSwigluTiles) -> KernelCost:
    """Return the cost of three products with the ranks, by programs that pass over columns."""
    passed = turns(min(tiles.length, F), tiles.block_n)
    return KernelCost(kind=KernelKind.ROWS, flops=6 * M * F * R, turns=passed)


def _backward_cost(M: int, F: int, R: int, tiles: LoraSwigluTiles) -> KernelCost:
    """Return the cost of four products with the ranks, by programs that pass over rows."""
    passed = turns(min(tiles.length, M), tiles.block_m)
    return KernelCost(kind=KernelKind.ROWS, flops=8 * M * F * R, turns=passed)
