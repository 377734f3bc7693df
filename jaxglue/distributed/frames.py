"""JSON objects over TCP, each after its length: bounded in bytes and in time, whatever the other end sends."""

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from typing import Any

from jaxglue.files.json_file import parse_object

DIED = "died"
"""The reason given for a process whose connection the system closed."""
HELLO_BYTES, FRAME_BYTES = 64 * 2**10, 16 * 2**20
"""Longest frame before and after the other end has proved itself."""
_LENGTH = struct.Struct(">I")
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""A host silent for 30 s is dead."""


class FrameError(Exception):
    """The other end is gone, late, or breaks the protocol; the text says which."""


class Connection:
    """JSON objects over a socket."""

    def __init__(self, connected: socket.socket):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket, self._lock, self._limit = connected, threading.Lock(), HELLO_BYTES
        self.values: queue.Queue[Any] = queue.Queue()
        """Values received and not yet taken by `all_gather_object`."""

    def admit(self) -> None:
        """Accept long frames from now on, because the other end has proved itself."""
        self._limit = FRAME_BYTES

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; silent if the peer is gone, because its listener reports that.

        Raises:
            ValueError: the message is longer than a frame.
        """
        text = json.dumps(message).encode()
        if len(text) > FRAME_BYTES:
            raise ValueError(f"a message of {len(text)} bytes to another process: at most {FRAME_BYTES} fit a frame")
        with contextlib.suppress(OSError), self._lock:
            self.socket.sendall(_LENGTH.pack(len(text)) + text)

    def receive(self, deadline: float | None = None) -> dict[str, Any]:
        """Wait for the next message, until `deadline` by `time.monotonic`.

        Raises:
            FrameError: the peer is gone or late, or sends no JSON object of admitted length.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > self._limit:
            raise FrameError(f"sends a frame of more than {self._limit} bytes")
        try:
            return parse_object(self._read(length, deadline), "the frame")
        except ValueError:
            raise FrameError("sends no JSON object") from None

    def close(self) -> None:
        """Close the connection; a thread that waits in `receive` ends."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                self.socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
                part = self.socket.recv(min(size - len(data), 2**16))
            except TimeoutError:
                raise FrameError("does not answer in time") from None
            except OSError:
                part = b""
            if not part:
                raise FrameError(DIED)
            data += part
        return bytes(data)
