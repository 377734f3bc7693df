"""Meeting of a run's processes: process 0 listens, the others join, and strangers are dropped and logged."""

import contextlib
import errno
import ipaddress
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterable, Iterator

from jaxglue.distributed.frames import Connection, FrameError
from jaxglue.distributed.handshake import Hello, challenge_peer, prove

_RETRY_SECONDS = 0.2
_HELLO_SECONDS = 10.0
"""Longest introduction of one connection."""
_UNPROVED = 256
"""Connections that may introduce themselves at a time; the oldest gives way."""
_LOGGED = 100
"""Dropped connections to log, by host and reason."""
_log = logging.getLogger(__name__)

Met = tuple[dict[int, Connection], list[str]]
"""Connections by the process at their other end, and the host of every process."""


def meet(count: int, address: tuple[str, int], token: bytes, deadline: float) -> Met:
    """Accept all others on process 0; refuse them all if one is missing or does not match.

    Args:
        count: number of processes.
        address: host and port to listen on.
        token: secret of the run; connections without it are dropped.
        deadline: of the whole meeting, by `time.monotonic`.

    Raises:
        ValueError: not all joined in time, two claim the same index or another count, or the port cannot be used.
    """
    peers: dict[int, Connection] = {}
    hosts = {0: socket.gethostname()}
    with _Entrance(listen(address), token, deadline, max(_UNPROVED, 2 * count)) as entrance:
        while len(peers) < count - 1:
            try:
                peer, hello = entrance.joined.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                missing = ", ".join(str(index) for index in range(1, count) if index not in peers)
                raise _refuse(
                    peers.values(),
                    f"of {count} processes these did not join in time: {missing} (process 0 listened on {hosts[0]}, "
                    f"the others connect to {address_text(address)})",
                ) from None
            if reason := _mismatch(hello, count, hosts):
                raise _refuse([*peers.values(), peer], reason)
            peers[hello.index], hosts[hello.index] = peer, hello.host
    in_order = [hosts[index] for index in range(count)]
    for peer in peers.values():
        peer.send({"hosts": in_order})
    return peers, in_order


def join(index: int, count: int, address: tuple[str, int], token: bytes, deadline: float) -> Met:
    """Connect to process 0, which may start later; the arguments are those of `meet`.

    Raises:
        ValueError: process 0 cannot be reached in time, has another token, or refuses.
    """
    hello, logged = Hello(index, count, socket.gethostname()), ""
    while True:
        try:
            return _ask(address, token, hello, deadline)
        except FrameError as error:
            reason = f"the process there {error}"
            if not logged:
                _log.warning("%s: %s; trying on", address_text(address), reason)
            logged = logged or reason
        except (OSError, UnicodeError):
            reason = "start it there, and open the port"
        if time.monotonic() > deadline:
            where = f"process 0 at {address_text(address)}"
            raise ValueError(f"process {index} on {hello.host} could not reach {where} in time: {logged or reason}")
        time.sleep(_RETRY_SECONDS)


def listen(address: tuple[str, int]) -> socket.socket:
    """Listen on the interface of the given host alone; port 0 takes a free one.

    A name that this host maps to its loopback, as Debian does with its own, names no interface: then on all.

    Raises:
        ValueError: the host is not this one, or the port is taken.
    """
    host, port = address
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if _is_masked(host, str(where[0])):
            where = ("", port)
        return socket.create_server(where, family=family, backlog=128)
    except (OSError, UnicodeError) as error:
        here, elsewhere = socket.gethostname(), getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        if elsewhere or isinstance(error, socket.gaierror | UnicodeError):
            text = f"{host} is no address of {here}, where process 0 runs: give a name or address of that host"
        else:
            text = f"port {port} of {here} cannot be used ({getattr(error, 'strerror', error)}): choose another"
        raise ValueError(f"--coordinator {address_text(address)}: {text}") from error


