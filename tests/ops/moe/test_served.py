"""Experts whose adapters are merged and rounded as they are served: values, and gradients straight through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.ops.moe import GROUPED_MATMUL, ExpertAdapter, ExpertLora, moe_mlp, route
from jaxglue.ops.moe.tiles import grouped_tiles
from jaxglue.ops.projection.served import merge_experts
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.ops.quant.mxfp4 import quantize_mxfp4
from jaxglue.ops.quant.stack import hold_matrices

M, D, F, E, X, R = 19, 64, 32, 4, 2, 3


def normal(seed, *shape, std=1.0):
    return jax.random.normal(jax.random.key(seed), shape) * std


def stack(kind, seed, out, columns):
    matrices = normal(seed, E, out, columns, std=columns**-0.5)
    if kind == "mxfp4":
        quantized = quantize_mxfp4(matrices.astype(jnp.bfloat16))
        return FORMATS["served_mxfp4"].join({"blocks": quantized.blocks, "scales": quantized.scales})
    return hold_matrices(FORMATS[f"served_{kind}"], matrices)


def adapters():
    return ExpertLora(
        gate_up=ExpertAdapter(normal(1, E, R, D, std=0.1), normal(2, E, 2 * F, R, std=0.1)),
        down=ExpertAdapter(normal(3, E, R, F, std=0.1), normal(4, E, D, R, std=0.1)),
        scales=(0.5, 0.5),
    )


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("reference", "nvfp4"), ("kernels", "mxfp4"), repeat("reference", "mxfp4"), repeat("kernels", "nvfp4")],
)
def test_experts_multiply_by_merges_and_gradients_pass_the_rounding(kind, backend, interpreted_kernels):
    gate_up, down = stack(kind, 5, 2 * F, D), stack(kind, 6, D, F)
    x, dy, logits = normal(7, M, D), normal(8, M, D), normal(9, M, E)

    def ours(x, logits, lora):
        routing = route(logits, X, order="topk_softmax")
        return (moe_mlp(x, routing, gate_up, down, lora=lora, transpose_rhs=True) * dy).sum()

    def plain(x, logits, lora):
        """Every expert on every token: merges are constants, and each adapter's gradient comes from beside them."""
        chosen, ids = jax.lax.top_k(logits, X)
        weights = jax.nn.softmax(chosen, axis=-1)

        def product(x, weight, adapter, expert):
            A, B = adapter.A, 0.5 * adapter.B
            merged = jax.lax.stop_gradient(merge_experts(weight, A, B, jnp.float32, backend="reference")[expert])
            beside = jax.lax.stop_gradient(x) @ A[expert].T @ B[expert].T
            return x @ merged.T + beside - jax.lax.stop_gradient(beside)

        out = 0.0
        for expert in range(E):
            gate, up = jnp.split(product(x, gate_up, lora.gate_up, expert), 2, axis=-1)
            # The weight of a token's expert multiplies the input of the second product.
            weight = jnp.where(ids == expert, weights, 0).sum(1)[:, None]
            out += product(jax.nn.silu(gate) * up * weight, down, lora.down, expert)
        return (out * dy).sum()

    kernels = interpreted_kernels(compute_capability=80, tiles=grouped_tiles((8, 0))) if backend == "kernels" else None
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2)))(x, logits, adapters())
        if kernels is None:
            got = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2)))(x, logits, adapters())
        else:
            with GROUPED_MATMUL.using(kernels):
                got = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2)))(x, logits, adapters())
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * float(jnp.abs(other).max()))
