"""Costs that launches of kernels state beside their arguments, for the planner and for profilers."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive

KERNEL = "triton_kernel_call"
"""Primitive of a launch in a traced program."""
_stand_in = Primitive("kernel_stand_in")
_stand_in.multiple_results = True
_stand_in.def_abstract_eval(lambda *_, cost, types: [ShapedArray(*each) for each in types])


class KernelKind(StrEnum):
    """Kinds of kernels that differ in the share of the GPU's rates that they reach."""

    ROWS = "rows"
    """Reads and writes each row about once; its matmuls, if any, are short."""
    ADAPTER_GRADIENTS = "adapter gradients"
    """Keeps sums of all ranks while it reads its rows."""
    EXPERTS_MATMUL = "experts matmul"
    """Multiplies sorted rows with their experts' matrices."""
    MXFP4 = "mxfp4"
    """Expands blocks of MXFP4 values."""
    DELTA_RULE = "delta rule"
    """Multiplies small tiles one after another, and follows documents from chunk to chunk."""
    ATTENTION_FORWARD = "attention forward"
    """Takes a time that documents' lengths decide."""
    ATTENTION_BACKWARD = "attention backward"
    """Likewise."""


@dataclass(frozen=True, kw_only=True)
class KernelCost:
    """Work of one launch."""

    kind: KernelKind
    flops: int = 0
    """Operations of matmuls, including padded rows of tiles."""
    fp8: bool = False
    """Its matmuls multiply FP8 values by FP8 values."""
    bytes: int | None = None
    """Read and written; None for those of all arguments and results, each once."""
    turns: int = 0
    """Turns of a program's loop over memory, one after another, where programs are too few to hide them."""

    def estimate(self) -> dict[str, Any]:
        """Return the cost as `cost_estimate` of `triton_call`, which carries it in the equation to profilers."""
        moved = {} if self.bytes is None else {"bytes_accessed": self.bytes}
        return {"kind": self.kind.value, "flops": self.flops, "fp8": self.fp8, "turns": self.turns} | moved


def stand_in(cost: KernelCost, arrays: Sequence[Any], types: Sequence[Any]) -> list[jax.Array]:
    """Return the results of a kernel that reads the arrays, in a program that is traced and never run.

    Args:
        cost: of the kernel.
        arrays: its arguments.
        types: shapes and dtypes of its results.
    """
    return _stand_in.bind(*arrays, cost=cost, types=tuple((each.shape, each.dtype) for each in types))


def stated_cost(eqn: Any) -> KernelCost | None:
    """Return the cost that a launch, or a stand-in, stated in a traced program; None for other equations."""
    if eqn.primitive is _stand_in:
        return eqn.params["cost"]
    if eqn.primitive.name != KERNEL:
        return None
    estimate = dict(eqn.params["cost_estimate"])
    moved, kind = estimate.pop("bytes_accessed", None), KernelKind(estimate.pop("kind"))
    return KernelCost(kind=kind, bytes=moved, **estimate)


def turns(elements: int, block: int) -> int:
    """Return the turns of a loop over elements, a block in each."""
    return -(-elements // block)
