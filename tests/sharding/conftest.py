"""A mesh of eight simulated devices; where there are fewer, tests that need it are run by `test_devices.py`."""

import jax
import pytest

from jaxglue.sharding.mesh import MeshShape, make_mesh


@pytest.fixture
def mesh_of():
    """The mesh of a text such as data=2,fsdp=4."""
    if jax.device_count() != 8:
        pytest.skip("run by test_devices.py in a process of eight devices")
    return lambda text: make_mesh(MeshShape.parse(text))
