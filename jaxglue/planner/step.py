"""Time of a step: kernels on the GPU, copies on the link, and the host that dispatches them and compiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from jaxglue.engine.policy import RematPolicy
from jaxglue.engine.saved import keeps_values, restored_inputs
from jaxglue.engine.transfer import requested_ahead, weights_prefetch_depth
from jaxglue.models.config import DecoderConfig
from jaxglue.ops.names import ATTENTION_OUT
from jaxglue.planner import calibration as fitted
from jaxglue.planner.gpus import Dispatch
from jaxglue.planner.layer_costs import LayerCost, TracedModel


class Work(NamedTuple):
    """Kernels and copies of one layer's forward or backward pass, seconds."""

    kernels: float
    arriving: float = 0.0
    """Copy from the host that must end before the kernels start."""
    leaving: float = 0.0
    """Copy to the host that starts when the kernels end."""
    weights: float = 0.0
    """Copy of streamed weights that must end before the kernels start."""

    def and_before(self, work: "Work") -> "Work":
        """Return this work with other kernels and copies before it."""
        return self._replace(kernels=self.kernels + work.kernels, arriving=self.arriving + work.arriving)


def simulate(layers: Sequence[Work], *, depth: int, run_ahead: int, weights_depth: int = 0) -> float:
    """Return the seconds from the first layer's start to the last one's end; copies of one direction are serial.

    Args:
        layers: in the order in which they run.
        depth: a layer's copy from the host is requested when the layer `depth` earlier starts.
        run_ahead: a layer is dispatched when the layer `run_ahead` + 1 earlier has been copied to the host.
        weights_depth: as `depth`, of streamed weights: counts only layers that have some.
    """
    now = left = arrived = 0.0
    departures: list[float] = []
    weights, values = [layer.weights for layer in layers], [layer.arriving for layer in layers]
    ahead = requested_ahead(tuple(copy > 0 for copy in weights), weights_depth)
    queues = [(weights, ahead), (values, requested_ahead((True,) * len(layers), depth))]
    arriving = [(copies, ends, list[float]()) for copies, ends in queues if any(copies)]
    for index, layer in enumerate(layers):
        asked = start = now
        for copies, ends, done in arriving:
            for copy in copies[len(done) : ends[index]]:
                arrived = max(arrived, asked) + copy if copy else arrived
                done.append(arrived if copy else 0.0)
            start = max(start, done[index])
        if index > run_ahead:
            start = max(start, departures[index - run_ahead - 1])
        now = start + layer.kernels
        left = max(left, now) + layer.leaving
        departures.append(left)
    return now


class Restoration(NamedTuple):
    """Layers that run again before the backward pass of the one after them."""

    layers: range
    inputs: range
    """Layers whose inputs are kept."""
    values: frozenset[int]
    """Layers whose attention is kept where their policies drop it."""


def restorations(policies: Sequence[RematPolicy], depth: int) -> list[Restoration]:
    """Return the runs that restore dropped inputs, in the order of the backward pass.

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


def replayed_bytes(
    policies: Sequence[RematPolicy], depth: int, model: TracedModel, streamed: Sequence[int]
) -> list[int]:
    """Return the bytes that running layers again takes before each layer's backward pass.

    Their weights and attention's output come from the host `depth` layers ahead, once more beside those of the backward
    pass.
    """
    taken = [0] * len(policies)
    for restoration in restorations(policies, depth):
        arriving = [
            streamed[index] + (model.attention_bytes if ATTENTION_OUT in policies[index].offloaded else 0)
            for index in restoration.layers
        ]
        buffers = max((sum(arriving[i : i + depth + 1]) for i in range(len(arriving))), default=0)
        programs = [model.replay(index, policies[index]) for index in restoration.layers]
        taken[restoration.layers.stop] = buffers + max((max(p.temporary, p.matmul) for p in programs), default=0)
    return taken


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """Policies and weights' places of all layers."""

    policies: tuple[RematPolicy, ...]
    weights: tuple[str, ...]
    costs: list[LayerCost]
    """Cost of each layer under its policy."""
    streamed: list[int]
    """Bytes of each layer's frozen weights in host memory or files."""
    mapped: list[int]
    """Bytes of those in files."""
    depth: int
    """Layers by which copies from the host are ahead."""

    @property
    def offloaded(self) -> int:
        """Return the bytes of values in host memory."""
        return sum(cost.offloaded for cost in self.costs[: -1 - self.depth])

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of host memory for layers' weights: of those from files only the ones on their way."""
        mapped = sum(self.mapped)
        ahead = weights_prefetch_depth(self.depth) + 1
        return sum(self.streamed) - mapped + min(max(self.mapped) * ahead, mapped)


_GRADIENT, _UPDATE = 3, 6
"""Arrays that the host hands over for each trainable one: the parameter, the last and the next gradient; or the
parameter and two moments, taken and returned."""
_LARGEST_PROGRAM, _LARGEST_GROUP = 36, 14
"""Most layers in a micro-batch's only program, and in one of several: more compile longer."""


