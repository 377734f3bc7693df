"""Runs our Triton kernels on the CPU in Triton's interpreter, which by itself needs torch."""

import importlib.util
from contextlib import contextmanager
from unittest import mock

import jax
import numpy as np
import pytest


class _Buffer:
    """The part of a torch tensor that the interpreter uses."""

    _NAMES = {"float32": "fp32", "float16": "fp16", "int32": "i32"}  # noqa: RUF012

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, self._NAMES[str(array.dtype)]

    def data_ptr(self) -> int:
        return self.array.ctypes.data


@contextmanager
def _interpreting():
    """Triton decorates for the interpreter, as do the library functions that the kernels use."""
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    before, triton.knobs.runtime.interpret = triton.knobs.runtime.interpret, True
    library = {name: InterpretedFunction(getattr(tl, name).fn) for name in ("max", "sum")}
    try:
        with mock.patch.multiple(tl, **library):
            yield
    finally:
        triton.knobs.runtime.interpret = before


def _load_interpreted(name: str):
    """A second copy of a module of kernels, decorated for the interpreter."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    with _interpreting():
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def interpreted_backend():
    """The class of a Triton backend whose launches run on the CPU; float32 and float16 only."""
    pytest.importorskip("jax_triton", reason="needs jax-triton and triton: pip install 'jaxglue[test]'")
    from triton.runtime.interpreter import GridExecutor

    from jaxglue.attention.triton import TritonBackend

    kernels = _load_interpreted("jaxglue.attention.kernels")

    class Executor(GridExecutor):
        def _init_args_hst(self, args, kwargs):
            return list(args), dict(kwargs)

        def _restore_args_dev(self, *args):
            pass

    class InterpretedBackend(TritonBackend):
        def _launch(self, kernel, arrays, out_type, grid, tiles, constants):
            interpreted = getattr(kernels, kernel.__name__)
            constants = constants | {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "DESCRIPTORS": False}

            def run(*arrays):
                outputs = [np.full(o.shape, np.nan, o.dtype) for o in out_type]  # an unwritten element shows
                buffers = [_Buffer(np.array(a)) for a in (*arrays, *outputs)]
                with _interpreting():
                    Executor(interpreted.rewrite(), interpreted.arg_names, grid)(*buffers, **constants)
                return tuple(b.array for b in buffers[len(arrays) :])

            return jax.pure_callback(run, out_type, *arrays)

    return InterpretedBackend
