"""Queries, keys and values of an input whose projections to the first two are one matmul with all adapters' ranks."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.lora.joined import down_gradients, join, project_joined, with_ranks
from jaxglue.ops.lora.vjp import LoraBackend

Matrices = tuple[Array, ...]
"""A matrix of queries, one of keys and one of values."""
Norms = tuple[Float[Array, " H"], Float[Array, " H"]]
Heads = tuple[Float[Array, "M out_q"], Float[Array, "M out_k"], Float[Array, "M out_v"]]


class LoraHeadsBackend(Protocol):
    """Kernels that read queries, keys and the adapters' ranks side by side in z; hashable."""

    def rotate(self, z, ups, norms: Norms | None, cos, sin, *, head_dim: int, eps: float) -> tuple[Array, Array]:
        """Return q and k with their adapters' products, normed if there are norms, and rotated."""

    def rotate_gradient(
        self, z, ups, norms: Norms | None, cos, sin, dq, dk, *, head_dim: int, eps: float
    ) -> tuple[Float[Array, "M width"], Float[Array, "M ranks"], tuple[Array, Array]]:
        """Return the gradients to z, without the ranks' columns, to the ranks, and to `ups` in float32."""


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
    """Return rotated queries and keys, and values; weights, norms and tables are frozen."""
    return _forward(spec, x, weights, downs, ups, norms, cos, sin)[0]


def _forward(spec: HeadsSpec, x, weights, downs, ups, norms, cos, sin):
    joined = join(weights[:2], downs, x.dtype)
    z = checkpoint_name(project_joined(x, joined), names.QUERY)
    first = _value_ranks(ups)
    v = project_joined(x, weights[2].astype(x.dtype)) + spec.lora.product(z, ups[2], first)
    q, k = spec.backend.rotate(z, ups[:2], norms, cos, sin, head_dim=spec.head_dim, eps=spec.eps)
    return (q, k, checkpoint_name(v, names.VALUE)), (x, joined, weights[2], z, downs, ups, norms, cos, sin)


def _backward(spec: HeadsSpec, residuals, cotangents):
    x, joined, v_weight, z, downs, ups, norms, cos, sin = residuals
    dq, dk, dv = cotangents
    tables, rotate_gradient = (norms, cos, sin), spec.backend.rotate_gradient
    dz, dhidden, dups = rotate_gradient(z, ups[:2], *tables, dq, dk, head_dim=spec.head_dim, eps=spec.eps)
    dvalue, dup, _ = spec.lora.gradients(dv, ups[2], z, _value_ranks(ups))
    dhidden = jnp.concatenate([dhidden, dvalue], axis=1)
    dz = with_ranks(dz, dhidden, len(ups[0]) + len(ups[1]))
    dx = dz @ joined + dv @ v_weight.astype(x.dtype)
    return dx, None, down_gradients(x, dhidden, downs), (*dups, dup), None, None, None


def _value_ranks(ups: Matrices) -> int:
    """Return the column of z where the values' ranks begin."""
    return len(ups[0]) + len(ups[1]) + 2 * ups[0].shape[1]


joined_heads.defvjp(_forward, _backward)
