"""Differentiation rules around the kernels; they save and compute only for the gradients that are needed."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jaxglue.ops import names
from jaxglue.ops.moe.reference import Activation, ExpertAdapter
from jaxglue.ops.moe.routing import GroupMetadata, Routing, weighted_bias_gradients
from jaxglue.ops.projection.fp8 import encode
from jaxglue.ops.projection.served import are_served, merge_experts
from jaxglue.ops.quant import dequantize, mxfp4_to_fp8
from jaxglue.ops.quant.formats import Quantized
from jaxglue.ops.quant.mxfp4 import MXFP4


class ExpertRows(NamedTuple):
    """Rows in the order of their experts: an array's own, or gathered from an array of tokens by the kernel."""

    array: Float[Array, "S K"]
    """[M, K] with `tokens`."""
    tokens: Int[Array, " S"] | None = None
    """Row of the array for each row s."""

    @property
    def size(self) -> int:
        """Return S."""
        return (self.array if self.tokens is None else self.tokens).shape[0]


class ExpertLowRank(NamedTuple):
    """The term values[s] · expand[group of s] of a sum."""

    values: Float[Array, "S R"]
    expand: Float[Array, "E R N"]
    """[E, N, R] if transposed."""
    transposed: bool


class ExpertScales(NamedTuple):
    """Factors of products of 8-bit values."""

    rows: Float[Array, "M 1"]
    """Factor of every row of lhs, or of every token."""
    groups: Float[Array, " E"]
    dtype: jnp.dtype
    """Dtype of the result."""


class MoeBackend(Protocol):
    """Kernels of one backend, hashable. Matmuls and sums accumulate in float32; rows of no group are unspecified."""

    def matmul(
        self,
        lhs: ExpertRows,
        rhs,
        bias,
        groups: GroupMetadata,
        *,
        transpose_rhs: bool,
        low_rank: ExpertLowRank | None = None,
        scales: ExpertScales | None = None,
    ) -> Float[Array, "S N"]:
        """Compute lhs[s] · rhs[group of s] (· scales) (+ bias[group of s]) (+ the low-rank term), in lhs's dtype."""

    def outer(self, lhs: ExpertRows, rhs: ExpertRows, groups: GroupMetadata, dtype) -> Float[Array, "E K N"]:
        """Compute Σ lhs[s]ᵀ rhs[s] over the rows of each group, of lhs [S, K] and rhs [S, N]."""

    def combine(self, rows: Float[Array, "S D"], inverse: Int[Array, "M k"], weights, expert_ids, bias) -> Array:
        """Compute Σ rows[inverse] (+ weights · bias[expert_ids]) over k: [M, D]."""

    def activate(self, projected, weights, groups: GroupMetadata, activation: Activation) -> Float[Array, "S F"]:
        """Compute activation(projected[s]) · weights[s], in projected's dtype."""

    def activate_gradient(
        self, projected, weights, groups: GroupMetadata, dout, activation: Activation
    ) -> tuple[Array, Array]:
        """Compute the gradients to projected and weights."""


