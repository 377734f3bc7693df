"""Launches of the kernels in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
from jax_triton import triton_call

from jaxglue.swiglu import kernels


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """A program walks over `length` columns forward, or rows backward, in tiles of block_m rows and block_n columns."""

    block_m: int = 64
    block_n: int = 64
    length: int
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True)
class TritonSwiglu:
    """`SwigluBackend` by our own kernels."""

    compute_capability: int
    """As Triton counts it: 90 for 9.0."""
    forward_tiles: Tiles = Tiles(length=512)
    backward_tiles: Tiles = Tiles(length=1024, num_stages=2)

    def forward(self, gate, up, hidden, matrices):
        """See `SwigluBackend`."""
        (M, F), R, tiles = gate.shape, matrices[0].shape[1], self.forward_tiles
        parts = triton.cdiv(F, tiles.length)
        out_type = _like(gate), jax.ShapeDtypeStruct((parts, M, R), jnp.float32)
        grid, length = (triton.cdiv(M, tiles.block_m), parts), {"COLUMNS": tiles.length}
        arrays = gate, up, hidden, *matrices
        out, ranks = self._call(kernels.forward_kernel, arrays, out_type, grid, tiles, length, 6 * M * F * R)
        return out, ranks.sum(axis=0).astype(gate.dtype)

    def backward(self, gate, up, hidden, matrices, dout, dranks):
        """See `SwigluBackend`."""
        (M, F), R, tiles = gate.shape, matrices[0].shape[1], self.backward_tiles
        parts = triton.cdiv(M, tiles.length)
        out_type = _like(gate), _like(up), jax.ShapeDtypeStruct((parts, F, R), jnp.float32)
        grid, length = (triton.cdiv(F, tiles.block_n), parts), {"ROWS": tiles.length}
        arrays = gate, up, hidden, *matrices, dout, dranks
        dgate, dup, ddown = self._call(kernels.backward_kernel, arrays, out_type, grid, tiles, length, 8 * M * F * R)
        return dgate, dup, ddown.sum(axis=0).T

    def _call(self, kernel, arrays, out_type, grid, tiles: Tiles, length: dict[str, int], flops: int):
        (M, F), R = arrays[0].shape, arrays[3].shape[1]
        blocks = {"BLOCK_R": max(16, triton.next_power_of_2(R)), "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
        precision = "ieee" if arrays[0].dtype == jnp.float32 else "tf32"
        constants = {"M": M, "F": F, "R": R, "STAGES": tiles.num_stages, "PRECISION": precision} | blocks | length
        return self._launch(kernel, arrays, out_type, grid, constants, tiles, flops)

    def _launch(self, kernel, arrays, out_type, grid, constants, tiles: Tiles, flops: int):
        return triton_call(
            *arrays,
            kernel=kernel,
            out_type=out_type,
            grid=grid,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            compute_capability=self.compute_capability,
            cost_estimate={"flops": flops},
            **constants,
        )


def _like(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
