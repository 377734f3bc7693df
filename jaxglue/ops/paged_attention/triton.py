"""Launch of the Triton kernel, and the sum of its shares."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
from jaxtyping import Array, Float

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.ops.launch import Launcher
from jaxglue.ops.paged_attention.kernels import paged_kernel

_PROGRAMS = 512
"""Programs that fill a GPU; few sequences are split among that many."""


@dataclass(frozen=True, kw_only=True)
class TritonPagedAttention(Launcher):
    """`paged_attention` by our own kernel."""

    def __call__(self, q, keys, values, tables, positions, *, window: int | None, sinks) -> Float[Array, "S N H"]:
        """See `paged_attention`."""
        (S, N, H), (_, K, page, _), P = q.shape, keys.shape, tables.shape[1]
        G, splits = N // K, _splits(S * K, P)
        sizes = {"P": P, "K": K, "G": G, "H": H, "PAGE": page, "WINDOW": window or 0, "SPLITS": splits}
        blocks = {"BLOCK_G": max(16, triton.next_power_of_2(G)), "BLOCK_H": triton.next_power_of_2(H)}
        types = (jax.ShapeDtypeStruct((S, K, splits, G, *last), jnp.float32) for last in ((H,), ()))
        arrays, constants = (q, keys, values, tables, positions), sizes | blocks | {"SCALE": H**-0.5}
        cost = KernelCost(kind=KernelKind.ATTENTION_FORWARD)
        out, lse = self._launch(paged_kernel, arrays, tuple(types), (S * K, splits), constants, 4, 3, cost=cost)
        return _sum_shares(out, lse, sinks).reshape(S, N, H).astype(q.dtype)


def _splits(programs: int, pages: int) -> int:
    """Return the shares of a sequence's pages, a power of two."""
    return min(1 << max(_PROGRAMS // programs, 1).bit_length() - 1, pages)


def _sum_shares(out: Float[Array, "S K P G H"], lse: Float[Array, "S K P G"], sinks) -> Float[Array, "S K G H"]:
    """Sum the shares' outputs, weighted by their parts of the softmax's denominator, of which sinks have one too."""
    highest = lse.max(2, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, lse.shape[1], 1, lse.shape[3]) / math.log(2)
        highest = jnp.maximum(highest, sink)
    weights = jnp.exp2(lse - highest)
    total = weights.sum(2)
    if sinks is not None:
        total += jnp.exp2(sink - highest)[:, :, 0]
    return (out * weights[..., None]).sum(2) / total[..., None]
