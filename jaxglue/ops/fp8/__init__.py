"""Products of activations and frozen weights in FP8: twice the rate of bfloat16 on tensor cores that have it."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from jaxglue.ops.backend import Capability, check_capability
from jaxglue.ops.fp8.adapted import add_adapted_fp8, project_adapted_fp8
from jaxglue.ops.fp8.encode import FIRST_CAPABILITY
from jaxglue.ops.fp8.rows import Rows, branch_norm_fp8
from jaxglue.ops.fp8.swiglu import swiglu_fp8
from jaxglue.ops.fp8.vjp import project_rows, project_trained
from jaxglue.ops.quant.fp8 import FP8Weight

__all__ = [
    "FIRST_CAPABILITY",
    "Rows",
    "add_adapted_fp8",
    "branch_norm_fp8",
    "check_fp8",
    "project_adapted_fp8",
    "project_fp8",
    "swiglu_fp8",
]


def check_fp8(capability: Capability | None) -> None:
    """Raise ValueError for a GPU without FP8 tensor cores."""
    try:
        check_capability(capability, FIRST_CAPABILITY)
    except NotImplementedError as reason:
        raise ValueError(f"--matmul fp8: {reason}, the first with FP8 tensor cores: use --matmul bf16") from None


def project_fp8(
    x: Float[Array, "*B in"], weights: Sequence[FP8Weight] | Sequence[Float[Array, "out in"]]
) -> list[Float[Array, "*B out"]]:
    """Compute x·Wᵀ of several weights in x's dtype, from e4m3 values with float32 accumulation.

    Quantize x once, with a scale for each token. Backward, fold the weights' scales into the cotangents and quantize
    these with a scale for each token that all share: so one copy of the weights serves both directions.

    Args:
        x: the inputs.
        weights: matrices [out, in]: quantized ones, which get no gradient, or ones that train, quantized on every call;
            their gradients are products in x's dtype, summed in float32.

    Raises:
        ValueError: a weight whose rows are not as long as x's.
    """
    for weight in weights:
        if weight.shape[1] != x.shape[-1]:
            raise ValueError(f"weights must be [out, {x.shape[-1]}] to fit x, got {list(weight.shape)}")
    frozen = tuple(weight for weight in weights if isinstance(weight, FP8Weight))
    return list(project_rows(x, frozen) if frozen else project_trained(x, tuple(weights)))
