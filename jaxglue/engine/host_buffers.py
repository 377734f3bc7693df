"""Page-locked buffers of the host for values that leave the device, in place of JAX's pool of pinned memory.

JAX has CUDA pin pages that do not exist yet, one after another: 2 GiB/s, while other calls wait. Pages that several
threads have touched are pinned ten times as fast.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

_PAGE, _HUGE_PAGE = 2**12, 2**21
_CHUNK = 2**28
"""Bytes that a thread touches at a time."""
_GROWTH = 2**30
"""Least bytes by which buffers grow beyond their first size."""
_TOUCHING, _COPYING = 16, 2
"""Most threads that touch pages, and threads that wait for copies: one's ends while the next one's runs."""
_NON_BLOCKING_STREAM, _BLOCKING_EVENT = 1, 3
"""A stream apart from the default one; an event without a time, on which a thread sleeps."""
_log = logging.getLogger(__name__)


class HostBuffers:
    """Context with page-locked buffers of one device, each used again for values of its size.

    Pages are touched in the background from the beginning, and buffers pinned as soon as their sizes are known.

    Args:
        device: from which values come.
        size: bytes to touch ahead; buffers grow beyond.
        copy: copies bytes from the device's address to the host's, by default CUDA's.

    Raises:
        OSError, RuntimeError: CUDA's driver cannot be called.
    """

    def __init__(self, device: jax.Device, size: int, copy: Callable[[int, int, int], None] | None = None):
        self._client = device.client
        self._copy = copy or CudaCopies(device.local_hardware_id)
        cpus = self._copy.cpus if isinstance(self._copy, CudaCopies) else os.sched_getaffinity(0)
        threads = min(_TOUCHING, len(cpus))  # on the GPU's NUMA node, on which they take memory
        self._touching = ThreadPoolExecutor(threads, "touching", _stay_on, (cpus,))
        self._locking = ThreadPoolExecutor(1, "pinning")
        self._copying = ThreadPoolExecutor(_COPYING, "copying")
        self._free: dict[int, deque[_Buffer]] = defaultdict(deque)
        self._locked: list[int] = []
        self._can_lock = True
        self._region, self._cutting = _Region(size, self._touching), threading.Lock()

    def __enter__(self) -> "HostBuffers":
        return self

    def __exit__(self, *error: object) -> None:
        for threads in (self._touching, self._locking, self._copying):
            threads.shutdown(cancel_futures=True)
        if isinstance(self._copy, CudaCopies):
            self._copy.finish()  # copies to the device may still read
        while self._locked:
            self._client.dma_unmap(self._locked.pop())

    def prepare(self, sizes: Iterable[int]) -> None:
        """Pin buffers for values of so many bytes, in the order of their use, in the background."""
        for size in map(_whole_pages, sizes):
            self._free[size].append(self._cut(size))

    def store(self, array: jax.Array, sharding: jax.sharding.Sharding) -> "HostValue":
        """Start copying a device's array; the result has the sharding of such an array on the host."""
        size = _whole_pages(array.nbytes)
        free = self._free[size]
        value = HostValue(array, sharding, free.popleft() if free else self._cut(size), free)
        value.start(self._copying.submit(self._fill, value, [array]))
        return value

    def _fill(self, value: "HostValue", arrays: list[jax.Array]) -> None:
        """Copy the one array, taken from the list, into its value's buffer once it is computed.

        The buffer's last reader, a copy to the device, is done by then: programs before the array's waited for it. The
        array's memory is free on return.
        """
        array = arrays.pop().block_until_ready()
        value.buffer.locked.result()
        self._copy(value.buffer.bytes.ctypes.data, array.unsafe_buffer_pointer(), array.nbytes)

    def _lock(self, data: np.ndarray, touched: list[Future[None]]) -> None:
        wait(touched)
        if not self._can_lock:
            return
        try:
            self._client.dma_map(data.ctypes.data, data.size)
            self._locked.append(data.ctypes.data)
        except jax.errors.JaxRuntimeError as error:
            self._can_lock = False
            _log.warning("offloading is slower, as host memory cannot be pinned: %s", error)

    def _cut(self, size: int) -> "_Buffer":
        """Return a new buffer, which is being pinned."""
        with self._cutting:
            if self._region.left < size:
                self._region = _Region(max(size, _GROWTH), self._touching)
            data, touched = self._region.take(size)
        return _Buffer(data, self._locking.submit(self._lock, data, touched))


