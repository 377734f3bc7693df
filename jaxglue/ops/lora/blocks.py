"""Blocks of kernels that multiply by matrices of a few ranks."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import triton


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Rows and columns that a program reads at a time, and how it is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def block_constants(tiles: Blocks, rank: int, dtype) -> dict[str, Any]:
    """Blocks of rows, columns and ranks, which matmuls want to be 16 or more, and the precision of matmuls."""
    blocks = {"BLOCK_R": max(16, triton.next_power_of_2(rank)), "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    return blocks | {"PRECISION": "ieee" if dtype == jnp.float32 else "tf32"}
