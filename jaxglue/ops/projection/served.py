"""Products with weights that have their adapter merged, rounded as they are served."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxglue.ops import names
from jaxglue.ops.backend import Backend, Capability, Operation, check_triton
from jaxglue.ops.projection.call import LowRankAdapter
from jaxglue.ops.quant.mxfp4 import MXFP4
from jaxglue.ops.quant.nf4 import NF4
from jaxglue.ops.quant.nvfp4 import NVFP4
from jaxglue.ops.quant.served import Served, ServedKQuant, ServedNF4, ServedNVFP4, ServedStored
from jaxglue.ops.quant.stack import Stack

_LARGEST_RANK = 128


class MergeBackend(Protocol):
    """Merges by one backend; hashable."""

    def merge(
        self,
        weight: Served,
        A: Float[Array, "E R in"],
        up: Float[Array, "E out R"],
        dtype,
        gain: Float[Array, " rows"] | None = None,
    ) -> Array:
        """Return gain · (weight + up·A) on the weight's grid, in `dtype`, matrices below one another."""


@dataclass(frozen=True)
class ReferenceMerge:
    """`MergeBackend` by XLA."""

    def merge(
        self, weight: Served, A: Float[Array, "E R in"], up: Float[Array, "E out R"], dtype, gain: Array | None = None
    ) -> Array:
        """See `MergeBackend`."""
        return weight.merged(jnp.matmul(up, A, precision="highest").reshape(weight.shape), dtype, gain)


@dataclass(frozen=True, kw_only=True, eq=False)
class MergeCall:
    """Meaning of a merge."""

    weight: Served
    rank: int


def _check(capability: Capability | None, call: MergeCall) -> None:
    check_triton(capability)
    if call.rank > _LARGEST_RANK:
        raise NotImplementedError(f"ranks are at most {_LARGEST_RANK}, got {call.rank}")


def _load(capability: Capability, call: MergeCall) -> MergeBackend:
    from jaxglue.ops.projection.served_triton import TritonMerge

    return TritonMerge.of(capability)


MERGE = Operation(
    name="merge of served adapters",
    backends={
        "triton": Backend(
            check=_check,
            load=_load,
            advantage="the product of the adapter's matrices is rounded where it is formed",
            reads={
                MergeCall: ("weight", "rank"),
                ServedNVFP4: ("matrix", "scales", "divisors"),
                ServedNF4: ("matrix", "scales", "scale_absmax", "scale_offset"),
                ServedKQuant: ("matrix", "scale", "minimum", "scale_levels", "minimum_levels", "top"),
                ServedStored: ("stored", "seeds"),
                **dict.fromkeys((NVFP4, NF4, MXFP4)),
            },
        )
    },
)
"""Backends of `merge`."""


def merge(
    weight: Served,
    A: Float[Array, "R in"],
    up: Float[Array, "out R"],
    dtype,
    gain: Float[Array, " out"] | None = None,
    *,
    backend: str = "auto",
) -> Float[Array, "out in"]:
    """Return gain · (weight + up·A) on the weight's grid, in `dtype`; not differentiable.

    Args:
        weight: the matrix and its grid.
        A: the adapter's first matrix.
        up: its second matrix times its scale.
        dtype: of the result.
        gain: of each row (DoRA).
        backend: one of `MERGE.names`.

    Raises:
        ValueError: a named backend that cannot serve.
    """
    return _load_merge(weight, A, backend).merge(weight, A[None], up[None], dtype, gain)


def merge_experts(
    weight: Stack, A: Float[Array, "E R in"], up: Float[Array, "E out R"], dtype, *, backend: str = "auto"
) -> Float[Array, "E out in"]:
    """Return experts' matrices + up·A on their grids, in `dtype`; not differentiable. Arguments as of `merge`."""
    assert isinstance(weight.rows, Served)
    return _load_merge(weight.rows, A, backend).merge(weight.rows, A, up, dtype).reshape(weight.shape)


def are_served(weight: Any) -> TypeGuard[Stack]:
    """Tell whether adapters of experts' matrices are merged and rounded."""
    return isinstance(weight, Stack) and isinstance(weight.rows, Served)


def _load_merge(weight: Served, A: Float[Array, "*E R in"], backend: str = "auto") -> MergeBackend:
    return MERGE.load(MergeCall(weight=weight, rank=A.shape[-2]), backend=backend) or ReferenceMerge()


def multiply_merged(
    x: Float[Array, "*B in"], weight: Served, adapter: LowRankAdapter, gain: Float[Array, " out"] | None = None
) -> Float[Array, "*B out"]:
    """Return x times the transposed merge in x's dtype, which gives gradients to x alone.

    The backward pass merges anew, unless the policy for checkpoints keeps the merge.

    Args:
        x: the inputs.
        weight: the matrix and its grid.
        adapter: merged into it.
        gain: of each row of the sum (DoRA).
    """
    return _project(_load_merge(weight, adapter.A), x, weight, adapter.A, adapter.up, gain)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(
    kernels: MergeBackend, x: Float[Array, "*B in"], weight: Served, A: Array, up: Array, gain: Array | None
) -> Float[Array, "*B out"]:
    return _project_forward(kernels, x, weight, A, up, gain)[0]


def _project_forward(kernels: MergeBackend, x, weight: Served, A, up, gain) -> tuple[Array, Array]:
    matrix = checkpoint_name(kernels.merge(weight, A[None], up[None], x.dtype, gain), names.MERGED)
    return jax.lax.dot_general(x, matrix, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=x.dtype), matrix


_project.defvjp(_project_forward, lambda kernels, matrix, dy: (dy @ matrix, None, None, None, None))
