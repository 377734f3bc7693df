"""The two halves of LoRA adapters: to their ranks, and from the ranks of those that share an input to their outputs.

The gradients to an adapter's matrices stay in float32, however the activations are rounded.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import Backend, Capability, Operation, check_triton_rank
from jaxglue.ops.projection.ordered import contract, ordered_product
from jaxglue.ops.quant.fp8 import Quantizer, ScaledProduct, encode_rows


class LoraBackend(Protocol):
    """One product and its gradients, each in one pass; hashable."""

    def product(
        self, low_rank, matrix, first: int, base: ScaledProduct | None = None, addend: Float[Array, "M N"] | None = None
    ) -> Float[Array, "M N"]:
        """Return low_rank[:, first : first + R]·matrixᵀ in low_rank's dtype, plus base times its factors and addend.

        An addend comes with a base.
        """

    def add_product(self, x, y, low_rank, matrix) -> Float[Array, "M N"]:
        """Return x + y + low_rank·matrixᵀ in x's dtype."""

    def sums(
        self,
        products: Sequence[Float[Array, "M N"]],
        low_rank,
        matrices,
        factors: Sequence[float],
        stream: Float[Array, "M N"] | None = None,
    ) -> list[Float[Array, "M N"]]:
        """Return the sums of `lora_sums`."""

    def gradients(
        self, dy, matrix, low_rank, first: int, quantizer: Quantizer | None = None
    ) -> tuple[Float[Array, "M R"], Float[Array, "N R"], Float[Array, "M N"] | None]:
        """Return dy·matrix in dy's dtype, dyᵀ·low_rank[:, first : first + R] in float32, and dy's e4m3 values.

        The last is None without a quantizer.
        """


