"""The registry's choice among the backends of an operation."""

import re
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, kw_only=True)
class ProductCall:
    """Meaning of a product."""

    dtype: jnp.dtype
    doubled: bool = False
    activation: str = "silu"


def check(capability, call):
    check_capability(capability, (8, 0))
    check_half(call.dtype)


PRODUCT = Operation(
    name="product",
    backends={
        "fast": Backend(
            check=check,
            load=lambda capability, call: ("fast", capability),
            advantage="one pass",
            reads={ProductCall: {"dtype": None, "activation": ("silu", "gelu")}},
        ),
        "new": Backend(
            check=lambda capability, call: check_capability(capability, (9, 0)),
            load=lambda capability, call: ("new", capability),
            advantage="any dtype",
            reads={ProductCall: ("dtype", "doubled")},
        ),
    },
)
HALF = ProductCall(dtype=jnp.float16)


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
    choice = PRODUCT.choose(capability, ProductCall(dtype=dtype))
    assert choice.name == name
    assert re.search(reason, choice.reason)


def test_a_named_backend_serves_or_refuses():
    assert PRODUCT.choose((9, 0), HALF, backend="new").name == "new"
    assert PRODUCT.choose((9, 0), HALF, backend="reference").name == "reference"
    with pytest.raises(ValueError, match=r"backend='new' cannot serve this product: .* 9.0 or newer, got 8.6"):
        PRODUCT.choose((8, 6), HALF, backend="new")
    with pytest.raises(ValueError, match="must be one of auto, reference, fast, new, got 'old'"):
        PRODUCT.choose((8, 6), HALF, backend="old")


def test_a_field_or_value_that_a_backend_does_not_read_is_refused():
    doubled = PRODUCT.choose((9, 0), replace(HALF, doubled=True))
    assert (doubled.name, doubled.reason) == ("new", "not fast: it does not read ProductCall.doubled")
    assert PRODUCT.choose((9, 0), replace(HALF, activation="gelu")).name == "fast"
    relu = PRODUCT.choose((9, 0), replace(HALF, activation="relu"))
    assert relu.name == "reference"
    assert "not fast: it does not read ProductCall.activation = 'relu'" in relu.reason


def test_load_follows_the_planned_gpu_and_an_override():
    with tracing_for((8, 6)):
        assert PRODUCT.load(HALF) == ("fast", (8, 6))
        with PRODUCT.using("mine"):
            assert PRODUCT.load(HALF) == "mine"
            assert PRODUCT.load(HALF, backend="reference") is None
        with PRODUCT.using(None):
            assert PRODUCT.load(HALF) is None


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
