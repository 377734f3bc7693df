"""Several projections of one input, and their adapters' first matrices, as rows of one matrix."""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxglue.ops.lora.vjp import shrink_gradient

_LARGEST = 2**25
"""Bytes of weights that are copied together for one matmul; measured at 12.6 MB."""
_MOST_ROWS = 2**16
"""Tokens up to which partial sums of gradients to ranks stay small beside a layer's values."""
_ALIGNMENT = 64
"""Rows of a joined matrix are a multiple of it."""
_PARTS = 16
"""Parts of the tokens whose gradients fill a GPU."""


def is_worth_joining(x: Float[Array, "M in"], weights: Sequence[Array]) -> bool:
    """Return whether weights of one input are small enough to be copied together, and its rows few enough."""
    return len(x) <= _MOST_ROWS and sum(weight.size * weight.dtype.itemsize for weight in weights) <= _LARGEST


def join(weights: Sequence[Array], downs: Sequence[Float[Array, "R in"]], dtype) -> Float[Array, "width in"]:
    """Return the rows of all weights, of the adapters' first matrices, and zeros up to a multiple of 64, in `dtype`."""
    parts = [part.astype(dtype) for part in (*weights, *downs)]
    padding = -sum(map(len, parts)) % _ALIGNMENT
    return jnp.concatenate([*parts, jnp.zeros((padding, parts[0].shape[1]), dtype)])


def project_joined(x: Float[Array, "M in"], joined: Float[Array, "width in"]) -> Float[Array, "M width"]:
    """Return x·joinedᵀ."""
    return jax.lax.dot_general(x, joined, (((1,), (1,)), ((), ())))


def with_ranks(dz: Float[Array, "M width"], dhidden: Float[Array, "M ranks"], first: int) -> Float[Array, "M width"]:
    """Return dz with the gradient to the ranks from column `first` on, then zeros."""
    padding = dz.shape[1] - first - dhidden.shape[1]
    return dz.at[:, first:].set(jnp.pad(dhidden, ((0, 0), (0, padding))))


def weight_gradients(
    x: Float[Array, "M in"], dz: Float[Array, "M width"], weights: Sequence[Array]
) -> tuple[Array, ...]:
    """Return the gradients to weights whose outputs are side by side in dz; without cost where they are frozen."""
    ends = itertools.accumulate(map(len, weights), initial=0)
    parts = zip(itertools.pairwise(ends), weights, strict=True)
    return tuple(shrink_gradient(x, dz[:, first:end]).astype(weight.dtype) for (first, end), weight in parts)


def down_gradients(
    x: Float[Array, "M in"], dhidden: Float[Array, "M ranks"], downs: Sequence[Float[Array, "R in"]]
) -> tuple[Float[Array, "R in"], ...]:
    """Return the float32 gradients to the adapters' first matrices, whose ranks are side by side in `dhidden`.

    Adding up parts of the tokens splits the adapters too, which costs copies after a whole product.
    """
    parts = math.gcd(len(x), _PARTS)
    rows, cotangents = (array.reshape(parts, -1, array.shape[1]) for array in (x, dhidden))
    products = jnp.einsum("pmr,pmd->prd", cotangents, rows, preferred_element_type=jnp.float32)
    ends = itertools.accumulate(map(len, downs), initial=0)
    return tuple(products[:, first:end].sum(axis=0) for first, end in itertools.pairwise(ends))
