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
        ("3060", "RTX 3060"),
        ("rtx4090", "RTX 4090"),
        ("a100-40", "A100 40GB"),
        ("A100-80", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("l40s", "L40S"),
        ("gb300", "GB300"),
        ("gb200", "GB200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GB10", "GB10"),
        ("spark", "GB10"),
        ("DGX Spark", "GB10"),
        ("pro 6000", "RTX PRO 6000"),
        ("4070 ti super", "RTX 4070 Ti SUPER"),
        ("4070ti", "RTX 4070 Ti"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti"),
        ("5060 Ti 16GB", "RTX 5060 Ti 16GB"),
    ],
)
def test_gpus_are_found_by_device_kind(kind, name):
    gpu = find_gpu(kind)
    assert isinstance(gpu, Gpu) and gpu.name == name


@pytest.mark.parametrize("name", ["T4", "Tesla T4", "V100-32GB", "2080 Ti"])
def test_gpus_older_than_bfloat16_are_refused_with_the_reason(name):
    with pytest.raises(
        ValueError, match=r"compute capability \d\.\d\) has no bfloat16: .* need compute capability 8\.0"
    ):
        find_gpu(name)


def test_unknown_gpu_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'Voodoo 2' is unknown: use one of GB300, B300"):
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
