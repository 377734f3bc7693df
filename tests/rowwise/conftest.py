"""The kernels over rows on the CPU."""

import pytest


@pytest.fixture(scope="session")
def interpreted_backend(interpreted):
    """A Triton backend whose launches run on the CPU; float32 and float16 only."""
    launch = interpreted("jaxglue.rowwise.kernels")
    from jaxglue.rowwise.triton import TritonBackend

    class InterpretedBackend(TritonBackend):
        def _launch(self, kernel, arrays, out_type, grid, constants, num_warps=4):
            return launch(kernel, arrays, out_type, grid, constants)

    return InterpretedBackend(compute_capability=80)
