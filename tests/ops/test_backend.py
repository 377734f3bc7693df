"""The registry's choice among the backends of an operation."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxglue.ops.backend import (
    Backend,
    Operation,
    check_capability,
    check_half,
    check_one_device,
    check_triton,
    one_device_each,
    tracing_for,
)


def check(capability, dtype):
    check_capability(capability, (8, 0))
    check_half(dtype)


PRODUCT = Operation(
    name="product",
    backends={
        "fast": Backend(check=check, load=lambda capability, dtype: ("fast", capability), advantage="one pass"),
        "new": Backend(
            check=lambda capability, dtype: check_capability(capability, (9, 0)),
            load=lambda capability, dtype: ("new", capability),
            advantage="any dtype",
        ),
    },
)


@pytest.mark.parametrize(
    ("capability", "dtype", "name", "reason"),
    [
        (None, jnp.bfloat16, "reference", "no NVIDIA GPU"),
        ((8, 0), jnp.bfloat16, "fast", "one pass"),
        ((9, 0), jnp.float32, "new", "not fast: dtype must be bfloat16 or float16"),
        ((7, 5), jnp.float16, "reference", "not fast: .*got 7.5; not new: .*got 7.5"),
    ],
)
def test_auto_takes_the_first_backend_that_can_serve(capability, dtype, name, reason):
    choice = PRODUCT.choose(capability, dtype)
    assert choice.name == name
    assert re.search(reason, choice.reason)


def test_a_named_backend_serves_or_refuses():
    assert PRODUCT.choose((9, 0), jnp.float16, backend="new").name == "new"
    assert PRODUCT.choose((9, 0), jnp.float16, backend="reference").name == "reference"
    with pytest.raises(ValueError, match=r"backend='new' cannot serve this product: .* 9.0 or newer, got 8.6"):
        PRODUCT.choose((8, 6), jnp.float16, backend="new")
    with pytest.raises(ValueError, match="must be one of auto, reference, fast, new, got 'old'"):
        PRODUCT.choose((8, 6), jnp.float16, backend="old")


def test_load_follows_the_planned_gpu_and_an_override():
    with tracing_for((8, 6)):
        assert PRODUCT.load(jnp.float16) == ("fast", (8, 6))
        with PRODUCT.using("mine"):
            assert PRODUCT.load(jnp.float16) == "mine"
            assert PRODUCT.load(jnp.float16, backend="reference") is None
        with PRODUCT.using(None):
            assert PRODUCT.load(jnp.float16) is None


def test_kernels_need_jax_triton(monkeypatch):
    monkeypatch.setattr("jaxglue.ops.backend.find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match="jax-triton is not installed"):
        check_triton((9, 0), jnp.bfloat16)


def test_kernels_for_one_device_serve_programs_of_one_among_several(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with one_device_each():
        check_one_device()
    with pytest.raises(NotImplementedError, match="several devices"):
        check_one_device()
