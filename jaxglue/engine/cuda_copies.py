"""Copies from the GPU to memory of this process by CUDA's driver, outside of JAX."""

import ctypes
import os
import threading
from pathlib import Path

_NON_BLOCKING_STREAM, _BLOCKING_EVENT = 1, 3
"""A stream apart from the default one; an event without a time, on which a thread sleeps."""


class CudaCopies:
    """Copies of one GPU, on a stream for each thread that asks for one.

    Args:
        ordinal: of the GPU among those that CUDA shows this process.

    Raises:
        OSError: there is no CUDA driver.
        RuntimeError: the driver refuses.
    """

    def __init__(self, ordinal: int):
        self._cuda, self._threads = ctypes.CDLL("libcuda.so.1"), threading.local()
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        bus = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", bus, len(bus), device)
        self.cpus = local_cpus(Path("/sys/bus/pci/devices") / bus.value.decode().lower())
        """The CPUs of this process that are beside the GPU."""

    def __call__(self, target: int, source: int, size: int) -> None:
        """Copy bytes from the GPU's address to the host's; return once they are there."""
        stream, event = self._stream_and_event()
        arguments = ctypes.c_void_p(target), ctypes.c_uint64(source), ctypes.c_size_t(size), stream
        self._call("cuMemcpyDtoHAsync_v2", *arguments)
        self._call("cuEventRecord", event, stream)
        self._call("cuEventSynchronize", event)

    def finish(self) -> None:
        """Wait for all work on the GPU."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuCtxSynchronize")

    def _stream_and_event(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """Return the calling thread's, made at its first call."""
        if not hasattr(self._threads, "made"):
            stream, event = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuCtxSetCurrent", self._context)
            self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING_STREAM)
            self._call("cuEventCreate", ctypes.byref(event), _BLOCKING_EVENT)
            self._threads.made = stream, event
        return self._threads.made

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._cuda, name)(*arguments):
            raise RuntimeError(f"CUDA's {name} failed with status {status}")


def local_cpus(device: Path) -> set[int]:
    """Return this process's CPUs on the NUMA node of a PCI device, given by its folder; all where it names none."""
    own = os.sched_getaffinity(0)
    try:
        ranges = (part.partition("-") for part in (device / "local_cpulist").read_text().strip().split(","))
        near = {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):  # not Linux's, or hidden in a container
        return own
    return near & own or own
