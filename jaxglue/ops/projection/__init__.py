"""Projections of one input: products with weights in any format, and their adapters.

Adding an adapter's product by itself would read and round the wide output once more. So it is written first, and the
product with the weight accumulates onto it; on the residual stream and in FP8 one pass adds all terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jaxglue.ops import names
from jaxglue.ops.backend import Capability, Operation, form
from jaxglue.ops.collectives import axis_size, reduce_from
from jaxglue.ops.projection.call import (
    EXPANDED_WEIGHTS,
    Conditions,
    LowRankAdapter,
    Projection,
    ProjectionCall,
    StaticConditions,
    check_adapters,
    check_frozen_fp8,
    check_unserved,
)
from jaxglue.ops.projection.dora import magnitude_gain
from jaxglue.ops.projection.few_rows import FewRowsCall, load_few_rows, project_few_rows
from jaxglue.ops.projection.fp8 import project_fp8
from jaxglue.ops.projection.fp8_adapters import FP8Rows, add_adapted_fp8, project_adapted_fp8
from jaxglue.ops.projection.lora import (
    LORA,
    LoraCall,
    lora_add,
    lora_expand,
    lora_shrink,
    lora_straight_through,
    lora_sums,
    shrink,
)
from jaxglue.ops.projection.ordered import adapted_products, ordered_product, ordered_products
from jaxglue.ops.projection.served import multiply_merged
from jaxglue.ops.quant import project_quantized
from jaxglue.ops.quant.formats import is_quantized
from jaxglue.ops.quant.fp8 import FP8Weight

__all__ = [
    "PROJECTION",
    "RESIDUAL_SUM",
    "Conditions",
    "LowRankAdapter",
    "Projection",
    "ProjectionCall",
    "ResidualSumCall",
    "StaticConditions",
    "adapted_projection",
    "add_to_stream",
    "base_products",
    "check_adapters",
    "check_frozen_fp8",
    "multiply",
    "project",
    "project_in_order",
    "projections_read_fp8",
    "ranks_of",
    "shared_down",
    "used_ranks",
]


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
    if (kernels := load_few_rows(FewRowsCall.of(x, projections, conditions))) is not None:
        return project_few_rows(kernels, x, projections, conditions, stream)
    if ranks_of(projections, conditions) is not None and StaticConditions.of(conditions).by_ranks:
        return _apply_by_ranks(x, projections, conditions, stream)
    if any(projection.is_served for projection in projections):
        return _apply_served(x, projections, conditions, stream)
    call = ProjectionCall.of(projections, conditions, onto_stream=stream is not None)
    apply = PROJECTION.load(call) or _apply_separately
    return apply(x, projections, conditions, stream)


def projections_read_fp8(projections: Sequence[Projection], conditions: Conditions | StaticConditions) -> bool:
    """Return whether the projections read e4m3 values of their input alone, so a norm need write nothing else."""
    return PROJECTION.load(ProjectionCall.of(projections, conditions)) is _apply_in_fp8


def ranks_of(projections: Sequence[Projection], conditions: Conditions) -> Bool[Array, "*tokens R"] | None:
    """Return which ranks of the projections' adapters each token uses; None where all use all, or there are none."""
    adapted = any(projection.adapter is not None for projection in projections)
    return getattr(conditions, "ranks", None) if adapted else None


def _check_fp8(capability: Capability | None, call: ProjectionCall) -> None:
    check_frozen_fp8(call.projections, call.conditions)
    if call.onto_stream and call.projections[0].bias is not None:
        raise NotImplementedError("a bias is added beside the product")


def _apply_in_fp8(x, projections: Sequence[Projection], conditions, stream) -> list[Array]:
    weights, down = [projection.weight for projection in projections], shared_down(projections)
    ups = [projection.adapter.up for projection in projections if projection.adapter is not None]
    if stream is not None:
        return [add_adapted_fp8(stream, x, weights[0], down, ups[0])]
    return _add_biases(projections, project_adapted_fp8(x, weights, down, ups))


