"""The grouped matmul's kernels on the CPU."""

import pytest


@pytest.fixture(scope="session")
def interpreted_backend(interpreted):
    """The class of a Triton backend whose launches run on the CPU; float32 and float16 only."""
    launch = interpreted("jaxglue.moe.kernels")
    from jaxglue.moe.triton import TritonBackend

    class InterpretedBackend(TritonBackend):
        def _launch(self, kernel, arrays, out_type, grid, tiles, constants):
            blocks = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "BAND": tiles.band}
            return launch(kernel, arrays, out_type, grid, constants | blocks)

    return InterpretedBackend
