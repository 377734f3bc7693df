"""Experts' feed-forward against every expert on every token, in float32."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import repeat

from jaxglue.ops import names
from jaxglue.ops.moe import GROUPED_MATMUL, ExpertAdapter, ExpertLora, GroupMetadata, moe_mlp, route
from jaxglue.ops.moe.reference import activate
from jaxglue.ops.moe.tiles import GroupedTiles, MatmulTiles, grouped_tiles
from jaxglue.ops.moe.vjp import fused_activation

M, D, F, E, X, R = 19, 16, 24, 5, 2, 4


def random_layer(transpose: bool, M=M, D=D, F=F, R=R, columns=2):
    """Draw x, logits, matrices, biases and adapters.

    Few projections are near GPT-OSS's clamps, where rounding to bfloat16 decides whether a gradient passes.
    """
    keys = iter(jax.random.split(jax.random.key(0), 16))
    normal = lambda *shape, scale=1.0: scale * jax.random.normal(next(keys), shape)  # noqa: E731

    def matrix(rows, columns):
        return normal(E, *((columns, rows) if transpose else (rows, columns)), scale=1.2 * rows**-0.5)

    return {
        "x": normal(M, D),
        "logits": normal(M, E),
        "gate_up": matrix(D, columns * F),
        "down": matrix(F, D),
        "gate_up_bias": normal(E, columns * F),
        "down_bias": normal(E, D),
        "lora": ExpertLora(
            gate_up=ExpertAdapter(normal(E, R, D, scale=4 * D**-0.5), normal(E, columns * F, R, scale=0.1)),
            down=ExpertAdapter(normal(E, R, F, scale=4 * F**-0.5), normal(E, D, R, scale=0.1)),
            scales=(0.5, 0.75),
        ),
    }


def every_expert(arguments, *, activation, transpose):
    """Compute the definition, as Hugging Face's modules do."""
    a = arguments
    chosen, expert_ids = jax.lax.top_k(a["logits"], X)
    weights = jax.nn.softmax(chosen, axis=-1)
    out, F = jnp.zeros(a["x"].shape), a["down"].shape[2 if transpose else 1]
    for e in range(E):
        gate_up = a["gate_up"][e].T if transpose else a["gate_up"][e]
        down = a["down"][e].T if transpose else a["down"][e]
        (A1, B1), (A2, B2) = a["lora"].gate_up[:2], a["lora"].down[:2]
        h = a["x"] @ (gate_up + 0.5 * A1[e].T @ B1[e].T) + a["gate_up_bias"][e]
        if activation == "relu2":
            h = jnp.square(jax.nn.relu(h))
        elif activation != "gpt_oss":
            gate, up = h[:, :F], h[:, F:]
            h = (jax.nn.silu(gate) if activation == "swiglu" else jax.nn.gelu(gate, approximate=True)) * up
        else:
            gate, up = jnp.minimum(h[:, ::2], 7.0), jnp.clip(h[:, 1::2], -7.0, 7.0)
            h = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
        y = h @ (down + 0.75 * A2[e].T @ B2[e].T) + a["down_bias"][e]
        out += y * jnp.where(expert_ids == e, weights, 0).sum(1)[:, None]
    return out


def ours(arguments, *, activation, transpose, backend="reference"):
    arguments = dict(arguments)
    routing = route(arguments.pop("logits"), X, order="topk_softmax")
    x, gate_up, down = (arguments.pop(name) for name in ("x", "gate_up", "down"))
    return moe_mlp(
        x, routing, gate_up, down, activation=activation, transpose_rhs=transpose, backend=backend, **arguments
    )


