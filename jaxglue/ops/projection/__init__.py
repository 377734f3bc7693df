"""Projections of one input: products with weights in any format, and their adapters.

Adding an adapter's product by itself would read and round the wide output once more. So it is written first, and the
product with the weight accumulates onto it; on the residual stream and in FP8 one pass adds all terms.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxglue.ops import names
from jaxglue.ops.backend import Capability, Operation, form
from jaxglue.ops.collectives import axis_size, reduce_from
from jaxglue.ops.projection.dora import magnitude_gain
from jaxglue.ops.projection.few_rows import load_few_rows, project_few_rows
from jaxglue.ops.projection.fp8 import project_fp8
from jaxglue.ops.projection.fp8_adapters import FP8Rows, add_adapted_fp8, project_adapted_fp8
from jaxglue.ops.projection.lora import lora_add, lora_expand, lora_shrink, shrink
from jaxglue.ops.quant import project_quantized
from jaxglue.ops.quant.formats import is_quantized
from jaxglue.ops.quant.fp8 import is_multiplied_in_fp8

__all__ = [
    "PROJECTION",
    "RESIDUAL_SUM",
    "Adapter",
    "Conditions",
    "Projection",
    "adapted_projection",
    "add_to_stream",
    "base_products",
    "check_adapters",
    "check_frozen_fp8",
    "multiply",
    "project",
    "projections_read_fp8",
    "ranks_of",
    "shared_down",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
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
    adapter: Adapter | None = None
    trains_in_fp8: bool = False
    """The weight is rounded to e4m3 for each product."""

    @property
    def is_for_fp8(self) -> bool:
        """Return whether the weight is multiplied in FP8, unless conditions say otherwise."""
        return self.trains_in_fp8 or is_multiplied_in_fp8(self.weight)

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
    # `ranks` [tokens or 1, R], if there are some, says which of the adapters' R ranks each token uses.


def adapted_projection(
    x: Float[Array, "*B in"] | FP8Rows,
    projections: Sequence[Projection],
    conditions: Conditions,
    *,
    stream: Float[Array, "*B out"] | None = None,
) -> list[Float[Array, "*B out"]]:
    """Apply projections to one input, or add a single one to a residual stream.

    Args:
        x: the input; e4m3 values of a norm where `projections_read_fp8`.
        projections: shrink x to the ranks of all their adapters in one matmul.
        conditions: of the layer.
        stream: the residual stream; devices along the axis `tensor` that split the projection's input sum their parts.
    """
    if (kernels := load_few_rows(x, projections, conditions)) is not None:
        return project_few_rows(kernels, x, projections, conditions, stream)
    if (ranks := ranks_of(projections, conditions)) is not None:
        return _apply_by_ranks(x, projections, conditions, stream, ranks)
    apply = PROJECTION.load(projections, conditions, stream is not None) or _apply_separately
    return apply(x, projections, conditions, stream)


def projections_read_fp8(projections: Sequence[Projection], conditions: Conditions) -> bool:
    """Return whether the projections read e4m3 values of their input alone, so a norm need write nothing else."""
    return PROJECTION.load(projections, conditions, False) is _apply_in_fp8


def ranks_of(projections: Sequence[Projection], conditions: Conditions) -> Bool[Array, "tokens R"] | None:
    """Return which ranks of the projections' adapters each token uses; None where all use all, or there are none."""
    adapted = any(projection.adapter is not None for projection in projections)
    return getattr(conditions, "ranks", None) if adapted else None


def check_adapters(projections: Sequence[Projection], conditions: Conditions) -> None:
    """Raise NotImplementedError unless all have adapters whose products are just added."""
    for adapter in (projection.adapter for projection in projections):
        if adapter is None:
            raise NotImplementedError("a projection has no adapter")
        if adapter.magnitude is not None:
            raise NotImplementedError("magnitudes (DoRA) scale the sum of product and adapter")
        if adapter.dropout > 0.0 and conditions.dropout_key is not None:
            raise NotImplementedError("dropout gives each adapter an input of its own")