def is_loopback(host: str) -> bool:
    """Tell whether a host's name or address is that of the loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_text(address: tuple[str, int]) -> str:
    """Write host and port as HOST:PORT, an IPv6 address in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_masked(host: str, found: str) -> bool:
    return is_loopback(found) and not is_loopback(host)


class _Entrance:
    """Accepts connections and lets each introduce itself in a thread of its own, while the context lasts."""

    def __init__(self, server: socket.socket, token: bytes, deadline: float, unproved: int):
        self.joined: queue.Queue[tuple[Connection, Hello]] = queue.Queue()
        """Processes that proved the token."""
        self._server, self._token, self._deadline, self._most = server, token, deadline, unproved
        self._unproved: dict[Connection, str] = {}
        self._logged: set[tuple[str, str]] = set()
        self._lock, self._closed = threading.Lock(), False

    def __enter__(self) -> "_Entrance":
        self._server.settimeout(_RETRY_SECONDS)
        self._thread = threading.Thread(target=self._accept, daemon=True, name="meeting")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._thread.join()
        self._server.close()
        with self._lock:
            for peer in self._unproved:
                peer.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connected, (host, *_) = self._server.accept()
                peer = Connection(connected)
            except TimeoutError:
                continue
            except OSError:  # closed again, or no descriptor is free
                time.sleep(_RETRY_SECONDS)
                continue
            with self._lock:
                if len(self._unproved) >= self._most:
                    next(iter(self._unproved)).close()
                self._unproved[peer] = host
            threading.Thread(target=self._introduce, args=(peer, host), daemon=True).start()

    def _introduce(self, peer: Connection, host: str) -> None:
        try:
            hello = challenge_peer(peer, self._token, min(self._deadline, time.monotonic() + _HELLO_SECONDS))
        except FrameError as error:
            peer.close()
            self._log_dropped(host, str(error))
        else:
            self.joined.put((peer, hello))
        finally:
            with self._lock:
                self._unproved.pop(peer, None)

    def _log_dropped(self, host: str, reason: str) -> None:
        with self._lock:
            known = (host, reason) in self._logged or len(self._logged) >= _LOGGED or self._closed
            self._logged.add((host, reason))
        if not known:
            _log.warning("a connection from %s was dropped: it %s", host, reason)


def _mismatch(hello: Hello, count: int, hosts: dict[int, str]) -> str | None:
    if hello.count != count:
        return (
            f"process 0 on {hosts[0]} has --num-processes {count}, process {hello.index} on {hello.host} has "
            f"{hello.count}: give all the same"
        )
    if hello.index >= count:
        return f"process {hello.index} on {hello.host}: expected --process-id 1 to {count - 1}"
    if hello.index in hosts:
        return (
            f"two processes, on {hosts[hello.index]} and {hello.host}, have --process-id {hello.index}: "
            "give each its own"
        )
    return None


def _refuse(peers: Iterable[Connection], reason: str) -> ValueError:
    for peer in peers:
        peer.send({"refused": reason})
        peer.close()
    return ValueError(reason)


def _ask(address: tuple[str, int], token: bytes, hello: Hello, deadline: float) -> Met:
    """Introduce this process to process 0 and wait until all have met.

    Raises:
        FrameError: the other end is not process 0, or ends.
        OSError: nobody answers.
        ValueError: process 0 refuses.
    """
    left = max(deadline - time.monotonic(), 0.1)
    with _closed_on_error(Connection(socket.create_connection(address, timeout=min(left, 5.0)))) as peer:
        prove(peer, token, hello, min(deadline, time.monotonic() + _HELLO_SECONDS))
        message = peer.receive(deadline + 5.0)  # that of process 0 may be a little later
        if "refused" in message:
            raise ValueError(str(message["refused"]))
        hosts = message.get("hosts")
        if not (isinstance(hosts, list) and len(hosts) == hello.count and all(isinstance(host, str) for host in hosts)):
            raise FrameError("names no hosts")
        return {0: peer}, hosts


@contextlib.contextmanager
def _closed_on_error(peer: Connection) -> Iterator[Connection]:
    try:
        yield peer
    except BaseException:
        peer.close()
        raise
