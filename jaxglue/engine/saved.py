"""Values of a layer between its forward and its backward pass, on the device or on the host."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from jaxtyping import Array, Float

from jaxglue.engine import transfer
from jaxglue.engine.host_buffers import Buffers
from jaxglue.engine.layer import LayerFunctions
from jaxglue.engine.policy import RematPolicy
from jaxglue.engine.residuals import Residuals
from jaxglue.models.context import PackedContext
from jaxglue.models.parameters import Params

RESTORED = 3
"""Most inputs computed again at once; those of a longer group are, nearer to its first layer, another time."""


class SavedLayer(NamedTuple):
    """Values of a layer's backward pass."""

    x: Float[Array, "B T D"] | None
    """The layer's input; None where it is dropped."""
    residuals: Residuals


def offload(
    policy: RematPolicy, x: Float[Array, "B T D"], residuals: Residuals, buffers: Buffers | None = None
) -> SavedLayer:
    """Drop a layer's input or start the copies of its values to the host, as its policy has them."""
    layer_input = None if policy.drops_input else x
    if not policy.offloaded:
        return SavedLayer(layer_input, residuals)
    sent = x if policy.offloads_input else None
    sent, offloaded = transfer.to_host((sent, residuals.offloaded), buffers)
    return SavedLayer(layer_input if sent is None else sent, residuals.with_offloaded(offloaded))


def check_dropped_inputs(policies: Sequence[RematPolicy]) -> None:
    """Raise ValueError where a dropped input cannot be computed again, the first layer's."""
    if policies and policies[0].drops_input:
        raise ValueError("remat drops the first layer's input, before which there is none to compute it from: keep it")


def restored_inputs(first: int, last: int) -> range:
    """Return the layers whose inputs are kept when those from `first` on run again for the input of `last`."""
    return range(max(first, last - RESTORED) + 1, last + 1)


def keeps_values(layer: int, first: int, last: int) -> bool:
    """Return whether a layer's attention is kept when it runs again: not where it runs once more."""
    return last - first <= RESTORED or layer in restored_inputs(first, last)


def restore_inputs(
    saved: list[SavedLayer], *, layers: Sequence[tuple[LayerFunctions, Params, Params, PackedContext]], depth: int
) -> None:
    """Compute the last layer's dropped input, and some on the way to it, from the last input kept.

    Args:
        saved: layers from the first on; inputs, and attention's values of policies that drop them, are set in place.
        layers: functions, trainable and frozen parameters, and context of every layer.
        depth: layers by which copies from the host are requested ahead.
    """
    last = len(saved) - 1
    first = max(i for i, layer in enumerate(saved) if layer.x is not None)
    indices, inputs = range(first, last), restored_inputs(first, last)
    loads = (partial(transfer.request, (layers[i][1:3], saved[i].residuals.attention_out)) for i in indices)
    x, running = transfer.to_device(saved[first].x), transfer.RunAhead(transfer.RUN_AHEAD if depth else 0)
    fetched = map(transfer.received, transfer.prefetch(loads, depth))
    for i, (weights, attention_out) in zip(indices, fetched, strict=True):
        functions, _, _, context = layers[i]
        if functions.policy.drops_attention and keeps_values(i, first, last):
            x, residuals = functions.restore(*weights, x, context)
            saved[i] = saved[i]._replace(residuals=residuals)
        else:
            x = functions.replay(attention_out, *weights, x, context)
        if i + 1 in inputs:
            saved[i + 1] = saved[i + 1]._replace(x=x)
        running.add(x)
        del weights, attention_out
