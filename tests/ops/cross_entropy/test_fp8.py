"""Cross-entropy of an output projection in FP8 against float32, its kernel, and the matmuls that XLA compiles."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.engine.compiler import jit_step
from jaxglue.ops.cross_entropy import linear_cross_entropy
from jaxglue.ops.cross_entropy.fp8 import ReferenceScaledCrossEntropy
from jaxglue.ops.quant.fp8 import quantize_rows

M, D, V = 24, 64, 301


def make_case(scale=3.0, dtype=jnp.float32, sizes=(M, D, V)):
    """Return (x, weight, targets, loss weights with some 0) of logits with this standard deviation."""
    m, d, v = sizes
    keys = jax.random.split(jax.random.key(0), 4)
    x, weight = jax.random.normal(keys[0], (m, d)) * scale * d**-0.5, jax.random.normal(keys[1], (v, d))
    weights = jax.random.uniform(keys[3], (m,)).at[jnp.array([0, 5])].set(0)
    return x.astype(dtype), weight.astype(dtype), jax.random.randint(keys[2], (m,), 0, v), weights


def loss_and_gradient(x, weight, *rest, **options):
    return jax.value_and_grad(lambda x: linear_cross_entropy(x, weight, *rest, **options))(x)


def cosine(a, b):
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return a @ b / np.sqrt((a @ a) * (b @ b))


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_loss_and_gradient_are_close_to_float32(scale, chunk):
    case = make_case(scale)
    loss, dx = loss_and_gradient(*case, fp8=True, chunk=chunk)
    expected, expected_dx = loss_and_gradient(*case)
    assert abs(loss / expected - 1) < 0.005
    assert cosine(dx, expected_dx) > 0.995
    assert not np.any(dx[np.asarray(case[3]) == 0])
    np.testing.assert_allclose(linear_cross_entropy(*case, fp8=True), loss, rtol=1e-5)


def test_likely_targets_keep_their_gradient():
    x, weight, targets, weights = make_case(1.0)
    x += 0.2 * weight[targets]
    dx, expected = (loss_and_gradient(x, weight, targets, weights, fp8=fp8)[1] for fp8 in (True, False))
    assert cosine(dx, expected) > 0.995


def test_a_trainable_projection_is_refused():
    x, weight, *rest = make_case()
    with pytest.raises(ValueError, match="must be frozen: leave out --fp8-head"):
        jax.grad(lambda weight: linear_cross_entropy(x, weight, *rest, fp8=True))(weight)


@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_kernel_matches_the_reference(interpreted, scale):
    from jaxglue.ops.cross_entropy.triton import TritonCrossEntropy

    x, weight, *rest = make_case(scale)
    (a, s), (b, t) = quantize_rows(x), quantize_rows(jnp.pad(weight, ((0, 3), (0, 0))))
    arguments = a.astype(jnp.float32) @ b.astype(jnp.float32).T, s, t[:, 0], *rest
    got = interpreted(TritonCrossEntropy)(compute_capability=90, block=64, vocab_size=V).scaled(*arguments)
    losses, codes, scales = ReferenceScaledCrossEntropy(V)(*arguments)
    np.testing.assert_allclose(got[0], losses, rtol=1e-4, atol=1e-5)
    # A scale may count the target's own probability.
    assert np.all(got[2] >= scales * (1 - 1e-4))
    values, expected = got[1].astype(jnp.float32) * got[2], codes.astype(jnp.float32) * scales
    assert cosine(values, expected) > 0.998


@pytest.mark.parametrize("capability", [repeat((8, 9)), (9, 0), repeat((12, 0))])
def test_products_compile_to_fp8_matmuls_and_one_transpose(gpu_target, capability):
    sharding = gpu_target(capability)
    x, weight, targets, weights = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in (
            ((1024, 256), jnp.bfloat16),
            ((4096, 256), jnp.bfloat16),
            ((1024,), jnp.int32),
            ((1024,), jnp.float32),
        )
    )
    program = jit_step(lambda *case: loss_and_gradient(*case, fp8=True, chunk=256))
    text = program.lower(x, weight, targets, weights).compile().as_text()
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 2
    assert len(re.findall(r"= f8e4m3fn\[(256,4096|4096,256)\]\{1,0\} (transpose|copy)\(", text)) == 1


@pytest.mark.gpu
def test_bf16_on_a_gpu_is_close_to_float32():
    case = make_case(2.0, jnp.bfloat16, (300, 256, 50_257))
    loss, dx = jax.jit(lambda *case: loss_and_gradient(*case, fp8=True, chunk=128))(*case)
    with jax.default_matmul_precision("highest"):
        expected, expected_dx = loss_and_gradient(*(x.astype(jnp.float32) for x in case[:2]), *case[2:])
    assert abs(loss / expected - 1) < 0.005
    assert cosine(dx, expected_dx) > 0.995
