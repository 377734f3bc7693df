"""Page-locked buffers from which a GPU copies the tensors of files."""

import contextlib
import math
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np

from jaxglue.hf.tensor_files import TensorFiles

_BUFFER_BYTES = 2**27


class UploadBuffers:
    """Context with buffers of the host that a GPU reads directly, for several threads, each allocated at its first use.

    From other memory, copies pass through page-locked memory of the runtime, whose growth takes longer than they do.

    Args:
        count: of the buffers.
        size: of one, in bytes.
        put: copies an array of the host; the result shares no memory with it.
    """

    def __init__(self, count: int, size: int = _BUFFER_BYTES, put: Callable[[np.ndarray], jax.Array] = jax.device_put):
        self._client, self._size, self._put = jax.local_devices()[0].client, size, put
        self._locked: list[np.ndarray] = []
        self._free: SimpleQueue[np.ndarray | None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def __enter__(self) -> "UploadBuffers":
        return self

    def __exit__(self, *error: object) -> None:
        for buffer in self._locked:
            self._client.dma_unmap(buffer.ctypes.data)

    def upload(self, files: TensorFiles, name: str) -> jax.Array:
        """Copy a tensor to the default device, by as many rows at a time as a buffer holds."""
        info = files.tensors[name]
        rows = self._size // max(1, math.prod(info.shape[1:]) * info.dtype.itemsize)
        if not info.shape or not rows:
            return jax.block_until_ready(self._put(files.read(name)))
        with self._buffer() as buffer:
            starts = range(0, max(1, info.shape[0]), rows)
            # A buffer is filled again only after its copy.
            read = (files.read_rows(name, start, start + rows, buffer) for start in starts)
            parts = [jax.block_until_ready(self._put(part)) for part in read]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    @contextlib.contextmanager
    def _buffer(self) -> Iterator[np.ndarray]:
        buffer = self._free.get()
        try:
            if buffer is None:
                buffer = self._allocate()
            yield buffer
        finally:
            self._free.put(buffer)

    def _allocate(self) -> np.ndarray:
        buffer = np.empty(self._size, np.uint8)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # unlocked memory is slower, and as good
            self._client.dma_map(buffer.ctypes.data, buffer.nbytes)
            self._locked.append(buffer)
        return buffer
