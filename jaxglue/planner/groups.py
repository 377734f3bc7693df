"""Groups of layers of which only the first keeps its input: the others' are computed again."""

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from jaxglue.engine.policy import RematPolicy, parse_policy
from jaxglue.engine.saved import keeps_values, restored_inputs
from jaxglue.planner.candidates import ATTENTION
from jaxglue.planner.schedule import Work
from jaxglue.planner.traced import TracedModel

SIZES = (2, 4, 8)
"""Layers in a group."""


class Restoration(NamedTuple):
    """Layers that run again before the backward pass of the one after them."""

    layers: range
    inputs: range
    """Layers whose inputs are kept."""
    values: frozenset[int]
    """Layers whose attention is kept where their policies drop it."""


def group_policies(layers: int, size: int, *, attention: int = 0, kept_again: bool = True) -> tuple[RematPolicy, ...]:
    """Return policies of layers in groups of one size.

    Args:
        layers: of the model.
        size: of a group.
        attention: layers that keep attention's values; all others compute them again. They are the last of the model,
            whose values stay on the device, and in each group those that run most often.
        kept_again: attention's values are kept when the layer runs again.
    """
    computing = set(_order_to_drop(layers, size)[: layers - attention])

    def policy(index: int) -> RematPolicy:
        of_input = "drop" if index % size else "offload"
        of_attention = "offload" if index not in computing else "drop" if kept_again else ""
        return parse_policy(f"{of_input}:layer_input" + (f"; {of_attention}:{ATTENTION}" if of_attention else ""))

    return tuple(map(policy, range(layers)))


def _order_to_drop(layers: int, size: int) -> list[int]:
    """Return the layers in the order in which they should compute attention again, evenly over the groups.

    The last but one of a group is first: it runs again once, and keeps attention's values as the last one's go.
    """
    places = [*range(size - 2, -1, -1), size - 1]
    order = [first + place for place in places for first in range(0, layers, size) if first + place < layers]
    ends = {layers - 1, layers - 2}
    return [index for index in order if index not in ends] + sorted(ends & set(order))


def restorations(policies: Sequence[RematPolicy], depth: int) -> list[Restoration]:
    """Return what runs again to restore dropped inputs, in the order of the backward pass.

    Args:
        policies: of all layers.
        depth: the inputs of one layer more, the last ones, stay on the device.
    """
    found, last = [], len(policies) - 2 - depth
    while last > 0:
        first = last
        while first > 0 and policies[first].drops_input:
            first -= 1
        while last > first:
            inputs, layers = restored_inputs(first, last), range(first, last)
            values = frozenset(i for i in layers if policies[i].drops_attention and keeps_values(i, first, last))
            found.append(Restoration(layers, inputs, values))
            last = inputs.start - 1
        last = first - 1
    return found


def restored_layers(policies: Sequence[RematPolicy], depth: int) -> frozenset[int]:
    """Return the layers whose attention is kept when they run again."""
    return frozenset[int]().union(*(restoration.values for restoration in restorations(policies, depth)))


def restored_bytes(policies: Sequence[RematPolicy], depth: int, model: TracedModel) -> list[int]:
    """Return for each layer's backward pass the bytes of dropped inputs and values that are on the device."""
    inputs = [0] * len(policies)
    found = restorations(policies, depth)
    for restoration in found:
        for index in restoration.inputs:
            inputs[index] = index - restoration.inputs.start + 1
    ends = range(max(len(policies) - 1 - depth, 0), len(policies))
    for index in ends:
        inputs[index] = sum(policies[end].drops_input for end in ends if end <= index)
    values = [0] * len(policies)
    for restoration in found:
        for index in (restoration.layers.start, *restoration.inputs):
            values[index] += sum(value <= index for value in restoration.values)
    sizes = model.input_bytes, model.attention_bytes
    return [sum(map(mul, counts, sizes)) for counts in zip(inputs, values, strict=True)]


def restore_work(
    restoration: Restoration,
    policies: Sequence[RematPolicy],
    model: TracedModel,
    streamed: Sequence[int],
    *,
    link: float,
) -> Work:
    """Return the work of running layers again.

    Args:
        restoration: the layers.
        policies: of all layers.
        model: gives the costs.
        streamed: bytes of each layer's weights in host memory.
        link: bytes/s from the host.
    """
    layers = restoration.layers
    kernels = sum(model.replay(index, policies[index]).seconds for index in layers)
    attention = sum(model.attention_bytes for index in layers if policies[index].keeps_attention)
    arriving = model.input_bytes + attention + sum(streamed[index] for index in layers)
    return Work(kernels, arriving=arriving / link)
