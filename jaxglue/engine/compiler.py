"""Compile the programs of a training step: with XLA's options, and from shapes while values are on their way."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.stages import Lowered, Traced

from jaxglue.ops.equations import equations
from jaxglue.ops.kernel_cost import KERNEL
from jaxglue.sharding.rules import Layout

STEP_OPTIONS = {
    # cuBLAS for every matmul: it reads adapters' narrow ones at 90% of copy bandwidth, accumulates into its output, and
    # tunes in 0.1 s; XLA's Triton kernels lose on all three.
    "xla_gpu_enable_triton_gemm": False,
    # Merged matmuls of one input would copy weights together and results apart.
    "xla_gpu_dot_merger_threshold_mb": 0,
    # XLA's cache does not keep these choices: sums would be rounded otherwise after another compilation.
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}
_EXCHANGING = STEP_OPTIONS | {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
_LAUNCH_ONLY = {"grid", "name", "cost_estimate", "serialized_metadata"}
"""Parameters of a kernel's call that its compilation does not read."""
_tracing = ContextVar("tracing", default=False)
_as_written = ContextVar("as_written", default=False)
_whole_products = ContextVar("whole_products", default=False)


@contextlib.contextmanager
def rounding_as_written(wanted: bool = True) -> Iterator[None]:
    """Let XLA round values wherever the code does, in programs that are made in the context.

    By default a value that is rounded inside a fusion keeps its float32 bits there, so that two programs with other
    fusions, as those of sampling and training, compute different numbers from the same code.
    """
    token = _as_written.set(wanted)
    try:
        yield
    finally:
        _as_written.reset(token)


def rounds_as_written() -> bool:
    """Return whether `rounding_as_written` holds for programs that are made now."""
    return _as_written.get()


@contextlib.contextmanager
def products_of(dtype: Any) -> Iterator[None]:
    """Let programs that are made in the context multiply a model's values of this dtype without rounding them.

    GPUs round float32 to TF32 in products by default, to 11 bits. Where JAX's own setting names a precision
    (`JAX_DEFAULT_MATMUL_PRECISION`), that one holds.
    """
    token = _whole_products.set(jnp.dtype(dtype) == jnp.float32)
    try:
        yield
    finally:
        _whole_products.reset(token)


def _multiplying(whole: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context in which a program is traced."""
    named = jax.config.jax_default_matmul_precision is not None
    return contextlib.nullcontext() if named or not whole else jax.default_matmul_precision("highest")


def _with_rounding(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"xla_allow_excess_precision": False} if rounds_as_written() else options


class Program:
    """A function compiled with XLA options; called inside another program, it is a part of that, under its options.

    Args:
        function: of arrays.
        compiler_options: of XLA.
        options: of `jax.jit`.
    """

    def __init__(self, function: Callable, *, compiler_options: dict[str, Any], **options: Any):
        whole = _whole_products.get()

        @functools.wraps(function)
        def trace(*args: Any, **kwargs: Any) -> Any:
            token = _tracing.set(True)
            try:
                with _multiplying(whole):
                    return function(*args, **kwargs)
            finally:
                _tracing.reset(token)

        self._alone: Any = jax.jit(trace, compiler_options=_with_rounding(compiler_options), **options)
        self._nested = jax.jit(trace, **options)  # JAX refuses XLA's options inside a program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's results."""
        return (self._nested if _tracing.get() else self._alone)(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace the program on arrays or `ShapeDtypeStruct`s."""
        return self._alone.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return the shapes and dtypes of the results for arrays or `ShapeDtypeStruct`s."""
        return self._alone.eval_shape(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lower the program for arrays or `ShapeDtypeStruct`s."""
        return self._alone.lower(*args, **kwargs)

    def compilations(self) -> int:
        """Return how often the program was compiled."""
        return self._alone._cache_size()


jit_step = partial(Program, compiler_options=STEP_OPTIONS)
"""`jax.jit` for the programs of a training step."""

jit_exchanging = partial(Program, compiler_options=_EXCHANGING)
"""`jit_step` for programs with collectives, of which two may be under way."""


class Lowering:
    """Programs that threads trace and lower as soon as this exists, their Triton kernels compiled side by side.

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
    """Return a tree's shapes as of arrays committed to the first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="device")
    return jax.tree.map(lambda leaf: _shape(leaf, sharding), tree)


def on_devices(layout: Layout, tree: Any, specs: Any) -> Any:
    """Return a tree's shapes as of arrays with these specs, a tree or its prefix; without a mesh as `on_device`."""
    if layout.mesh is None:
        return on_device(tree)

    def shapes(spec: PartitionSpec, part: Any) -> Any:
        return jax.tree.map(lambda leaf: _shape(leaf, layout.sharding(spec)), part)

    return jax.tree.map(shapes, specs, tree)


def _shape(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def _kernel(call: Any) -> tuple[Any, ...]:
    """Return a key that calls of the same compiled kernel share."""
    constants = {name: value for name, value in call.params.items() if name not in _LAUNCH_ONLY}
    return call.params["fn"], *(str(value.aval) for value in call.invars), str(constants)


def _compile_kernel(call: Any) -> None:
    """Lower a call alone: its kernel is found when the program is lowered, or fails once more."""
    jax.jit(lambda *values: call.primitive.bind(*values, **call.params)).lower(*(value.aval for value in call.invars))
