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


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["lhs", "hidden", "rhs", "bias", "adapter", "groups"],
    meta_fields=["rhs_moves"],
)
@dataclass(frozen=True, kw_only=True)
class _Residuals:
    """What the gradient needs; None where it is not asked for, which is known when a step is traced."""

    lhs: Array | None
    """Only for the gradients of rhs and adapter."""
    hidden: Array | None
    """lhs · Aᵀ, only for the gradient of the adapter."""
    rhs: Array | MXFP4
    bias: Array | None
    adapter: Adapter | None
    """Wherever there is one: the gradient to lhs goes through it."""
    groups: Groups
    rhs_moves: bool


def _forward(spec, *primals):
    lhs, rhs, bias, adapter, groups = jax.tree.map(lambda primal: primal.value, primals)
    rhs_moves, bias_moves, adapter_moves = (_perturbed(tree) for tree in primals[1:4])
    out, hidden = _adapted(spec, lhs, rhs, bias, adapter, groups)
    return out, _Residuals(
        lhs=lhs if rhs_moves or adapter_moves else None,
        hidden=hidden if adapter_moves else None,
        rhs=rhs,
        bias=bias if bias_moves else None,
        adapter=adapter,
        groups=groups,
        rhs_moves=rhs_moves,
    )


def _perturbed(tree) -> bool:
    return any(primal.perturbed for primal in jax.tree.leaves(tree))


def _backward(spec, r: _Residuals, dout):
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    low_rank, dadapter = _adapter_backward(spec, r, dout)
    matrices = _dense(spec, r.rhs, dout.dtype)
    dlhs = spec.backend.matmul(dout, matrices, None, r.groups, transpose_rhs=not spec.transpose_rhs, low_rank=low_rank)
    drhs = None
    if r.rhs_moves and not isinstance(r.rhs, MXFP4):
        pair = (dout, r.lhs) if spec.transpose_rhs else (r.lhs, dout)
        drhs = spec.backend.outer(*pair, r.groups, r.rhs.dtype)
    dbias = None if r.bias is None else _group_sums(dout, r.groups).astype(r.bias.dtype)
    return dlhs, drhs, dbias, dadapter, None


def _adapter_backward(spec, r: _Residuals, dout):
    """(the adapter's term of the gradient to lhs, its own gradient), None where there is none."""
    if r.adapter is None:
        return None, None
    A, B = (x.astype(dout.dtype) for x in r.adapter)
    dhidden = spec.backend.matmul(dout, B, None, r.groups, transpose_rhs=False)
    low_rank = LowRank(dhidden, A, False)
    if r.hidden is None:
        return low_rank, None
    dA = spec.backend.outer(dhidden, r.lhs, r.groups, r.adapter.A.dtype)
    dB = spec.backend.outer(dout, r.hidden, r.groups, r.adapter.B.dtype)
    return low_rank, Adapter(dA, dB)


fused_grouped_matmul.defvjp(_forward, _backward, symbolic_zeros=True)


def _group_sums(rows: Float[Array, "S N"], groups: Groups) -> Float[Array, "E N"]:
    """Sum of the rows of each group in float32. A product with zeros and ones: a scatter would contend for E rows."""
    rows = jnp.where(jnp.arange(rows.shape[0])[:, None] < groups.offsets[-1], rows, 0)
    member = jax.nn.one_hot(groups.row_group(rows.shape[0]), groups.sizes.shape[0], dtype=rows.dtype)
    return jnp.einsum("se,sn->en", member, rows, preferred_element_type=jnp.float32)