@dataclass(frozen=True, kw_only=True)
class GroupedSpec:
    """Static arguments of a grouped matmul."""

    kernels: MoeBackend
    transpose_rhs: bool
    fp8: bool = False
    """Multiply by MXFP4 matrices in FP8."""
    exchange: Literal["dispatch", "combine"] | None = None
    """Dispatch lhs, an array of tokens, to the rows of their experts, or combine the rows of out to tokens."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_grouped_matmul(
    spec: GroupedSpec,
    lhs: Float[Array, "S K"],
    rhs: Float[Array, "E K N"] | Quantized,
    bias: Float[Array, "E N"] | None,
    adapter: ExpertAdapter | None,
    groups: GroupMetadata,
    routing: Routing | None = None,
    weights: Float[Array, "M k"] | None = None,
) -> Float[Array, "S N"]:
    """Compute a grouped matmul by kernels.

    With an exchange, lhs or the result has a row for each token. Kernels gather rows of tokens as they load them,
    forward and backward, so no array of copies exists. A bias of combined rows is weighted.
    """
    return _adapted(spec, lhs, rhs, bias, adapter, groups, routing, weights)[0]


def _dense(rhs: Array | Quantized, dtype) -> Array:
    """Return the matrices as an array of this dtype."""
    return dequantize(rhs, dtype) if isinstance(rhs, Quantized) else rhs.astype(dtype)


def _multiply(spec, rows: ExpertRows, rhs, bias, groups: GroupMetadata, low_rank, *, transpose_rhs: bool) -> Array:
    """Compute the products of rows and matrices, in FP8 if the spec says so."""
    if not (spec.fp8 and isinstance(rhs, MXFP4)):
        matrices = _dense(rhs, rows.array.dtype)
        return spec.kernels.matmul(rows, matrices, bias, groups, transpose_rhs=transpose_rhs, low_rank=low_rank)
    fp8_values, row_scales = encode(rows.array)
    # FP8 tensor cores multiply along last axes only.
    matrices, factors = mxfp4_to_fp8(rhs, transposed=not transpose_rhs)
    scales = ExpertScales(row_scales, factors, rows.array.dtype)
    return spec.kernels.matmul(
        ExpertRows(fp8_values, rows.tokens),
        matrices,
        bias,
        groups,
        transpose_rhs=True,
        low_rank=low_rank,
        scales=scales,
    )


def _adapted(spec, lhs, rhs, bias, adapter, groups, routing, weights):
    """Return (out, low_rank); low_rank is lhs · Aᵀ, None without an adapter."""
    matmul, rows = partial(spec.kernels.matmul, groups=groups), _rows(spec, "dispatch", lhs, routing)
    low_rank, term = None, None
    if adapter is not None:
        A, B = (x.astype(lhs.dtype) for x in adapter[:2])
        low_rank = adapter.keep_used(matmul(rows, A, None, transpose_rhs=True))
        low_rank = checkpoint_name(low_rank, names.LOW_RANK)
        term = ExpertLowRank(low_rank, B, True)
        if are_served(rhs):
            rhs, term = merge_experts(rhs, adapter.A, adapter.B, lhs.dtype), None
    own_bias = None if spec.exchange == "combine" else bias
    out = _multiply(spec, rows, rhs, own_bias, groups, term, transpose_rhs=spec.transpose_rhs)
    if spec.exchange != "combine":
        return out, low_rank
    return spec.kernels.combine(out, routing.inverse, weights, routing.expert_ids, bias), low_rank


def _rows(spec: GroupedSpec, exchange: str, array, routing: Routing | None) -> ExpertRows:
    """Return the array's rows, gathered if this is the exchange."""
    if spec.exchange != exchange:
        return ExpertRows(array)
    assert routing is not None
    return ExpertRows(array, routing.tokens)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["lhs", "low_rank", "rhs", "bias", "adapter", "groups", "routing"],
    meta_fields=["rhs_needs_grad"],
)
@dataclass(frozen=True, kw_only=True)
class _GroupedResiduals:
    """Residuals; None where the gradients that need them are not taken."""

    lhs: Array | None
    """For the gradients to rhs and adapter."""
    low_rank: Array | None
    """lhs · Aᵀ, for the gradient to the adapter."""
    rhs: Array | Quantized
    bias: Array | None
    adapter: ExpertAdapter | None
    """Always saved: the gradient to lhs flows through it."""
    groups: GroupMetadata
    routing: Routing | None
    rhs_needs_grad: bool


def _forward(spec, *primals):
    lhs, rhs, bias, adapter, groups, routing, weights = jax.tree.map(lambda primal: primal.value, primals)
    rhs_needs_grad, bias_needs_grad, adapter_needs_grad = (_perturbed(tree) for tree in primals[1:4])
    out, low_rank = _adapted(spec, lhs, rhs, bias, adapter, groups, routing, weights)
    return out, _GroupedResiduals(
        lhs=lhs if rhs_needs_grad or adapter_needs_grad else None,
        low_rank=low_rank if adapter_needs_grad else None,
        rhs=rhs,
        bias=bias if bias_needs_grad or _perturbed(primals[6]) else None,
        adapter=adapter,
        groups=groups,
        routing=routing,
        rhs_needs_grad=rhs_needs_grad,
    )


def _perturbed(tree) -> bool:
    return any(primal.perturbed for primal in jax.tree.leaves(tree))