def check_frozen_fp8(projections: Sequence[Projection], conditions: Conditions, *, adapted: bool = True) -> None:
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


def _check_fp8(capability: Capability | None, projections, conditions, onto_stream: bool) -> None:
    check_frozen_fp8(projections, conditions)
    if onto_stream and projections[0].bias is not None:
        raise NotImplementedError("a bias is added beside the product")


def _apply_in_fp8(x, projections: Sequence[Projection], conditions, stream) -> list[Array]:
    weights, down = [projection.weight for projection in projections], shared_down(projections)
    ups = [projection.adapter.up for projection in projections if projection.adapter is not None]
    if stream is not None:
        return [add_adapted_fp8(stream, x, weights[0], down, ups[0])]
    return _add_biases(projections, project_adapted_fp8(x, weights, down, ups))


PROJECTION = Operation(
    name="projection",
    backends={"fp8": form(_check_fp8, _apply_in_fp8, "scales are applied where adapters' products are added")},
)
"""Forms of `adapted_projection`; a call is described by projections, conditions, and whether it adds to a stream."""


def shared_down(projections: Sequence[Projection]) -> Float[Array, "ranks in"]:
    """Return the adapters' first matrices, one below the other."""
    return jnp.concatenate([projection.adapter.A for projection in projections if projection.adapter is not None])


def _apply_separately(x, projections: Sequence[Projection], conditions, stream) -> list[Array]:
    """Compute products in each weight's format, and add those of adapters."""
    assert not isinstance(x, FP8Rows)
    products, low_rank = base_products(x, projections, conditions)
    if stream is not None:
        return [add_to_stream(stream, projections[0], products[0], low_rank)]
    return _add_adapters(projections, products, low_rank)


def _apply_by_ranks(x, projections: Sequence[Projection], conditions, stream, ranks) -> list[Array]:
    """Apply the weights alone, and add the products of each token's own ranks; there are no gradients."""
    assert not isinstance(x, FP8Rows)
    products = adapted_projection(x, [replace(projection, adapter=None) for projection in projections], conditions)
    adapters = {index: p.adapter for index, p in enumerate(projections) if p.adapter is not None}
    low_rank = shrink(x, jnp.concatenate([adapter.A for adapter in adapters.values()]))
    low_rank = low_rank.reshape(*x.shape[:-1], len(adapters), -1)
    low_rank = jnp.where(ranks[:, None], low_rank, 0)
    for place, (index, adapter) in enumerate(adapters.items()):
        expanded = project(low_rank[..., place, :], adapter.up, jnp.float32)
        products[index] = (products[index] + expanded).astype(x.dtype)
    return products if stream is None else [stream + reduce_from(products[0])]


def base_products(x, projections: Sequence[Projection], conditions: Conditions) -> tuple[list[Array], Array | None]:
    """Return the products with the weights alone, and the input at the ranks of all adapters, None without any."""
    in_fp8 = conditions.fp8 and all(projection.is_for_fp8 for projection in projections)
    groups = [projections] if in_fp8 else [[projection] for projection in projections]  # FP8 weights quantize x once
    x, *copies = fan_out(x, 1 + len(groups))
    products = [y for group, copy in zip(groups, copies, strict=True) for y in multiply(copy, group, conditions)]
    return products, _shrink(x, [p.adapter for p in projections if p.adapter is not None], conditions)


def multiply(x: Float[Array, "*B in"], projections: Sequence[Projection], conditions: Conditions) -> list[Array]:
    """Compute x·Wᵀ of weights for FP8 together, or of a single one in another format."""
    weights = [projection.weight for projection in projections]
    if conditions.fp8 and projections[0].is_for_fp8:
        return project_fp8(x, weights)
    return [project_quantized(x, weight) if is_quantized(weight) else project(x, weight) for weight in weights]


def project(x: Float[Array, "*B in"], weight: Float[Array, "out in"], dtype=None) -> Float[Array, "*B out"]:
    """Compute x·Wᵀ in `dtype` (default: x's), without saving a transposed copy of the weight for the backward pass."""
    contract_last = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight.astype(x.dtype), contract_last, preferred_element_type=dtype or x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def fan_out(x: Float[Array, "*B in"], count: int) -> tuple[Float[Array, "*B in"], ...]:
    """Alias x `count` times; sum cotangents serially so that XLA fuses each add into a GEMM."""
    return (x,) * count


