"""Time of single kernels: their work at the GPU's rates, and what short ones take beyond it."""

from collections.abc import Mapping
from typing import Any

from jaxglue.planner.gpus import Gpu

_GAP, _SHORTEST = 0.3e-6, 0.8e-6
"""Seconds between kernels, and of the shortest one."""
_MATMUL_START, _UNHEATED = 3.3e-6, 0.8
"""Seconds in which a matmul starts and ends, and the share of its time that the rest takes where it is short: rates are
those of long ones, whose power lowers the clock."""
_TURN = 1.1e-6
"""Seconds of a turn of a kernel's loop."""
_LOOPS = ("COLUMNS", "F", "BLOCK_N"), ("COLUMNS", "N", "BLOCK_N"), ("ROWS", "M", "BLOCK_M"), ("D", "D", "BLOCK_N")
"""Constants of adapters' kernels: elements that a program passes in turns, of all, and in a turn."""
_CODES_RATE = 0.83e12
"""8-bit codes that XLA converts in a second on 132 multiprocessors, where memory is not slower."""
_SHARE = 0.92
"""Share of the memory's rate at which our kernels, and matmuls bound by it, move their bytes; XLA's own do at all of it
(benchmarks/results/sft_step.json)."""
_KERNEL_SHARES = {"gradients_kernel": 0.73}
"""The same by kernel: that of adapters' gradients keeps sums of all ranks (benchmarks/results/sft_step.json)."""
_FP8_SHARE = 0.55
"""The same of kernels that read or write FP8 codes."""
_MOST_MOVED = {"mxfp4_kernel": 3.4e12, "matmul_kernel": 3.8e12, "outer_kernel": 3.8e12}
"""Bytes that kernels move in a second on 132 multiprocessors, where memory is not slower."""
_EXPERTS_KERNELS, _EXPERTS_SHARE = {"matmul_kernel", "outer_kernel"}, 0.9
"""Kernels of experts' matmuls, and their share of the matmul rate."""


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


def loop_seconds(constants: Mapping[str, Any]) -> float:
    """Return the time of the turns of one program of a Triton kernel, by the kernel's constants."""
    for length, size, block in _LOOPS:
        if constants.keys() >= {length, size, block}:
            return _TURN * -(-min(constants[length], constants[size]) // constants[block])
    return 0.0


def conversion_seconds(codes: int) -> float:
    """Return the time of converting 8-bit codes."""
    return codes / _CODES_RATE


def fused_seconds(moved: int, gpu: Gpu) -> float:
    """Return the time of a kernel of XLA's without matmuls."""
    return moved / gpu.copy


def transposed_seconds(size: int, gpu: Gpu) -> float:
    """Return the time of transposing FP8 codes of so many bytes."""
    return 2 * size / (_FP8_SHARE * gpu.copy)


def kernel_seconds(
    name: str, constants: Mapping[str, Any], *, flops: float, moved: int, codes: bool, gpu: Gpu
) -> float:
    """Return the time of a Triton kernel.

    Args:
        name: of its function.
        constants: with which it is compiled.
        flops: seconds of its matmuls at the rate of large ones.
        moved: bytes read and written.
        codes: some are of FP8.
        gpu: that runs it.
    """
    copied = moved / (gpu.copy * (_FP8_SHARE if codes else _KERNEL_SHARES.get(name, _SHARE)))
    if name in _MOST_MOVED:
        copied = moved / min(gpu.copy, _MOST_MOVED[name])
    if name in _EXPERTS_KERNELS:
        return _together(flops / _EXPERTS_SHARE, copied)
    return max(flops, copied, loop_seconds(constants))


def padding(constants: Mapping[str, Any]) -> float:
    """Return the rows that an experts' kernel multiplies by those given: of each expert, a quarter tile is empty."""
    experts, tiles = constants.get("E", 0), constants.get("TILES", 0)
    return 1 + experts / (4 * (tiles - experts)) if tiles > experts else 1.0


def _together(*seconds: float) -> float:
    """Return the time of multiplying and of moving operands, which hide each other where one is short."""
    return sum(each**3 for each in seconds) ** (1 / 3)
