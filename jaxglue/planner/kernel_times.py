"""Times of single kernels on a GPU, from their FLOPs and the bytes that they move."""

from jaxglue.ops.kernel_cost import KernelCost, KernelKind
from jaxglue.planner import calibration as fitted
from jaxglue.planner.gpus import Gpu


def with_gap(seconds: float) -> float:
    """Return the time from a kernel's start to the next one's."""
    return max(seconds, fitted.SHORTEST_KERNEL) + fitted.KERNEL_GAP


def matmul_seconds(flops: float, moved: int, gpu: Gpu) -> float:
    """Return the time of a matmul.

    Args:
        flops: seconds at the rate of long ones.
        moved: bytes read and written.
        gpu: that runs it.
    """
    seconds = _together(flops, moved / (fitted.KERNEL_SHARE * gpu.copy))
    return max(seconds, fitted.MATMUL_START + fitted.UNHEATED * seconds)


def conversion_seconds(codes: int) -> float:
    """Return the time of converting 8-bit codes."""
    return codes / fitted.CODES_RATE


def fused_seconds(moved: int, gpu: Gpu) -> float:
    """Return the time of a kernel of XLA's without matmuls."""
    return moved / gpu.copy


def transposed_seconds(size: int, gpu: Gpu) -> float:
    """Return the time of transposing FP8 codes of so many bytes."""
    return 2 * size / (fitted.FP8_SHARE * gpu.copy)


def kernel_seconds(cost: KernelCost, *, flops: int, moved: int, reads_fp8: bool, gpu: Gpu) -> float:
    """Return the time of a Triton kernel.

    Args:
        cost: as its launch states it.
        flops: of its matmuls, for the rows that are planned.
        moved: bytes read and written, likewise.
        reads_fp8: some are of FP8 values.
        gpu: that runs it.
    """
    multiplied = flops / (gpu.matmul * (gpu.fp8_gain if cost.fp8 else 1))
    share = fitted.FP8_SHARE if reads_fp8 else fitted.KIND_SHARES.get(cost.kind, fitted.KERNEL_SHARE)
    copied = moved / (gpu.copy * share)
    if cost.kind in fitted.MOST_MOVED:
        copied = moved / min(gpu.copy, fitted.MOST_MOVED[cost.kind])
    if cost.kind == KernelKind.EXPERTS_MATMUL:
        return _together(multiplied / fitted.EXPERTS_SHARE, copied)
    return max(multiplied, copied, fitted.LOOP_TURN * cost.turns)


def _together(*seconds: float) -> float:
    """Return the time of multiplying and of moving operands, which hide each other where one is short."""
    return sum(each**3 for each in seconds) ** (1 / 3)
