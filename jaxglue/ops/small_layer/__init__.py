"""Decoder layers of small models: adapters' ranks are further columns of matmuls, and a third of the kernels run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import Array, Float

from jaxglue.ops.backend import HOPPER, Backend, Capability, Operation, check_triton_rank
from jaxglue.ops.collectives import axis_size
from jaxglue.ops.projection import LowRankAdapter, Projection, StaticConditions, check_adapters
from jaxglue.ops.rope import TABLES_READ
from jaxglue.ops.small_layer.layer import FrozenWeights, LayerNorms, LayerSpec, fused_layer

if TYPE_CHECKING:
    from jaxglue.ops.small_layer.triton import TritonSmallLayer

__all__ = ["SMALL_LAYER", "LayerNorms", "LayerSpec", "SmallLayerCall", "is_small", "small_layer"]

_LARGEST = 2**25
"""Bytes of weights that are copied together for one matmul; measured at 12.6 MB."""
_MOST_ROWS = 2**16
"""Tokens up to which further columns of values stay small beside the model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SmallLayerCall:
    """Meaning of a whole layer."""

    x: Float[Array, "B T D"]
    spec: LayerSpec
    projections: Sequence[Projection]
    """To queries, keys and values, of attention's output, gate, up and down."""
    conditions: StaticConditions


def _check(capability: Capability | None, call: SmallLayerCall) -> None:
    x, projections = call.x, call.projections
    check_adapters(projections, call.conditions)
    for projection in projections:
        if projection.bias is not None:
            raise NotImplementedError("a projection has a bias")
        if projection.trains_in_fp8 or not isinstance(projection.weight, jax.Array):
            raise NotImplementedError("weights are quantized")
    if not is_small(x, [projection.weight for projection in projections[4:6]]):
        raise NotImplementedError(f"at most {_MOST_ROWS:,} tokens, and {_LARGEST:,} bytes of weights of one input")
    ranks = {len(projection.adapter.A) for projection in projections if projection.adapter is not None}
    if len(ranks) > 1:
        raise NotImplementedError(f"adapters must have one rank, got {', '.join(map(str, sorted(ranks)))}")
    if axis_size("tensor", "context") > 1:
        raise NotImplementedError("devices along tensor split its matrices, or those along context its rows")
    check_triton_rank(capability, x.dtype, min(ranks), largest=32)


def _load(capability: Capability, call: SmallLayerCall) -> "TritonSmallLayer":
    from jaxglue.ops.small_layer.triton import TritonSmallLayer, shallow_tiles

    roomy = HOPPER <= capability < (12, 0)
    return TritonSmallLayer.of(capability, **({} if roomy else shallow_tiles(TritonSmallLayer)))


SMALL_LAYER = Operation(
    name="small layer",
    backends={
        "triton": Backend(
            check=_check,
            load=_load,
            advantage="22 kernels instead of 64",
            reads={
                SmallLayerCall: ("x", "spec", "projections", "conditions"),
                LayerSpec: ("rotary", "eps", "window"),
                **TABLES_READ,
                StaticConditions: ("dropout", "fp8"),
                Projection: ("weight", "adapter"),
                LowRankAdapter: ("A", "B", "scale", "dropout", "salt"),
            },
        )
    },
)
"""Backends of `small_layer`; the reference is separate operations."""


def small_layer(
    spec: LayerSpec, x: Float[Array, "B T D"], norms: LayerNorms, projections: Sequence[Projection], context: Any
) -> Float[Array, "B T D"] | None:
    """Return the output of a layer with adapters on all linear layers; None where separate operations serve better.

    Only x and the adapters get gradients; see `fused_layer`.

    Args:
        spec: of the layer.
        x: the residual stream.
        norms: the layer's.
        projections: to queries, keys and values, of attention's output, gate, up and down.
        context: a dataclass, `fused_layer`'s context with the conditions of adapters' dropout.
    """
    call = SmallLayerCall(x=x, spec=spec, projections=projections, conditions=StaticConditions.of(context))
    kernels = SMALL_LAYER.load(call)
    if kernels is None:
        return None
    adapters = tuple((p.adapter.A, p.adapter.up) for p in projections if p.adapter is not None)
    weights = FrozenWeights(norms, tuple(projection.weight for projection in projections))
    # What the layer does not read would be an argument of its differentiation rule, and keys have no gradients.
    return fused_layer(kernels, spec, x, weights, adapters, replace(context, dropout_key=None, router_losses=None))


def is_small(x: Float[Array, "*B D"], weights: Sequence[Array]) -> bool:
    """Return whether weights of one input are small enough to be copied together in every step, and its rows few."""
    rows = x.size // x.shape[-1]
    return rows <= _MOST_ROWS and sum(weight.size * weight.dtype.itemsize for weight in weights) <= _LARGEST
