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
_CODE_FLOPS = 820
"""FLOPs of matmuls in the time in which XLA converts an 8-bit code."""


def with_gap(seconds: float) -> float:
    """Return the time from a kernel's start to the next one's."""
    return max(seconds, _SHORTEST) + _GAP


def matmul_seconds(seconds: float) -> float:
    """Return the time of a matmul that takes so long at the rate of long ones."""
    return max(seconds, _MATMUL_START + _UNHEATED * seconds)


def loop_seconds(constants: Mapping[str, Any]) -> float:
    """Return the time of the turns of one program of a Triton kernel, by the kernel's constants."""
    for length, size, block in _LOOPS:
        if constants.keys() >= {length, size, block}:
            return _TURN * -(-min(constants[length], constants[size]) // constants[block])
    return 0.0


def conversion_seconds(codes: int, gpu: Gpu) -> float:
    """Return the time of converting 8-bit codes."""
    return codes * _CODE_FLOPS / gpu.matmul


def padding(constants: Mapping[str, Any]) -> float:
    """Return the rows that an experts' kernel multiplies by those given: of each expert, a quarter tile is empty."""
    experts, tiles = constants.get("E", 0), constants.get("TILES", 0)
    return 1 + experts / (4 * (tiles - experts)) if tiles > experts else 1.0


def together(*seconds: float) -> float:
    """Return the time of experts' matmuls and of reading their weights, which hide each other where one is short."""
    return sum(each**3 for each in seconds) ** (1 / 3)
