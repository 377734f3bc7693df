"""Host time of a step and of the first one: dispatch, compilation, pinning of host memory."""

from collections.abc import Sequence

from jaxglue.engine.policy import RematPolicy
from jaxglue.models.config import DecoderConfig
from jaxglue.planner.gpus import GIB
from jaxglue.planner.traced import LayerCost

_DISPATCH, _OFFLOAD_DISPATCH = 0.45e-3, 0.15e-3
"""Host seconds to dispatch a layer's pass, and the copies of its values."""
_QUANTIZED_DISPATCH = 0.5e-3
"""Host seconds to pass a layer's quantized matrices, each of several arrays, to a program."""
_GROUPED_DISPATCH = 0.28e-3
"""Host seconds to dispatch a layer's pass in a program with others."""
_SHORT_PASS = 1.2e-3
"""GPU seconds of a layer's pass, of which the host hardly dispatches one in this time."""
_LARGEST_GROUP = 14
"""Most layers in a program: more compile longer and save little."""
_SERIAL, _GROUPED_SERIAL = 0.1, 0.5
"""Shares of the shorter one of GPU's and host's time that are not hidden under the longer one; the latter's where
programs have several layers, as one starts once the host has passed all their parameters."""
_COMPILE_ENDS, _COMPILE_LAYER, _COMPILE_EXPERTS = 5.0, 3.5, 7.0
"""Seconds to compile embedding and head, and the passes of a layer and of one with experts, with autotuning."""
_COMPILE_GROUPED = 0.15
"""Seconds to compile each further layer of a program."""
_PINNING = 4.0 * GIB
"""Bytes of host memory pinned in a second; a quarter where a virtual machine's memory grows as it is touched."""


def choose_group(costs: Sequence[LayerCost]) -> int:
    """Return the layers to dispatch as one program: one, unless their passes are short."""
    layers = len(costs)
    if sum(cost.forward.seconds + cost.backward.seconds for cost in costs) > 2 * layers * _SHORT_PASS:
        return 1
    even = [size for size in range(1, _LARGEST_GROUP + 1) if layers % size == 0]
    return even[-1] if even[-1] > _LARGEST_GROUP // 2 else min(layers, _LARGEST_GROUP)


def with_dispatch(
    gpu_seconds: float,
    costs: Sequence[LayerCost],
    layers_per_program: int = 1,
    passes: int = 2,
    *,
    quantized: bool = False,
) -> float:
    """Return the time of a micro-batch whose kernels and copies take `gpu_seconds`; layers are run `passes` times."""
    dispatch, serial = (_DISPATCH, _SERIAL) if layers_per_program == 1 else (_GROUPED_DISPATCH, _GROUPED_SERIAL)
    dispatch += _QUANTIZED_DISPATCH if quantized and layers_per_program == 1 else 0
    host_seconds = sum(passes * dispatch + (2 * _OFFLOAD_DISPATCH if cost.offloaded else 0) for cost in costs)
    return max(gpu_seconds, host_seconds) + serial * min(gpu_seconds, host_seconds)


def compile_seconds(
    config: DecoderConfig, policies: Sequence[RematPolicy], pinned: int, layers_per_program: int = 1
) -> float:
    """Predict how much longer the first step takes than others, with nothing compiled before.

    Args:
        config: of the model.
        policies: one for each layer; equal layers under equal policies share programs.
        pinned: bytes of values copied to host memory.
        layers_per_program: consecutive layers dispatched as one program.
    """
    programs = len(set(zip(config.first_of_kind, policies, strict=True)))
    layer = (_COMPILE_LAYER if config.moe is None else _COMPILE_EXPERTS) + _COMPILE_GROUPED * (layers_per_program - 1)
    return _COMPILE_ENDS + layer * programs + pinned / _PINNING
