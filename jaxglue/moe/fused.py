"""What the fused backends share: one differentiation rule, which keeps and computes only what is asked for."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jaxglue.memory import names
from jaxglue.moe.groups import Groups
from jaxglue.quant.mxfp4 import MXFP4


class Adapter(NamedTuple):
    """Low-rank change of each group's matrix: y += (x·Aᵀ)·Bᵀ. A scale belongs into B."""

    A: Float[Array, "E R K"]
    B: Float[Array, "E N R"]


class LowRank(NamedTuple):
    """A term hidden[s] · expand[group of s] of a product."""

    hidden: Float[Array, "S R"]
    expand: Float[Array, "E R N"]
    """[E, N, R] when transposed."""
    transposed: bool


class GroupedBackend(Protocol):
    """The two products, which sum in float32, and what expands packed matrices."""

    def matmul(
        self, lhs, rhs, bias, groups: Groups, *, transpose_rhs: bool, low_rank: LowRank | None = None
    ) -> Float[Array, "S N"]:
        """lhs[s] · rhs[group of s] (+ bias[group of s]) (+ the low-rank term), in lhs's dtype."""

    def dequantise(self, packed: MXFP4, dtype) -> Array:
        """The values of the packed array, exact where the dtype can hold them."""

    def outer(self, lhs, rhs, groups: Groups, dtype) -> Float[Array, "E K N"]:
        """Σ lhs[s]ᵀ rhs[s] over the rows of each group, of lhs [S, K] and rhs [S, N]."""


@dataclass(frozen=True, kw_only=True)
class GroupedSpec:
    """What is static in a call: it must be hashable."""

    backend: GroupedBackend
    transpose_rhs: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_grouped_matmul(
    spec: GroupedSpec,
    lhs: Float[Array, "S K"],
    rhs: Float[Array, "E K N"] | MXFP4,
    bias: Float[Array, "E N"] | None,
    adapter: Adapter | None,
    groups: Groups,
) -> Float[Array, "S N"]:
    """A grouped matmul by a fused backend."""
    return _adapted(spec, lhs, rhs, bias, adapter, groups)[0]


def _dense(spec: GroupedSpec, rhs: Array | MXFP4, dtype) -> Array:
    """The matrices as an array of this dtype."""
    return spec.backend.dequantise(rhs, dtype) if isinstance(rhs, MXFP4) else rhs.astype(dtype)


def _adapted(spec, lhs, rhs, bias, adapter, groups):
    """(out, hidden); the hidden values of the adapter are None where there is none."""
    matmul = partial(spec.backend.matmul, groups=groups)
    hidden, low_rank = None, None
    if adapter is not None:
        A, B = (x.astype(lhs.dtype) for x in adapter)
        hidden = checkpoint_name(matmul(lhs, A, None, transpose_rhs=True), names.LORA_HIDDEN)
        low_rank = LowRank(hidden, B, True)
    out = matmul(lhs, _dense(spec, rhs, lhs.dtype), bias, transpose_rhs=spec.transpose_rhs, low_rank=low_rank)
    return out, hidden


def _forward(spec, *primals):
    lhs, rhs, bias, adapter, groups = jax.tree.map(lambda p: p.value, primals)
    rhs_moves, bias_moves, adapter_moves = (_perturbed(tree) for tree in primals[1:4])
    out, hidden = _adapted(spec, lhs, rhs, bias, adapter, groups)
    rows = lhs if rhs_moves or adapter_moves else None
    hidden = hidden if adapter_moves else None
    return out, (rows, rhs_moves or None, rhs, bias if bias_moves else None, adapter, hidden, groups)


def _perturbed(tree) -> bool:
    return any(primal.perturbed for primal in jax.tree.leaves(tree))


def _backward(spec, residuals, dout):
    lhs, rhs_moves, rhs, bias, adapter, hidden, groups = residuals
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    matmul, outer = partial(spec.backend.matmul, groups=groups), partial(spec.backend.outer, groups=groups)
    low_rank, dadapter = None, None
    if adapter is not None:
        A, B = (x.astype(dout.dtype) for x in adapter)
        dhidden = matmul(dout, B, None, transpose_rhs=False)
        low_rank = LowRank(dhidden, A, False)
        if hidden is not None:
            dadapter = Adapter(outer(dhidden, lhs, dtype=adapter.A.dtype), outer(dout, hidden, dtype=adapter.B.dtype))
    dlhs = matmul(dout, _dense(spec, rhs, dout.dtype), None, transpose_rhs=not spec.transpose_rhs, low_rank=low_rank)
    pair = (dout, lhs) if spec.transpose_rhs else (lhs, dout)
    drhs = outer(*pair, dtype=rhs.dtype) if rhs_moves else None
    return dlhs, drhs, None if bias is None else _group_sums(dout, groups).astype(bias.dtype), dadapter, None


fused_grouped_matmul.defvjp(_forward, _backward, symbolic_zeros=True)


def _group_sums(rows: Float[Array, "S N"], groups: Groups) -> Float[Array, "E N"]:
    """Sum of the rows of each group in float32. A product with zeros and ones: a scatter would contend for E rows."""
    member = jax.nn.one_hot(groups.row_group(rows.shape[0]), groups.sizes.shape[0], dtype=rows.dtype)
    return jnp.einsum("se,sn->en", member, rows, preferred_element_type=jnp.float32)
