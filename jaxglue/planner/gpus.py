"""Rates and memory of GPUs, for plans and for MFU."""

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxglue.planner import calibration as fitted

_POOL_SHARE = 0.9
"""Share of the memory that JAX may allocate (XLA_PYTHON_CLIENT_MEM_FRACTION=0.9)."""
GIB = 2**30


class Dispatch(NamedTuple):
    """Seconds that a host takes to dispatch."""

    call: float
    """To call a compiled program of one array."""
    array: float
    """For each further array that a program takes or returns."""
    copy: float
    """For each array of a copy between host and device."""


RECORDED = Dispatch(call=fitted.CALL, array=fitted.ARRAY, copy=fitted.COPY)
"""`Gpu.dispatch` of a machine that is not at hand: that of a host beside an H200."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Sustained rates and memory of a GPU, from its data sheet or measured."""

    name: str
    capability: tuple[int, int]
    """Compute capability, which decides the kernels."""
    memory: float
    """Bytes that JAX may allocate."""
    matmul: float
    """bf16 matmuls of a layer with float32 accumulation, FLOP/s."""
    fp8_gain: float = fitted.FP8_GAIN
    """Rate of FP8 matmuls in units of `matmul`."""
    copy: float
    """Device memory, bytes/s, read plus written."""
    link: float
    """Pinned host memory to the device and, at the same time, back: bytes/s each way."""
    peers: float
    """Collectives among the GPUs of a host: bytes/s that one receives."""
    files: float = 0.0
    """Mapped files in the page cache to the device, bytes/s; 0 where weights may not stay in files."""
    dispatch: Dispatch = RECORDED
    """The host's times."""
    peak: float | None = None
    """Dense bf16 matmuls with float32 accumulation by the data sheet, FLOP/s; None where it is not known."""
    unified: bool = False
    """The host's memory is the GPU's own, so that moving values there frees nothing."""

    def limited(self, gib: float | None) -> "Gpu":
        """Return the same GPU with at most `gib` GiB of its memory to plan with; None for all of it."""
        return self if gib is None else replace(self, memory=min(self.memory, gib * GIB))

    def host_memory(self, available: float) -> float:
        """Return the bytes of host memory that plans may pin, of those that are available."""
        return 0.0 if self.unified else available


def _gpu(
    name: str,
    capability: tuple[int, int],
    tflops: float,
    memory_gib: float,
    bandwidth: float,
    link: float,
    *,
    nvlink: float = 0,
    share: float = fitted.MATMUL_SHARE,
    copy_share: float = fitted.COPY_SHARE,
    unified: bool = False,
) -> Gpu:
    """Return a GPU by its data sheet: dense bf16 TFLOP/s, GiB, GB/s of memory, and GB/s each way of links."""
    return Gpu(
        name=name,
        capability=capability,
        memory=_POOL_SHARE * memory_gib * GIB,
        matmul=share * (tflops * 1e12),
        copy=copy_share * bandwidth * 1e9,
        link=link * 1e9,
        peers=fitted.PEER_SHARE * (nvlink or link) * 1e9,
        peak=tflops * 1e12,
        unified=unified,
    )