PROJECTION = Operation(
    name="projection",
    backends={
        "fp8": form(
            _check_fp8,
            _apply_in_fp8,
            "scales are applied where adapters' products are added",
            reads={
                ProjectionCall: ("projections", "conditions", "onto_stream"),
                StaticConditions: ("dropout", "fp8", "inference"),
                Projection: ("weight", "bias", "adapter"),
                LowRankAdapter: ("A", "B", "scale", "dropout", "salt"),
                FP8Weight: ("values", "scales", "dtype"),
            },
        )
    },
)
"""Forms of `adapted_projection`."""


def shared_down(projections: Sequence[Projection]) -> Float[Array, "ranks in"]:
    """Return the adapters' first matrices, one below the other."""
    return jnp.concatenate([projection.adapter.A for projection in projections if projection.adapter is not None])


def _apply_separately(x, projections: Sequence[Projection], conditions, stream) -> list[Array]:
    """Compute products in each weight's format, and add those of adapters."""
    assert not isinstance(x, FP8Rows)
    if (products := project_in_order(x, projections, conditions, stream)) is not None:
        return products
    products, low_rank = base_products(x, projections, conditions)
    if stream is not None:
        return [add_to_stream(stream, projections[0], products[0], low_rank, conditions)]
    if low_rank is not None and _added_at_once(projections, conditions):
        return _add_biases(projections, _add_at_once_in_order(projections, products, low_rank))
    return _add_adapters(projections, products, low_rank)


def project_in_order(
    x: Float[Array, "*B in"],
    projections: Sequence[Projection],
    conditions: Conditions,
    stream: Float[Array, "*B out"] | None = None,
    *,
    activation: str | None = None,
    part: int | None = None,
) -> list[Float[Array, "*B out"]] | None:
    """Apply projections with their adapters in one launch, with training's bits; None where no kernel does.

    Args:
        x, projections, conditions, stream: see `adapted_projection`.
        activation, part: see `adapted_products`.
    """
    if not _added_at_once(projections, conditions):
        return None
    if stream is not None and RESIDUAL_SUM.load(ResidualSumCall(projection=projections[0])) is not _add_at_once:
        return None
    adapters = [projection.adapter for projection in projections if projection.adapter is not None]
    if LORA.load(LoraCall(dtype=x.dtype, rank=len(adapters[0].A))) is None:
        return None  # training's products with second matrices are XLA's
    products = adapted_products(
        x,
        [projection.weight for projection in projections],
        [adapter.A for adapter in adapters],
        [adapter.B for adapter in adapters],
        [adapter.scale for adapter in adapters],
        used=ranks_of(projections, conditions),
        stream=stream,
        activation=activation,
        part=part,
    )
    if products is None or stream is not None or activation is not None:  # neither has biases
        return products
    return _add_biases(projections, products)


def _added_at_once(projections: Sequence[Projection], conditions) -> bool:
    """Return whether adapters' products are added in one launch, which takes no gradients, in training's order."""
    adapters = [projection.adapter for projection in projections]
    if not StaticConditions.of(conditions).in_one_order or any(a is None or a.magnitude is not None for a in adapters):
        return False
    return len({adapter.A.shape[0] for adapter in adapters if adapter is not None}) == 1


def _add_at_once_in_order(projections: Sequence[Projection], products, low_rank, stream=None) -> list[Array]:
    adapters = [projection.adapter for projection in projections if projection.adapter is not None]
    matrices, factors = [adapter.B for adapter in adapters], [adapter.scale for adapter in adapters]
    return lora_sums(products, low_rank, matrices, factors, stream)


