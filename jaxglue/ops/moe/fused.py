"""What the fused backends share: one differentiation rule, which keeps and computes only what is asked for."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jaxglue.ops import names
from jaxglue.ops.moe.exchange import weighted_bias_gradients
from jaxglue.ops.moe.groups import GroupMetadata
from jaxglue.ops.moe.routing import Routing
from jaxglue.ops.quant.mxfp4 import MXFP4


class Adapter(NamedTuple):
    """Low-rank change of each group's matrix: y += (x·Aᵀ)·Bᵀ. A scale belongs into B."""

    A: Float[Array, "E R K"]
    B: Float[Array, "E N R"]


class Rows(NamedTuple):
    """Rows in the order of their experts: of an array, or of tokens, gathered as they are loaded."""

    array: Float[Array, "S K"]
    tokens: Int[Array, " S"] | None = None
    """Row s is array[tokens[s]]; the array is then [M, K]."""

    @property
    def number(self) -> int:
        """S."""
        return (self.array if self.tokens is None else self.tokens).shape[0]


class LowRank(NamedTuple):
    """A term hidden[s] · expand[group of s] of a product."""

    hidden: Float[Array, "S R"]
    expand: Float[Array, "E R N"]
    """[E, N, R] when transposed."""
    transposed: bool


class GroupedBackend(Protocol):
    """The products, which sum in float32, and what goes with them."""

    def matmul(
        self, lhs: Rows, rhs, bias, groups: GroupMetadata, *, transpose_rhs: bool, low_rank: LowRank | None = None
    ) -> Float[Array, "S N"]:
        """lhs[s] · rhs[group of s] (+ bias[group of s]) (+ the low-rank term), in lhs's dtype."""

    def outer(self, lhs: Rows, rhs: Rows, groups: GroupMetadata, dtype) -> Float[Array, "E K N"]:
        """Σ lhs[s]ᵀ rhs[s] over the rows of each group, of lhs [S, K] and rhs [S, N]."""

    def combine(self, rows: Float[Array, "S D"], inverse: Int[Array, "M k"], weights, expert_ids, bias) -> Array:
        """Σ rows[inverse] (+ weights · bias[expert_ids]) over k, summed in float32: [M, D]."""

    def dequantize(self, packed: MXFP4, dtype) -> Array:
        """The values of the packed array, exact where the dtype can hold them."""


@dataclass(frozen=True, kw_only=True)
class GroupedSpec:
    """What is static in a call: it must be hashable."""

    backend: GroupedBackend
    transpose_rhs: bool
    exchange: Literal["dispatch", "combine"] | None = None
    """Whether lhs holds tokens, which are dispatched to the rows of their experts, or the rows of out are combined."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_grouped_matmul(
    spec: GroupedSpec,
    lhs: Float[Array, "S K"],
    rhs: Float[Array, "E K N"] | MXFP4,
    bias: Float[Array, "E N"] | None,
    adapter: Adapter | None,
    groups: GroupMetadata,
    routing: Routing | None = None,
    weights: Float[Array, "M k"] | None = None,
) -> Float[Array, "S N"]:
    """A grouped matmul by a fused backend.

    With an exchange, lhs or the result has a row for each token: rows of the experts are gathered as they are loaded,
    forward and backward, and no array of them is made. A bias of combined rows is weighted.
    """
    return _adapted(spec, lhs, rhs, bias, adapter, groups, routing, weights)[0]


def _dense(spec: GroupedSpec, rhs: Array | MXFP4, dtype) -> Array:
    """The matrices as an array of this dtype."""
    return spec.backend.dequantize(rhs, dtype) if isinstance(rhs, MXFP4) else rhs.astype(dtype)


def _adapted(spec, lhs, rhs, bias, adapter, groups, routing, weights):
    """(out, hidden); the hidden values of the adapter are None where there is none."""
    matmul, rows = partial(spec.backend.matmul, groups=groups), _rows(spec, "dispatch", lhs, routing)
    hidden, low_rank = None, None
    if adapter is not None:
        A, B = (x.astype(lhs.dtype) for x in adapter)
        hidden = checkpoint_name(matmul(rows, A, None, transpose_rhs=True), names.LORA_HIDDEN)
        low_rank = LowRank(hidden, B, True)
    product = partial(matmul, transpose_rhs=spec.transpose_rhs, low_rank=low_rank)
    matrices = _dense(spec, rhs, lhs.dtype)
    if spec.exchange != "combine":
        return product(rows, matrices, bias), hidden
    out = product(rows, matrices, None)
    return spec.backend.combine(out, routing.inverse, weights, routing.expert_ids, bias), hidden


def _rows(spec: GroupedSpec, exchange: str, array, routing: Routing | None) -> Rows:
    """The array's rows, gathered where this is the exchange."""
    if spec.exchange != exchange:
        return Rows(array)
    assert routing is not None
    return Rows(array, routing.tokens)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["lhs", "hidden", "rhs", "bias", "adapter", "groups", "routing"],
    meta_fields=["rhs_needs_grad"],
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
    groups: GroupMetadata
    routing: Routing | None
    rhs_needs_grad: bool


