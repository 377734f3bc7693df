"""Launches of the kernel in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
from jax_triton import triton_call

from jaxglue.low_rank import kernels


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """What a program reads: `columns` of `block_m` rows, `block_n` at a time."""

    block_m: int
    columns: int
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3


_SIZES = tuple(Tiles(block_m=rows, columns=columns) for rows, columns in ((512, 1024), (512, 512), (256, 512)))
_SMALLEST = Tiles(block_m=256, columns=256)
_PROGRAMS = 128
"""As many as an H200 has multiprocessors, nearly."""


def fitting_tiles(M: int, N: int) -> Tiles:
    """The largest tiles of [M, N], which leave least to add up, of which every multiprocessor gets one."""
    fitting = (t for t in _SIZES if triton.cdiv(M, t.block_m) * triton.cdiv(N, t.columns) >= _PROGRAMS)
    return next(fitting, _SMALLEST)


@dataclass(frozen=True, kw_only=True)
class TritonGradients:
    """`LowRankBackend` by our own kernel."""

    compute_capability: int
    """As Triton counts it: 90 for 9.0."""
    tiles: Tiles | None = None
    """None for those that fit."""

    def __call__(self, dy, matrix, hidden, first: int):
        """See `LowRankBackend`."""
        (M, N), R = dy.shape, matrix.shape[1]
        tiles = self.tiles or fitting_tiles(M, N)
        grid = triton.cdiv(M, tiles.block_m), triton.cdiv(N, tiles.columns)
        out_type = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((grid[1], M, R), (grid[0], N, R)))
        sizes = {"M": M, "N": N, "R": R, "STRIDE": hidden.shape[1], "FIRST": first}
        blocks = {"BLOCK_R": max(16, triton.next_power_of_2(R)), "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
        constants = sizes | blocks | {"COLUMNS": tiles.columns, "PRECISION": _precision(dy.dtype)}
        arrays = (dy, matrix, hidden)
        dhidden, dmatrix = self._launch(
            kernels.gradients_kernel, arrays, out_type, grid, constants, tiles, 4 * M * N * R
        )
        return dhidden.sum(axis=0).astype(dy.dtype), dmatrix.sum(axis=0)

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


def _precision(dtype) -> str:
    return "ieee" if dtype == jnp.float32 else "tf32"