def _backward(spec, r: _GroupedResiduals, dout):
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    lhs, drows = _rows(spec, "dispatch", r.lhs, r.routing), _rows(spec, "combine", dout, r.routing)
    term, dadapter = _adapter_backward(spec, r, lhs, drows)
    rhs = r.rhs
    if r.adapter is not None and are_served(r.rhs):  # merged anew; gradients to the adapter are as beside the matrices
        rhs, term = merge_experts(r.rhs, r.adapter.A, r.adapter.B, dout.dtype), None
    dlhs = _multiply(spec, drows, rhs, None, r.groups, term, transpose_rhs=not spec.transpose_rhs)
    if spec.exchange == "dispatch":
        assert r.routing is not None
        dlhs = spec.kernels.combine(dlhs, r.routing.inverse, None, r.routing.expert_ids, None)
    drhs = None
    if r.rhs_needs_grad and not isinstance(r.rhs, Quantized):
        pair = (drows, lhs) if spec.transpose_rhs else (lhs, drows)
        drhs = spec.kernels.outer(*pair, r.groups, r.rhs.dtype)
    dbias, dweights = _bias_backward(spec, r, dout)
    return dlhs, drhs, dbias, dadapter, None, None, dweights


def _bias_backward(spec, r: _GroupedResiduals, dout):
    """Return the gradients to bias and weights, None if neither is needed."""
    if r.bias is None:
        return None, None
    if spec.exchange == "combine":
        assert r.routing is not None
        return weighted_bias_gradients(dout, r.bias, r.routing)
    return _group_sums(dout, r.groups).astype(r.bias.dtype), None


def _adapter_backward(spec, r: _GroupedResiduals, lhs: ExpertRows, drows: ExpertRows):
    """Return (low-rank term of the gradient to lhs, gradient to the adapter)."""
    if r.adapter is None:
        return None, None
    A, B = (x.astype(drows.array.dtype) for x in r.adapter[:2])
    dlow_rank = r.adapter.keep_used(spec.kernels.matmul(drows, B, None, r.groups, transpose_rhs=False))
    term = ExpertLowRank(dlow_rank, A, False)
    if r.low_rank is None:
        return term, None
    dA = spec.kernels.outer(ExpertRows(dlow_rank), lhs, r.groups, r.adapter.A.dtype)
    dB = spec.kernels.outer(drows, ExpertRows(r.low_rank), r.groups, r.adapter.B.dtype)
    return term, ExpertAdapter(dA, dB)


fused_grouped_matmul.defvjp(_forward, _backward, symbolic_zeros=True)


def _group_sums(rows: Float[Array, "S N"], groups: GroupMetadata) -> Float[Array, "E N"]:
    """Sum the rows of each group in float32, by a matmul with one-hot rows: a scatter would contend for E rows."""
    rows = jnp.where(jnp.arange(rows.shape[0])[:, None] < groups.offsets[-1], rows, 0)
    member = jax.nn.one_hot(groups.row_group(rows.shape[0]), groups.sizes.shape[0], dtype=rows.dtype)
    return jnp.einsum("se,sn->en", member, rows, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def fused_activation(
    kernels: MoeBackend,
    activation: Activation,
    projected: Float[Array, "S 2F"],
    weights: Float[Array, " S"],
    groups: GroupMetadata,
) -> Float[Array, "S F"]:
    """Compute the activation times the rows' weights by kernels."""
    return kernels.activate(projected, weights, groups, activation)


def _activation_forward(kernels, activation, *primals):
    return fused_activation(kernels, activation, *primals), primals


def _activation_backward(kernels, activation, residuals, dout):
    return *kernels.activate_gradient(*residuals, dout, activation), None


fused_activation.defvjp(_activation_forward, _activation_backward)


def fused_mlp(
    kernels: MoeBackend,
    x: Float[Array, "M D"],
    routing: Routing,
    matrices,
    biases,
    adapters,
    *,
    activation: Activation,
    transpose_rhs: bool,
    fp8: bool = False,
) -> Float[Array, "M D"]:
    """Compute `moe_mlp` by kernels from (gate_up, down) of matrices, biases and adapters."""
    spec = partial(GroupedSpec, kernels=kernels, transpose_rhs=transpose_rhs, fp8=fp8)
    groups, weights = routing.groups, None if biases[1] is None else routing.weights
    first, second = zip(matrices, biases, adapters, strict=True)
    projected = fused_grouped_matmul(spec(exchange="dispatch"), x, *first, groups, routing, None)
    projected = checkpoint_name(projected, names.EXPERT_GATE_UP)
    hidden = fused_activation(kernels, activation, projected, routing.row_weights, groups)
    return fused_grouped_matmul(spec(exchange="combine"), hidden, *second, groups, routing, weights)
