"""The control channel between the processes of a run: meet, gather objects, and hear of a death at once.

A star of TCP connections around process 0. The operating system closes a dead process's connections, and TCP keepalive
detects a dead host, so a slow process is never taken for dead.
"""

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

DIED = "died"
"""The reason given for a process whose connection the system closed."""
_RETRY_SECONDS = 0.2
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""A host silent for 30 s is dead."""


class _Connection:
    """JSON values over a socket, one a line."""

    def __init__(self, connected: socket.socket):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket, self._lines, self._lock = connected, connected.makefile("rb"), threading.Lock()
        self.values: queue.Queue[Any] = queue.Queue()
        """Values received and not yet taken by `all_gather_object`."""

    def send(self, message: Any) -> None:
        """Send a message; silent if the peer is gone, because its listener reports that."""
        with contextlib.suppress(OSError), self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        """Wait for the next message; None if the peer is gone."""
        try:
            line = self._lines.readline()
        except OSError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class ControlChannel:
    """The connections of one process: process 0 to all others, the others to process 0.

    Args:
        index, count: number of this process, from 0, and of all processes.
        address: host and port on which process 0 listens.
        timeout: seconds until all must have joined.
        lost: called in a thread, with one line for the user, when another process has died or failed.

    Raises:
        ValueError: not all joined in time, two claim the same index, or the port is taken.
    """

    def __init__(
        self, index: int, count: int, address: tuple[str, int], *, timeout: float, lost: Callable[[str], None]
    ):
        self._index, self._lost, self._closing = index, lost, False
        self.broken = threading.Event()
        """Set when another process has died or failed."""
        deadline = time.monotonic() + timeout
        meet = _meet(count, address, deadline) if index == 0 else _join(index, count, address, deadline)
        self._peers, self._hosts = meet
        for peer in self._peers:
            threading.Thread(target=self._listen, args=(peer,), daemon=True, name=f"process {peer}").start()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the JSON values of all processes in their order; all must call, and all wait for the last."""
        if self._index:
            self._peers[0].send({"value": value})
            return self._peers[0].values.get()
        values = [json.loads(json.dumps(value)), *(self._peers[index].values.get() for index in sorted(self._peers))]
        for peer in self._peers.values():
            peer.send({"value": values})
        return values

    def fail(self, reason: str) -> None:
        """Tell the others why this process stops; they stop too."""
        self._closing = True
        for peer in self._peers.values():
            peer.send({"failed": self._index, "reason": reason})

    def close(self) -> None:
        """Close cleanly; every peer must also be closing."""
        self._closing = True
        for peer in self._peers.values():
            peer.send({"bye": True})
            peer.close()

    def _listen(self, index: int) -> None:
        peer = self._peers[index]
        while (message := peer.receive()) is not None and "value" in message:
            peer.values.put(message["value"])
        if self._closing or (message and "bye" in message):
            return
        if message is None:
            self._end(index, DIED)
        else:
            self._end(message["failed"], message["reason"])

    def _end(self, index: int, reason: str) -> None:
        """Report a lost process to the others, then to this one."""
        self.broken.set()
        if self._index == 0:
            for other, peer in self._peers.items():
                if other != index:
                    peer.send({"failed": index, "reason": reason})
        self._lost(f"process {index} on {self._hosts[index]}: {reason}")


_Met = tuple[dict[int, _Connection], list[str]]
"""Connections by the process at their other end, and the host of every process."""


def _meet(count: int, address: tuple[str, int], deadline: float) -> _Met:
    """Accept all others on process 0; refuse them all if one is missing or does not match."""
    peers: dict[int, _Connection] = {}
    hosts = {0: socket.gethostname()}
    try:
        server = socket.create_server(("", address[1]), backlog=count)
    except OSError as error:
        raise ValueError(
            f"--coordinator {_text(address)}: port {address[1]} of {hosts[0]} cannot be used ({error.strerror}): "
            "choose another"
        ) from error
    with server:
        while len(peers) < count - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                peer = _Connection(server.accept()[0])
            except TimeoutError:
                missing = ", ".join(str(index) for index in range(1, count) if index not in peers)
                raise _refuse(
                    peers.values(),
                    f"of {count} processes these did not join in time: {missing} (process 0 listened on {hosts[0]}, "
                    f"the others connect to {_text(address)})",
                ) from None
            hello = _hello(peer)
            if hello is None:  # not of this run
                peer.close()
                continue
            if reason := _mismatch(hello, count, hosts):
                raise _refuse([*peers.values(), peer], reason)
            peers[hello["index"]], hosts[hello["index"]] = peer, hello["host"]
    in_order = [hosts[index] for index in range(count)]
    for peer in peers.values():
        peer.send({"hosts": in_order})
    return peers, in_order


def _hello(peer: _Connection) -> dict[str, Any] | None:
    """Read how a process introduces itself; None for a stranger."""
    peer.socket.settimeout(10.0)
    try:
        hello = peer.receive()
    except ValueError:
        return None
    peer.socket.settimeout(None)
    return hello if isinstance(hello, dict) and hello.keys() == {"index", "count", "host"} else None


def _mismatch(hello: dict[str, Any], count: int, hosts: dict[int, str]) -> str | None:
    index = hello["index"]
    if hello["count"] != count:
        return (
            f"process 0 on {hosts[0]} has --num-processes {count}, process {index} on {hello['host']} has "
            f"{hello['count']}: give all the same"
        )
    if index in hosts:
        return f"two processes, on {hosts[index]} and {hello['host']}, have --process-id {index}: give each its own"
    return None


def _refuse(peers: Iterable[_Connection], reason: str) -> ValueError:
    for peer in peers:
        peer.send({"refused": reason})
        peer.close()
    return ValueError(reason)


def _join(index: int, count: int, address: tuple[str, int], deadline: float) -> _Met:
    """Connect to process 0, which may start later."""
    hello = {"index": index, "count": count, "host": socket.gethostname()}
    while (answer := _ask(address, hello, deadline)) is None:
        if time.monotonic() > deadline:
            raise ValueError(
                f"process {index} on {hello['host']} could not reach process 0 at {_text(address)} in time: "
                "start it there, and open the port"
            )
        time.sleep(_RETRY_SECONDS)
    peer, message = answer
    if "refused" in message:
        raise ValueError(message["refused"])
    return {0: peer}, message["hosts"]


def _ask(address: tuple[str, int], hello: dict[str, Any], deadline: float) -> tuple[_Connection, dict] | None:
    """Introduce this process to process 0; return connection and answer, or None if nobody answers."""
    try:
        peer = _Connection(socket.create_connection(address, timeout=5.0))
    except OSError:
        return None
    # The deadline of process 0 may be a little later.
    peer.socket.settimeout(max(deadline - time.monotonic(), 0.0) + 5.0)
    peer.send(hello)
    message = peer.receive()
    peer.socket.settimeout(None)
    return None if message is None else (peer, message)


def _text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
