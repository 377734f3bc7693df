"""The grouped matmul: one public function, several backends with one meaning."""

from typing import TYPE_CHECKING

from jaxtyping import Array, Float, Int

from jaxglue.ops.backend import compute_capability
from jaxglue.ops.moe.backends import choose_backend
from jaxglue.ops.moe.fused import Adapter, GroupedSpec, fused_grouped_matmul
from jaxglue.ops.moe.groups import GroupMetadata
from jaxglue.ops.moe.reference import reference_grouped_matmul
from jaxglue.ops.quant.mxfp4 import MXFP4, dequantize

if TYPE_CHECKING:
    from jaxglue.ops.moe.triton import TritonBackend


def grouped_matmul(
    lhs: Float[Array, "S K"],
    rhs: Float[Array, "E K N"] | MXFP4,
    group_sizes: Int[Array, " E"] | GroupMetadata,
    *,
    bias: Float[Array, "E N"] | None = None,
    adapter: Adapter | None = None,
    transpose_rhs: bool = False,
    backend: str = "auto",
) -> Float[Array, "S N"]:
    """Multiplies consecutive groups of rows by a matrix each: out[s] = lhs[s] · rhs[group of s] (+ bias[group of s]).

    Sums in float32. Gradients flow to lhs, rhs, bias and adapter; other than lhs's, they and what they need kept
    exist only where they are asked for.

    Args:
        lhs: rows in the order of their groups.
        rhs: a matrix for each group, cast to lhs's dtype; [E, N, K] with `transpose_rhs`. An `MXFP4` is expanded on the
            way, forward and backward, and gets no gradient.
        group_sizes: rows of each group, with S as their sum; or `GroupMetadata`, made once for several calls.
        bias: added to the rows of each group.
        adapter: added as (lhs[s] · Aᵀ) · Bᵀ with the matrices of the row's group.
        transpose_rhs: whether rhs holds its matrices transposed, as Hugging Face stores most of them.
        backend: one of `BACKENDS`; `auto` is decided by `choose_backend` from the dtype and the default device.

    Raises:
        ValueError: shapes that do not fit, sizes that `GroupMetadata.of` refuses, or a named backend that cannot serve.
    """
    groups = group_sizes if isinstance(group_sizes, GroupMetadata) else GroupMetadata.of(group_sizes, lhs.shape[0])
    check_operands(lhs, rhs, groups, bias, adapter, transpose_rhs)
    fused = fused_backend(lhs.dtype, backend)
    if fused is not None:
        spec = GroupedSpec(backend=fused, transpose_rhs=transpose_rhs)
        return fused_grouped_matmul(spec, lhs, rhs, bias, adapter, groups, None, None)
    matrices = dequantize(rhs, lhs.dtype) if isinstance(rhs, MXFP4) else rhs
    out = reference_grouped_matmul(lhs, matrices.mT if transpose_rhs else matrices, groups, bias)
    if adapter is None:
        return out
    hidden = reference_grouped_matmul(lhs, adapter.A.mT, groups, None)
    return out + reference_grouped_matmul(hidden, adapter.B.mT, groups, None)


def fused_backend(dtype, name: str) -> "TritonBackend | None":
    """The backend's object, None for the reference; imported here, for only GPU installations have what it needs."""
    capability = compute_capability()
    if choose_backend(dtype, backend=name, capability=capability).name == "reference":
        return None
    assert capability is not None
    from jaxglue.ops.moe.triton import TritonBackend

    return TritonBackend.of(capability)


def check_operands(lhs, rhs, groups: GroupMetadata, bias, adapter: Adapter | None, transpose_rhs: bool) -> None:
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
    if adapter is not None:
        R = adapter.A.shape[1]
        if adapter.A.shape != (E, R, K) or adapter.B.shape != (E, N, R):
            got = f"{tuple(adapter.A.shape)} and {tuple(adapter.B.shape)}"
            raise ValueError(f"adapter must be [E, R, K] = [{E}, R, {K}] and [E, N, R] = [{E}, {N}, R], got {got}")