def _apply_served(x, projections: Sequence[Projection], conditions: Conditions, stream) -> list[Array]:
    """Multiply by weights with their adapters merged, on the grids on which they are served.

    Rounding has no slope, so gradients pass it unchanged: the adapters' are those of a product beside the weight's,
    which is not computed, and the input's are through the rounded weight alone.
    """
    assert not isinstance(x, FP8Rows)
    x, *copies = fan_out(x, 1 + len(projections))
    adapters = {index: p.adapter for index, p in enumerate(projections) if p.is_served and p.adapter is not None}
    gains = {index: _gain(projections[index], adapter, x.dtype) for index, adapter in adapters.items()}
    products = [
        multiply_merged(copy, p.weight, adapters[index], jax.lax.stop_gradient(gains[index]))
        if index in adapters
        else multiply(copy, [p], conditions)[0]
        for index, (p, copy) in enumerate(zip(projections, copies, strict=True))
    ]
    low_rank = _shrink(jax.lax.stop_gradient(x), list(adapters.values()), conditions)
    if low_rank is not None:
        ups = [_scaled_rows(adapter.up, jax.lax.stop_gradient(gains[index])) for index, adapter in adapters.items()]
        through = lora_straight_through([products[index] for index in adapters], low_rank, ups)
        for (index, gain), product in zip(gains.items(), through, strict=True):
            # One in value, and the magnitude's gradient is that of a factor of the product's columns.
            one = None if gain is None else (gain / jax.lax.stop_gradient(gain)).astype(x.dtype)
            products[index] = product if one is None else product * one
    products = _add_biases(projections, products)
    return products if stream is None else [stream + reduce_from(products[0])]


def _apply_by_ranks(x, projections: Sequence[Projection], conditions, stream) -> list[Array]:
    """Apply the weights alone, and add the products of each token's own ranks; there are no gradients."""
    assert not isinstance(x, FP8Rows)
    products = adapted_projection(x, [replace(projection, adapter=None) for projection in projections], conditions)
    adapters = {index: p.adapter for index, p in enumerate(projections) if p.adapter is not None}
    low_rank = shrink(x, jnp.concatenate([adapter.A for adapter in adapters.values()]))
    low_rank = used_ranks(low_rank, conditions, len(adapters)).reshape(*x.shape[:-1], len(adapters), -1)
    for row, (index, adapter) in enumerate(adapters.items()):
        expanded = project(low_rank[..., row, :], adapter.up, jnp.float32)
        products[index] = (products[index] + expanded).astype(x.dtype)
    return products if stream is None else [stream + reduce_from(products[0])]


def base_products(x, projections: Sequence[Projection], conditions: Conditions) -> tuple[list[Array], Array | None]:
    """Return the products with the weights alone, and the input at the ranks of all adapters, None without any."""
    if StaticConditions.of(conditions).in_one_order:
        return _products_in_one_order(x, projections, conditions)
    in_fp8 = conditions.fp8 and all(projection.is_for_fp8 for projection in projections)
    groups = [projections] if in_fp8 else [[projection] for projection in projections]  # FP8 weights quantize x once
    x, *copies = fan_out(x, 1 + len(groups))
    products = [y for group, copy in zip(groups, copies, strict=True) for y in multiply(copy, group, conditions)]
    adapters = [projection.adapter for projection in projections if projection.adapter is not None]
    low_rank = _shrink(x, adapters, conditions)
    return products, None if low_rank is None else used_ranks(low_rank, conditions, len(adapters))


def _products_in_one_order(x, projections: Sequence[Projection], conditions) -> tuple[list[Array], Array | None]:
    """Do as `base_products` in one launch, with adapters' first matrices as one more weight."""
    adapters = [projection.adapter for projection in projections if projection.adapter is not None]
    weights = [projection.weight for projection in projections]
    if not adapters:
        return ordered_products(x, weights), None
    *products, low_rank = ordered_products(x, weights, joined=[adapter.A for adapter in adapters])
    return products, used_ranks(low_rank, conditions, len(adapters))


def used_ranks(low_rank: Float[Array, "*B ranks"], conditions: Conditions, adapters: int = 1) -> Array:
    """Return the input at the ranks of so many adapters, with zeros for those that a token does not use."""
    if (ranks := getattr(conditions, "ranks", None)) is None:
        return low_rank
    of_each = low_rank.reshape(*low_rank.shape[:-1], adapters, -1)
    return jnp.where(ranks[..., None, :], of_each, 0).reshape(low_rank.shape)


