"""XLA options of the programs of a training step."""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
from jax.stages import Lowered, Traced

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
_tracing = ContextVar("tracing", default=False)


class Program:
    """A compiled function with XLA options; a part of the program whose function calls it, and under its options.

    Args:
        function: of arrays.
        compiler_options: of XLA.
        options: of `jax.jit`.
    """

    def __init__(self, function: Callable, *, compiler_options: dict[str, Any], **options: Any):
        @functools.wraps(function)
        def trace(*args: Any, **kwargs: Any) -> Any:
            token = _tracing.set(True)
            try:
                return function(*args, **kwargs)
            finally:
                _tracing.reset(token)

        self._alone: Any = jax.jit(trace, compiler_options=compiler_options, **options)
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
