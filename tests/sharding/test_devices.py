"""Runs the tests of this folder that need a mesh, in a process that has eight devices."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest


@pytest.mark.skipif(jax.device_count() == 8, reason="this is that process")
def test_on_eight_simulated_devices():
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    )
    # A device that waits for another keeps a thread; XLA starts as many as NPROC says, by default one for each core.
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    tests = Path(__file__).parents[1]
    files = [str(tests / path) for path in ("sharding", "training/test_mesh.py", "training/test_resident_bytes.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tests.parent)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
