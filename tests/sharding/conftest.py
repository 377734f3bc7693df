"""A mesh of eight simulated devices; with fewer devices `test_simulated_devices.py` runs the tests that need it."""

import jax
import pytest

from jaxglue.sharding.mesh import MeshShape, make_mesh


@pytest.fixture
def mesh_of():
    """mesh_of("data=2,fsdp=4") → the mesh."""
    if jax.device_count() != 8:
        pytest.skip("run by test_simulated_devices.py in a process of eight devices")
    return lambda text: make_mesh(MeshShape.parse(text))
