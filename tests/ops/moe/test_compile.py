"""Layers of experts compiled for an H200 without a GPU. Needs jax-cuda13-plugin and jax-cuda13-pjrt."""

import jax
import jax.numpy as jnp
import pytest
from selection import repeats_parts_of

from jaxglue.ops import names
from jaxglue.ops.backend import HOPPER, tracing_for
from jaxglue.ops.moe import ExpertAdapter, ExpertLora, moe_mlp, route
from jaxglue.ops.quant.mxfp4 import MXFP4

M, D, F, E, X = 8192, 2880, 2880, 32, 4
ROWS = M * X * D * 2
"""Bytes of one array of rows."""


@pytest.fixture
def compile_step(h200):
    """Compile the output and the gradient to x of a GPT-OSS layer of frozen experts."""

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=h200)

    def packed(out, into):
        blocks, scales = shaped(E, out, into // 32, 16, dtype=jnp.uint8), shaped(E, out, into // 32, dtype=jnp.uint8)
        return MXFP4(blocks=blocks, scales=scales)

    def make(policy, *, mxfp4=False, fp8=False):
        matrices = packed if mxfp4 else lambda out, into: shaped(E, out, into)

        def step(x, logits, gate_up, down, dout):
            def layer(x):
                routing = route(logits, X, order="topk_softmax")
                return moe_mlp(x, routing, gate_up, down, activation="gpt_oss", transpose_rhs=True, fp8=fp8)

            out, pull = jax.vjp(jax.checkpoint(layer, policy=policy), x)
            return out, pull(dout)

        inputs = (shaped(M, D), shaped(M, E), matrices(2 * F, D), matrices(D, F), shaped(M, D))
        with tracing_for(HOPPER):
            return jax.jit(step).lower(*inputs).compile()

    return make


@pytest.fixture
def compile_adapters(h200):
    """Compile the gradients to x and to adapters of all experts of a layer in Qwen3-30B-A3B's shape."""
    M, D, F, E, X, R = 16_384, 2048, 768, 128, 8, 16

    def shaped(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=h200)

    def step(x, logits, gate_up, down, lora, dout):
        def layer(x, lora):
            return moe_mlp(x, route(logits, X), gate_up, down, transpose_rhs=True, lora=lora)

        return jax.vjp(layer, x, lora)[1](dout)

    gate_up = ExpertAdapter(shaped(E, R, D), shaped(E, 2 * F, R))
    lora = ExpertLora(gate_up=gate_up, down=ExpertAdapter(shaped(E, R, F), shaped(E, D, R)))
    inputs = (shaped(M, D), shaped(M, E), shaped(E, 2 * F, D), shaped(E, D, F), lora, shaped(M, D))
    with tracing_for(HOPPER):
        return jax.jit(step).lower(*inputs).compile()


def kernels(compiled) -> int:
    return compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"')


@repeats_parts_of("test_mxfp4_experts_multiply_in_fp8_without_bf16_copies")
def test_frozen_experts_take_two_matmuls_each_way(compile_step):
    compiled = compile_step(jax.checkpoint_policies.everything_saveable)
    assert kernels(compiled) == 9  # a choice, 4 matmuls, 2 activations, 2 combines
    assert compiled.memory_analysis().temp_size_in_bytes < 5.5 * ROWS


@repeats_parts_of("test_mxfp4_experts_multiply_in_fp8_without_bf16_copies")
def test_saving_projections_avoids_recomputing_a_matmul(compile_step):
    saved = jax.checkpoint_policies.save_only_these_names(names.EXPERT_GATE_UP, names.ROUTING)
    compiled = compile_step(saved)
    assert kernels(compiled) == 9  # a choice, 4 matmuls, 2 activations, 2 combines
    assert compiled.memory_analysis().temp_size_in_bytes < 5.5 * ROWS
    assert kernels(compile_step(jax.checkpoint_policies.nothing_saveable)) == 11


@repeats_parts_of("test_mxfp4_experts_multiply_in_fp8_without_bf16_copies")
def test_mxfp4_experts_are_dequantized_in_both_passes(compile_step):
    compiled = compile_step(jax.checkpoint_policies.everything_saveable, mxfp4=True)
    assert kernels(compiled) == 13
    expanded = 2 * E * 3 * F * D
    assert compiled.memory_analysis().temp_size_in_bytes < 5.5 * ROWS + expanded


def test_mxfp4_experts_multiply_in_fp8_without_bf16_copies(compile_step):
    compiled = compile_step(jax.checkpoint_policies.everything_saveable, mxfp4=True, fp8=True)
    assert kernels(compiled) == 17  # 4 expansions and 4 quantizations of rows more
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * ROWS + E * 3 * F * D


@repeats_parts_of("test_mxfp4_experts_multiply_in_fp8_without_bf16_copies")
def test_no_array_of_copied_tokens_exists(compile_adapters):
    rows = 16_384 * 8 * 2048 * 2
    assert kernels(compile_adapters) == 15
    assert compile_adapters.memory_analysis().temp_size_in_bytes < 2.5 * rows
