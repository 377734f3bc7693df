"""Preparation of a step's programs from the shapes of its arrays, while their values are on their way."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import jax
from jax.stages import Lowered, Traced

from jaxglue.engine.equations import equations
from jaxglue.ops.kernel_cost import KERNEL

_LAUNCH_ONLY = {"grid", "name", "cost_estimate", "serialized_metadata"}
"""Parameters of a kernel's call that its compilation does not read."""


class Lowering:
    """Programs that threads trace and lower from the beginning on, their Triton kernels side by side.

    As a context it stops at an error inside.

    Args:
        programs: traced one by one.
    """

    def __init__(self, programs: Iterator[Traced]):
        self._programs, self._stopped = programs, False
        thread = ThreadPoolExecutor(1, "lowering")
        self._lowered = thread.submit(copy_context().run, self._lower)
        thread.shutdown(wait=False)

    def __enter__(self) -> "Lowering":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._stopped = error is not None

    def compile(self) -> None:
        """Compile the programs; JAX's calls of the same functions with arrays of these shapes find them."""
        for lowered in self._lowered.result():
            lowered.compile()

    def _lower(self) -> list[Lowered]:
        traced: list[Traced] = []
        kernels: set[tuple[Any, ...]] = set()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "kernels") as threads:
            for program in self._programs:
                if self._stopped:
                    threads.shutdown(wait=False, cancel_futures=True)
                    return []
                traced.append(program)
                for call, _ in equations(program.jaxpr.jaxpr):
                    if call.primitive.name == KERNEL and (kernel := _kernel(call)) not in kernels:
                        kernels.add(kernel)
                        threads.submit(_compile_kernel, call)
        return [program.lower() for program in traced if not self._stopped]


def on_device(tree: Any) -> Any:
    """Return the shapes of a tree's arrays as those of arrays that are committed to the first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="device")

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(shape, tree)


def _kernel(call: Any) -> tuple[Any, ...]:
    """Return a key that calls of the same compiled kernel share."""
    constants = {name: value for name, value in call.params.items() if name not in _LAUNCH_ONLY}
    return call.params["fn"], *(str(value.aval) for value in call.invars), str(constants)


def _compile_kernel(call: Any) -> None:
    """Lower a call alone: its kernel is found when the program is lowered, or fails once more."""
    jax.jit(lambda *values: call.primitive.bind(*values, **call.params)).lower(*(value.aval for value in call.invars))