_PCIE_4, _PCIE_5, _C2C = 25.0, 55.0, 390.0
_H100: dict[str, Any] = {"share": fitted.H100_MATMUL_SHARE, "copy_share": fitted.H100_COPY_SHARE}
_TABLE = (
    #    name           capability TFLOP/s  GiB  GB/s  link
    _gpu("GB300", (10, 3), 2500, 277, 8000, _C2C, nvlink=900),
    _gpu("B300", (10, 3), 2250, 268, 8000, _PCIE_5, nvlink=900),
    _gpu("B200", (10, 0), 2250, 180, 8000, _PCIE_5, nvlink=900),
    _gpu("GB200", (10, 0), 2500, 185, 8000, _C2C, nvlink=900),
    _gpu("GB10", (12, 1), 125, 119.2, 273, 136, unified=True),  # 1 PFLOP/s of sparse FP4 is 125 TFLOP/s of dense bf16
    _gpu("B100", (10, 0), 1750, 180, 8000, _PCIE_5, nvlink=900),
    _gpu("H200 NVL", (9, 0), 835, 140, 4800, _PCIE_5, nvlink=450),
    _gpu("H200", (9, 0), 989, 140, 4800, _PCIE_5, nvlink=450),
    _gpu("GH200", (9, 0), 989, 95.6, 4000, _C2C),
    _gpu("H100 PCIe", (9, 0), 756, 79.6, 2039, _PCIE_5),
    _gpu("H100 NVL", (9, 0), 835, 94, 3938, _PCIE_5, nvlink=300),
    _gpu("H100", (9, 0), 989, 79.6, 3350, _PCIE_5, nvlink=450, **_H100),
    _gpu("H800", (9, 0), 989, 79.6, 3350, _PCIE_5, nvlink=200),
    _gpu("H20", (9, 0), 148, 95.6, 4000, _PCIE_5, nvlink=450),
    _gpu("A100 40GB", (8, 0), 312, 40, 1555, _PCIE_4, nvlink=300),
    _gpu("A100", (8, 0), 312, 80, 2039, _PCIE_4, nvlink=300),
    _gpu("A800", (8, 0), 312, 80, 2039, _PCIE_4, nvlink=200),
    _gpu("A30", (8, 0), 165, 24, 933, _PCIE_4, nvlink=100),
    _gpu("A40", (8, 6), 149.7, 45, 696, _PCIE_4),
    _gpu("A10G", (8, 6), 70, 22.5, 600, _PCIE_4),
    _gpu("A10", (8, 6), 125, 22.5, 600, _PCIE_4),
    _gpu("L40S", (8, 9), 362, 45, 864, _PCIE_4),
    _gpu("L40", (8, 9), 181, 45, 864, _PCIE_4),
    _gpu("L4", (8, 9), 121, 22.5, 300, _PCIE_4),
    _gpu("RTX PRO 6000", (12, 0), 503.8, 95.6, 1792, _PCIE_5),
    _gpu("RTX PRO 5000", (12, 0), 258, 48, 1344, _PCIE_5),
    _gpu("RTX PRO 4500", (12, 0), 219.7, 32, 896, _PCIE_5),
    _gpu("RTX 6000 Ada", (8, 9), 364.2, 48, 960, _PCIE_4),
    _gpu("RTX 5000 Ada", (8, 9), 261.1, 32, 576, _PCIE_4),
    _gpu("RTX 4500 Ada", (8, 9), 158.5, 24, 432, _PCIE_4),
    _gpu("RTX 4000 Ada", (8, 9), 106.8, 20, 360, _PCIE_4),
    _gpu("RTX A6000", (8, 6), 154.8, 48, 768, _PCIE_4),
    _gpu("RTX A5000", (8, 6), 111.1, 24, 768, _PCIE_4),
    _gpu("RTX A4000", (8, 6), 76.7, 16, 448, _PCIE_4),
    _gpu("RTX 5090", (12, 0), 209.5, 32, 1792, _PCIE_5),
    _gpu("RTX 5080", (12, 0), 112.6, 16, 960, _PCIE_5),
    _gpu("RTX 5070 Ti", (12, 0), 87.9, 16, 896, _PCIE_5),
    _gpu("RTX 5070", (12, 0), 61.7, 12, 672, _PCIE_5),
    _gpu("RTX 5060 Ti 16GB", (12, 0), 47.4, 16, 448, _PCIE_5 / 2),
    _gpu("RTX 5060 Ti", (12, 0), 47.4, 8, 448, _PCIE_5 / 2),
    _gpu("RTX 5060", (12, 0), 38.4, 8, 448, _PCIE_5 / 2),
    _gpu("RTX 4090", (8, 9), 165.2, 24, 1008, _PCIE_4),
    _gpu("RTX 4080 SUPER", (8, 9), 104.4, 16, 736, _PCIE_4),
    _gpu("RTX 4080", (8, 9), 97.5, 16, 717, _PCIE_4),
    _gpu("RTX 4070 Ti SUPER", (8, 9), 88.2, 16, 672, _PCIE_4),
    _gpu("RTX 4070 Ti", (8, 9), 80.2, 12, 504, _PCIE_4),
    _gpu("RTX 4070 SUPER", (8, 9), 71, 12, 504, _PCIE_4),
    _gpu("RTX 4070", (8, 9), 58.3, 12, 504, _PCIE_4),
    _gpu("RTX 4060 Ti 16GB", (8, 9), 44.1, 16, 288, _PCIE_4 / 2),
    _gpu("RTX 4060 Ti", (8, 9), 44.1, 8, 288, _PCIE_4 / 2),
    _gpu("RTX 4060", (8, 9), 30.2, 8, 272, _PCIE_4 / 2),
    _gpu("RTX 3090 Ti", (8, 6), 80, 24, 1008, _PCIE_4),
    _gpu("RTX 3090", (8, 6), 71, 24, 936, _PCIE_4),
    _gpu("RTX 3080 Ti", (8, 6), 68.2, 12, 912, _PCIE_4),
    _gpu("RTX 3080", (8, 6), 59.5, 10, 760, _PCIE_4),
    _gpu("RTX 3070 Ti", (8, 6), 43.5, 8, 608, _PCIE_4),
    _gpu("RTX 3070", (8, 6), 40.6, 8, 448, _PCIE_4),
    _gpu("RTX 3060 Ti", (8, 6), 32.4, 8, 448, _PCIE_4),
    _gpu("RTX 3060", (8, 6), 25.5, 12, 360, _PCIE_4),
)
"""NVIDIA's data sheets and architecture white papers, memory as nvidia-smi shows it, times the shares measured on an
H200: 680 of 989 TFLOP/s in a step's matmuls (790 in a single large one), 4.2 of 4.8 TB/s, 55 of 63 GB/s over PCIe 5.
Narrower names first."""
_CHIPS = {"SPARK": "GB10"}
"""Chips of machines that are named."""
_VARIANTS = {"LAPTOP", "D", "MAX", "MIG", "SUPER", "TI"}
"""Words in the names of variants, slower or faster than the chips without them."""
_BEFORE_BFLOAT16 = {"T4": "7.5", "RTX 2080 Ti": "7.5", "RTX 2080": "7.5", "RTX 2060": "7.5", "TITAN RTX": "7.5"}
_BEFORE_BFLOAT16 |= {"V100": "7.0", "P100": "6.0", "P40": "6.1", "GTX 1080 Ti": "6.1"}
"""Compute capabilities of GPUs without bfloat16."""


