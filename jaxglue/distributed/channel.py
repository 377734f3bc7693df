"""The control channel between the processes of a run: meet, gather objects, and hear of a death at once.

A star of TCP connections around process 0. The operating system closes a dead process's connections, and TCP keepalive
detects a dead host, so a slow process is never taken for dead.
"""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxglue.distributed.frames import FrameError
from jaxglue.distributed.meeting import join, meet


class ControlChannel:
    """The connections of one process: process 0 to all others, the others to process 0.

    Args:
        index, count: number of this process, from 0, and of all processes.
        address: host and port on which process 0 listens.
        token: secret of the run; only who proves it is listened to.
        timeout: seconds until all must have joined.
        lost: called in a thread, with one line for the user, when another process has died or failed.

    Raises:
        ValueError: not all joined in time, two claim the same index, or the port is taken.
    """

    def __init__(
        self,
        index: int,
        count: int,
        address: tuple[str, int],
        *,
        token: bytes,
        timeout: float,
        lost: Callable[[str], None],
    ):
        self._index, self._lost, self._closing = index, lost, False
        self.broken = threading.Event()
        """Set when another process has died or failed."""
        deadline = time.monotonic() + timeout
        met = meet(count, address, token, deadline) if index == 0 else join(index, count, address, token, deadline)
        self._peers, self._hosts = met
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
        try:
            while "value" in (message := peer.receive()):
                peer.values.put(message["value"])
        except FrameError as error:
            message = {"failed": index, "reason": str(error)}
        if not self._closing and "bye" not in message:
            self._end(*self._read_failure(message, index))

    def _read_failure(self, message: dict[str, Any], sender: int) -> tuple[int, str]:
        """Return the failed process and its reason; process 0 forwards those of others, a process tells its own."""
        failed, reason = message.get("failed"), message.get("reason")
        if self._index == 0 or type(failed) is not int or not 0 <= failed < len(self._hosts):
            failed = sender
        return failed, str(reason or "sends an unknown message")

    def _end(self, index: int, reason: str) -> None:
        """Report a lost process to the others, then to this one."""
        self.broken.set()
        if self._index == 0:
            for other, peer in self._peers.items():
                if other != index:
                    peer.send({"failed": index, "reason": reason})
        self._lost(f"process {index} on {self._hosts[index]}: {reason}")
