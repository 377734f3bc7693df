"""Decoder layers of small models: adapters' ranks are further columns of matmuls, and a third of the kernels run."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxtyping import Array, Float

from jaxglue.ops.backend import HOPPER, Backend, Capability, Operation, check_triton_rank
from jaxglue.ops.small_layer.layer import Adapter, Context, LayerSpec, Weights, fused_layer

__all__ = ["SMALL_LAYER", "LayerSpec", "Weights", "is_small", "small_layer"]

_LARGEST = 2**25
"""Bytes of weights that are copied together for one matmul; measured at 12.6 MB."""
_MOST_ROWS = 2**16
"""Tokens up to which further columns of values stay small beside the model."""
_check = partial(check_triton_rank, largest=32)


def _load(capability: Capability, dtype, rank: int) -> Any:
    from jaxglue.ops.small_layer.tiles import shallow_tiles
    from jaxglue.ops.small_layer.triton import TritonSmallLayer

    roomy = HOPPER <= capability < (12, 0)
    return TritonSmallLayer.of(capability, **({} if roomy else shallow_tiles(TritonSmallLayer)))


SMALL_LAYER = Operation(
    name="small layer",
    backends={"triton": Backend(check=_check, load=_load, advantage="22 kernels instead of 64")},
)


def small_layer(
    spec: LayerSpec, x: Float[Array, "B T D"], weights: Weights, adapters: Sequence[Adapter], context: Context
) -> Float[Array, "B T D"] | None:
    """Return the output of a layer with adapters on all linear layers; None where separate operations serve better.

    Only x and the adapters get gradients; see `fused_layer`.
    """
    ranks = {len(down) for down, _ in adapters}
    if len(ranks) > 1 or not is_small(x, weights.linears[4:6]):
        return None
    kernels = SMALL_LAYER.load(x.dtype, min(ranks))
    return None if kernels is None else fused_layer(kernels, spec, x, weights, tuple(adapters), context)


def is_small(x: Float[Array, "*B D"], weights: Sequence[Array]) -> bool:
    """Return whether weights of one input are small enough to be copied together in every step, and its rows few."""
    rows = x.size // x.shape[-1]
    return rows <= _MOST_ROWS and sum(weight.size * weight.dtype.itemsize for weight in weights) <= _LARGEST
