from types import SimpleNamespace

import jax
import pytest

from jaxglue.training.record import Meter, memory_use


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_meter(kind: str, count: int = 1):
    clock = Clock()
    devices = [SimpleNamespace(device_kind=kind)] * count
    return Meter(model_flops_per_token=1e9, devices=devices, clock=clock), clock


def test_speed_of_a_window_and_of_the_whole():
    meter, clock = make_meter("NVIDIA H200", count=2)
    clock.now = 50.0
    meter.restart()
    for tokens, seconds in ((1000, 1.0), (1000, 3.0)):
        with meter.waiting():
            clock.now += seconds / 4
        clock.now += seconds * 3 / 4
        meter.add(tokens, done=clock.now)
        with meter.paused():
            clock.now += 100
        reading = meter.read()
        assert reading.tokens_per_second == pytest.approx(tokens / seconds)
        assert reading.data_wait == pytest.approx(0.25)
    assert meter.total().tokens_per_second == pytest.approx(500)
    assert meter.total().mfu == pytest.approx(500 * 1e9 / (2 * 989e12))


def test_step_counts_until_it_is_done():
    meter, clock = make_meter("NVIDIA H200")
    meter.add(1000, done=2.0)
    clock.now = 5.0
    assert meter.read().tokens_per_second == pytest.approx(500)
    meter.add(1000, done=6.0)
    assert meter.read().tokens_per_second == pytest.approx(250)


def test_mfu_is_none_on_an_unknown_device():
    meter, _ = make_meter("cpu")
    meter.add(1000, done=1.0)
    assert meter.read().mfu is None


def test_memory_of_the_fullest_device():
    devices = [
        SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 3, "peak_bytes_in_use": 4}),
        SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 2, "peak_bytes_in_use": 9}),
    ]
    assert memory_use(devices) == (3, 9, "device")


def test_memory_of_the_process_on_cpus():
    memory = memory_use(jax.devices("cpu"))
    assert memory.kind == "host"
    assert memory.peak >= 1e7
