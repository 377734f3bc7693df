import io
import subprocess
import sys

import pytest

from jaxglue.commands.streams import standard_streams

RUN = f"{sys.executable} -c 'from jaxglue.commands import main; main([\"--help\"])'"


@pytest.mark.parametrize(("redirected", "status"), [("| :", 141), ("> /dev/full", 1), (">&-", 0), ("<&- >&- 2>&-", 0)])
def test_status_tells_whether_the_output_was_read(redirected, status):
    command = ["bash", "-c", f"{RUN} {redirected}; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == (status == 1)


def test_characters_that_the_encoding_lacks_are_escaped(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    with standard_streams():
        print("loss 2 → 1")
    assert output.buffer.getvalue() == b"loss 2 \\u2192 1\n"


def test_pipe_broken_elsewhere_is_an_error():
    with pytest.raises(BrokenPipeError), standard_streams():
        raise BrokenPipeError("of a worker")
