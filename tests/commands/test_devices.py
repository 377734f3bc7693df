"""Preparation of the accelerator before a command's modules are imported."""

import jax
import pytest

from jaxglue.commands import devices

OPTIONS = "jax_pjrt_client_create_options"


@pytest.mark.parametrize(
    ("gpus", "own", "expected"),
    [
        (["GPU-0"], None, {"max_inflight_computations": 1024}),
        (["GPU-0"], {"max_inflight_computations": 32}, {"max_inflight_computations": 32}),
        ([], None, None),
    ],
    ids=["a GPU", "a setting of the user's", "no GPU"],
)
def test_the_host_may_dispatch_far_ahead_of_a_gpu_unless_jax_has_a_setting(gpus, own, expected, monkeypatch):
    monkeypatch.setattr(devices, "visible_gpus", lambda: gpus)
    before = getattr(jax.config, OPTIONS)
    jax.config.update(OPTIONS, own)
    try:
        devices.dispatch_far_ahead()
        assert getattr(jax.config, OPTIONS) == expected
    finally:
        jax.config.update(OPTIONS, before)