def choose_group(costs: Sequence[LayerCost], *, one_program: bool) -> int:
    """Return the layers to dispatch as one program: one, unless their passes are short.

    Args:
        costs: of all layers.
        one_program: a program of all layers can have embedding and head too, and is a micro-batch's only one.
    """
    layers = len(costs)
    if sum(cost.forward.seconds + cost.backward.seconds for cost in costs) > 2 * layers * fitted.SHORT_PASS:
        return 1
    if one_program and layers <= _LARGEST_PROGRAM:
        return layers
    even = [size for size in range(1, _LARGEST_GROUP + 1) if layers % size == 0]
    return even[-1] if even[-1] > _LARGEST_GROUP // 2 else min(layers, _LARGEST_GROUP)


class LayerArrays(NamedTuple):
    """Arrays of a layer that the host handles one by one."""

    trainable: int
    frozen: int
    offloaded: int = 0
    """Values copied to the host and back."""
    streamed: bool = False
    """The frozen ones are copied to the GPU for every pass."""
    kernels: int = 0
    """Kernels of both passes."""


class MicroBatch(NamedTuple):
    """Work of a micro-batch, of the GPU in seconds and of the host in units of its rates (`Dispatch`)."""

    gpu_seconds: float
    calls: float
    arrays: float
    copies: float
    overlap: float
    """Exponent with which both times make the micro-batch's."""

    def seconds(self, host: Dispatch) -> float:
        """Return the time with this host."""
        dispatch = self.calls * host.call + self.arrays * host.array + self.copies * host.copy
        return (self.gpu_seconds**self.overlap + dispatch**self.overlap) ** (1 / self.overlap)


def micro_batch(
    gpu_seconds: float,
    layers: Sequence[LayerArrays],
    layers_per_program: int = 1,
    passes: int = 2,
    *,
    one_program: bool = False,
    updates: bool = False,
) -> MicroBatch:
    """Return the work of a micro-batch whose kernels and copies take `gpu_seconds`.

    Args:
        gpu_seconds: of kernels and copies.
        layers: arrays of each.
        layers_per_program: consecutive layers dispatched as one program.
        passes: runs of each layer.
        one_program: embedding, layers and head are one program.
        updates: this program updates the parameters, too.
    """
    if one_program:
        trainable = (_UPDATE if updates else _GRADIENT) * sum(layer.trainable for layer in layers)
        arrays = fitted.WHOLE_TRAINABLE * trainable + fitted.WHOLE_FROZEN * sum(layer.frozen for layer in layers)
        return MicroBatch(gpu_seconds, fitted.WHOLE, arrays, 0, fitted.WHOLE_OVERLAP)
    kernels = sum(layer.kernels for layer in layers)
    arrays = fitted.LAYER_ARRAY * sum(_handled(layer, passes) for layer in layers)
    if layers_per_program > 1:
        return MicroBatch(gpu_seconds, fitted.ENDS + fitted.GROUPED_KERNEL * kernels, arrays, 0, fitted.GROUPED_OVERLAP)
    streamed = [layer.frozen for layer in layers if layer.streamed]
    calls = fitted.PASS * len(layers) + fitted.STREAMED_LAYER * len(streamed)
    calls = fitted.ENDS + passes * calls + fitted.KERNEL * kernels
    offloaded = sum(layer.offloaded for layer in layers)
    copies = 2 * fitted.OFFLOADED_VALUE * offloaded + passes * fitted.STREAMED_ARRAY * sum(streamed)
    return MicroBatch(gpu_seconds, calls, arrays, copies, fitted.OVERLAP)


def _handled(layer: LayerArrays, passes: int) -> int:
    """Count a layer's arrays each time a program takes or returns them."""
    return passes * (layer.trainable + layer.frozen) + layer.trainable


def compile_seconds(
    config: DecoderConfig, policies: Sequence[RematPolicy], layers_per_program: int = 1, *, one_program: bool = False
) -> float:
    """Predict the time of compiling a step's programs, with none compiled before.

    Args:
        config: of the model.
        policies: one for each layer; equal layers under equal policies share programs.
        layers_per_program: consecutive layers dispatched as one program.
        one_program: embedding, layers and head are one program.
    """
    if one_program:
        return fitted.COMPILE_WHOLE + fitted.COMPILE_IN_WHOLE * len(policies)
    programs = len(set(zip(config.first_of_kind, policies, strict=True)))
    layer: float = fitted.COMPILE_LAYER if config.moe is None else fitted.COMPILE_EXPERTS
    layer += fitted.COMPILE_GROUPED * (layers_per_program - 1)
    return fitted.COMPILE_ENDS + layer * programs


def pinning_seconds(size: int, compiling: float, *, devices: int = 1) -> float:
    """Predict the time by which pinning values' bytes for each of some devices lengthens a start that compiles."""
    return max(devices * size / fitted.PINNING - compiling, 0.0)
