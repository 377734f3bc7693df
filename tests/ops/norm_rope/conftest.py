"""The kernels on the CPU."""

import pytest


@pytest.fixture(scope="session")
def interpreted_backend(interpreted):
    """A TritonNormRope with launches on the CPU; float32 and float16 only."""
    from jaxglue.ops.norm_rope.triton import TritonNormRope

    return interpreted(TritonNormRope)(compute_capability=80)
