"""Tokenizing workers end with their parent, however it ends, and do not run its script again."""

import signal
import subprocess
import sys

import psutil
import pytest
from selection import repeat

SLOW = """
import os, time

class Slow:
    def encode(self, rows):
        print(os.getpid(), flush=True)
        time.sleep(600)
"""
PREPARING = """
from slow import Slow
from jaxglue.data.files import Row
from jaxglue.data.tokenize import encode_in_processes

list(encode_in_processes(Slow(), [((Row("", {}),), 0)] * 9, 2))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, repeat(signal.SIGTERM)])
def test_workers_end_with_their_parent(tmp_path, number):
    script = tmp_path / "preparing.py"
    script.write_text(PREPARING)
    (tmp_path / "slow.py").write_text(SLOW)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        workers = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
        parent.send_signal(number)
        _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
