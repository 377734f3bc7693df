"""The processes of a run: joined before JAX starts, in agreement, ended together."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import jax

from jaxglue.distributed.channel import DIED, ControlChannel
from jaxglue.distributed.process_info import ProcessInfo

_MEETING_SECONDS = 300.0
_HEARTBEAT_SECONDS = 60
"""After which JAX ends the run for a process that is there and does not answer, as one that was stopped."""
_FAREWELL_SECONDS = 2.0
"""Long enough to hear that another process is the cause of an error here, or to let the others hear of it."""


class Processes:
    """This process among those of the run; alone without a channel."""

    def __init__(self, index: int = 0, count: int = 1, channel: ControlChannel | None = None):
        self.index, self.count, self._channel = index, count, channel

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, which alone writes what there is one of."""
        return self.index == 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """The JSON-able value of every process, in their order; all must ask, and it is there when the last has."""
        return [value] if self._channel is None else self._channel.all_gather_object(value)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Process 0 goes through this context before the others do, as to fill a cache that they then read."""
        if not self.is_main:
            self.all_gather_object(None)
        yield
        if self.is_main:
            self.all_gather_object(None)

    def agree(self, what: str, values: Mapping[str, Any]) -> None:
        """Compares JSON-able values, perhaps nested, among the processes.

        Raises:
            ValueError: on every process, with the same words: each value in which a process differs from process 0.
        """
        flat = self.all_gather_object(_flatten(values))
        lines = [
            f"  {name}: {_shown(flat[0], name)} on process 0, {_shown(other, name)} on process {index}"
            for index, other in enumerate(flat)
            for name in {**flat[0], **other}
            if _shown(flat[0], name) != _shown(other, name)
        ]
        if lines:
            raise ValueError(
                f"the processes disagree on the {what}:\n"
                + "\n".join(lines)
                + "\nStart all with the same flags and files."
            )


SINGLE_PROCESS = Processes()
"""A run in one process."""


@contextlib.contextmanager
def join_processes(launch: ProcessInfo | None) -> Iterator[Processes]:
    """Finds the other processes and starts JAX's distributed runtime, before anything asks JAX for a device.

    While the context lasts, the death of another process ends this one, with a line that says which it was. An error
    inside ends all processes; each says where it came from.

    Raises:
        ValueError: the others were not found, or do not fit.
    """
    if launch is None:
        yield SINGLE_PROCESS
        return
    index, count = launch.process_id, launch.num_processes
    channel = ControlChannel(
        index, count, launch.address, timeout=_MEETING_SECONDS, lost=partial(_stop, is_main=index == 0)
    )
    processes = Processes(index, count, channel)
    try:
        _start_jax(launch.address[0], processes)
        yield processes
        processes.all_gather_object("done")
        channel.close()
        jax.distributed.shutdown()
    except BaseException as error:
        _leave(error, channel)


def _start_jax(host: str, processes: Processes) -> None:
    port = processes.all_gather_object(_free_port() if processes.is_main else None)[0]
    # JAX's own handler would take SIGTERM, with which a scheduler asks for a checkpoint, from the trainer.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"{host}:{port}",
        processes.count,
        processes.index,
        local_device_ids=[],
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )
    gpus = processes.all_gather_object([socket.gethostname(), visible_gpus()])
    if own := share_gpus(gpus, processes.index):
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, own)))
    jax.devices()  # all start their devices together: later, one that waits for another would hold it up


def share_gpus(visible: list[list[Any]], index: int) -> list[int]:
    """Which of the GPUs that it sees a process takes, by their number among these.

    Processes that see the same GPUs of a host share them evenly; a launcher may also have given each its own.

    Args:
        visible: host and GPUs that are visible there, of every process.
        index: which process to answer for.

    Raises:
        ValueError: the GPUs do not divide among the processes.
    """
    same = [other for other, seen in enumerate(visible) if seen == visible[index]]
    host, gpus = visible[index]
    if len(gpus) % len(same):
        raise ValueError(
            f"{len(same)} processes on {host} see the same {len(gpus)} GPUs, which do not divide among them: "
            "start one process for each GPU, or one for each host"
        )
    each = len(gpus) // len(same)
    first = same.index(index) * each
    return list(range(first, first + each))


def visible_gpus() -> list[str]:
    """The GPUs that CUDA will show this process, by UUID; none where JAX is to use CPUs, or nvidia-smi is missing."""
    if jax.config.jax_platforms == "cpu":
        return []
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return found
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [found[int(name)] if name.isdecimal() and int(name) < len(found) else name for name in names]


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _stop(reason: str, *, is_main: bool) -> None:
    """Called in a thread: the main one may hang in a collective operation that will never end."""
    remedy = "; continue the run with --resume" if reason.endswith(DIED) else ""
    print(f"error: {reason.rstrip('.')}. This process stops too{remedy}", file=sys.stderr, flush=True)
    if is_main:  # JAX's runtime aborts the others when process 0 is gone: let them hear of the reason before
        time.sleep(_FAREWELL_SECONDS)
    os._exit(1)


def _leave(error: BaseException, channel: ControlChannel) -> NoReturn:
    """Tells the others and exits, without the orderly end of JAX's runtime, which would wait for them."""
    if channel.broken.wait(_FAREWELL_SECONDS):
        time.sleep(2 * _FAREWELL_SECONDS)  # this is what another's death looks like from here: `_stop` has the word
    user = isinstance(error, (ValueError, OSError))
    text = str(error) if user else "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, SystemExit):
        text = str(error.code)
    print(f"error: {text}" if user else text, file=sys.stderr, flush=True)
    channel.fail(text if user else text.splitlines()[-1])
    time.sleep(_FAREWELL_SECONDS)
    os._exit(1)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "nothing"