def _sum_partials(count: int, _, gradients):
    total, *others = gradients
    for gradient in others:
        total = gradient + total
    return (total,)


fan_out.defvjp(lambda x, count: (fan_out(x, count), None), _sum_partials)


def _shrink(x, adapters: Sequence[Adapter], conditions: Conditions) -> Float[Array, "*B ranks"] | None:
    """Compute dropout(x)·Aᵀ of every adapter, concatenated along the last axis."""
    if not adapters:
        return None
    if conditions.dropout_key is None or not any(adapter.dropout for adapter in adapters):
        low_rank = lora_shrink(x, jnp.concatenate([adapter.A for adapter in adapters]))
    else:
        parts = [lora_shrink(adapter.drop(x, conditions.dropout_key), adapter.A) for adapter in adapters]
        low_rank = jnp.concatenate(parts, axis=-1)
    return checkpoint_name(low_rank, names.LOW_RANK)


def _add_adapters(projections: Sequence[Projection], products: list[Array], low_rank: Array | None) -> list[Array]:
    adapters = {index: p.adapter for index, p in enumerate(projections) if p.adapter is not None}
    if low_rank is not None:
        ups = [adapter.up for adapter in adapters.values()]
        for (index, adapter), up, expanded in zip(adapters.items(), ups, lora_expand(low_rank, ups), strict=True):
            total = products[index] + expanded
            if adapter.magnitude is not None:
                weight, magnitude = projections[index].weight, adapter.magnitude
                gain = magnitude_gain(weight, adapter.A, up, magnitude, dtype=total.dtype)
                total = (total * gain).astype(total.dtype)
            products[index] = total
    return _add_biases(projections, products)


def _add_biases(projections: Sequence[Projection], outputs: list[Array]) -> list[Array]:
    biases = [projection.bias for projection in projections]
    return [y if bias is None else y + bias.astype(y.dtype) for y, bias in zip(outputs, biases, strict=True)]


def add_to_stream(
    stream: Float[Array, "*B out"],
    projection: Projection,
    product: Float[Array, "*B out"],
    low_rank: Float[Array, "*B R"] | None,
) -> Float[Array, "*B out"]:
    """Return the residual stream plus the product with a projection's weight, its adapter's product, and its bias.

    Args:
        stream: the residual stream.
        projection: of the product.
        product: the product with the weight alone.
        low_rank: the input at the adapter's ranks; None without an adapter.
    """
    add: Callable = RESIDUAL_SUM.load(projection) or _add_separately
    return add(stream, projection, product, low_rank)


def _check_sum(capability: Capability | None, projection: Projection) -> None:
    if projection.adapter is None:
        raise NotImplementedError("the projection has no adapter")
    if projection.bias is not None:
        raise NotImplementedError("a bias is added beside the product")
    if projection.adapter.magnitude is not None:
        raise NotImplementedError("magnitudes (DoRA) scale the sum of product and adapter")
    if axis_size("tensor") > 1:
        raise NotImplementedError("devices along the axis tensor sum their parts first")
    if projection.is_for_fp8:
        raise NotImplementedError("weights for FP8 are added as in FP8 also where a layer multiplies in 16 bits")


def _add_at_once(stream, projection: Projection, product, low_rank) -> Array:
    assert projection.adapter is not None and low_rank is not None
    return lora_add(stream, product, low_rank, projection.adapter.up)


def _add_separately(stream, projection: Projection, product, low_rank) -> Array:
    return stream + reduce_from(_add_adapters((projection,), [product], low_rank)[0])


RESIDUAL_SUM = Operation(
    name="sum onto the residual stream",
    backends={
        "lora": form(
            _check_sum, _add_at_once, "stream, product and adapter's product are added in float32 and rounded once"
        )
    },
)
"""Forms of `add_to_stream`; a call is described by the projection."""
