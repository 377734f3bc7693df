"""The attention kernels on the CPU."""

import pytest


@pytest.fixture(scope="session")
def interpreted_backend(interpreted):
    """A TritonAttention class with launches on the CPU; float32 and float16 only."""
    from jaxglue.ops.attention.triton import TritonAttention

    return interpreted(TritonAttention)
