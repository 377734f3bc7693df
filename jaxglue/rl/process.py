"""A process that judges answers, as the run sees it: started when it is asked, ended beyond its limits."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from jaxglue.terminal.lines import echo

START_SECONDS = 120.0
"""Time for a process to import a file."""
_END_SECONDS = 5.0
"""Time to end the programs that functions started."""
_LONGEST_LINE = 8192
"""Bytes of a function's line that is printed at once."""


class Function(NamedTuple):
    """A function of a file, with its settings."""

    file: str
    name: str
    options: Mapping[str, str]

    @property
    def request(self) -> dict[str, Any]:
        """Return its part of a request."""
        return {"file": self.file, "function": self.name, "options": dict(self.options)}


class JudgingProcess:
    """A process that judges answers, started when it is asked and again after it was ended.

    Args:
        memory: GiB of its address space.
    """

    def __init__(self, memory: float):
        self._memory, self._process, self._read = memory, None, b""  # type: tuple[float, subprocess.Popen | None, bytes]
        self._loaded = list[Function]()
        self._number = 0
        self.is_stopped = False
        """Whether the process is stopped for good, and judges no further answers."""

    def ask(self, function: Function, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return a function's reply, or a `limit` that it reached, or an `error`.

        Args:
            function: to ask.
            request: what it judges.
            seconds: the time to judge it; an import has its own.
        """
        if self.is_stopped:
            return {"limit": "the end of the run"}
        if function not in self._loaded:
            reply = self.check(function, {})
            if "limit" in reply or "error" in reply:
                return reply
        return self._exchange(function.request | request, seconds)

    def check(self, function: Function, known: dict[str, Any]) -> dict[str, Any]:
        """Import a function and check its parameters; return whether it judges each answer alone, or as `ask`."""
        reply = self._exchange(function.request | {"check": True} | known, START_SECONDS)
        if not ("limit" in reply or "error" in reply):
            self._loaded.append(function)
        return reply

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        self._number += 1
        try:
            process.stdin.write(json.dumps(request | {"number": self._number}, default=str).encode() + b"\n")
            process.stdin.flush()
            reply = self._reply(process, time.monotonic() + seconds)
        except (BrokenPipeError, EOFError):
            with suppress(subprocess.TimeoutExpired):  # its pipes close before it has a status
                process.wait(_END_SECONDS)
            status = self.end()
            return {"limit": "the end of the run"} if self.is_stopped else _reason(status)
        if reply is None:
            self.end()
            return {"limit": f"its limit of {seconds:g} s"}
        return reply

    def _start(self) -> subprocess.Popen:
        # The file is run by its path, as importing the package takes time; -P keeps its neighbors out of the imports,
        # and -B bytecode of a file that changed within a second.
        command = [sys.executable, "-PB", str(Path(__file__).parent / "worker.py"), str(self._memory)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)
        Thread(target=print_lines, args=(process,), daemon=True, name="prints of rewards").start()
        return process

    def _reply(self, process: subprocess.Popen, end: float) -> dict[str, Any] | None:
        """Return the reply to the latest request; None where it takes too long."""
        while (line := self._line(process, end)) is not None:
            reply = json.loads(line)
            if reply.pop("number") == self._number:
                return reply
        return None

    def _line(self, process: subprocess.Popen, end: float) -> bytes | None:
        """Return a line of the process; None at the end of its time."""
        assert process.stdout is not None
        while b"\n" not in self._read:
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            if not (part := os.read(process.stdout.fileno(), 65536)):
                raise EOFError
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line

    def stop(self) -> None:
        """End the process from another thread than the one that asks it, and start none again."""
        self.is_stopped = True
        if (process := self._process) is not None:
            process.terminate()

    def end(self) -> int:
        """End the process, if there is one, with the programs that functions started; return its exit status."""
        if (process := self._process) is None:
            return 0
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # of unwritten requests
                pipe and pipe.close()
        self._process, self._read = None, b""
        self._loaded.clear()
        return process.returncode


def _reason(status: int) -> dict[str, Any]:
    """Return the reply in the place of that of a process which has ended."""
    if status == -signal.SIGKILL:
        return {"limit": "its limit of memory, or was killed", "killed": True}
    if status < 0:
        name = signal.Signals(-status).name
        return {"error": f"its process was ended by {name}: mend it, or raise --reward-memory where it took too much"}
    return {"error": f"it ended its process with status {status}: let it return a reward, or raise an error"}


def print_lines(process: subprocess.Popen) -> None:
    """Print what functions print, with control characters visible: they may print answers."""
    assert process.stderr is not None
    with suppress(OSError, ValueError), process.stderr:
        while line := process.stderr.readline(_LONGEST_LINE):
            with suppress(ValueError):  # of a stream closed here, after which later lines are still read
                echo(line.decode(errors="replace").removesuffix("\n"), error=True)
