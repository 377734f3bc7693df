"""Runs the tests that need a mesh in processes of several simulated devices."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() > 1, reason="this is that process")
@pytest.mark.parametrize(
    ("devices", "files"),
    [
        (
            8,
            (
                "sharding/test_loading.py",
                "sharding/test_parity.py",
                "sharding/test_reads.py",
                "sharding/test_vision_parity.py",
            ),
        ),
        (4, ("training/test_mesh.py",)),
    ],
)
def test_on_simulated_devices(devices, files, pytestconfig):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    # A device that waits for another holds a thread; XLA starts NPROC of them, by default one per core.
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-m",
        pytestconfig.getoption("-m") or "not gpu",
        "-p",
        "no:cacheprovider",
    ]
    command += [TESTS / file for file in files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
