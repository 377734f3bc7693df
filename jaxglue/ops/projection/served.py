"""Products with weights that have their adapter merged, rounded as they are served."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_triton
from jaxglue.ops.projection.call import LowRankAdapter
from jaxglue.ops.quant.served import Served, ServedKQuant, ServedNF4, ServedNVFP4

_LARGEST_RANK = 128


class MergeBackend(Protocol):
    """Merges by one backend; hashable."""

    def merge(self, weight: Served, A: Float[Array, "R in"], up: Float[Array, "out R"], dtype) -> Array:
        """Return weight + up·A on the weight's grid, in `dtype`."""


@dataclass(frozen=True)
class ReferenceMerge:
    """`MergeBackend` by XLA."""

    def merge(self, weight: Served, A: Float[Array, "R in"], up: Float[Array, "out R"], dtype) -> Array:
        """See `MergeBackend`."""
        return weight.merged(jnp.matmul(up, A, precision="highest"), dtype)


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
                ServedNF4: ("matrix", "scales"),
                ServedKQuant: ("matrix", "scale", "minimum", "scale_levels", "minimum_levels", "top"),
            },
        )
    },
)
"""Backends of `merge`."""


def merge(
    weight: Served, A: Float[Array, "R in"], up: Float[Array, "out R"], dtype, *, backend: str = "auto"
) -> Float[Array, "out in"]:
    """Return weight + up·A on the weight's grid, in `dtype`; not differentiable.

    Args:
        weight: the matrix and its grid.
        A: the adapter's first matrix.
        up: its second matrix times its scale.
        dtype: of the result.
        backend: one of `MERGE.names`.

    Raises:
        ValueError: a named backend that cannot serve.
    """
    return _load_merge(weight, A, backend).merge(weight, A, up, dtype)


def _load_merge(weight: Served, A: Float[Array, "R in"], backend: str = "auto") -> MergeBackend:
    return MERGE.load(MergeCall(weight=weight, rank=len(A)), backend=backend) or ReferenceMerge()


def multiply_merged(x: Float[Array, "*B in"], weight: Served, adapter: LowRankAdapter) -> Float[Array, "*B out"]:
    """Return x times the transposed merge in x's dtype, which gives gradients to x alone; both passes merge anew."""
    return _project(_load_merge(weight, adapter.A), x, weight, adapter.A, adapter.up)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(
    kernels: MergeBackend, x: Float[Array, "*B in"], weight: Served, A: Float[Array, "R in"], up: Float[Array, "out R"]
) -> Float[Array, "*B out"]:
    matrix = kernels.merge(weight, A, up, x.dtype)
    return jax.lax.dot_general(x, matrix, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=x.dtype)


_project.defvjp(
    lambda kernels, x, weight, A, up: (_project(kernels, x, weight, A, up), (weight, A, up)),
    lambda kernels, residuals, dy: (dy @ kernels.merge(*residuals, dy.dtype), None, None, None),
)
