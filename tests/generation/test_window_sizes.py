from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxglue.generation import window_sizes
from jaxglue.generation.window_sizes import WindowSizes, WindowTimes


@pytest.mark.parametrize(
    ("slots", "sizes"), [(512, {1: 64, 65: 128, 300: 320, 449: 512}), (128, {1: 16, 17: 32, 64: 64, 65: 128})]
)
def test_answers_that_are_left_run_in_windows_hardly_larger(slots, sizes):
    windows = WindowSizes(slots)
    windows.put("all")
    windows.compile(ThreadPoolExecutor(1), str)
    windows.wait()
    for count, size in sizes.items():
        assert windows.take(count, True) == (size, "all" if size == slots else str(size))


@pytest.mark.parametrize(("count", "order"), [(1, [32, 64, 128, 192]), (65, [128, 192, 64, 32])])
def test_programs_for_as_many_answers_as_there_are_are_compiled_first(count, order):
    windows, compiled = WindowSizes(256), []
    windows.put("all")
    windows.compile(ThreadPoolExecutor(1), compiled.append, count)
    windows.wait()
    assert compiled == order


def test_windows_of_few_answers_are_compiled_for_as_many_as_came():
    windows = WindowSizes(512, grows=True)
    for count, size, sizes in ((100, 128, {64, 128}), (60, 64, {64, 128}), (130, 192, {64, 128, 192})):
        assert windows.take(count, True)[0] == size
        windows.put("as many")
        windows.compile(ThreadPoolExecutor(1), str)
        windows.wait()
        assert {windows.take(least, True)[0] for least in sizes} == sizes
    assert windows.take(128, True) == (128, "as many") and windows.take(64, True) == (64, "64")


def test_small_steps_of_sizes_add_up():
    """Times of a GPU, on which each of many sizes gives a few more tokens a second than the one before."""
    windows, took = WindowSizes(256), {8: 6.0, 16: 6.2, 32: 6.8, 64: 8.0, 96: 9.7, 128: 11.5, 160: 13.0, 192: 14.5}
    windows.put("all")
    windows.compile(ThreadPoolExecutor(1), str)
    windows.wait()
    for size in range(8, 257, 8):
        for _ in range(2):
            windows.note(size, took.get(size, 0.016 + size * 0.069))
    assert windows.widest(256) == 256


def test_times_of_another_kind_of_windows_serve_until_their_own_are_known():
    times = WindowTimes()
    usual, rare = WindowSizes(16, times=times), WindowSizes(16, times=times)
    for windows in (usual, rare):
        windows.put("all")
        windows.compile(ThreadPoolExecutor(1), str)
        windows.wait()
    for size, seconds in ((8, 1.0), (16, 3.0)):
        for _ in range(2):
            usual.note(size, seconds)
    assert rare.widest(3) == 8 and rare.seconds(3) is None
    for size in (8, 16):
        for _ in range(2):
            rare.note(size, 5.0)
    assert rare.widest(3) == 16 and rare.seconds(3) == 5
    assert usual.widest(3) == 8


def test_windows_are_filled_up_as_their_times_say(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(window_sizes, "monotonic", lambda: now[0])
    windows = WindowSizes(64)
    windows.put("all")
    windows.compile(ThreadPoolExecutor(1), str)
    windows.wait()
    assert windows.widest(3) == windows.widest(64) == 8, "its time is not known"
    for seconds in (99.0, 10.0):
        windows.note(8, seconds)
        windows.note(16, 1.2 * seconds)
    assert windows.widest(3) == 32, (
        "the first one does not count, 16 take about as long as 8, and the next time is not known"
    )
    for size, seconds in {32: 20.0, 64: 50.0}.items():
        windows.note(size, 99.0)
        windows.note(size, seconds)
    assert windows.widest(3) == 16, "32 take twice as long as 8"
    assert windows.widest(20) == 16, "20 have more tokens a second in turns than in windows for 32"
    assert windows.widest(32) == windows.widest(64) == 32, "and 32 in windows for 32 than in others"
    windows.note(8, 99.0)
    assert windows.widest(3) == 16, "one of three that waited for something else does not count"
    now[0] = 1000.0
    assert windows.widest(3) == windows.widest(64) == 8, "times are not known any more"
    windows.note(8, 10.0)
    assert windows.widest(3) == windows.widest(64) == 16, "the next time is not known"
