"""The Triton backend: launches of the kernels in `kernels.py`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import jax_triton
import triton
from jaxtyping import Array, Float

from jaxglue.attention import kernels
from jaxglue.attention.flash import Gradients
from jaxglue.attention.tiles import KernelTiles, Tiles


@dataclass(frozen=True, kw_only=True)
class TritonBackend:
    """`FusedBackend` by our own kernels. lse is [B, K, T, G]: G query heads share each of K key/value heads."""

    tiles: KernelTiles
    compute_capability: int
    """As Triton counts it: 90 for 9.0."""

    def forward(self, q, k, v, sinks, segments, *, window, scale):
        """Returns (out, lse)."""
        sizes = _Sizes.of(q, k)
        out_type = (jax.ShapeDtypeStruct(q.shape, q.dtype), sizes.statistics())
        arrays = (q, k, v, q if sinks is None else sinks, segments.starts)
        grid = (sizes.query_tiles(self.tiles.forward), sizes.K, sizes.B)
        constants = sizes.constants(window, scale) | {"HAS_SINKS": sinks is not None}
        return self._launch(kernels.forward_kernel, arrays, out_type, grid, self.tiles.forward, constants)

    def backward(self, q, k, v, sinks, segments, out, lse, dout, *, window, scale) -> Gradients:
        """Returns (dq, dk, dv, dsinks)."""
        sizes = _Sizes.of(q, k)
        constants = sizes.constants(window, scale)
        dq, delta = self._launch(
            kernels.dq_kernel,
            (q, k, v, segments.starts, out, lse, dout),
            (jax.ShapeDtypeStruct(q.shape, q.dtype), sizes.statistics()),
            (sizes.query_tiles(self.tiles.dq), sizes.K, sizes.B),
            self.tiles.dq,
            constants,
        )
        dk, dv = self._launch(
            kernels.dkdv_kernel,
            (q, k, v, segments.starts, segments.ends, lse, delta, dout),
            (jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
            (triton.cdiv(sizes.T, self.tiles.dkdv.block_n), sizes.K, sizes.B),
            self.tiles.dkdv,
            constants,
        )
        return dq, dk, dv, None if sinks is None else _sink_gradient(sinks, lse, delta)

    def _launch(self, kernel, arrays, out_type, grid, tiles: Tiles, constants):
        return jax_triton.triton_call(
            *arrays,
            kernel=kernel,
            out_type=out_type,
            grid=grid,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            compute_capability=self.compute_capability,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            **constants,
        )


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    B: int
    T: int
    K: int
    G: int
    H: int

    @classmethod
    def of(cls, q, k) -> "_Sizes":
        B, T, N, H = q.shape
        return cls(B=B, T=T, K=k.shape[2], G=N // k.shape[2], H=H)

    def statistics(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.B, self.K, self.T, self.G), jnp.float32)

    def query_tiles(self, tiles: Tiles) -> int:
        return triton.cdiv(self.T, tiles.block_m // self.G)

    def constants(self, window: int | None, scale: float) -> dict:
        sizes = {"T": self.T, "K": self.K, "G": self.G, "H": self.H, "BLOCK_H": triton.next_power_of_2(self.H)}
        return sizes | {"WINDOW": window or 0, "SCALE": scale}


def _sink_gradient(
    sinks: Float[Array, " N"], lse: Float[Array, "B K T G"], delta: Float[Array, "B K T G"]
) -> Float[Array, " N"]:
    """−Σ exp(sink − lse)·delta: the sink is a key whose value is zero. Padding has delta 0."""
    sink = sinks.astype(jnp.float32).reshape(lse.shape[1], 1, lse.shape[3])
    return -(jnp.exp(sink - lse) * delta).sum((0, 2)).reshape(sinks.shape).astype(sinks.dtype)
