"""Differentiation rules of both halves of adapters; the gradients to their matrices stay in float32."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Quantizer(NamedTuple):
    """Scales by which cotangents dy [M, N] become e4m3 codes: dy · columns / rows."""

    columns: Float[Array, " N"]
    rows: Float[Array, "M 1"]


class ScaledProduct(NamedTuple):
    """A product [M, N] whose factors are still to be applied."""

    product: Float[Array, "M N"]
    rows: Float[Array, "M 1"]
    columns: Float[Array, " N"] | None = None


class LoraBackend(Protocol):
    """One product and its gradients, each in one pass; hashable."""

    def product(
        self, hidden, matrix, first: int, base: ScaledProduct | None = None, addend: Float[Array, "M N"] | None = None
    ) -> Float[Array, "M N"]:
        """Return hidden[:, first : first + R]·matrixᵀ in hidden's dtype, plus base times its factors and addend.

        An addend comes with a base.
        """

    def add_product(self, x, y, hidden, matrix) -> Float[Array, "M N"]:
        """Return x + y + hidden·matrixᵀ in x's dtype."""

    def gradients(
        self, dy, matrix, hidden, first: int, quantizer: Quantizer | None = None
    ) -> tuple[Float[Array, "M R"], Float[Array, "N R"], Float[Array, "M N"] | None]:
        """Return dy·matrix in dy's dtype, dyᵀ·hidden[:, first : first + R] in float32, and dy's codes if quantized."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def expand(
    backend: LoraBackend, hidden: Float[Array, "M ranks"], matrices: tuple[Float[Array, "out R"], ...]
) -> tuple[Float[Array, "M out"], ...]:
    """See `lora_expand`."""
    return tuple(
        backend.product(hidden, matrix, first) for matrix, first in zip(matrices, first_ranks(matrices), strict=True)
    )


def first_ranks(matrices: Sequence[Float[Array, "out R"]]) -> list[int]:
    """Return each matrix's first rank among those of all, side by side."""
    *firsts, _ = itertools.accumulate((matrix.shape[1] for matrix in matrices), initial=0)
    return firsts


def _expand_forward(backend, hidden, matrices):
    return expand(backend, hidden, matrices), (hidden, matrices)


def _expand_backward(backend, residuals, cotangents):
    hidden, matrices = residuals
    return expand_gradients(backend, hidden, matrices, cotangents)[:2]


def expand_gradients(
    backend: LoraBackend, hidden, matrices, cotangents, quantizers: Sequence[Quantizer | None] | None = None
):
    """See `lora_expand_gradients`."""
    calls = zip(cotangents, matrices, first_ranks(matrices), quantizers or [None] * len(matrices), strict=True)
    found = (backend.gradients(dy, matrix, hidden, first, quantizer) for dy, matrix, first, quantizer in calls)
    dhidden, dmatrices, codes = zip(*found, strict=True)
    return jnp.concatenate(dhidden, axis=-1), dmatrices, codes


expand.defvjp(_expand_forward, _expand_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def add_product(
    backend: LoraBackend,
    x: Float[Array, "M out"],
    y: Float[Array, "M out"],
    hidden: Float[Array, "M R"],
    matrix: Float[Array, "out R"],
) -> Float[Array, "M out"]:
    """See `lora_add`."""
    return backend.add_product(x, y, hidden, matrix)


def _add_product_forward(backend, x, y, hidden, matrix):
    return add_product(backend, x, y, hidden, matrix), (hidden, matrix)


def _add_product_backward(backend, residuals, cotangent):
    hidden, matrix = residuals
    return cotangent, cotangent, *backend.gradients(cotangent, matrix, hidden, 0)[:2]


add_product.defvjp(_add_product_forward, _add_product_backward)


@jax.custom_vjp
def lora_shrink(x: Float[Array, "*B in"], matrix: Float[Array, "R in"]) -> Float[Array, "*B R"]:
    """Compute x·matrixᵀ in x's dtype for a float32 matrix, whose gradient is never rounded to x's dtype."""
    return shrink(x, matrix)


def shrink(x: Float[Array, "*B in"], matrix: Float[Array, "R in"]) -> Float[Array, "*B R"]:
    """Compute `lora_shrink` without its differentiation rule."""
    return jax.lax.dot_general(x, matrix.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


def shrink_gradient(x: Float[Array, "*B in"], dy: Float[Array, "*B R"]) -> Float[Array, "R in"]:
    """Compute the gradient of `lora_shrink` to its matrix, in float32."""
    tokens = tuple(range(x.ndim - 1))
    return jax.lax.dot_general(dy, x, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32)


def _shrink_forward(x, matrix):
    matrix = matrix.astype(x.dtype)
    return shrink(x, matrix), (x, matrix)


def _shrink_backward(residuals, dy):
    x, matrix = residuals
    return dy @ matrix, shrink_gradient(x, dy)


lora_shrink.defvjp(_shrink_forward, _shrink_backward)