def _forward(spec, *primals):
    lhs, rhs, bias, adapter, groups, routing, weights = jax.tree.map(lambda primal: primal.value, primals)
    rhs_needs_grad, bias_needs_grad, adapter_needs_grad = (_perturbed(tree) for tree in primals[1:4])
    out, hidden = _adapted(spec, lhs, rhs, bias, adapter, groups, routing, weights)
    return out, _Residuals(
        lhs=lhs if rhs_needs_grad or adapter_needs_grad else None,
        hidden=hidden if adapter_needs_grad else None,
        rhs=rhs,
        bias=bias if bias_needs_grad or _perturbed(primals[6]) else None,
        adapter=adapter,
        groups=groups,
        routing=routing,
        rhs_needs_grad=rhs_needs_grad,
    )


def _perturbed(tree) -> bool:
    return any(primal.perturbed for primal in jax.tree.leaves(tree))


def _backward(spec, r: _Residuals, dout):
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    lhs, drows = _rows(spec, "dispatch", r.lhs, r.routing), _rows(spec, "combine", dout, r.routing)
    low_rank, dadapter = _adapter_backward(spec, r, lhs, drows)
    matrices = _dense(spec, r.rhs, dout.dtype)
    dlhs = spec.backend.matmul(drows, matrices, None, r.groups, transpose_rhs=not spec.transpose_rhs, low_rank=low_rank)
    if spec.exchange == "dispatch":
        assert r.routing is not None
        dlhs = spec.backend.combine(dlhs, r.routing.inverse, None, r.routing.expert_ids, None)
    drhs = None
    if r.rhs_needs_grad and not isinstance(r.rhs, MXFP4):
        pair = (drows, lhs) if spec.transpose_rhs else (lhs, drows)
        drhs = spec.backend.outer(*pair, r.groups, r.rhs.dtype)
    dbias, dweights = _bias_backward(spec, r, dout)
    return dlhs, drhs, dbias, dadapter, None, None, dweights


def _bias_backward(spec, r: _Residuals, dout):
    """Gradients of the bias and of what weighs it, None where they are not asked for."""
    if r.bias is None:
        return None, None
    if spec.exchange == "combine":
        assert r.routing is not None
        return weighted_bias_gradients(dout, r.bias, r.routing)
    return _group_sums(dout, r.groups).astype(r.bias.dtype), None


def _adapter_backward(spec, r: _Residuals, lhs: Rows, drows: Rows):
    """(the adapter's term of the gradient to lhs, its own gradient), None where there is none."""
    if r.adapter is None:
        return None, None
    A, B = (x.astype(drows.array.dtype) for x in r.adapter)
    dhidden = spec.backend.matmul(drows, B, None, r.groups, transpose_rhs=False)
    low_rank = LowRank(dhidden, A, False)
    if r.hidden is None:
        return low_rank, None
    dA = spec.backend.outer(Rows(dhidden), lhs, r.groups, r.adapter.A.dtype)
    dB = spec.backend.outer(drows, Rows(r.hidden), r.groups, r.adapter.B.dtype)
    return low_rank, Adapter(dA, dB)


fused_grouped_matmul.defvjp(_forward, _backward, symbolic_zeros=True)


def _group_sums(rows: Float[Array, "S N"], groups: GroupMetadata) -> Float[Array, "E N"]:
    """Sum of the rows of each group in float32. A product with zeros and ones: a scatter would contend for E rows."""
    rows = jnp.where(jnp.arange(rows.shape[0])[:, None] < groups.offsets[-1], rows, 0)
    member = jax.nn.one_hot(groups.row_group(rows.shape[0]), groups.sizes.shape[0], dtype=rows.dtype)
    return jnp.einsum("se,sn->en", member, rows, preferred_element_type=jnp.float32)
