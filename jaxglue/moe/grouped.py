"""The grouped matmul: one public function, several backends with one meaning, one differentiation rule."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jaxglue.attention.backends import compute_capability
from jaxglue.moe.backends import choose_backend
from jaxglue.moe.groups import Groups
from jaxglue.moe.reference import reference_grouped_matmul
from jaxglue.quant.mxfp4 import MXFP4, dequantise


class GroupedBackend(Protocol):
    """The two products of a fused backend; both sum in float32."""

    def matmul(self, lhs, rhs, bias, groups: Groups, *, transpose_rhs: bool) -> Array:
        """out[s] = lhs[s] · rhs[group of s] (+ bias[group of s]): [S, N] in lhs's dtype."""

    def outer(self, lhs, rhs, groups: Groups, dtype) -> Array:
        """out[e] = Σ lhs[s]ᵀ rhs[s] over the rows of group e: [E, K, N] of lhs [S, K] and rhs [S, N]."""


@dataclass(frozen=True, kw_only=True)
class GroupedSpec:
    """What is static in a call: it must be hashable."""

    backend: GroupedBackend
    transpose_rhs: bool


def grouped_matmul(
    lhs: Float[Array, "S K"],
    rhs: Float[Array, "E K N"] | MXFP4,
    group_sizes: Int[Array, " E"] | Groups,
    *,
    bias: Float[Array, "E N"] | None = None,
    transpose_rhs: bool = False,
    backend: str = "auto",
) -> Float[Array, "S N"]:
    """Multiplies consecutive groups of rows by a matrix each: out[s] = lhs[s] · rhs[group of s] (+ bias[group of s]).

    Sums in float32. Gradients flow to lhs, rhs and bias; those of rhs and bias, and what they need kept, only where
    they are asked for.

    Args:
        lhs: rows in the order of their groups.
        rhs: a matrix for each group, cast to lhs's dtype; [E, N, K] with `transpose_rhs`. An `MXFP4` is expanded on the
            way, forward and backward, and gets no gradient.
        group_sizes: rows of each group, with S as their sum; or `Groups`, made once for several calls.
        bias: added to the rows of each group.
        transpose_rhs: whether rhs holds its matrices transposed, as Hugging Face stores most of them.
        backend: one of `BACKENDS`; `auto` is decided by `choose_backend` from the dtype and the default device.

    Raises:
        ValueError: shapes that do not fit, sizes that `Groups.of` refuses, or a named backend that cannot serve.
    """
    groups = group_sizes if isinstance(group_sizes, Groups) else Groups.of(group_sizes, lhs.shape[0])
    _check(lhs, rhs, groups, bias, transpose_rhs)
    capability = compute_capability()
    if choose_backend(lhs.dtype, backend=backend, capability=capability).name == "reference":
        dense = _dense(rhs, lhs.dtype)
        return reference_grouped_matmul(lhs, dense.mT if transpose_rhs else dense, groups, bias)
    assert capability is not None
    from jaxglue.moe.triton import TritonBackend  # only GPU installations have what it needs

    spec = GroupedSpec(backend=TritonBackend.of(capability), transpose_rhs=transpose_rhs)
    return fused_grouped_matmul(spec, lhs, rhs, bias, groups)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_grouped_matmul(
    spec: GroupedSpec,
    lhs: Float[Array, "S K"],
    rhs: Float[Array, "E K N"] | MXFP4,
    bias: Float[Array, "E N"] | None,
    groups: Groups,
) -> Float[Array, "S N"]:
    """A grouped matmul by a fused backend."""
    dense = _dense(rhs, lhs.dtype)
    return spec.backend.matmul(lhs, dense, bias, groups, transpose_rhs=spec.transpose_rhs)


def _forward(spec, *primals):
    lhs, rhs, bias, groups = jax.tree.map(lambda p: p.value, primals)
    rhs_moves, bias_moves = (any(p.perturbed for p in jax.tree.leaves(tree)) for tree in primals[1:3])
    out = fused_grouped_matmul(spec, lhs, rhs, bias, groups)
    return out, (lhs if rhs_moves else None, rhs, bias if bias_moves else None, groups)


def _backward(spec, residuals, dout):
    lhs, rhs, bias, groups = residuals
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    dense = _dense(rhs, dout.dtype)
    dlhs = spec.backend.matmul(dout, dense, None, groups, transpose_rhs=not spec.transpose_rhs)
    pair = (dout, lhs) if spec.transpose_rhs else (lhs, dout)
    drhs = None if lhs is None else spec.backend.outer(*pair, groups, rhs.dtype)
    return dlhs, drhs, None if bias is None else _group_sums(dout, groups).astype(bias.dtype), None


fused_grouped_matmul.defvjp(_forward, _backward, symbolic_zeros=True)


def _group_sums(rows: Float[Array, "S N"], groups: Groups) -> Float[Array, "E N"]:
    """Sum of the rows of each group in float32. A product with zeros and ones: a scatter would contend for E rows."""
    member = jax.nn.one_hot(groups.row_group(rows.shape[0]), groups.sizes.shape[0], dtype=rows.dtype)
    return jnp.einsum("se,sn->en", member, rows, preferred_element_type=jnp.float32)


def _dense(rhs: Array | MXFP4, dtype) -> Array:
    return dequantise(rhs, dtype) if isinstance(rhs, MXFP4) else rhs.astype(dtype)


def _check(lhs, rhs, groups: Groups, bias, transpose_rhs: bool) -> None:
    """Raises ValueError for arguments that do not fit together."""
    if isinstance(rhs, MXFP4):
        rhs.check("rhs")
    layout = "[E, N, K]" if transpose_rhs else "[E, K, N]"
    if lhs.ndim != 2 or rhs.ndim != 3:
        raise ValueError(f"lhs must be [S, K] and rhs {layout}, got {tuple(lhs.shape)} and {tuple(rhs.shape)}")
    E, K = groups.sizes.shape[0], lhs.shape[1]
    N, rhs_K = (rhs.shape[1], rhs.shape[2]) if transpose_rhs else (rhs.shape[2], rhs.shape[1])
    if (rhs.shape[0], rhs_K) != (E, K):
        raise ValueError(f"rhs must be {layout} with E={E} groups and K={K} to fit lhs, got {tuple(rhs.shape)}")
    if bias is not None and bias.shape != (E, N):
        raise ValueError(f"bias must be [E, N] = [{E}, {N}], got {tuple(bias.shape)}")
