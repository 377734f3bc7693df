"""Products whose sums run in one order: a row has the same bits among few rows as among many.

So does a sampler that multiplies some rows have a trainer's bits, which multiplies thousands.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import batched
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxglue.ops.backend import (
    Backend,
    Capability,
    Operation,
    check_hopper,
    check_one_device,
    check_triton,
    compute_capability,
)
from jaxglue.ops.projection.few_rows_operands import MOST_MANY_ROWS
from jaxglue.ops.row_sums import FEWEST_ROWS

if TYPE_CHECKING:
    from jaxglue.ops.projection.ordered_triton import TritonOrdered

_WEIGHTS = 4
"""Weights of a launch."""
_MANY_ROWS, _WIDE = 16_384, 1024
"""Rows of x and of a weight from which cuBLAS' products were seen to have this order (`exact_sampler.json`)."""


@dataclass(frozen=True, kw_only=True)
class OrderedCall:
    """Meaning of products in one order."""

    dtype: jnp.dtype
    """Dtype of the operands."""


def _check(capability: Capability | None, call: OrderedCall) -> None:
    check_triton(capability, call.dtype)
    check_hopper(capability)
    check_one_device()


def _load(capability: Capability, call: OrderedCall) -> "TritonOrdered":
    from jaxglue.ops.projection.ordered_triton import TritonOrdered

    return TritonOrdered.of(capability)


ORDERED = Operation(
    name="product in one order",
    backends={
        "triton": Backend(
            check=_check,
            load=_load,
            advantage="sums take 16 columns after another, as cuBLAS' of many rows do",
            reads={OrderedCall: ("dtype",)},
        )
    },
)
"""Backends of `ordered_products`; the reference has one order on a CPU alone."""


def ordered_products(
    x: Float[Array, "*B in"],
    weights: Sequence[Float[Array, "out in"]],
    dtype=None,
    *,
    joined: Sequence[Float[Array, "out in"]] = (),
    part: int | None = None,
    backend: str = "auto",
) -> list[Float[Array, "*B out"]]:
    """Compute x·Wᵀ of each weight in `dtype` (default: x's), with sums in float32 that no number of rows changes.

    There are no gradients.

    Args:
        x: the input of all.
        weights: matrices, rounded to x's dtype.
        dtype: of the products.
        joined: further matrices, whose products are the last one, side by side.
        part: columns of a part of the last weight's sums, which are then added one after another; None for whole sums.
        backend: `auto`, `reference` or `triton`; see `ORDERED.choose`.

    Raises:
        ValueError: a weight that does not fit, or a named backend that cannot serve.
    """
    if wrong := [weight.shape for weight in weights if weight.ndim != 2 or weight.shape[1] != x.shape[-1]]:
        raise ValueError(f"weights must be [out, {x.shape[-1]}] to fit x, got {wrong[0]}")
    rows, dtype = x.reshape(-1, x.shape[-1]), dtype or x.dtype
    matrices, others = ([matrix.astype(x.dtype) for matrix in some] for some in (weights, joined))
    kernels = ORDERED.load(OrderedCall(dtype=x.dtype), backend=backend)
    if kernels is None:
        matrices += [jnp.concatenate(others)] if others else []
        products = [_multiply(rows, matrix, dtype) for matrix in matrices]
        if part is not None:
            products[-1] = _multiply_in_parts(rows, matrices[-1], dtype, part)
    else:
        *launches, last = batched(matrices, _WEIGHTS)
        products = [product for several in launches for product in kernels.multiply(rows, several, dtype)]
        products += kernels.multiply(rows, (*last, *others), dtype, part, max(len(others), 1))
    return [product.reshape(*x.shape[:-1], -1) for product in products]