def assert_same(got, expected, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(np.asarray(a, np.float32) - b) <= tolerance * np.linalg.norm(b)


@partial(jax.jit, static_argnums=0)
def output_and_gradients(function, arguments):
    out, pull = jax.vjp(function, arguments)
    return out, pull(jax.random.normal(jax.random.key(1), out.shape).astype(out.dtype))


@cache
def random_case(activation, transpose):
    """Return a layer's arguments, and the output and gradients of every expert."""
    arguments = random_layer(transpose, columns=1 if activation == "relu2" else 2)
    function = partial(every_expert, activation=activation, transpose=transpose)
    return arguments, output_and_gradients(function, arguments)


@pytest.mark.parametrize(
    ("activation", "transpose"),
    [("swiglu", True), repeat("geglu", True), repeat("gpt_oss", False), repeat("relu2", True)],
)
def test_reference_matches_every_expert(activation, transpose):
    arguments, expected = random_case(activation, transpose)
    function = partial(ours, activation=activation, transpose=transpose)
    assert_same(output_and_gradients(function, arguments), expected)


@pytest.mark.parametrize(("activation", "transpose"), [("swiglu", True), ("gpt_oss", False), repeat("relu2", True)])
def test_interpreted_kernels_match_every_expert(activation, transpose, interpreted_kernels):
    tiles = MatmulTiles(block_m=16, block_n=16, block_k=16, num_warps=4, num_stages=1)
    kernels = interpreted_kernels(tiles=GroupedTiles(matmul=tiles, outer=tiles), compute_capability=80)
    arguments, expected = random_case(activation, transpose)
    function = partial(ours, activation=activation, transpose=transpose, backend="auto")
    with GROUPED_MATMUL.using(kernels):
        got = output_and_gradients(function, arguments)
    assert_same(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "D", "F"), [(600, 64, 96), (700, 320, 576)])
@pytest.mark.parametrize(("activation", "transpose"), [("swiglu", True), ("geglu", True), ("gpt_oss", False)])
def test_kernels_on_a_gpu_match_every_expert(activation, transpose, M, D, F):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_layer(transpose, M=M, D=D, F=F, R=16))
    half["logits"] = half["logits"].astype(jnp.float32)
    options = {"activation": activation, "transpose": transpose}
    with jax.default_matmul_precision("highest"):  # not TF32
        expected = output_and_gradients(
            partial(every_expert, **options), jax.tree.map(lambda x: x.astype(jnp.float32), half)
        )
    got = output_and_gradients(partial(ours, **options, backend="triton"), half)
    assert_same(got, expected, 1e-2)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gpt_oss"])
def test_activation_kernels_match_at_the_clamps(activation, interpreted_kernels):
    kernels = interpreted_kernels(tiles=grouped_tiles((8, 0)), compute_capability=80)
    rng = np.random.default_rng(0)
    projected, weights = (
        jnp.asarray(rng.uniform(-12, 12, (7, 60)), jnp.float32),
        jnp.asarray(rng.random(7), jnp.float32),
    )
    groups = GroupMetadata.of(jnp.array([3, 2]), 7)  # the last two rows are in none
    plain = lambda projected, weights: activate(projected, activation) * weights[:, None]  # noqa: E731
    fused = lambda projected, weights: fused_activation(kernels, activation, projected, weights, groups)  # noqa: E731
    expected, pull = jax.vjp(plain, projected, weights)
    got, fused_pull = jax.vjp(fused, projected, weights)
    result = jax.tree.map(lambda x: x[:5], (got, fused_pull(expected)))
    assert_same(result, jax.tree.map(lambda x: x[:5], (expected, pull(expected))), 2e-6)


def test_a_policy_can_save_the_projections_by_name():
    arguments = random_layer(transpose=True)
    policy = jax.checkpoint_policies.save_only_these_names(names.EXPERT_GATE_UP)
    layer = jax.checkpoint(partial(ours, activation="swiglu", transpose=True), policy=policy)
    pull = jax.eval_shape(lambda arguments: jax.vjp(layer, arguments)[1], arguments)
    assert [x.shape for x in jax.tree.leaves(pull) if x.shape[:1] == (M * X,)] == [(M * X, 2 * F)]


def test_mismatched_arguments_are_refused():
    arguments = random_layer(transpose=True)
    with pytest.raises(ValueError, match="activation must be one of swiglu, geglu, gpt_oss, relu2, got 'relu'"):
        ours(arguments, activation="relu", transpose=True)
    with pytest.raises(ValueError, match="routing is for 19 tokens, but x has 18"):
        ours(arguments | {"x": arguments["x"][1:]}, activation="swiglu", transpose=True)
    with pytest.raises(ValueError, match=r"down must be \[E, N, K\] with E=5 groups and K=24, got \(5, 16, 23\)"):
        ours(arguments | {"down": arguments["down"][..., 1:]}, activation="swiglu", transpose=True)
