"""The meaning of a projection: its parameters, and the conditions of its products."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxglue.ops.backend import Reads
from jaxglue.ops.quant.formats import Quantized
from jaxglue.ops.quant.fp8 import is_multiplied_in_fp8
from jaxglue.ops.quant.served import Served

EXPANDED_WEIGHTS: Reads = {Quantized: None}
"""Read by forms that leave products to `multiply`, which knows all formats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRankAdapter:
    """Low-rank change of a weight: W + scale · B·A, its rows rescaled to `magnitude` if there is one (DoRA)."""

    A: Float[Array, "R in"]
    B: Float[Array, "out R"]
    magnitude: Float[Array, " out"] | None = None
    scale: float = 1.0
    dropout: float = 0.0
    """Share of inputs that training drops."""
    salt: int = 0
    """Makes the dropout of this adapter differ from that of others."""

    @property
    def up(self) -> Float[Array, "out R"]:
        """Return scale · B."""
        return self.B if self.scale == 1.0 else self.scale * self.B

    def drop(self, x: Float[Array, "*B in"], key: PRNGKeyArray | None) -> Float[Array, "*B in"]:
        """Apply the adapter's own dropout to x; the identity without a key."""
        if self.dropout == 0.0 or key is None:
            return x
        keep = jax.random.bernoulli(jax.random.fold_in(key, self.salt), 1.0 - self.dropout, x.shape)
        return jnp.where(keep, x / (1.0 - self.dropout), 0).astype(x.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """Parameters of y = x·Wᵀ (+ bias) (+ adapter's product)."""

    weight: Any
    """[out, in], quantized or not."""
    bias: Float[Array, " out"] | None = None
    adapter: LowRankAdapter | None = None
    trains_in_fp8: bool = False
    """The weight is rounded to e4m3 for each product."""

    @property
    def is_for_fp8(self) -> bool:
        """Return whether the weight is multiplied in FP8, unless conditions say otherwise."""
        return self.trains_in_fp8 or is_multiplied_in_fp8(self.weight)

    @property
    def is_served(self) -> bool:
        """Return whether the adapter is merged into the weight, which is then rounded as it is served."""
        return isinstance(self.weight, Served)

    def split(self, *bounds: int) -> list["Projection"]:
        """Return a projection for each range of outputs between the bounds; itself alone where the parts cost copies.

        Rows of a frozen matrix are read where they lie, and an adapter's first matrix is shared. The gradients to the
        rows of a matrix that trains would be joined again, and other formats have no rows.
        """
        rows, arrays = self.weight.shape[0], jax.tree.leaves(self.weight)
        if self.adapter is None or any(array.ndim == 0 or len(array) != rows for array in arrays):
            return [self]
        return [self._rows(slice(*ends)) for ends in itertools.pairwise((0, *bounds, rows))]

    def _rows(self, rows: slice) -> "Projection":
        assert self.adapter is not None
        weight = jax.tree.map(lambda array: array[rows], self.weight)
        bias = None if self.bias is None else self.bias[rows]
        magnitude = None if self.adapter.magnitude is None else self.adapter.magnitude[rows]
        adapter = replace(self.adapter, B=self.adapter.B[rows], magnitude=magnitude)
        return replace(self, weight=weight, bias=bias, adapter=adapter)


class Conditions(Protocol):
    """Conditions of the products of a layer."""

    @property
    def dropout_key(self) -> PRNGKeyArray | None:
        """Return the key of the adapters' dropout; None without."""

    @property
    def fp8(self) -> bool:
        """Return whether weights for FP8 are multiplied so; otherwise in the activations' dtype."""

    # `inference`, if there is one and it is true, says that no gradients are taken: few rows have kernels of their own.
    # `ranks` [B, T, R], [tokens, R] or [1, R], if there are some, says which of the adapters' R ranks each token uses.
    # `exact`, if there is one and it is true, says that no number of rows may change the bits of one.


@dataclass(frozen=True, kw_only=True)
class StaticConditions:
    """`Conditions` as far as a form of the product depends on them."""

    dropout: bool = False
    """Adapters drop inputs."""
    fp8: bool = False
    """Weights for FP8 are multiplied so."""
    inference: bool = False
    """No gradients are taken."""
    ranks: bool = False
    """Each token uses some of the adapters' ranks."""
    exact: bool = False
    """A row's bits are those of training, among however many rows it is."""

    @property
    def by_ranks(self) -> bool:
        """Return whether products of each token's own ranks are added to those of weights, without gradients."""
        return self.ranks and self.inference and not self.exact

    @property
    def in_one_order(self) -> bool:
        """Return whether products of few rows sum as training's of many."""
        return self.exact and self.inference

    @classmethod
    def of(cls, conditions: "Conditions | StaticConditions") -> "StaticConditions":
        """Return those of a layer, or these themselves."""
        if isinstance(conditions, StaticConditions):
            return conditions
        return cls(
            dropout=conditions.dropout_key is not None,
            fp8=conditions.fp8,
            inference=getattr(conditions, "inference", False),
            ranks=getattr(conditions, "ranks", None) is not None,
            exact=getattr(conditions, "exact", False),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ProjectionCall:
    """Meaning of projections of one input."""

    projections: Sequence[Projection]
    conditions: StaticConditions
    onto_stream: bool = False
    """The product is added to a residual stream."""

    @classmethod
    def of(
        cls, projections: Sequence[Projection], conditions: Conditions | StaticConditions, *, onto_stream: bool = False
    ) -> "ProjectionCall":
        """Return the meaning of projections under a layer's conditions."""
        return cls(projections=projections, conditions=StaticConditions.of(conditions), onto_stream=onto_stream)


def check_unserved(projections: Sequence[Projection]) -> None:
    """Raise NotImplementedError if adapters are merged into weights, rounded as they are served."""
    if any(projection.is_served for projection in projections):
        raise NotImplementedError("adapters are merged into weights that are rounded as they are served")


def check_adapters(projections: Sequence[Projection], conditions: StaticConditions) -> None:
    """Raise NotImplementedError unless all have adapters whose products are just added."""
    check_unserved(projections)
    for adapter in (projection.adapter for projection in projections):
        if adapter is None:
            raise NotImplementedError("a projection has no adapter")
        if adapter.magnitude is not None:
            raise NotImplementedError("magnitudes (DoRA) scale the sum of product and adapter")
        if adapter.dropout > 0.0 and conditions.dropout:
            raise NotImplementedError("dropout gives each adapter an input of its own")


def check_frozen_fp8(projections: Sequence[Projection], conditions: StaticConditions, *, adapted: bool = True) -> None:
    """Raise NotImplementedError unless all are frozen FP8 weights, with adapters whose products are just added.

    Args:
        projections: of one input.
        conditions: of the layer.
        adapted: whether they must have adapters; otherwise they must have none.
    """
    if not all(is_multiplied_in_fp8(projection.weight) for projection in projections):
        raise NotImplementedError("weights are not stored for FP8 products")
    if any(projection.trains_in_fp8 for projection in projections):
        raise NotImplementedError("weights train")
    if not conditions.fp8:
        raise NotImplementedError("this layer multiplies in the activations' dtype")
    if adapted:
        check_adapters(projections, conditions)
    elif any(projection.adapter is not None for projection in projections):
        raise NotImplementedError("a projection has an adapter")
