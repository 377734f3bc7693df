"""Page-locked buffers of the host for values that leave the device, in place of JAX's pool of pinned memory.

JAX has CUDA pin pages that do not exist yet, one after another: 2 GiB/s, while other calls wait. Pages that several
threads have touched are pinned ten times as fast.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from jaxglue.engine.cuda_copies import CudaCopies

_PAGE, _HUGE_PAGE = 2**12, 2**21
_CHUNK = 2**28
"""Bytes that a thread touches at a time."""
_GROWTH = 2**30
"""Least bytes by which buffers grow beyond their first size."""
_TOUCHING, _COPYING = 16, 2
"""Most threads that touch pages, and threads that wait for copies: one's ends while the next one's runs."""
_log = logging.getLogger(__name__)


class HostBuffers:
    """Context with page-locked buffers of one device, each used again for values of its size.

    Pages are touched in the background from the beginning; a buffer is pinned when it is first used.

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
        self._touching = ThreadPoolExecutor(min(_TOUCHING, os.cpu_count() or 1), "touching")
        self._copying = ThreadPoolExecutor(_COPYING, "copying")
        self._free: dict[int, list[_Buffer]] = defaultdict(list)
        self._locked: list[_Buffer] = []
        self._grow(size)

    def __enter__(self) -> "HostBuffers":
        return self

    def __exit__(self, *error: object) -> None:
        self._touching.shutdown(cancel_futures=True)
        self._copying.shutdown(cancel_futures=True)
        if isinstance(self._copy, CudaCopies):
            self._copy.finish()  # copies to the device may still read
        for buffer in self._locked:
            self._client.dma_unmap(buffer.bytes.ctypes.data)
        self._locked.clear()

    def store(self, array: jax.Array, sharding: jax.sharding.Sharding) -> "HostValue":
        """Start copying a device's array; the result has the sharding of such an array on the host."""
        buffer = self._take(-(-array.nbytes // _HUGE_PAGE) * _HUGE_PAGE)
        value = HostValue(array, sharding, buffer, self._free[buffer.bytes.size])
        value.start(self._copying.submit(self._fill, value, array))
        return value

    def _fill(self, value: "HostValue", array: jax.Array) -> None:
        """Copy an array into its value's buffer once it is computed.

        The buffer's last reader, a copy to the device, is done by then: programs before the array's waited for it.
        """
        array.block_until_ready()
        buffer = value.buffer
        if not buffer.is_locked:
            self._lock(buffer)
        self._copy(buffer.bytes.ctypes.data, array.unsafe_buffer_pointer(), array.nbytes)

    def _lock(self, buffer: "_Buffer") -> None:
        wait(buffer.touched)
        try:
            self._client.dma_map(buffer.bytes.ctypes.data, buffer.bytes.size)
            self._locked.append(buffer)
        except jax.errors.JaxRuntimeError as error:
            _log.warning("values leave the GPU more slowly, as CUDA cannot pin their memory: %s", error)
        buffer.is_locked = True

    def _take(self, size: int) -> "_Buffer":
        if self._free[size]:
            return self._free[size].pop()
        if self._region.size - self._begun < size:
            self._grow(max(size, _GROWTH))
        end = self._begun + size
        touched = self._touched[self._begun // _CHUNK : -(-end // _CHUNK)]
        buffer = _Buffer(self._region[self._begun : end], touched)
        self._begun = end
        return buffer

    def _grow(self, size: int) -> None:
        """Begin a region, whose pages threads touch; numpy asks for huge ones."""
        memory = np.empty(size + _HUGE_PAGE, np.uint8)
        region = memory[-memory.ctypes.data % _HUGE_PAGE :][:size]
        chunks = (region[first : first + _CHUNK] for first in range(0, size, _CHUNK))
        self._region, self._begun = region, 0
        self._touched = [self._touching.submit(_touch, chunk) for chunk in chunks]


class _Buffer:
    """Bytes of a region, with the futures of touching them."""

    def __init__(self, data: np.ndarray, touched: list[Future[None]]):
        self.bytes, self.touched, self.is_locked = data, touched, False


class HostValue:
    """Copy of a device's array in a buffer, which is free again once nothing refers to the value."""

    def __init__(self, array: jax.Array, sharding: jax.sharding.Sharding, buffer: _Buffer, free: list[_Buffer]):
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


def _touch(chunk: np.ndarray) -> None:
    chunk[::_PAGE] = 0
