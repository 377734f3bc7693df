"""The processes of a run: they join before JAX starts, compare their configuration, and end together."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

from jaxglue.distributed.channel import ControlChannel
from jaxglue.distributed.frames import DIED
from jaxglue.distributed.meeting import address_text, listen
from jaxglue.distributed.process_info import ProcessInfo
from jaxglue.terminal.lines import echo

_MEETING_SECONDS = 300.0
_HEARTBEAT_SECONDS = 60
"""Silence after which JAX ends the run: a process that lives but does not answer, such as a stopped one."""
_FAREWELL_SECONDS = 2.0
"""Time to hear that another process caused an error here, or to let the others hear of this one's."""


class Processes:
    """This process among those of its run; single without a channel."""

    def __init__(self, index: int = 0, count: int = 1, channel: ControlChannel | None = None):
        self.index, self.count, self._channel = index, count, channel

    @property
    def is_main(self) -> bool:
        """Return whether this is process 0, which alone prints and writes shared files."""
        return self.index == 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the JSON values of all processes in their order; all must call, and all wait for the last."""
        return [value] if self._channel is None else self._channel.all_gather_object(value)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let process 0 run the context before the others, so that they read the cache it fills."""
        if not self.is_main:
            self.all_gather_object(None)
        yield
        if self.is_main:
            self.all_gather_object(None)

    def agree(self, what: str, values: Mapping[str, Any]) -> None:
        """Compare JSON values, perhaps nested, among the processes.

        Raises:
            ValueError: on every process, with the same text: each value that differs from process 0's.
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
"""The processes of a run in one process."""


@contextlib.contextmanager
def join_processes(process_info: ProcessInfo | None) -> Iterator[Processes]:
    """Join the other processes and start JAX's distributed runtime; call it before JAX is asked for a device.

    While the context lasts, the death of another process ends this one, with a line that names it. An error inside
    ends all processes; each names its origin.

    Raises:
        ValueError: the others are missing, or have other settings.
    """
    if process_info is None:
        yield SINGLE_PROCESS
        return
    import jax

    index, count = process_info.process_id, process_info.num_processes
    lost = partial(_stop, is_main=index == 0)
    token, address = process_info.token, process_info.address
    channel = ControlChannel(index, count, address, token=token, timeout=_MEETING_SECONDS, lost=lost)
    processes = Processes(index, count, channel)
    try:
        _start_jax(address[0], processes)
        yield processes
        processes.all_gather_object("done")
        channel.close()
        jax.distributed.shutdown()
    except BaseException as error:
        _leave(error, channel)


def _start_jax(host: str, processes: Processes) -> None:
    import jax

    service = _free_address(host) if processes.is_main else None
    port = processes.all_gather_object(service and service[1])[0]
    # JAX's handler would take SIGTERM, a scheduler's request for a checkpoint, from the trainer.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address_text((host, port)),
        processes.count,
        processes.index,
        coordinator_bind_address=service and address_text(service),
        local_device_ids=[],
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )
    gpus = processes.all_gather_object([socket.gethostname(), visible_gpus()])
    if own := share_gpus(gpus, processes.index):
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, own)))
    jax.devices()  # now, on all together: later, a process could start its devices while another waits for it


def share_gpus(visible: list[list[Any]], index: int) -> list[int]:
    """Return the GPUs of one process, as indices into its visible ones.

    Processes that see the same GPUs of a host share them evenly; a launcher may also give each its own.

    Args:
        visible: host and visible GPUs of every process.
        index: number of the process.

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
    """Return UUIDs of the GPUs visible to this process; none if JAX uses CPUs, or without nvidia-smi."""
    import jax

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


def _free_address(host: str) -> tuple[str, int]:
    """Return address and port on the host's interface, where JAX's service can listen."""
    with listen((host, 0)) as server:
        return server.getsockname()[:2]


def _stop(reason: str, *, is_main: bool) -> None:
    """End the process from a thread: the main one may hang in a collective operation that never ends."""
    remedy = "; continue the run with --resume" if reason.endswith(DIED) else ""
    echo(f"error: {reason.rstrip('.')}. This process stops too{remedy}", error=True)
    if is_main:  # without process 0 JAX's runtime aborts the others: let them hear the reason first
        time.sleep(_FAREWELL_SECONDS)
    os._exit(1)


def _leave(error: BaseException, channel: ControlChannel) -> NoReturn:
    """Tell the others and exit without shutting down JAX's runtime, which would wait for them; 130 after Ctrl-C."""
    if channel.broken.wait(_FAREWELL_SECONDS):
        time.sleep(2 * _FAREWELL_SECONDS)  # a consequence of another's death, which `_stop` reports
    user = isinstance(error, (ValueError, OSError))
    text = str(error) if user else "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, SystemExit):
        text = str(error.code)
    if interrupted := isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    echo(f"error: {text}" if user else text, error=True)
    channel.fail(text if user else text.splitlines()[-1])
    time.sleep(_FAREWELL_SECONDS)
    os._exit(128 + signal.SIGINT if interrupted else 1)


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
