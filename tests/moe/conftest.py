"""The grouped matmul's kernels on the CPU."""

import pytest

MODULES = ("jaxglue.moe.kernels", "jaxglue.moe.row_kernels", "jaxglue.quant.kernels")


@pytest.fixture(scope="session")
def interpreted_backend(interpreted):
    """The class of a Triton backend whose launches run on the CPU; float32 and float16 only."""
    launches = {name: interpreted(name) for name in MODULES}
    from jaxglue.moe.triton import TritonBackend

    class InterpretedBackend(TritonBackend):
        def _launch(self, kernel, arrays, out_type, grid, constants, num_warps=4, num_stages=1, flops=0):
            return launches[kernel.__module__](kernel, arrays, out_type, grid, constants)

    return InterpretedBackend