def multiply(x: Float[Array, "*B in"], projections: Sequence[Projection], conditions: Conditions) -> list[Array]:
    """Compute x·Wᵀ of weights for FP8 together, or of a single one in another format."""
    weights = [projection.weight for projection in projections]
    static = StaticConditions.of(conditions)
    if static.in_one_order:
        return ordered_products(x, weights)
    if static.exact:
        return [ordered_product(x, weight.astype(x.dtype)) for weight in weights]
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


def _shrink(x, adapters: Sequence[LowRankAdapter], conditions: Conditions) -> Float[Array, "*B ranks"] | None:
    """Compute dropout(x)·Aᵀ of every adapter, concatenated along the last axis."""
    if not adapters:
        return None
    if conditions.dropout_key is None or not any(adapter.dropout for adapter in adapters):
        exact = StaticConditions.of(conditions).exact
        low_rank = lora_shrink(x, jnp.concatenate([adapter.A for adapter in adapters]), exact)
    else:
        parts = [lora_shrink(adapter.drop(x, conditions.dropout_key), adapter.A) for adapter in adapters]
        low_rank = jnp.concatenate(parts, axis=-1)
    return checkpoint_name(low_rank, names.LOW_RANK)


def _add_adapters(projections: Sequence[Projection], products: list[Array], low_rank: Array | None) -> list[Array]:
    adapters = {index: p.adapter for index, p in enumerate(projections) if p.adapter is not None}
    if low_rank is not None:
        ups = [adapter.up for adapter in adapters.values()]
        for (index, adapter), expanded in zip(adapters.items(), lora_expand(low_rank, ups), strict=True):
            total = products[index] + expanded
            if (gain := _gain(projections[index], adapter, total.dtype)) is not None:
                total = (total * gain).astype(total.dtype)
            products[index] = total
    return _add_biases(projections, products)


def _gain(projection: Projection, adapter: LowRankAdapter, dtype) -> Array | None:
    """Return the factor of each row of a weight with its adapter; None without a magnitude."""
    if adapter.magnitude is None:
        return None
    exact = jnp.float32 if projection.is_served else dtype  # an export finds the same levels
    return magnitude_gain(projection.weight, adapter.A, adapter.up, adapter.magnitude, dtype=exact)


def _scaled_rows(matrix: Float[Array, "out R"], gain: Float[Array, " out"] | None) -> Float[Array, "out R"]:
    return matrix if gain is None else gain[:, None] * matrix


def _add_biases(projections: Sequence[Projection], outputs: list[Array]) -> list[Array]:
    biases = [projection.bias for projection in projections]
    return [y if bias is None else y + bias.astype(y.dtype) for y, bias in zip(outputs, biases, strict=True)]


def add_to_stream(
    stream: Float[Array, "*B out"],
    projection: Projection,
    product: Float[Array, "*B out"],
    low_rank: Float[Array, "*B R"] | None,
    conditions: Conditions | None = None,
) -> Float[Array, "*B out"]:
    """Return the residual stream plus the product with a projection's weight, its adapter's product, and its bias.

    Args:
        stream: the residual stream.
        projection: of the product.
        product: the product with the weight alone.
        low_rank: the input at the adapter's ranks; None without an adapter.
        conditions: of the layer; None where gradients may be taken.
    """
    add = RESIDUAL_SUM.load(ResidualSumCall(projection=projection)) or _add_separately
    if add is _add_at_once and conditions is not None and _added_at_once([projection], conditions):
        return _add_at_once_in_order([projection], [product], low_rank, stream)[0]
    return add(stream, projection, product, low_rank)


@dataclass(frozen=True, kw_only=True)
class ResidualSumCall:
    """Meaning of a sum onto the residual stream."""

    projection: Projection


def _check_sum(capability: Capability | None, call: ResidualSumCall) -> None:
    projection = call.projection
    check_unserved([projection])
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
            _check_sum,
            _add_at_once,
            "stream, product and adapter's product are added in float32 and rounded once",
            reads={
                ResidualSumCall: ("projection",),
                Projection: ("weight", "adapter"),
                LowRankAdapter: ("A", "B", "scale", "dropout", "salt"),
                **EXPANDED_WEIGHTS,
            },
        )
    },
)
"""Forms of `add_to_stream`."""
