from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxglue.generation.window_sizes import WindowSizes


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
