"""Time of single kernels: their work at the GPU's rates, and what short ones take beyond it."""

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.planner.gpus import Gpu

_GAP, _SHORTEST = 0.3e-6, 0.8e-6
"""Seconds between kernels, and of the shortest one."""
_MATMUL_START, _UNHEATED = 3.3e-6, 0.8
"""Seconds in which a matmul starts and ends, and the share of its time that the rest takes where it is short: rates are
those of long ones, whose power lowers the clock."""
_TURN = 1.1e-6
"""Seconds of a turn of a kernel's loop."""
_CODES_RATE = 0.83e12
"""8-bit codes that XLA converts in a second on 132 multiprocessors, where memory is not slower."""
_SHARE = 0.92
"""Share of the memory's rate at which our kernels, and matmuls bound by it, move their bytes; XLA's own do at all of it
(benchmarks/results/sft_step.json)."""
_KIND_SHARES = {KernelKind.ADAPTER_GRADIENTS: 0.73}
"""The same by kind: that of adapters' gradients keeps sums of all ranks (benchmarks/results/sft_step.json)."""
_FP8_SHARE = 0.55
"""The same of kernels that read or write FP8 codes."""
_MOST_MOVED = {KernelKind.MXFP4: 3.4e12, KernelKind.EXPERTS_MATMUL: 3.8e12}
"""Bytes that kernels move in a second on 132 multiprocessors, where memory is not slower."""
_EXPERTS_SHARE = 0.9
"""Share of the matmul rate at which experts' matmuls run."""


def with_gap(seconds: float) -> float:
    """Return the time from a kernel's start to the next one's."""
    return max(seconds, _SHORTEST) + _GAP


def matmul_seconds(flops: float, moved: int, gpu: Gpu) -> float:
    """Return the time of a matmul.

    Args:
        flops: seconds at the rate of long ones.
        moved: bytes read and written.
        gpu: that runs it.
    """
    seconds = _together(flops, moved / (_SHARE * gpu.copy))
    return max(seconds, _MATMUL_START + _UNHEATED * seconds)


def conversion_seconds(codes: int) -> float:
    """Return the time of converting 8-bit codes."""
    return codes / _CODES_RATE


def fused_seconds(moved: int, gpu: Gpu) -> float:
    """Return the time of a kernel of XLA's without matmuls."""
    return moved / gpu.copy


def transposed_seconds(size: int, gpu: Gpu) -> float:
    """Return the time of transposing FP8 codes of so many bytes."""
    return 2 * size / (_FP8_SHARE * gpu.copy)


def kernel_seconds(cost: KernelCost, *, flops: int, moved: int, codes: bool, gpu: Gpu) -> float:
    """Return the time of a Triton kernel.

    Args:
        cost: as its launch states it.
        flops: of its matmuls, for the rows that are planned.
        moved: bytes read and written, likewise.
        codes: some are of FP8.
        gpu: that runs it.
    """
    multiplied = flops / (gpu.matmul * (gpu.fp8_gain if cost.fp8 else 1))
    copied = moved / (gpu.copy * (_FP8_SHARE if codes else _KIND_SHARES.get(cost.kind, _SHARE)))
    if cost.kind in _MOST_MOVED:
        copied = moved / min(gpu.copy, _MOST_MOVED[cost.kind])
    if cost.kind == KernelKind.EXPERTS_MATMUL:
        return _together(multiplied / _EXPERTS_SHARE, copied)
    return max(multiplied, copied, _TURN * cost.turns)


def _together(*seconds: float) -> float:
    """Return the time of multiplying and of moving operands, which hide each other where one is short."""
    return sum(each**3 for each in seconds) ** (1 / 3)