def adapted_products(
    x: Float[Array, "*B in"],
    weights: Sequence[Float[Array, "out in"]],
    downs: Sequence[Float[Array, "R in"]],
    matrices: Sequence[Float[Array, "out R"]],
    factors: Sequence[float],
    *,
    used: Bool[Array, "*#B R"] | None = None,
    stream: Float[Array, "*B out"] | None = None,
    activation: str | None = None,
    part: int | None = None,
) -> list[Float[Array, "*B out"]] | None:
    """Compute x·Wᵢᵀ + (x·Aᵢᵀ)·(factorᵢ · Bᵢ)ᵀ in one launch, with the bits of `ordered_products` and `lora_sums`.

    With an activation, compute y of `lora_swiglu` of gate's and up's weights and adapters. There are no gradients.

    Args:
        x: the input of all.
        weights: matrices.
        downs: the adapters' first matrices, of one rank.
        matrices: their second ones in float32.
        factors: of these.
        used: ranks that each token uses; None where all use all.
        stream: the residual stream, to which the products of a single weight are added.
        activation: of the gate.
        part: columns of a part of the adapters' sums; see `ordered_products`.

    Returns:
        The products; None without a kernel, and for many rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    kernels = ORDERED.load(OrderedCall(dtype=x.dtype))
    if kernels is None or len(rows) > MOST_MANY_ROWS:
        return None
    ranks = None if used is None else jnp.broadcast_to(used, (*x.shape[:-1], used.shape[-1])).reshape(len(rows), -1)
    added = None if stream is None else stream.reshape(-1, stream.shape[-1])
    given, firsts = ([matrix.astype(x.dtype) for matrix in some] for some in (weights, downs))
    options: dict[str, Any] = {"used": ranks, "stream": added, "activation": activation, "part": part}
    products = kernels.adapt(rows, given, firsts, matrices, factors, **options)
    return [product.reshape(*x.shape[:-1], -1) for product in products]


def _multiply(x: Float[Array, "M in"], weight: Float[Array, "out in"], dtype) -> Float[Array, "M out"]:
    padded = jnp.pad(x, ((0, max(FEWEST_ROWS - len(x), 0)), (0, 0)))
    return contract(padded, weight, dtype)[: len(x)]


def contract(x: Float[Array, "*B in"], weight: Float[Array, "out in"], dtype) -> Float[Array, "*B out"]:
    """Compute x·Wᵀ in `dtype` by XLA.

    On a CPU values are multiplied in float32: where it has instructions for bfloat16, XLA's products of such values
    have an order by the number of rows.
    """
    contract_last = (((x.ndim - 1,), (1,)), ((), ()))
    if compute_capability() is not None:
        return jax.lax.dot_general(x, weight, contract_last, preferred_element_type=dtype)
    x = jax.lax.optimization_barrier(x)  # or XLA would leave out the rounding before
    product = jax.lax.dot_general(x.astype(jnp.float32), weight.astype(jnp.float32), contract_last)
    return product.astype(dtype)


def _multiply_in_parts(x: Float[Array, "M in"], weight: Float[Array, "out in"], dtype, part: int):
    parts = [slice(first, first + part) for first in range(0, x.shape[1], part)]
    return reduce(operator.add, (_multiply(x[:, own], weight[:, own], jnp.float32) for own in parts)).astype(dtype)


def ordered_product(
    x: Float[Array, "*B in"], weight: Float[Array, "out in"], dtype=None, *, backend: str = "auto"
) -> Float[Array, "*B out"]:
    """Compute `ordered_products` of one weight, in x's dtype, with gradients.

    Many rows are left to cuBLAS, which sums them in this order. Other arguments and errors are those of
    `ordered_products`.
    """
    if x.size // x.shape[-1] >= _MANY_ROWS and len(weight) >= _WIDE and backend == "auto":
        backend = "reference"
    kernels = ORDERED.load(OrderedCall(dtype=x.dtype), backend=backend)
    if kernels is None:
        product = contract(x, weight, dtype or x.dtype)
        # Else cuBLAS would add what is added to it before it rounds the product.
        return jax.lax.optimization_barrier(product)
    return _differentiable(dtype or x.dtype, x, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(dtype, x, weight):
    return ordered_products(x, [weight], dtype)[0]


def _backward(dtype, residuals, dy):
    x, weight = residuals
    tokens = tuple(range(x.ndim - 1))
    dy = dy.astype(x.dtype)
    return dy @ weight, jax.lax.dot_general(dy, x, ((tokens, tokens), ((), ())))


_differentiable.defvjp(lambda dtype, x, weight: (_differentiable(dtype, x, weight), (x, weight)), _backward)


@jax.custom_vjp
def ordered_float32_product(x: Float[Array, "M in"], weight: Float[Array, "out in"]) -> Float[Array, "M out"]:
    """Compute x·Wᵀ in float32 of a float32 weight, with sums that no number of rows changes, and gradients.

    Products of bfloat16 have such sums, and three of them are the weight, to the bit. A float32 x, which no kernel
    serves, is multiplied at once.
    """
    parts = _bfloat16_parts(weight) if x.dtype == jnp.bfloat16 else [weight]
    total, *others = ordered_products(x, parts, jnp.float32)
    for other in others:
        total += other
    return total


def _bfloat16_parts(weight: Float[Array, "out in"]) -> list[Float[Array, "out in"]]:
    """Return three arrays whose sum is a float32 one, the smallest first."""
    parts, rest = [], weight
    for _ in range(3):
        parts.append(jax.lax.reduce_precision(rest, 8, 7))
        rest = rest - parts[-1]
    return parts[::-1]


def _float32_backward(residuals, dy):
    x, weight = residuals
    product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    return product("me,ed->md", dy, weight).astype(x.dtype), product("me,md->ed", dy, x.astype(jnp.float32))


ordered_float32_product.defvjp(lambda x, weight: (ordered_float32_product(x, weight), (x, weight)), _float32_backward)
