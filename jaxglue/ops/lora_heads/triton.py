"""Launches of the kernels in `kernels.py`."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.lora.tiles import dot_precision, rank_block
from jaxglue.ops.lora_heads import kernels
from jaxglue.ops.lora_heads.tiles import GRADIENT_TILES, ROTATE_TILES, HeadTiles


@dataclass(frozen=True, kw_only=True)
class TritonLoraHeads(Launcher):
    """`LoraHeadsBackend` by our own kernels."""

    rotate_tiles: HeadTiles = ROTATE_TILES
    gradient_tiles: HeadTiles = GRADIENT_TILES

    def rotate(self, z, ups, norms, cos, sin, *, head_dim: int, eps: float):
        """See `LoraHeadsBackend`."""
        tiles, heads = self.rotate_tiles, [len(up) // head_dim for up in ups]
        out_type = tuple(jax.ShapeDtypeStruct((len(z), len(up)), z.dtype) for up in ups)
        arrays = z, *ups, *(norms or ups), cos, sin
        group = math.gcd(*heads, tiles.heads)
        grid = triton.cdiv(len(z), tiles.block_m), sum(heads) // group
        constants = {"HAS_NORM": norms is not None, "EPS": eps, "HEADS": group}
        return self._call(kernels.rotate_kernel, arrays, out_type, grid, tiles, head_dim, constants)

    def rotate_gradient(self, z, ups, norms, cos, sin, dq, dk, *, head_dim: int, eps: float):
        """See `LoraHeadsBackend`."""
        tiles, (q_heads, k_heads) = self.gradient_tiles, [len(up) // head_dim for up in ups]
        (M, R), heads = (len(z), ups[0].shape[1]), q_heads + k_heads
        grid = triton.cdiv(M, tiles.rows), heads
        shapes = (heads, M, R), (grid[0], heads * head_dim, R)
        out_type = shape_dtype_of(z), *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        constants = {"HAS_NORM": norms is not None, "EPS": eps, "ROWS": tiles.rows, "STAGES": tiles.num_stages}
        arrays, kernel = (z, *ups, *(norms or ups), cos, sin, dq, dk), kernels.rotate_gradient_kernel
        dz, dhidden, dmatrix = self._call(kernel, arrays, out_type, grid, tiles, head_dim, constants)
        dhidden = jnp.concatenate([dhidden[:q_heads].sum(axis=0), dhidden[q_heads:].sum(axis=0)], axis=1)
        dups = dmatrix[:, : len(ups[0])].sum(axis=0), dmatrix[:, len(ups[0]) :].sum(axis=0)
        return dz, dhidden.astype(z.dtype), dups

    def _call(self, kernel, arrays, out_type, grid, tiles: HeadTiles, head_dim: int, constants):
        z, q_b, k_b = arrays[:3]
        (M, width), R, N, K = z.shape, q_b.shape[1], len(q_b) // head_dim, len(k_b) // head_dim
        sizes = {"M": M, "N": N, "K": K, "H": head_dim, "R": R, "WIDTH": width, "BLOCK_M": tiles.block_m}
        blocks = {"BLOCK_R": rank_block(R), "BLOCK_H": max(16, triton.next_power_of_2(head_dim // 2))}
        constants = constants | sizes | blocks | {"PRECISION": dot_precision(z.dtype)}
        compiled = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        flops = len(out_type) * M * (N + K) * head_dim * R
        return self._launch(kernel, arrays, out_type, grid, constants, **compiled, flops=flops)
