"""Launches of the kernels in `kernels.py`."""

import math
from dataclasses import dataclass

import jax
import triton

from jaxglue.ops.launch import Launcher, shape_dtype_of
from jaxglue.ops.lora.tiles import block_constants
from jaxglue.ops.lora_heads import kernels
from jaxglue.ops.lora_heads.tiles import GRADIENT_TILES, ROTATE_TILES, HeadTiles


@dataclass(frozen=True, kw_only=True)
class TritonLoraHeads(Launcher):
    """`LoraHeadsBackend` by our own kernels."""

    rotate_tiles: HeadTiles = ROTATE_TILES
    gradient_tiles: HeadTiles = GRADIENT_TILES

    def rotate(self, z, ups, norms, cos, sin, *, head_dim: int, eps: float):
        """See `LoraHeadsBackend`."""
        out_type = tuple(jax.ShapeDtypeStruct((len(z), len(up)), z.dtype) for up in ups)
        arrays = z, *ups, *(norms or ups), cos, sin
        constants = {"HAS_NORM": norms is not None, "EPS": eps}
        return self._call(kernels.rotate_kernel, arrays, out_type, self.rotate_tiles, head_dim, constants)

    def rotate_gradient(self, z, ups, norms, cos, sin, dq, dk, *, head_dim: int, eps: float):
        """See `LoraHeadsBackend`."""
        arrays = z, *ups, *(norms or ups), cos, sin, dq, dk
        constants, tiles = {"HAS_NORM": norms is not None, "EPS": eps}, self.gradient_tiles
        kernel = kernels.rotate_gradient_kernel
        return self._call(kernel, arrays, (shape_dtype_of(z),), tiles, head_dim, constants)[0]

    def _call(self, kernel, arrays, out_type, tiles: HeadTiles, head_dim: int, constants):
        z, q_b, k_b = arrays[:3]
        (M, width), R, N, K = z.shape, q_b.shape[1], len(q_b) // head_dim, len(k_b) // head_dim
        heads = math.gcd(N, K, tiles.heads)
        blocks = block_constants(tiles, R, z.dtype)
        del blocks["BLOCK_N"]
        blocks |= {"BLOCK_H": max(16, triton.next_power_of_2(head_dim // 2)), "HEADS": heads}
        sizes = {"M": M, "N": N, "K": K, "H": head_dim, "R": R, "WIDTH": width}
        grid, flops = (triton.cdiv(M, tiles.block_m), (N + K) // heads), 2 * M * (N + K) * head_dim * R
        compiled = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "flops": flops}
        return self._launch(kernel, arrays, out_type, grid, sizes | blocks | constants, **compiled)
