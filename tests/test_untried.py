"""Kernels that no GPU has run since they were last changed are left out, with the reason."""

import jax.numpy as jnp
import pytest

from jaxglue.ops import backend
from jaxglue.ops.backend import check_tried
from jaxglue.ops.projection import Projection
from jaxglue.ops.projection.few_rows import FEW_ROWS, FewRowsCall
from jaxglue.ops.quant.int8 import quantize_int8


class Decoding:
    inference, fp8, dropout_key = True, False, None


def test_a_kernel_is_left_out_until_a_gpu_has_run_it(monkeypatch):
    pytest.importorskip("triton")
    x, weight = jnp.zeros((4, 64), jnp.bfloat16), quantize_int8(jnp.ones((32, 64), jnp.bfloat16))

    def choose():
        return FEW_ROWS.choose((9, 0), FewRowsCall.of(x, [Projection(weight=weight)], Decoding()))

    monkeypatch.setattr(backend, "UNTRIED", {"few rows of int8"})
    assert choose().name == "reference" and "no GPU has run the kernel" in choose().reason
    monkeypatch.setattr(backend, "UNTRIED", set())
    assert choose().name == "triton"


def test_names_of_untried_kernels_are_those_that_are_checked():
    for name in backend.UNTRIED:
        with pytest.raises(NotImplementedError, match="no GPU has run"):
            check_tried(name)
    check_tried("few rows of 16 bits")
