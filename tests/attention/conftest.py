"""The attention kernels on the CPU."""

import pytest


@pytest.fixture(scope="session")
def interpreted_backend(interpreted):
    """The class of a Triton backend whose launches run on the CPU; float32 and float16 only."""
    launch = interpreted("jaxglue.attention.kernels")
    from jaxglue.attention.triton import TritonBackend

    class InterpretedBackend(TritonBackend):
        def _launch(self, kernel, arrays, out_type, grid, tiles, constants):
            blocks = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "DESCRIPTORS": False}
            return launch(kernel, arrays, out_type, grid, constants | blocks)

    return InterpretedBackend
