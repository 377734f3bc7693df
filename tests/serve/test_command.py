"""The command `jaxglue serve` as a process."""

import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("uvicorn")


@pytest.mark.long
def test_ctrl_c_while_programs_compile_ends_with_130_and_a_line(folders, tmp_path):
    flags = ["--model", str(folders[0]), "--port", "0", "--compilation-cache", str(tmp_path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "jaxglue", "serve", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        lines = [line for line in iter(process.stderr.readline, "compiling the programs\n") if line]
        process.send_signal(signal.SIGINT)
        lines += process.stderr.readlines()
        assert process.wait(60) == 130, lines
    assert lines[-1] == "jaxglue serve: interrupted\n" and "Traceback" not in "".join(lines)
