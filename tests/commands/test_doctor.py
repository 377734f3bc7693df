"""Verdicts of `jaxglue doctor` on machines of several kinds."""

import jax
import pytest

from jaxglue.commands import doctor
from jaxglue.commands.doctor import (
    GIB,
    Check,
    check_driver,
    check_gpu,
    check_gpu_memory,
    check_host_memory,
    check_speed,
    check_xla,
    parse_gpu,
)

ROW = ["580.65.06", " NVIDIA H200", " 9.0", " 143771", " 143000"]


def test_gpu_is_read_from_nvidia_smi():
    gpu = parse_gpu(ROW)
    assert (gpu.driver, gpu.name, gpu.capability) == ("580.65.06", "NVIDIA H200", (9, 0))
    assert 139 * GIB < gpu.free < gpu.total < 141 * GIB


@pytest.mark.parametrize(
    ("check", "verdict", "says"),
    [
        (lambda: check_driver([parse_gpu(ROW)]), "ok", "580.65.06"),
        (lambda: check_driver([parse_gpu(["550.54.14", *ROW[1:]])]), "fail", "too old for CUDA 13"),
        (lambda: check_driver([]), "fail", "lists no GPU"),
        (lambda: check_gpu(parse_gpu(ROW)), "ok", "compute capability 9.0"),
        (lambda: check_gpu(parse_gpu([*ROW[:2], "7.5", *ROW[3:]])), "warn", "compute capability 7.5"),
        (lambda: check_gpu_memory(parse_gpu(ROW)), "ok", "GiB free"),
        (lambda: check_gpu_memory(parse_gpu([*ROW[:4], "50000"])), "warn", "48.8 of 140.4 GiB free"),
        (lambda: check_speed("XLA", "a program compiles", 1.5, 90.0), "ok", "a program compiles in 1.5 s"),
        (lambda: check_speed("XLA", "a program compiles", 100.0, 0.5), "warn", "in 100.0 s"),
        (lambda: check_host_memory(64 * GIB, 128 * GIB), "ok", "64.0 of 128.0 GiB"),
        (lambda: check_host_memory(4 * GIB, 16 * GIB), "warn", "4.0 of 16.0 GiB"),
    ],
)
def test_verdict_has_a_remedy_unless_all_is_well(check, verdict, says):
    result = check()
    assert result.verdict == verdict and says in result.found
    assert bool(result.remedy) == (verdict != "ok")


def test_a_compilation_is_timed_without_what_is_kept():
    assert check_xla(False, iter([1.0, 43.5]).__next__).found == "a small program compiles in 42.5 s"
    assert jax.config.jax_enable_compilation_cache


def test_slow_compilation_names_a_busy_machine_alone_as_the_cause():
    busy, idle = (check_speed("XLA", "it compiles", 100.0, load).remedy for load in (900.0, 0.5))
    assert busy.startswith("900 processes share ") and busy.endswith(idle) and "--compilation-cache" in idle


def test_errors_of_a_check_are_its_verdict():
    def fail(expect_gpu):
        raise RuntimeError("no device\nmore")

    assert doctor._guarded("JAX", fail, True).found == "RuntimeError: no device"


@pytest.mark.parametrize(("verdict", "status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_status_tells_whether_something_is_missing(monkeypatch, capsys, verdict, status):
    check = Check(name="GPU", verdict=verdict, found="a thing " * 20, remedy="do something " * 10)
    monkeypatch.setattr(doctor, "checks", lambda gpus: [check])
    with pytest.raises(SystemExit) as stop:
        doctor.main([])
    assert stop.value.code == status
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
