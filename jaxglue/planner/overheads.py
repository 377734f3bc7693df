"""Host time of a step and of the first one: dispatch, compilation, pinning of host memory."""

from collections.abc import Sequence

from jaxglue.engine.policy import RematPolicy
from jaxglue.models.config import DecoderConfig
from jaxglue.planner.gpus import GIB
from jaxglue.planner.traced import LayerCost

_DISPATCH, _OFFLOAD_DISPATCH = 0.45e-3, 0.15e-3
"""Host seconds to dispatch a layer's pass, and the copies of its values."""
_SERIAL = 0.1
"""Share of the shorter one of GPU's and host's time that is not hidden under the longer one."""
_COMPILE_ENDS, _COMPILE_LAYER, _COMPILE_EXPERTS = 5.0, 3.5, 7.0
"""Seconds to compile embedding and head, and the passes of a layer and of one with experts, with autotuning."""
_PINNING = 1.0 * GIB
"""Bytes of host memory pinned in a second."""


def with_dispatch(gpu_seconds: float, costs: Sequence[LayerCost]) -> float:
    """Return the time of a micro-batch whose kernels and copies take `gpu_seconds`."""
    host_seconds = sum(2 * (_DISPATCH + (_OFFLOAD_DISPATCH if cost.offloaded else 0)) for cost in costs)
    return max(gpu_seconds, host_seconds) + _SERIAL * min(gpu_seconds, host_seconds)


def compile_seconds(config: DecoderConfig, policies: Sequence[RematPolicy], pinned: int) -> float:
    """Predict how much longer the first step takes than others, with nothing compiled before.

    Args:
        config: of the model.
        policies: one for each layer; equal layers under equal policies share programs.
        pinned: bytes of values copied to host memory.
    """
    programs = len(set(zip(config.first_of_kind, policies, strict=True)))
    return _COMPILE_ENDS + (_COMPILE_LAYER if config.moe is None else _COMPILE_EXPERTS) * programs + pinned / _PINNING
