"""The two halves of LoRA adapters: to their ranks, and from the ranks of those that share an input to their outputs."""

from collections.abc import Sequence
from functools import partial

from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_triton_rank
from jaxglue.ops.lora.reference import ReferenceLora
from jaxglue.ops.lora.vjp import (
    LoraBackend,
    Quantizer,
    ScaledProduct,
    add_product,
    expand,
    expand_gradients,
    first_ranks,
    lora_shrink,
    shrink,
    shrink_gradient,
)

__all__ = [
    "LORA",
    "Quantizer",
    "ReferenceLora",
    "ScaledProduct",
    "first_ranks",
    "lora_add",
    "lora_expand",
    "lora_expand_gradients",
    "lora_expand_gradients_and_codes",
    "lora_expand_onto",
    "lora_shrink",
    "shrink",
    "shrink_gradient",
]

_check = partial(check_triton_rank, largest=64)


def _load(capability: Capability, dtype, rank: int) -> LoraBackend:
    from jaxglue.ops.lora.triton import TritonLora

    return TritonLora.of(capability)


LORA = Operation(
    name="LoRA product",
    backends={"triton": Backend(check=_check, load=_load, advantage="both gradients in one pass over the cotangent")},
)


def lora_expand(
    hidden: Float[Array, "*B ranks"], matrices: Sequence[Float[Array, "out R"]], *, backend: str = "auto"
) -> list[Float[Array, "*B out"]]:
    """Compute hiddenᵢ·matrixᵢᵀ in hidden's dtype, where `hidden` holds the adapters' ranks side by side.

    Args:
        hidden: the input projected to the ranks of all adapters.
        matrices: the adapters' second matrices in float32, as are their gradients.
        backend: `auto`, `reference` or `triton`; see `LORA.choose`.

    Raises:
        ValueError: ranks that do not add up, or a named backend that cannot serve.
    """
    ranks = [matrix.shape[1] for matrix in matrices]
    if sum(ranks) != hidden.shape[-1]:
        raise ValueError(f"the matrices' ranks {ranks} must add up to the {hidden.shape[-1]} columns of hidden")
    rows = hidden.reshape(-1, hidden.shape[-1])
    products = expand(_implementation(hidden, matrices, backend), rows, tuple(matrices))
    return [product.reshape(*hidden.shape[:-1], -1) for product in products]


def lora_expand_onto(
    base: ScaledProduct,
    hidden: Float[Array, "M ranks"],
    matrix: Float[Array, "out R"],
    first: int = 0,
    addend: Float[Array, "M out"] | None = None,
) -> Float[Array, "M out"]:
    """Compute base times its factors + hidden[:, first : first + R]·matrixᵀ + addend; round once.

    Not differentiable.
    """
    return _implementation(hidden, [matrix], "auto").product(hidden, matrix, first, base, addend)


def lora_add(
    x: Float[Array, "*B out"],
    y: Float[Array, "*B out"],
    hidden: Float[Array, "*B R"],
    matrix: Float[Array, "out R"],
    *,
    backend: str = "auto",
) -> Float[Array, "*B out"]:
    """Compute x + y + hidden·matrixᵀ in x's dtype; kernels add in float32 and round once.

    Args:
        x: a residual stream.
        y: a projection's output without its adapter.
        hidden: the projection's input at the adapter's ranks.
        matrix: the adapter's second matrix in float32, as is its gradient.
        backend: `auto`, `reference` or `triton`; see `LORA.choose`.

    Raises:
        ValueError: shapes that do not fit, or a named backend that cannot serve.
    """
    if x.shape != y.shape or x.shape != (*hidden.shape[:-1], len(matrix)) or hidden.shape[-1] != matrix.shape[1]:
        shapes = ", ".join(str(list(array.shape)) for array in (x, y, hidden, matrix))
        raise ValueError(f"x and y must be [..., out], hidden [..., R] and matrix [out, R], got {shapes}")
    rows = (array.reshape(-1, array.shape[-1]) for array in (x, y, hidden))
    return add_product(_implementation(hidden, [matrix], backend), *rows, matrix).reshape(x.shape)


def lora_expand_gradients(
    hidden: Float[Array, "M ranks"],
    matrices: Sequence[Float[Array, "out R"]],
    cotangents: Sequence[Float[Array, "M out"]],
) -> tuple[Float[Array, "M ranks"], tuple[Float[Array, "out R"], ...]]:
    """Compute the gradients of `lora_expand` to hidden and, in float32, to the matrices."""
    return expand_gradients(_implementation(hidden, matrices, "auto"), hidden, matrices, cotangents)[:2]


def lora_expand_gradients_and_codes(
    hidden: Float[Array, "M ranks"],
    matrices: Sequence[Float[Array, "out R"]],
    cotangents: Sequence[Float[Array, "M out"]],
    quantizers: Sequence[Quantizer],
) -> tuple[Float[Array, "M ranks"], tuple[Float[Array, "out R"], ...], list[Float[Array, "M out"]]]:
    """Compute `lora_expand_gradients`, and the cotangents' e4m3 codes while they are read."""
    return expand_gradients(_implementation(hidden, matrices, "auto"), hidden, matrices, cotangents, quantizers)


def _implementation(hidden, matrices, backend: str) -> LoraBackend:
    rank = max(matrix.shape[1] for matrix in matrices)
    return LORA.load(hidden.dtype, rank, backend=backend) or ReferenceLora()
