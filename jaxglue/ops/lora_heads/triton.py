"""Launches of the kernels in `kernels.py`."""

import itertools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton

from jaxglue.ops.launch import Launcher
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
        constants = {"HAS_NORM": norms is not None, "EPS": eps, "HEADS": group, "STAGES": tiles.num_stages}
        return self._call(kernels.rotate_kernel, arrays, out_type, grid, tiles, head_dim, constants)

    def rotate_gradient(self, z, ups, norms, cos, sin, cotangents, *, head_dim: int, eps: float):
        """See `LoraHeadsBackend`."""
        tiles, outs, (M, width), R = self.gradient_tiles, [len(up) for up in ups], z.shape, ups[0].shape[1]
        grid = triton.cdiv(M, tiles.rows), sum(outs) // head_dim
        shapes = (grid[1], M, R), (grid[0], sum(outs), R)
        dz = jax.ShapeDtypeStruct((M, width + outs[2]), z.dtype)
        out_type = dz, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        constants = {"HAS_NORM": norms is not None, "EPS": eps, "ROWS": tiles.rows, "STAGES": tiles.num_stages}
        arrays, kernel = (z, *ups, *(norms or ups[:2]), cos, sin, *cotangents), kernels.rotate_gradient_kernel
        dz, heads, matrices = self._call(kernel, arrays, out_type, grid, tiles, head_dim, constants)
        ends = list(itertools.accumulate(outs, initial=0))
        parts = list(itertools.pairwise(ends))
        hidden = [heads[first // head_dim : end // head_dim].sum(axis=0) for first, end in parts]
        dups = tuple(matrices[:, first:end].sum(axis=0) for first, end in parts)
        return dz, jnp.concatenate(hidden, axis=1).astype(z.dtype), dups

    def _call(self, kernel, arrays, out_type, grid, tiles: HeadTiles, head_dim: int, constants):
        z, q_b, k_b = arrays[:3]
        (M, width), R, N, K = z.shape, q_b.shape[1], len(q_b) // head_dim, len(k_b) // head_dim
        sizes = {"M": M, "N": N, "K": K, "H": head_dim, "R": R, "WIDTH": width, "BLOCK_M": tiles.block_m}
        blocks = {"BLOCK_R": rank_block(R), "BLOCK_H": max(16, triton.next_power_of_2(head_dim // 2))}
        constants = constants | sizes | blocks | {"PRECISION": dot_precision(z.dtype)}
        compiled = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        flops = len(out_type) * M * (N + K) * head_dim * R
        return self._launch(kernel, arrays, out_type, grid, constants, **compiled, flops=flops)
