"""Products that are gradients to adapters, and the width of values that ranks extend."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Array, Float

Adapter = tuple[Float[Array, "R in"], Float[Array, "out R"]]
"""Both matrices in float32, the second one times the adapter's scale."""
_ALIGNMENT = 64
"""Extended values have a multiple of it in columns."""


class WeightGroup(NamedTuple):
    """Weights and adapters of linear layers with one input."""

    weights: Sequence[Float[Array, "out in"]]
    adapters: Sequence[Adapter]
    joined: bool = False
    """Ranks are multiplied with the weights, not before them."""

    def width(self, rank: int) -> int:
        """Return the columns of extended inputs or, where ranks are multiplied with the weights, of outputs."""
        columns = sum(map(len, self.weights)) if self.joined else self.weights[0].shape[1]
        return extended_width(columns, rank * len(self.weights))


class ExtendedWeights(NamedTuple):
    """Weights and adapters of linear layers with one input, in the activations' dtype."""

    whole: Float[Array, "out width"]
    """Weights one below the other; second matrices in the columns of their ranks or, joined, first ones below."""
    downs: Float[Array, "lanes in"] | None = None
    """First matrices one below the other, then zeros; None in joined groups."""


class Pair(NamedTuple):
    """Arrays [M, …] whose product wideᵀ·narrow is the gradient to an adapter."""

    wide: Array
    columns: slice
    """Columns of `wide` that are multiplied."""
    narrow: Array
    first: int
    """Narrow's first rank."""
    is_second: bool
    """The gradient is to a second matrix [columns, R], not to a first one [R, columns]."""


class Partials(NamedTuple):
    """Partial sums [parts, columns, R] of an adapter's gradient."""

    sums: Array
    is_second: bool
    """As in `Pair`."""


def extended_width(columns: int, ranks: int) -> int:
    """Return the columns of extended values."""
    return -(-(columns + ranks) // _ALIGNMENT) * _ALIGNMENT
