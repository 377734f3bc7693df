"""Preparation of a step's programs from the shapes of its arrays, while their values are on their way."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.stages import Lowered, Traced

_log = logging.getLogger(__name__)


class Lowering:
    """Programs that a thread traces and lowers, with their Triton kernels, from the beginning on.

    Args:
        programs: traced one by one.
    """

    def __init__(self, programs: Iterator[Traced]):
        self._programs = programs
        threads = ThreadPoolExecutor(1, "lowering")
        self._lowered = threads.submit(self._lower)
        threads.shutdown(wait=False)

    def compile(self) -> None:
        """Compile the programs; JAX's calls of the same functions with arrays of these shapes find them."""
        for lowered in self._lowered.result():
            lowered.compile()

    def _lower(self) -> list[Lowered]:
        begun = time.monotonic()
        lowered = [program.lower() for program in self._programs]
        _log.debug("lowered %d programs in %.1f s", len(lowered), time.monotonic() - begun)
        return lowered


def on_device(tree: Any) -> Any:
    """Return the shapes of a tree's arrays as those of arrays that are committed to the first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="device")

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(shape, tree)
