"""FP8 in the cost model."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxglue.models import config_from_hf
from jaxglue.models.lora import LoraConfig
from jaxglue.ops.projection.fp8 import dot_to_e4m3
from jaxglue.planner.cost import program_cost
from jaxglue.planner.gpus import find_gpu
from jaxglue.planner.layer_costs import TracedModel
from jaxglue.planner.workload import Workload


def test_fp8_matmuls_are_costed_at_their_own_rate():
    gpu = find_gpu("H200")

    def seconds(dtype):
        a, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((16384, 4096), (12288, 4096)))
        program = jax.make_jaxpr(lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ()))))(a, b)
        return program_cost(program, gpu, attention={}).seconds

    assert 1.9 < seconds(jnp.bfloat16) / seconds(jnp.float8_e4m3fn) < 2.1


def test_a_matmul_that_writes_fp8_needs_no_memory_for_more():
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn) for shape in ((4096, 1024), (8192, 1024)))

    def program(x, weight):
        gate, factor = dot_to_e4m3(x, weight)
        return (gate.astype(jnp.float32) * factor).sum()

    cost = program_cost(jax.make_jaxpr(program)(x, weight), find_gpu("H200"), attention={})
    assert cost.temporary == 4096 * 8192


def test_a_head_in_fp8_is_planned_faster(tiny_config):
    sizes = {"vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 1}
    config = config_from_hf({**tiny_config, **sizes, "model_type": "qwen3"})

    def seconds(fp8_head):
        shape = replace(config, quantize="fp8", fp8_head=fp8_head)
        work = Workload(config=shape, batch_size=1, seq_len=4096, lora=LoraConfig())
        return TracedModel(work, find_gpu("H200"), kernels=True).head.seconds

    assert 0.45 < seconds(True) / seconds(False) < 0.8
