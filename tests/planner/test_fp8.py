"""FP8 in the cost model."""

import jax
import jax.numpy as jnp

from jaxglue.planner.cost import program_cost
from jaxglue.planner.gpus import find_gpu


def test_fp8_matmuls_are_costed_at_their_own_rate():
    gpu = find_gpu("H200")

    def seconds(dtype):
        a, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((16384, 4096), (12288, 4096)))
        program = jax.make_jaxpr(lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ()))))(a, b)
        return program_cost(program, gpu, attention_seconds={}).seconds

    assert 1.8 < seconds(jnp.bfloat16) / seconds(jnp.float8_e4m3fn) < 2.0
