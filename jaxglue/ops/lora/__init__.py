"""The two halves of adapters: to their ranks, and from the ranks of those that share an input to their outputs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.backend import compute_capability, triton_capability, why_not_triton

__all__ = [
    "LowRankBackend",
    "ReferenceLowRank",
    "expansion_gradients",
    "lora_expand",
    "lora_shrink",
]

_WIDEST_RANK = 64


class LowRankBackend(Protocol):
    """What is done with one product in one pass. Hashable."""

    def product(self, hidden, matrix, first: int) -> Float[Array, "M N"]:
        """hidden[:, first : first + R]·matrixᵀ in hidden's dtype."""

    def gradients(self, dy, matrix, hidden, first: int) -> tuple[Float[Array, "M R"], Float[Array, "N R"]]:
        """(dy·matrix in dy's dtype, dyᵀ·hidden[:, first : first + R] in float32) for dy [M, N] and matrix [N, R]."""


def lora_expand(
    hidden: Float[Array, "*B ranks"], matrices: Sequence[Float[Array, "out R"]]
) -> list[Float[Array, "*B out"]]:
    """hiddenᵢ·matrixᵢᵀ for float32 matrices whose ranks lie side by side in `hidden`, in hidden's dtype.

    The gradients to matrices are float32. On NVIDIA GPUs our kernel forms both gradients of a product in one pass over
    the cotangent.
    """
    ranks = [matrix.shape[1] for matrix in matrices]
    if sum(ranks) != hidden.shape[-1]:
        raise ValueError(f"the matrices' ranks {ranks} must add up to the {hidden.shape[-1]} columns of hidden")
    rows = hidden.reshape(-1, hidden.shape[-1])
    products = _expand(_backend(hidden.dtype, max(ranks)), rows, tuple(matrices))
    return [product.reshape(*hidden.shape[:-1], -1) for product in products]


@jax.custom_vjp
def lora_shrink(x: Float[Array, "*B in"], matrix: Float[Array, "R in"]) -> Float[Array, "*B R"]:
    """x·matrixᵀ in x's dtype for a float32 matrix, whose gradient is not rounded to x's dtype on the way."""
    return _project(x, matrix.astype(x.dtype))


def _project(x, matrix):
    return jax.lax.dot_general(x, matrix, (((x.ndim - 1,), (1,)), ((), ())))


def _project_forward(x, matrix):
    matrix = matrix.astype(x.dtype)
    return _project(x, matrix), (x, matrix)


def _project_backward(residuals, dy):
    x, matrix = residuals
    tokens = tuple(range(x.ndim - 1))
    gradient = jax.lax.dot_general(dy, x, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32)
    return dy @ matrix, gradient


lora_shrink.defvjp(_project_forward, _project_backward)


def expansion_gradients(
    hidden: Float[Array, "M ranks"],
    matrices: Sequence[Float[Array, "out R"]],
    cotangents: Sequence[Float[Array, "M out"]],
) -> tuple[Float[Array, "M ranks"], tuple[Float[Array, "out R"], ...]]:
    """The gradients of `lora_expand` to hidden and, in float32, to the matrices, for a rule of one's own."""
    backend = _backend(hidden.dtype, max(matrix.shape[1] for matrix in matrices))
    return _gradients(backend, hidden, matrices, cotangents)


def _backend(dtype, rank: int) -> LowRankBackend:
    """Imported here, for only GPU installations have what the kernel needs."""
    capability = compute_capability()
    if capability is None or rank > _WIDEST_RANK or why_not_triton(dtype, capability):
        return ReferenceLowRank()
    from jaxglue.ops.lora.triton import TritonLowRank

    return TritonLowRank(compute_capability=triton_capability(capability))


@dataclass(frozen=True)
class ReferenceLowRank:
    """`LowRankBackend` by matmuls."""

    def product(self, hidden, matrix, first: int):
        """See `LowRankBackend`. The matrix is padded to all ranks, which costs less than taking `hidden` apart."""
        ranks = ((0, 0), (first, hidden.shape[1] - first - matrix.shape[1]))
        return jax.lax.dot_general(hidden, jnp.pad(matrix.astype(hidden.dtype), ranks), (((1,), (1,)), ((), ())))

    def gradients(self, dy, matrix, hidden, first: int):
        """See `LowRankBackend`."""
        own = hidden[:, first : first + matrix.shape[1]]
        dmatrix = jax.lax.dot_general(dy, own, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return dy @ matrix.astype(dy.dtype), dmatrix


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expand(backend: LowRankBackend, hidden, matrices: tuple[Array, ...]) -> tuple[Array, ...]:
    firsts = itertools.accumulate((matrix.shape[1] for matrix in matrices), initial=0)
    return tuple(backend.product(hidden, matrix, first) for matrix, first in zip(matrices, firsts, strict=False))


def _forward(backend, hidden, matrices):
    return _expand(backend, hidden, matrices), (hidden, matrices)


def _backward(backend, residuals, cotangents):
    hidden, matrices = residuals
    return _gradients(backend, hidden, matrices, cotangents)


def _gradients(backend, hidden, matrices, cotangents):
    dhidden, dmatrices, first = [], [], 0
    for dy, matrix in zip(cotangents, matrices, strict=True):
        part, dmatrix = backend.gradients(dy, matrix, hidden, first)
        dhidden.append(part)
        dmatrices.append(dmatrix)
        first += matrix.shape[1]
    return jnp.concatenate(dhidden, axis=-1), tuple(dmatrices)


_expand.defvjp(_forward, _backward)
