"""Peak rates of GPUs from data sheets."""

import re

_PEAK_TFLOPS = {
    "B200": 2250,
    "GB200": 2500,
    "B100": 1750,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200 NVL": 835,
    "H200": 989,
    "GH200": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A30": 165,
    "A40": 149.7,
    "A10G": 70,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX PRO 6000": 503.8,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
    "RTX 5090": 209.5,
    "RTX 5080": 112.6,
    "RTX 4090": 165.2,
    "RTX 4080": 97.5,
    "RTX 3090": 71,
}
"""Dense bf16 with float32 accumulation, TFLOP/s, from NVIDIA's data sheets and architecture white papers. The first
entry wins all of whose words are in the device's name."""
_OTHER_CHIPS = {"Laptop", "D", "Max", "MIG", "SUPER"}
"""Words in a device's name that make it slower (or faster) than the entry."""


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 peak of a GPU, FLOP/s, from `jax.Device.device_kind`; None for one that is not in the table."""
    words = set(re.split(r"[\s-]+", device_kind))
    if words & _OTHER_CHIPS:
        return None
    return next((peak * 1e12 for name, peak in _PEAK_TFLOPS.items() if words.issuperset(name.split())), None)
