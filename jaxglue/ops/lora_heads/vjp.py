"""Queries, keys and values of an input whose projections to the first two are one matmul with all adapters' ranks."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.lora.joined import down_gradients, join, project_joined, weight_gradients, with_ranks
from jaxglue.ops.lora.vjp import LoraBackend
from jaxglue.ops.norm_rope.reference import HeadNorms, reference_rotate

Matrices = tuple[Array, ...]
"""A matrix of queries, one of keys and one of values."""
Norms = tuple[Float[Array, " H"], Float[Array, " H"]]
Heads = tuple[Float[Array, "M out_q"], Float[Array, "M out_k"], Float[Array, "M out_v"]]


class LoraHeadsBackend(Protocol):
    """Kernels that read queries, keys and the adapters' ranks side by side in z; hashable."""

    def rotate(self, z, ups, norms: Norms | None, cos, sin, *, head_dim: int, eps: float) -> tuple[Array, Array]:
        """Return q and k with their adapters' products, normed if there are norms, and rotated."""

    def rotate_gradient(
        self, z, ups, norms: Norms | None, cos, sin, cotangents: Heads, *, head_dim: int, eps: float
    ) -> tuple[Float[Array, "M wider"], Float[Array, "M ranks"], Heads]:
        """Return the gradients to z, values beside it, to the ranks, and to `ups` in float32.

        The first one lacks the ranks' columns.
        """


@dataclass(frozen=True, kw_only=True)
class HeadsSpec:
    """Static, hashable arguments of `joined_heads`."""

    backend: LoraHeadsBackend
    lora: LoraBackend
    head_dim: int
    eps: float


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def joined_heads(
    spec: HeadsSpec,
    x: Float[Array, "M D"],
    weights: Matrices,
    downs: Matrices,
    ups: Matrices,
    norms: Norms | None,
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
) -> Heads:
    """Return rotated queries and keys, and values; tables get no gradient."""
    return _forward(spec, x, weights, downs, ups, norms, cos, sin)[0]


def _forward(spec: HeadsSpec, x, weights, downs, ups, norms, cos, sin):
    joined = jnp.concatenate([join(weights[:2], downs, x.dtype), weights[2].astype(x.dtype)])
    joined = jax.lax.optimization_barrier(joined)  # or XLA would copy its first rows together again
    z = checkpoint_name(project_joined(x, joined[: -len(ups[2])]), names.QUERY)
    first = len(ups[0]) + len(ups[1]) + 2 * ups[0].shape[1]
    v = project_joined(x, weights[2].astype(x.dtype)) + spec.lora.product(z, ups[2], first)
    q, k = spec.backend.rotate(z, ups[:2], norms, cos, sin, head_dim=spec.head_dim, eps=spec.eps)
    return (q, k, checkpoint_name(v, names.VALUE)), (x, joined, z, weights, downs, ups, norms, cos, sin)


def _backward(spec: HeadsSpec, residuals, cotangents):
    x, joined, z, weights, downs, ups, norms, cos, sin = residuals
    gradient = partial(spec.backend.rotate_gradient, head_dim=spec.head_dim, eps=spec.eps)
    dz, dhidden, dups = gradient(z, ups, norms, cos, sin, cotangents)
    dz = with_ranks(dz, dhidden, len(ups[0]) + len(ups[1]), z.shape[1])
    (*narrow, v_weight), first = weights, z.shape[1]
    dweights = *weight_gradients(x, dz, narrow), *weight_gradients(x, dz[:, first:], (v_weight,))
    dnorms = None if norms is None else _norm_gradients(spec, z, ups, norms, cos, sin, cotangents)
    return dz @ joined, dweights, down_gradients(x, dhidden, downs), dups, dnorms, None, None


def _norm_gradients(spec: HeadsSpec, z, ups, norms: Norms, cos, sin, cotangents) -> Norms:
    """Compute the norms' gradients by XLA in float32; without cost where they are frozen."""
    q_end, k_end, R = len(ups[0]), len(ups[0]) + len(ups[1]), ups[0].shape[1]
    z = z.astype(jnp.float32)
    q = z[:, :q_end] + z[:, k_end : k_end + R] @ ups[0].T
    k = z[:, q_end:k_end] + z[:, k_end + R : k_end + 2 * R] @ ups[1].T
    q, k, dq, dk = (x.reshape(1, len(z), -1, spec.head_dim).astype(jnp.float32) for x in (q, k, *cotangents[:2]))

    def rotate(norms: Norms):
        return reference_rotate(q, k, cos[None], sin[None], HeadNorms(*norms, spec.eps))

    return jax.vjp(rotate, norms)[1]((dq, dk))[0]


joined_heads.defvjp(_forward, _backward)
