"""One order of sums in mixtures: a token has the same experts, weights and output in any company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.engine.compiler import jit_step, rounding_as_written
from jaxglue.ops import backend
from jaxglue.ops.moe import ExpertAdapter, ExpertLora, Groups, moe_mlp, route
from jaxglue.ops.projection.ordered import ordered_float32_product

TOKENS, FEW = 80, (2, 5, 16)


def normal(seed: int, *shape: int, dtype=jnp.bfloat16):
    return 0.3 * jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def assert_rows_alone(function, *arrays, few=FEW):
    """Check that few rows have the bits of many."""
    with rounding_as_written():
        program = jit_step(function)
        many = program(*arrays)
        for count in few:
            alone = program(*(array[:count] for array in arrays))
            for own, other in zip(jax.tree.leaves(alone), jax.tree.leaves(many), strict=True):
                np.testing.assert_array_equal(np.asarray(own), np.asarray(other[:count]))


@pytest.mark.parametrize(
    ("order", "options"),
    [
        ("softmax_topk", {"normalize": True}),
        ("topk_softmax", {}),
        ("sigmoid_topk", {"normalize": True, "scale": 1.5, "groups": Groups(2, 1)}),
    ],
)
def test_routing_is_a_token_s_own(order, options):
    def choose(logits):
        routing = route(logits, 3, order=order, inference=True, exact=True, **options)
        return routing.expert_ids, routing.weights

    assert_rows_alone(choose, normal(0, TOKENS, 24, dtype=jnp.float32))


@pytest.mark.parametrize("order", ["softmax_topk", repeat("topk_softmax")])
def test_exact_routing_is_routing(order):
    logits = normal(0, TOKENS, 24, dtype=jnp.float32)
    exact, plain = (route(logits, 3, order=order, normalize=True, exact=exact) for exact in (True, False))
    np.testing.assert_array_equal(exact.expert_ids, plain.expert_ids)
    np.testing.assert_allclose(exact.weights, plain.weights, rtol=1e-6)


def test_products_with_float32_weights_are_theirs_in_one_order():
    x, weight = normal(0, TOKENS, 64), normal(1, 24, 64, dtype=jnp.float32)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(ordered_float32_product(x, weight), want, rtol=1e-5, atol=1e-6)
    assert_rows_alone(lambda x: ordered_float32_product(x, weight), x)
    plain, exact = (
        jax.grad(lambda x, w, f=f: jnp.sin(f(x, w)).sum(), (0, 1))(x, weight)
        for f in (lambda x, w: jnp.matmul(x.astype(jnp.float32), w.T, precision="highest"), ordered_float32_product)
    )
    for own, other in zip(exact, plain, strict=True):
        np.testing.assert_allclose(own.astype(jnp.float32), other.astype(jnp.float32), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(("activation", "transposed"), [("gpt_oss", False), repeat("swiglu", True)])
def test_experts_outputs_are_a_token_s_own(activation, transposed):
    assert_rows_alone(experts_of(activation, transposed, sizes=(8, 64, 32), rank=2), *inputs(TOKENS, 64, 8))


def inputs(tokens: int, width: int, experts: int):
    return normal(0, tokens, width), normal(1, tokens, experts, dtype=jnp.float32)


def experts_of(activation, transposed, *, sizes, rank):
    """Return a function of tokens and logits: experts of these sizes, biased where they are GPT-OSS', with adapters."""
    E, D, F = sizes
    shapes = ((E, 2 * F, D), (E, D, F)) if transposed else ((E, D, 2 * F), (E, F, D))
    matrices = [normal(seed, *shape) for seed, shape in enumerate(shapes, 2)]
    biases = [normal(4, E, 2 * F), normal(5, E, D)] if activation == "gpt_oss" else [None, None]
    pairs = [
        ExpertAdapter(*(normal(seed, *shape, dtype=jnp.float32) for shape in ((E, rank, K), (E, N, rank))))
        for seed, (K, N) in enumerate(((D, 2 * F), (F, D)), 6)
    ]
    options = {"activation": activation, "transpose_rhs": transposed, "inference": True, "exact": True}
    options |= {"gate_up_bias": biases[0], "down_bias": biases[1]}
    lora = ExpertLora(gate_up=pairs[0], down=pairs[1], scales=(4.0, 2.0))

    def apply(x, logits):
        return moe_mlp(x, route(logits, 2, order="topk_softmax", exact=True), *matrices, lora=lora, **options)

    return apply


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("activation", "transposed", "sizes"), [("gpt_oss", False, (8, 2880, 2880)), ("swiglu", True, (16, 2048, 768))]
)
def test_kernels_outputs_are_a_token_s_own(activation, transposed, sizes):
    """Few rows have tiles of 16, multiplied by other instructions than those of 128 and 192 rows of an expert."""
    apply = experts_of(activation, transposed, sizes=sizes, rank=16)
    assert_rows_alone(apply, *inputs(4096, sizes[1], sizes[0]), few=(2, 16, 64, 512))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("activation", "transposed", "sizes"), [("gpt_oss", False, (8, 2880, 2880)), ("swiglu", True, (16, 2048, 768))]
)
def test_kernels_of_few_rows_have_the_bits_of_grouped_matmuls(activation, transposed, sizes, monkeypatch):
    apply, (x, logits) = experts_of(activation, transposed, sizes=sizes, rank=16), inputs(32, sizes[1], sizes[0])
    grouped = np.asarray(jit_step(lambda *arrays: apply(*arrays))(x, logits))
    monkeypatch.setattr(backend, "UNTRIED", set())
    few = np.asarray(jit_step(lambda *arrays: apply(*arrays))(x, logits))
    np.testing.assert_array_equal(few, grouped)
