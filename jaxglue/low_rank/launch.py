"""Launches of kernels that multiply by matrices of a few ranks."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import triton
from jax_triton import triton_call


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Rows and columns that a program reads at a time, and how it is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Launches on one kind of GPU."""

    compute_capability: int
    """As Triton counts it: 90 for 9.0."""

    def _launch(self, kernel, arrays, out_type, grid, constants, tiles: Blocks, flops: int):
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


def block_constants(tiles: Blocks, rank: int, dtype) -> dict[str, Any]:
    """Blocks of rows, columns and ranks, which matmuls want to be 16 or more, and the precision of matmuls."""
    blocks = {"BLOCK_R": max(16, triton.next_power_of_2(rank)), "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    return blocks | {"PRECISION": "ieee" if dtype == jnp.float32 else "tf32"}
