"""Rates and memory of GPUs, for plans and estimates."""

from dataclasses import dataclass, replace

from jaxglue.planner.peaks import peak_flops

_MATMUL_SHARE = 0.71
SUSTAINED = 0.89
"""Of a single large matmul's rate, what a long row of a layer's matmuls reaches."""
_COPY_SHARE = 0.9
_PEER_SHARE = 0.7
_POOL_SHARE = 0.9
"""Of the memory: what JAX is told to take (XLA_PYTHON_CLIENT_MEM_FRACTION=0.9)."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a plan needs to know of a GPU and its link to the host; measured rates may replace these."""

    name: str
    capability: tuple[int, int]
    """Compute capability, which decides the kernels."""
    memory: float
    """Bytes that JAX may allocate."""
    matmul: float
    """bf16 matmuls of a layer with float32 accumulation, FLOP/s."""
    copy: float
    """Device memory, bytes/s, read plus written."""
    link: float
    """Pinned host memory to the device and, at the same time, back: bytes/s each way."""
    peers: float
    """Collectives among the GPUs of a host: bytes/s that one receives."""

    def limited(self, gib: float | None) -> "Gpu":
        """The same GPU with at most `gib` GiB of its memory to plan with; None for all of it."""
        return self if gib is None else replace(self, memory=min(self.memory, gib * GIB))


def _gpu(
    name: str, capability: tuple[int, int], memory_gib: float, bandwidth: float, link: float, *, nvlink: float = 0
) -> Gpu:
    """From the data sheet: compute capability, GiB, GB/s of memory, of the link and of NVLink each way."""
    peak = peak_flops(name)
    assert peak, name
    return Gpu(
        name=name,
        capability=capability,
        memory=_POOL_SHARE * memory_gib * GIB,
        matmul=_MATMUL_SHARE * peak,
        copy=_COPY_SHARE * bandwidth * 1e9,
        link=link * 1e9,
        peers=_PEER_SHARE * (nvlink or link) * 1e9,
    )


_PCIE_5, _PCIE_4 = 55.0, 25.0
_TABLE = (
    _gpu("B200", (10, 0), 180, 8000, _PCIE_5, nvlink=900),
    _gpu("H200", (9, 0), 140, 4800, _PCIE_5, nvlink=450),
    _gpu("H100 PCIe", (9, 0), 80, 2039, _PCIE_5),
    _gpu("H100", (9, 0), 80, 3350, _PCIE_5, nvlink=450),
    _gpu("A100 40GB", (8, 0), 40, 1555, _PCIE_4, nvlink=300),
    _gpu("A100", (8, 0), 80, 2039, _PCIE_4, nvlink=300),
    _gpu("L40S", (8, 9), 45, 864, _PCIE_4),
    _gpu("L4", (8, 9), 22.5, 300, _PCIE_4),
    _gpu("A10G", (8, 6), 22.5, 600, _PCIE_4),
    _gpu("RTX PRO 6000", (12, 0), 95, 1792, _PCIE_5),
    _gpu("RTX 6000 Ada", (8, 9), 48, 960, _PCIE_4),
    _gpu("RTX A6000", (8, 6), 48, 768, _PCIE_4),
    _gpu("RTX 5090", (12, 0), 32, 1792, _PCIE_5),
    _gpu("RTX 4090", (8, 9), 24, 1008, _PCIE_4),
    _gpu("RTX 4080", (8, 9), 16, 717, _PCIE_4),
    _gpu("RTX 3090", (8, 6), 24, 936, _PCIE_4),
)
"""NVIDIA's data sheets and architecture white papers, times the shares that an H200 was measured to reach: 700 of 989
TFLOP/s in a step's matmuls (790 in a single large one), 4.3 of 4.8 TB/s, 55 GB/s over PCIe 5. Narrower names first."""


def find_gpu(name: str) -> Gpu:
    """The GPU all of whose words are in `name`, which may be `jax.Device.device_kind`.

    Raises:
        ValueError: no GPU of the table; it lists them.
    """
    words = set(name.upper().replace("-", " ").split())
    for gpu in _TABLE:
        if words.issuperset(gpu.name.upper().split()):
            return gpu
    raise ValueError(f"GPU {name!r} is unknown: use one of {', '.join(gpu.name for gpu in _TABLE)}")