class _Region:
    """Memory from which buffers are cut, its pages, huge where the system has them, touched by threads."""

    def __init__(self, size: int, threads: ThreadPoolExecutor):
        mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_DONTFORK)  # the kernel would copy pinned pages for a forked process
        with contextlib.suppress(OSError):  # no huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(mapping, np.uint8)
        self._bytes = memory[-memory.ctypes.data % _HUGE_PAGE :][:size]
        self._touched = [threads.submit(_touch, self._bytes[i : i + _CHUNK]) for i in range(0, size, _CHUNK)]
        self._begun = 0

    @property
    def left(self) -> int:
        """Return the bytes of which no buffer is made."""
        return self._bytes.size - self._begun

    def take(self, size: int) -> tuple[np.ndarray, list[Future[None]]]:
        """Return the next bytes, and the futures of touching them."""
        begun, end = self._begun, self._begun + size
        self._begun = end
        return self._bytes[begun:end], self._touched[begun // _CHUNK : -(-end // _CHUNK)]


class _Buffer(NamedTuple):
    """Memory of a value."""

    bytes: np.ndarray
    locked: Future[None]
    """Done once the memory is pinned."""


class HostValue:
    """Copy of a device's array in a buffer, which is free again once nothing refers to the value."""

    def __init__(self, array: jax.Array, sharding: jax.sharding.Sharding, buffer: _Buffer, free: deque[_Buffer]):
        self.shape, self.dtype, self.nbytes, self.sharding = array.shape, array.dtype, array.nbytes, sharding
        self.buffer, self._free = buffer, free
        self._done: Future[Any]

    def __del__(self) -> None:
        self._free.append(self.buffer)

    def start(self, done: Future[None]) -> None:
        """Set the future of the copy, which holds the value."""
        self._done = done

    def block_until_ready(self) -> "HostValue":
        """Wait until the copy is complete, as a JAX array's method does."""
        self._done.result()
        return self

    @property
    def content(self) -> np.ndarray:
        """Return the complete copy, in the buffer."""
        self._done.result()
        return self.buffer.bytes[: self.nbytes].view(self.dtype).reshape(self.shape)


class MeshBuffers:
    """Context with the page-locked buffers of several devices, each beside its own.

    Args:
        devices: of this process.
        size: bytes to touch ahead for each.
        copy: of `HostBuffers`.
    """

    def __init__(self, devices: Sequence[jax.Device], size: int, copy: Callable[[int, int, int], None] | None = None):
        self._of = {device: HostBuffers(device, size, copy) for device in devices}

    def __enter__(self) -> "MeshBuffers":
        return self

    def __exit__(self, *error: object) -> None:
        for buffers in self._of.values():
            buffers.__exit__(*error)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Pin buffers for parts of so many bytes on each device, in the order of their use, in the background."""
        sizes = list(sizes)
        for buffers in self._of.values():
            buffers.prepare(sizes)

    def store(self, array: jax.Array, sharding: jax.sharding.Sharding) -> "MeshValue":
        """Start copying every device's part; the result has the sharding of such an array on the host."""
        kind = sharding.memory_kind
        parts = [(part.device, part.data) for part in array.addressable_shards]
        shardings = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device, _ in parts]
        values = [self._of[device].store(data, to) for (device, data), to in zip(parts, shardings, strict=True)]
        return MeshValue(array, sharding, values)


Buffers = HostBuffers | MeshBuffers


class MeshValue:
    """Copies of an array's parts on the devices of this process."""

    def __init__(self, array: jax.Array, sharding: jax.sharding.Sharding, parts: list[HostValue]):
        self.shape, self.dtype, self.nbytes, self.sharding = array.shape, array.dtype, array.nbytes, sharding
        self.parts = parts

    def block_until_ready(self) -> "MeshValue":
        """Wait until all copies are complete, as a JAX array's method does."""
        for part in self.parts:
            part.block_until_ready()
        return self


def _whole_pages(size: int) -> int:
    return max(-(-size // _HUGE_PAGE), 1) * _HUGE_PAGE


def _stay_on(cpus: set[int]) -> None:
    with contextlib.suppress(OSError):  # forbidden
        os.sched_setaffinity(0, cpus)


def _touch(chunk: np.ndarray) -> None:
    chunk[::_PAGE] = 0


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
    allowed = os.sched_getaffinity(0)
    try:
        ranges = (part.partition("-") for part in (device / "local_cpulist").read_text().strip().split(","))
        near = {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):  # not Linux's, or hidden in a container
        return allowed
    return near & allowed or allowed