def lookup_gpu(name: str) -> Gpu | None:
    """Return the GPU of the table all of whose words are in `name`, which may be `jax.Device.device_kind`.

    None for an unknown chip or a variant of a known one, such as a laptop's.
    """
    words = _words(name)
    return next((gpu for gpu in _TABLE if _is_chip(_words(gpu.name), words)), None)


def find_gpu(name: str) -> Gpu:
    """Return the GPU of a name, in any case and without RTX if need be: 4090, a100-40, RTX PRO 6000.

    Raises:
        ValueError: an unknown name, with the known ones; or a GPU older than bfloat16.
    """
    if gpu := lookup_gpu(name) or lookup_gpu(f"RTX {name}"):
        return gpu
    for old, capability in _BEFORE_BFLOAT16.items():
        if _is_chip(_words(old), _words(name) | {"RTX"} & _words(old)):
            raise ValueError(_too_old(old, capability))
    raise ValueError(f"GPU {name!r} is unknown: use one of {', '.join(gpu.name for gpu in _TABLE)}")


def _words(name: str) -> set[str]:
    """Return the words of a GPU's name, memory sizes as plain numbers, RTX and Ti apart: rtx4070ti, A100-40GB."""
    apart = re.sub(r"^(RTX|GTX)(?=\d)|(?<=\d)(?=TI\b|SUPER\b)", r"\1 ", name.strip().upper())
    words = (re.sub(r"^(\d+)GB$", r"\1", word) for word in re.split(r"[\s_-]+", apart))
    return {_CHIPS.get(word, word) for word in words}


def _is_chip(chip: set[str], words: set[str]) -> bool:
    return words.issuperset(chip) and not (words - chip) & _VARIANTS


def _too_old(name: str, capability: str) -> str:
    return (
        f"{name} (compute capability {capability}) has no bfloat16: jaxglue's kernels (attention, MoE, LoRA, "
        "quantized weights) and its bfloat16 training need compute capability 8.0, as in RTX 3060, A10 or newer"
    )


def peak_flops(device_kind: str) -> float | None:
    """Return a GPU's dense bf16 peak, FLOP/s, from `jax.Device.device_kind`; None for an unknown chip."""
    gpu = lookup_gpu(device_kind)
    return gpu.peak if gpu else None
