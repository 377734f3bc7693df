"""The attention kernels on the CPU."""

import pytest


@pytest.fixture(scope="session")
def interpreted_backend(interpreted):
    """The class of a Triton backend whose launches run on the CPU; float32 and float16 only."""
    from jaxglue.ops.attention.triton import TritonAttention

    return interpreted(TritonAttention)