@dataclass(frozen=True)
class ReferenceLora:
    """`LoraBackend` by matmuls."""

    def product(self, low_rank, matrix, first: int, base=None, addend=None):
        """See `LoraBackend`; padding the matrix to all ranks costs less than slicing `low_rank`."""
        ranks = ((0, 0), (first, low_rank.shape[1] - first - matrix.shape[1]))
        padded = jnp.pad(matrix.astype(low_rank.dtype), ranks)
        product = contract(low_rank, padded, low_rank.dtype)
        if base is None:
            return product
        scaled = base.product.astype(jnp.float32) * base.rows * (1.0 if base.columns is None else base.columns)
        total = scaled + product if addend is None else scaled + product + addend
        return total.astype(low_rank.dtype)

    def add_product(self, x, y, low_rank, matrix):
        """See `LoraBackend`."""
        return x + (y + self.product(low_rank, matrix, 0))

    def sums(self, products, low_rank, matrices, factors, stream=None):
        """See `LoraBackend`."""
        ups = [matrix if factor == 1.0 else factor * matrix for matrix, factor in zip(matrices, factors, strict=True)]
        if stream is not None:
            return [self.add_product(stream, products[0], low_rank, ups[0])]
        firsts = zip(products, ups, first_ranks(ups), strict=True)
        return [product + self.product(low_rank, up, first) for product, up, first in firsts]

    def gradients(self, dy, matrix, low_rank, first: int, quantizer=None):
        """See `LoraBackend`."""
        of_adapter = low_rank[:, first : first + matrix.shape[1]]
        dmatrix = jax.lax.dot_general(dy, of_adapter, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        fp8_values = None if quantizer is None else encode_rows(dy * quantizer.columns, quantizer.rows)[0]
        return dy @ matrix.astype(dy.dtype), dmatrix, fp8_values


@dataclass(frozen=True, kw_only=True)
class LoraCall:
    """Meaning of a product with one of an adapter's matrices, and of its gradients."""

    dtype: jnp.dtype
    rank: int
    """The largest of the adapters that share an input."""


def _check(capability: Capability | None, call: LoraCall) -> None:
    check_triton_rank(capability, call.dtype, call.rank, largest=64)


def _load(capability: Capability, call: LoraCall) -> LoraBackend:
    from jaxglue.ops.projection.triton import TritonLora

    return TritonLora.of(capability)


LORA = Operation(
    name="LoRA product",
    backends={
        "triton": Backend(
            check=_check,
            load=_load,
            advantage="both gradients in one pass over the cotangent",
            reads={LoraCall: ("dtype", "rank")},
        )
    },
)


def _implementation(low_rank, matrices, backend: str = "auto") -> LoraBackend:
    rank = max(matrix.shape[1] for matrix in matrices)
    return LORA.load(LoraCall(dtype=low_rank.dtype, rank=rank), backend=backend) or ReferenceLora()


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def lora_shrink(x: Float[Array, "*B in"], matrix: Float[Array, "R in"], exact: bool = False) -> Float[Array, "*B R"]:
    """Compute x·matrixᵀ in x's dtype for a float32 matrix, whose gradient is never rounded to x's dtype.

    Args:
        x: the adapter's input.
        matrix: its first matrix.
        exact: sum in the order of `ordered_products`.
    """
    return ordered_product(x, matrix.astype(x.dtype)) if exact else shrink(x, matrix)


def shrink(x: Float[Array, "*B in"], matrix: Float[Array, "R in"]) -> Float[Array, "*B R"]:
    """Compute `lora_shrink` without its differentiation rule."""
    return jax.lax.dot_general(x, matrix.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


def shrink_gradient(x: Float[Array, "*B in"], dy: Float[Array, "*B R"]) -> Float[Array, "R in"]:
    """Compute the gradient of `lora_shrink` to its matrix, in float32."""
    tokens = tuple(range(x.ndim - 1))
    return jax.lax.dot_general(dy, x, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32)


def _shrink_forward(x, matrix, exact):
    matrix = matrix.astype(x.dtype)
    return lora_shrink(x, matrix, exact), (x, matrix)


def _shrink_backward(exact, residuals, dy):
    x, matrix = residuals
    return dy @ matrix, shrink_gradient(x, dy)


lora_shrink.defvjp(_shrink_forward, _shrink_backward)


def lora_expand(
    low_rank: Float[Array, "*B ranks"], matrices: Sequence[Float[Array, "out R"]], *, backend: str = "auto"
) -> list[Float[Array, "*B out"]]:
    """Compute low_rankᵢ·matrixᵢᵀ in low_rank's dtype, where `low_rank` holds the adapters' ranks side by side.

    Args:
        low_rank: the input projected to the ranks of all adapters.
        matrices: the adapters' second matrices in float32, as are their gradients.
        backend: `auto`, `reference` or `triton`; see `LORA.choose`.

    Raises:
        ValueError: ranks that do not add up, or a named backend that cannot serve.
    """
    ranks = [matrix.shape[1] for matrix in matrices]
    if sum(ranks) != low_rank.shape[-1]:
        raise ValueError(f"the matrices' ranks {ranks} must add up to the {low_rank.shape[-1]} columns of low_rank")
    rows = low_rank.reshape(-1, low_rank.shape[-1])
    products = _expand(_implementation(low_rank, matrices, backend), rows, tuple(matrices))
    return [product.reshape(*low_rank.shape[:-1], -1) for product in products]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expand(
    backend: LoraBackend, low_rank: Float[Array, "M ranks"], matrices: tuple[Float[Array, "out R"], ...]
) -> tuple[Float[Array, "M out"], ...]:
    return tuple(
        backend.product(low_rank, matrix, first) for matrix, first in zip(matrices, first_ranks(matrices), strict=True)
    )


def first_ranks(matrices: Sequence[Float[Array, "out R"]]) -> list[int]:
    """Return each matrix's first rank among those of all, side by side."""
    *firsts, _ = itertools.accumulate((matrix.shape[1] for matrix in matrices), initial=0)
    return firsts


def _expand_forward(backend, low_rank, matrices):
    return _expand(backend, low_rank, matrices), (low_rank, matrices)


def _expand_backward(backend, residuals, cotangents):
    low_rank, matrices = residuals
    return _expand_gradients(backend, low_rank, matrices, cotangents)[:2]


def _expand_gradients(
    backend: LoraBackend, low_rank, matrices, cotangents, quantizers: Sequence[Quantizer | None] | None = None
):
    """Return the gradients to low_rank and the matrices, and the cotangents' e4m3 values."""
    calls = zip(cotangents, matrices, first_ranks(matrices), quantizers or [None] * len(matrices), strict=True)
    gradients = (backend.gradients(dy, matrix, low_rank, first, quantizer) for dy, matrix, first, quantizer in calls)
    dlow_rank, dmatrices, fp8_values = zip(*gradients, strict=True)
    return jnp.concatenate(dlow_rank, axis=-1), dmatrices, fp8_values


_expand.defvjp(_expand_forward, _expand_backward)


def lora_sums(
    products: Sequence[Float[Array, "*B out"]],
    low_rank: Float[Array, "*B ranks"],
    matrices: Sequence[Float[Array, "out R"]],
    factors: Sequence[float],
    stream: Float[Array, "*B out"] | None = None,
) -> list[Float[Array, "*B out"]]:
    """Compute productsᵢ + low_rankᵢ·(factorᵢ · matrixᵢ)ᵀ in one launch, with the bits of `lora_expand` and a sum.

    With a stream, of one adapter, those of `lora_add`. Not differentiable.

    Args:
        products: with weights alone.
        low_rank: the input projected to the ranks of all adapters, as many of each.
        matrices: the adapters' second matrices in float32.
        factors: of these.
        stream: the residual stream.
    """
    *rows, ranks = [array.reshape(-1, array.shape[-1]) for array in (*products, low_rank)]
    flat = None if stream is None else stream.reshape(-1, stream.shape[-1])
    sums = _implementation(low_rank, matrices).sums(rows, ranks, matrices, factors, flat)
    return [total.reshape(product.shape) for total, product in zip(sums, products, strict=True)]


def lora_straight_through(
    products: Sequence[Float[Array, "*B out"]], low_rank: Float[Array, "*B ranks"], matrices: Sequence[Array]
) -> list[Float[Array, "*B out"]]:
    """Return products as they are; the backward pass adds gradients as if low_rankᵢ·matrixᵢᵀ had been added to each.

    Args:
        products: with weights that have the adapters within.
        low_rank: the input projected to the ranks of all adapters.
        matrices: the adapters' second matrices [out, R] in float32, as are their gradients.
    """
    rows = [array.reshape(-1, array.shape[-1]) for array in (*products, low_rank)]
    backend = _implementation(low_rank, matrices)
    passed = _pass_through(backend, tuple(rows[:-1]), rows[-1], tuple(matrices))
    return [new.reshape(old.shape) for new, old in zip(passed, products, strict=True)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pass_through(backend: LoraBackend, products, low_rank, matrices) -> tuple[Float[Array, "M out"], ...]:
    return products


def _pass_through_backward(backend, residuals, cotangents):
    low_rank, matrices = residuals
    return cotangents, *_expand_gradients(backend, low_rank, matrices, cotangents)[:2]


_pass_through.defvjp(
    lambda backend, products, low_rank, matrices: (products, (low_rank, matrices)), _pass_through_backward
)


def lora_expand_gradients(
    low_rank: Float[Array, "M ranks"],
    matrices: Sequence[Float[Array, "out R"]],
    cotangents: Sequence[Float[Array, "M out"]],
) -> tuple[Float[Array, "M ranks"], tuple[Float[Array, "out R"], ...]]:
    """Compute the gradients of `lora_expand` to low_rank and, in float32, to the matrices."""
    return _expand_gradients(_implementation(low_rank, matrices), low_rank, matrices, cotangents)[:2]


def lora_expand_gradients_in_fp8(
    low_rank: Float[Array, "M ranks"],
    matrices: Sequence[Float[Array, "out R"]],
    cotangents: Sequence[Float[Array, "M out"]],
    quantizers: Sequence[Quantizer],
) -> tuple[Float[Array, "M ranks"], tuple[Float[Array, "out R"], ...], list[Float[Array, "M out"]]]:
    """Compute `lora_expand_gradients`, and the cotangents' e4m3 values while they are read."""
    return _expand_gradients(_implementation(low_rank, matrices), low_rank, matrices, cotangents, quantizers)


def lora_expand_onto(
    base: ScaledProduct,
    low_rank: Float[Array, "M ranks"],
    matrix: Float[Array, "out R"],
    first: int = 0,
    addend: Float[Array, "M out"] | None = None,
) -> Float[Array, "M out"]:
    """Compute base times its factors + low_rank[:, first : first + R]·matrixᵀ + addend; round once.

    Not differentiable.
    """
    return _implementation(low_rank, [matrix]).product(low_rank, matrix, first, base, addend)


def lora_add(
    x: Float[Array, "*B out"],
    y: Float[Array, "*B out"],
    low_rank: Float[Array, "*B R"],
    matrix: Float[Array, "out R"],
    *,
    backend: str = "auto",
) -> Float[Array, "*B out"]:
    """Compute x + y + low_rank·matrixᵀ in x's dtype; kernels add in float32 and round once.

    Args:
        x: a residual stream.
        y: a projection's output without its adapter.
        low_rank: the projection's input at the adapter's ranks.
        matrix: the adapter's second matrix in float32, as is its gradient.
        backend: `auto`, `reference` or `triton`; see `LORA.choose`.

    Raises:
        ValueError: shapes that do not fit, or a named backend that cannot serve.
    """
    if x.shape != y.shape or x.shape != (*low_rank.shape[:-1], len(matrix)) or low_rank.shape[-1] != matrix.shape[1]:
        shapes = ", ".join(str(list(array.shape)) for array in (x, y, low_rank, matrix))
        raise ValueError(f"x and y must be [..., out], low_rank [..., R] and matrix [out, R], got {shapes}")
    rows = (array.reshape(-1, array.shape[-1]) for array in (x, y, low_rank))
    return _add_product(_implementation(low_rank, [matrix], backend), *rows, matrix).reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_product(
    backend: LoraBackend,
    x: Float[Array, "M out"],
    y: Float[Array, "M out"],
    low_rank: Float[Array, "M R"],
    matrix: Float[Array, "out R"],
) -> Float[Array, "M out"]:
    return backend.add_product(x, y, low_rank, matrix)


def _add_product_forward(backend, x, y, low_rank, matrix):
    return _add_product(backend, x, y, low_rank, matrix), (low_rank, matrix)


def _add_product_backward(backend, residuals, cotangent):
    low_rank, matrix = residuals
    return cotangent, cotangent, *backend.gradients(cotangent, matrix, low_rank, 0)[:2]


_add_product.defvjp(_add_product_forward, _add_product_backward)
