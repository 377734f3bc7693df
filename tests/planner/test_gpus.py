"""The table of GPUs and its matcher."""

import pytest

from jaxglue.planner.gpus import Gpu, find_gpu, peak_flops


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("rtx 5090", "RTX 5090"),
    ],
)
def test_gpus_are_found_by_device_kind(kind, name):
    gpu = find_gpu(kind)
    assert isinstance(gpu, Gpu) and gpu.name == name


def test_unknown_gpu_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'Voodoo 2' is unknown: use one of B200, GB200"):
        find_gpu("Voodoo 2")


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
    ],
)
def test_peaks_of_known_gpus(kind, tflops):
    assert peak_flops(kind) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "kind", ["cpu", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA H200 MIG 1g.18gb"]
)
def test_unknown_devices_have_no_peak(kind):
    assert peak_flops(kind) is None
    with pytest.raises(ValueError, match="is unknown"):
        find_gpu(kind)
