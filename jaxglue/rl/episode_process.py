"""Environments in processes of their own, as the run sees them: begun for an episode, asked, ended beyond limits."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from jaxglue.rl.process import START_SECONDS, Function, print_lines

_LONGEST_REPLY = 1 << 26
"""Bytes of a reply: a tool's result and texts are far shorter, a state may be long."""
_END_SECONDS = 5.0


class EpisodeDiedError(Exception):
    """Reports that an episode can't go on, and why."""


@dataclass(frozen=True)
class EnvironmentKind:
    """A class of environments."""

    name: str | None
    """By which rows choose it; None where there is one alone."""
    class_name: str
    tools: list[dict[str, Any]]
    """Schemas of its tools."""
    judges: bool
    """It gives rewards."""
    saves: bool
    """It can say its state, and go on from it."""
    replies: bool
    """It replies to turns that call no tool."""


class EpisodeProcess:
    """A process that begins an episode's environment when it is asked, started for the first of them.

    Args:
        function: class, function or mapping of a file that makes environments.
        memory: GiB of address space of an episode.
        seconds: the time for a reset, for the calls of a turn, or for a reward.
    """

    def __init__(self, function: Function, *, memory: float, seconds: float):
        self._function, self._memory, self._seconds = function, memory, seconds
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._lock = Lock()
        self._free: dict[str | None, list[EpisodeConnection]] = {}
        """Processes of episodes that have ended, by the name of their environment."""

    def describe(self) -> list[EnvironmentKind] | None:
        """Return the environments' kinds; None where the name is that of a function that replies to conversations.

        Raises:
            ValueError: a file that cannot be imported, or environments without a reset or with undocumented tools.
        """
        control, process = self._start()
        try:
            described = _checked(self._request(control, "describe"))["environments"]
        finally:
            control.close()
            _end(process)
        if described is None:
            return None
        return [EnvironmentKind(**kind) for kind in described]

    def begin(self, environment: str | None, seed: str) -> "EpisodeConnection":
        """Begin an episode, in the process of one that has ended where there is one.

        Args:
            environment: name of its kind.
            seed: of the generators of random numbers that its process shares.

        Raises:
            ValueError: the file cannot be imported any more.
        """
        with self._lock:
            if free := self._free.get(environment):
                connection = free.pop()
                connection.seed = seed
                return connection
            if self._control is None:
                self._control, self._process = self._start()
                _checked(self._request(self._control, "load"))
            ours, theirs = socket.socketpair()
            with theirs:
                begin = {"do": "begin", "environment": environment, "seed": seed, "options": {**self._function.options}}
                try:
                    socket.send_fds(self._control, [json.dumps(begin).encode()], [theirs.fileno()])
                except OSError:
                    raise ValueError(
                        f"--environment {self._function.file}: the process that imported it has ended"
                    ) from None
        return EpisodeConnection(ours, self._seconds, partial(self._take_back, environment))

    def _take_back(self, environment: str | None, connection: "EpisodeConnection") -> bool:
        """Keep the process of an episode that has ended for another one; return False where none will come."""
        with self._lock:
            if self._control is None:
                return False
            self._free.setdefault(environment, []).append(connection)
            return True

    def close(self) -> None:
        """End the process, and with it all episodes whose connections are closed."""
        with self._lock:
            if self._control is not None:
                self._control.close()
                self._control = None
            for connection in (each for free in self._free.values() for each in free):
                connection.close()
            self._free.clear()
            if self._process is not None:
                _end(self._process)
                self._process = None

    def _start(self) -> tuple[socket.socket, subprocess.Popen]:
        # The file is run by its path, as importing the package takes time; -P keeps its neighbors out of the imports.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        file = str(Path(__file__).parent / "episode_worker.py")
        command = [sys.executable, "-PB", file, str(theirs.fileno()), str(self._memory)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        environment |= {"OPENBLAS_NUM_THREADS": "1"}  # a fork has no threads but its own
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, env=environment, start_new_session=True, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        Thread(target=print_lines, args=(process,), daemon=True, name="prints of environments").start()
        return ours, process

    def _request(self, control: socket.socket, do: str) -> dict[str, Any]:
        """Return the reply to a request that begins no episode."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [json.dumps({"do": do, **self._function.request}).encode()], [theirs.fileno()])
        with EpisodeConnection(ours, START_SECONDS) as connection:
            try:
                return connection.read()
            except EpisodeDiedError as error:
                return {"error": f"its import {error}"}


class EpisodeConnection:
    """An episode's environment; a context that ends it.

    Args:
        connection: to its process.
        seconds: the time for a reply.
        take_back: keeps it for another episode when this one has ended, or returns False.
    """

    def __init__(
        self,
        connection: socket.socket,
        seconds: float,
        take_back: "Callable[[EpisodeConnection], bool] | None" = None,
    ):
        self._connection, self._seconds, self._received = connection, seconds, bytearray()
        self._take_back, self._has_ended = take_back, False
        self.seed: str | None = None
        """Of the next request, which begins an episode in the process of another one."""

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Return the reply to a request.

        Raises:
            EpisodeDiedError: the environment fails, ends its process, or reaches a limit.
        """
        if self.seed is not None:
            request["seed"], self.seed = self.seed, None
        self._has_ended = False
        body = json.dumps({"do": do, **request}, default=str).encode() + b"\n"
        end = time.monotonic() + self._seconds
        try:
            self._connection.settimeout(self._seconds)
            self._connection.sendall(body)
        except TimeoutError:
            raise EpisodeDiedError(f"reached its limit of {self._seconds:g} s") from None
        except OSError:
            pass  # it has ended, and says so
        reply = self._read(end)
        if error := reply.get("error"):
            raise EpisodeDiedError(f"failed: {error}")
        self._has_ended = do == "end" and reply.get("again", False)
        return reply

    def read(self) -> dict[str, Any]:
        """Return the next reply; errors as of `ask`."""
        return self._read(time.monotonic() + self._seconds)

    def _read(self, end: float) -> dict[str, Any]:
        searched = 0
        while (end_of_line := self._received.find(b"\n", searched)) < 0:
            searched, left = len(self._received), end - time.monotonic()
            if left <= 0:
                raise EpisodeDiedError(f"reached its limit of {self._seconds:g} s")
            if searched > _LONGEST_REPLY:
                raise EpisodeDiedError(f"replied with more than {_LONGEST_REPLY >> 20} MiB")
            self._connection.settimeout(left)
            try:
                part = self._connection.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                part = b""
            if not part:
                raise EpisodeDiedError("ended with its process")
            self._received += part
        line = bytes(self._received[:end_of_line])
        del self._received[: end_of_line + 1]
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise EpisodeDiedError("replied with something else than an object of JSON")
        if "ended" in reply:
            raise EpisodeDiedError(_reason(reply["ended"]))
        return reply

    def close(self) -> None:
        """End the episode's process, with all programs that it started, unless another episode may take it."""
        if self._has_ended and self._take_back is not None:
            self._has_ended = False
            if self._take_back(self):
                return
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # another thread may wait for a reply
        self._connection.close()

    def __enter__(self) -> "EpisodeConnection":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _checked(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a reply; raise ValueError for an error."""
    if error := reply.get("error"):
        raise ValueError(error)
    return reply


def _reason(status: Any) -> str:
    """Return why a process ended, by its exit status."""
    if status == -signal.SIGKILL:
        return "was killed, or reached its limit of memory"
    if isinstance(status, int) and -signal.NSIG < status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended its process with status {status!r:.10}"


def _end(process: subprocess.Popen) -> None:
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def finite(value: Any) -> float:
    """Return a reward as a number, NaN for none; raise EpisodeDiedError for one that is not finite."""
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise EpisodeDiedError(f"failed: a reward must be a finite number or None, got {value!r:.100}")
    return float(value)
