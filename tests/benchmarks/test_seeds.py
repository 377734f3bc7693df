"""The habits that benchmarks/seeds.py compares compute the same values: only their time differs."""

import jax
import numpy as np
import pytest
from selection import repeat, thorough

from jaxglue.ops.moe import ExpertAdapter, ExpertLora, moe_mlp, route
from jaxglue.ops.segments import pack_segments

M, D, F, E, K, R = 48, 16, 8, 6, 2, 3


def operands(transpose: bool):
    """Random experts, of which the last gets no token and the first most of them."""
    keys = iter(jax.random.split(jax.random.key(0), 12))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) * 0.5

    shapes = [(E, 2 * F, D), (E, D, F)] if transpose else [(E, D, 2 * F), (E, F, D)]
    logits = normal(M, E).at[:, 0].add(2.0).at[:, -1].add(-100.0)
    biases = normal(E, 2 * F), normal(E, D)
    adapters = [(normal(E, R, D), normal(E, 2 * F, R)), (normal(E, R, F), normal(E, D, R))]
    return normal(M, D), logits, adapters, [normal(*shape) for shape in shapes], biases, normal(M, D)


@pytest.mark.parametrize("transpose", [True, repeat(False)])
def test_the_loop_over_experts_equals_grouped_matmuls(transpose):
    from expert_loop import looped_mlp

    x, logits, adapters, matrices, biases, dout = operands(transpose)

    def apply(function, x, logits, adapters):
        first, second = (ExpertAdapter(*each) for each in adapters)
        lora = ExpertLora(gate_up=first, down=second, scales=(2.0, 1.5))
        options = {"gate_up_bias": biases[0], "down_bias": biases[1], "transpose_rhs": transpose, "lora": lora}
        return function(x, route(logits, K, normalize=True), *matrices, **options)

    def gradients(function, *inputs):
        out, pull = jax.vjp(lambda *values: apply(function, *values), *inputs[:-1])
        return out, *pull(inputs[-1])

    both = []
    for function in (looped_mlp, moe_mlp):
        both.append(jax.jit(gradients, static_argnums=0)(function, x, logits, adapters, dout))
    jax.tree.map(lambda ours, wanted: np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=2e-5), *both)
    counts = np.asarray(route(logits, K, normalize=True).group_sizes)
    assert counts[-1] == 0 and counts[0] > M // 2  # of an expert without tokens, and one with several tiles


def test_bounds_that_every_layer_finds_again_are_those_of_the_batch():
    from packed_metadata import bounds_from_ids

    segments = pack_segments([[5, 1, 20], [32]], seq_len=32)
    found = bounds_from_ids(segments)
    held = np.asarray(segments.segment_ids) > 0
    for name in ("positions", "starts", "ends"):
        ours, wanted = (np.asarray(getattr(each, name)) for each in (found, segments))
        assert (ours[held] == wanted[held]).all(), name


def test_a_variant_of_another_loss_is_marked():
    import seeds

    turns = [
        {"variant": "none of them", "ms": 50.0, "loss": 5.0},
        {"variant": "none of them", "ms": 54.0, "loss": 5.0},
        {"variant": "loop over experts", "ms": 65.0, "loss": 5.001},
        {"variant": "all three habits", "ms": 104.0, "loss": 5.2},
        {"variant": "one buffer", "error": "out of memory"},
    ]
    rows = {row["variant"]: row for row in seeds.summary(turns)}
    assert rows["loop over experts"]["faster without"] == "1.250 ×" and rows["loop over experts"]["same loss"] == "yes"
    assert rows["all three habits"]["saved without"] == "50.0%" and rows["all three habits"]["same loss"] == "no"
    assert "one buffer" not in rows


@thorough("benchmarks/test_seeds.py")
@pytest.mark.long
def test_a_step_has_the_same_loss_with_all_three_and_without(monkeypatch):
    import seeds
    import step

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    case = {"shape": "tiny-qwen3-moe", "layers": 2, "tokens": 256, "remat": "offload", "steps": 1}
    losses = [step.run_case(**case, **variant)["loss"] for variant in (seeds.OLD, seeds.NEW)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
