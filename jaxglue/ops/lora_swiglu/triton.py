"""Launches of the kernels in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.lora.tiles import block_constants
from jaxglue.ops.lora_swiglu import kernels
from jaxglue.ops.lora_swiglu.tiles import BACKWARD_TILES, FORWARD_TILES, LoraSwigluTiles


@dataclass(frozen=True, kw_only=True)
class TritonLoraSwiglu(Launcher):
    """`LoraSwigluBackend` by our own kernels."""

    forward_tiles: LoraSwigluTiles = FORWARD_TILES
    backward_tiles: LoraSwigluTiles = BACKWARD_TILES

    def forward(self, gate, up, hidden, matrices):
        """See `LoraSwigluBackend`."""
        (M, F), R, tiles = gate.shape, matrices[0].shape[1], self.forward_tiles
        parts = triton.cdiv(F, tiles.length)
        out_type = shape_dtype_of(gate), jax.ShapeDtypeStruct((parts, M, R), jnp.float32)
        grid, length = (triton.cdiv(M, tiles.block_m), parts), {"COLUMNS": tiles.length}
        arrays = gate, up, hidden, *matrices
        out, ranks = self._call(kernels.forward_kernel, arrays, out_type, grid, tiles, length, 6 * M * F * R)
        return out, ranks.sum(axis=0).astype(gate.dtype)

    def backward(self, gate, up, hidden, matrices, dout, dranks):
        """See `LoraSwigluBackend`."""
        (M, F), R, tiles = gate.shape, matrices[0].shape[1], self.backward_tiles
        parts = triton.cdiv(M, tiles.length)
        out_type = shape_dtype_of(gate), shape_dtype_of(up), jax.ShapeDtypeStruct((parts, F, R), jnp.float32)
        grid, length = (triton.cdiv(F, tiles.block_n), parts), {"ROWS": tiles.length}
        arrays = gate, up, hidden, *matrices, dout, dranks
        dgate, dup, ddown = self._call(kernels.backward_kernel, arrays, out_type, grid, tiles, length, 8 * M * F * R)
        return dgate, dup, ddown.sum(axis=0).T

    def _call(self, kernel, arrays, out_type, grid, tiles: LoraSwigluTiles, length: dict[str, int], flops: int):
        (M, F), R = arrays[0].shape, arrays[3].shape[1]
        blocks = block_constants(tiles, R, arrays[0].dtype)
        constants = {"M": M, "F": F, "R": R, "STAGES": tiles.num_stages} | blocks | length
        return self._launch(kernel, arrays, out_type, grid, constants, tiles.num_warps, tiles.num_stages, flops)
