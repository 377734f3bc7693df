"""Norm and rotation of heads: outputs and gradients of every backend against numpy and the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.backend import tracing_for
from jaxglue.ops.norm_rope import LLAMA_NORM, NORM_ROPE, HeadNorms, NormCall, NormStyle, rotate_heads
from jaxglue.ops.rope import RopeConfig, rope_tables
from jaxglue.ops.segments import pack_segments

EPS = 1e-3
YARN = RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)
GEMMA = NormStyle(offset=1.0, rounds_first=False)
# name: (N, K, H, norms' style, rope)
CASES = {
    "normed": (4, 2, 16, LLAMA_NORM, RopeConfig()),
    "not normed": (4, 2, 16, None, RopeConfig()),
    "odd numbers": (6, 3, 24, LLAMA_NORM, RopeConfig()),
    "more heads than a program holds": (40, 20, 8, LLAMA_NORM, RopeConfig()),
    "scaled tables": (2, 1, 32, None, YARN),
    "weights around 0, a part turns": (4, 2, 24, GEMMA, RopeConfig(partial_rotary_factor=0.5)),
    "a part turns, not normed": (2, 1, 16, None, RopeConfig(partial_rotary_factor=0.5)),
}


def random_case(name, dtype=jnp.float32):
    """Return ((q, k, norms), tables, (dq, dk)) over uneven segments."""
    N, K, H, style, rope = CASES[name]
    segments = pack_segments([[5, 2, 4], [9]], seq_len=12)
    rng, shape = np.random.default_rng(0), segments.positions.shape
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    q, k, dq, dk = (normal(*shape, heads, H) for heads in (N, K, N, K))
    norms = HeadNorms(1 + normal(H) / 4, 1 + normal(H) / 4, EPS, style) if style else None
    return (q, k, norms), rope_tables(segments.positions, rope, H), (dq, dk)


def output_and_gradients(backend, inputs, tables, douts):
    """Return ((q, k), (dq, dk, the norms' gradients)) in float32."""

    @jax.jit
    def compute(inputs, douts):
        out, pull = jax.vjp(lambda q, k, norms: rotate_heads(q, k, *tables, norms=norms, backend=backend), *inputs)
        return out, pull(douts)

    return jax.tree.map(lambda x: np.asarray(x, np.float32), compute(inputs, douts))


def assert_close(got, expected, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def test_reference_matches_numpy():
    (q, k, norms), (cos, sin), _ = random_case("odd numbers")
    turns = np.asarray(cos + 1j * sin)[:, :, None]
    for got, x, weight in zip(
        rotate_heads(q, k, cos, sin, norms=norms, backend="reference"), (q, k), norms.weights, strict=True
    ):
        normed = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + EPS) * weight
        rotated = (normed[..., :12] + 1j * normed[..., 12:]) * turns
        np.testing.assert_allclose(got, np.concatenate([rotated.real, rotated.imag], -1), atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_match_the_reference(name, interpreted_backend):
    case = random_case(name)
    expected = output_and_gradients("reference", *case)
    with NORM_ROPE.using(interpreted_backend):
        assert_close(output_and_gradients("auto", *case), expected, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_reference_on_a_gpu(name, dtype):
    half = random_case(name, dtype)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    assert_close(output_and_gradients("triton", *half), output_and_gradients("reference", *exact), 1e-2)


@pytest.mark.parametrize(("name", "heads"), [("normed", 2), ("not normed", 0)])
def test_residuals_hold_heads_only_for_norms(name, heads, interpreted_backend):
    (q, k, norms), tables, _ = random_case(name)
    with NORM_ROPE.using(interpreted_backend):
        _, pull = jax.vjp(lambda q, k: rotate_heads(q, k, *tables, norms=norms), q, k)
    assert sum(x.shape in (q.shape, k.shape) for x in jax.tree.leaves(pull)) == heads


def test_frozen_norms_are_one_kernel_each_way(h200):
    def step(q, k, weights, tables, douts):
        out, pull = jax.vjp(lambda q, k: rotate_heads(q, k, *tables, norms=HeadNorms(*weights, EPS)), q, k)
        return out, pull(douts)

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=h200)

    T, N, K, H = 4096, 40, 8, 128
    heads, tables = (shaped(1, T, N, H), shaped(1, T, K, H)), 2 * (shaped(1, T, H // 2, dtype=jnp.float32),)
    with tracing_for((9, 0)):
        compiled = jax.jit(step).lower(*heads, 2 * (shaped(H),), tables, heads).compile()
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 2
    assert compiled.memory_analysis().temp_size_in_bytes < 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((1, 3, 2, 5))}, "q must be .* even H"),
        ({"k": jnp.zeros((1, 4, 1, 8))}, r"k must be \[B, T, K, H\] = \[1, 3, K, 8\] float32"),
        ({"k": jnp.zeros((1, 3, 1, 8), jnp.float16)}, "float32 to fit q, got .* float16"),
        ({"sin": jnp.zeros((1, 3, 8))}, r"cos and sin must be \[1, 3, 4\]"),
        ({"norms": HeadNorms(jnp.zeros(8), jnp.zeros(4), EPS)}, r"head dim, \[8\], got shape \(4,\)"),
        ({"backend": "cudnn"}, "backend must be one of"),
        ({"backend": "triton"}, "cannot serve this norm and rotation"),
    ],
)
def test_unfit_arguments_are_refused(changes, message):
    tables = {name: jnp.zeros((1, 3, 4)) for name in ("cos", "sin")}
    arguments = {"q": jnp.zeros((1, 3, 2, 8)), "k": jnp.zeros((1, 3, 1, 8)), **tables} | changes
    with pytest.raises(ValueError, match=message):
        rotate_heads(**arguments)


def test_backend_choice_names_its_reason():
    assert NORM_ROPE.choose((9, 0), NormCall(dtype=jnp.bfloat16)).name == "triton"
    assert "float32" in NORM_ROPE.choose((9, 0), NormCall(dtype=jnp.float32)).reason
    assert "neighboring dimensions" in NORM_ROPE.choose((9, 0), NormCall(dtype=jnp.bfloat16, interleaved=True)).reason
