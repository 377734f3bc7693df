"""Bridges between jax-triton and the versions of JAX and Triton beside it."""

from types import SimpleNamespace

import pytest

pytest.importorskip("jax_triton")
import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from jaxglue.ops.backend import tracing_for
from jaxglue.ops.cross_entropy import linear_cross_entropy
from jaxglue.ops.launch import triton_lib


@pytest.mark.parametrize("alive", [(), ([True, False],)], ids=["jax 0.11", "jax 0.12"])
def test_kernels_stay_where_dead_code_is_dropped(alive):
    call = SimpleNamespace(invars=["x", "out"])
    assert partial_eval.dce_rules[triton_lib.triton_kernel_call_p]([False], *alive, call) == ([True, True], call)


def test_programs_with_kernels_are_rid_of_dead_code():
    x, weight = (jax.ShapeDtypeStruct((size, 64), jnp.bfloat16) for size in (64, 256))
    rows = jax.ShapeDtypeStruct((64,), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.float32)
    with tracing_for((9, 0)):
        gradient = jax.grad(linear_cross_entropy)
        program = jax.make_jaxpr(lambda x, *others: (gradient(x, *others), jnp.sin(x)))(x, weight, *rows)
    kept, used = partial_eval.dce_jaxpr(program.jaxpr, [True, False])
    assert "triton_kernel_call" in str(kept) and "= sin " not in str(kept) and used == [True] * 4
