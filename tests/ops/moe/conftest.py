"""Kernels of mixture of experts in Triton's interpreter."""

import pytest


@pytest.fixture(scope="session")
def interpreted_kernels(interpreted):
    """`TritonMoe` with launches on the CPU; float32 and float16 only."""
    from jaxglue.ops.moe.triton import TritonMoe

    return interpreted(TritonMoe)
