import io

from jaxglue.data.progress import DataProgress, metered
from jaxglue.terminal.console import Console


def test_rate_and_time_left_are_said_now_and_then():
    out, times = io.StringIO(), iter([0.0, 4.0, 20.0, 21.0])
    with DataProgress(Console(file=out), clock=lambda: next(times)).stage("loading m", 100e6) as advance:
        assert list(metered("abc", [10e6, 40e6, 50e6], advance)) == ["a", "b", "c"]
    assert out.getvalue() == "loading m: 50.0 of 100.0 MB, 2.50 MB/s, 0:00:20 left\n"
