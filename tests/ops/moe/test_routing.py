"""Routing against its definition, losses against Hugging Face's formula, and extreme loads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.moe import GroupMetadata, Groups, auxiliary_loss, route, routing_statistics, z_loss


def random_logits(tokens=33, experts=7):
    return jax.random.normal(jax.random.key(0), (tokens, experts))


@pytest.mark.parametrize(
    ("order", "normalize", "sums_to_one"),
    [("softmax_topk", False, False), ("softmax_topk", True, True), ("topk_softmax", False, True)],
)
def test_weights_follow_the_order_of_softmax_and_top_k(order, normalize, sums_to_one):
    logits = random_logits()
    routing = route(logits, 3, order=order, normalize=normalize)
    chosen = np.argsort(-np.asarray(logits), axis=-1)[:, :3]
    np.testing.assert_array_equal(routing.expert_ids, chosen)
    expected = np.take_along_axis(np.exp(np.asarray(logits)), chosen, axis=-1)
    expected /= expected.sum(-1, keepdims=True) if sums_to_one else np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(routing.weights, expected, rtol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("order", ["sigmoid_topk", "softmax_topk"])
def test_experts_come_from_the_best_groups_by_corrected_scores(order, normalize):
    logits, sigmoid = random_logits(experts=12), order == "sigmoid_topk"
    correction = jnp.linspace(-0.6, 0.6, 12) if sigmoid else None
    options = {"correction": correction, "groups": Groups(4, 2), "scale": 1.5}
    routing = route(logits, 3, order=order, normalize=normalize, **options)
    for token, row in enumerate(np.asarray(logits, np.float64)):
        scores = 1 / (1 + np.exp(-row)) if sigmoid else np.exp(row) / np.exp(row).sum()
        preferred = scores + (np.asarray(correction) if sigmoid else 0)
        groups = np.sort(preferred.reshape(4, 3), axis=1)[:, ::-1][:, : 2 if sigmoid else 1].sum(1)
        allowed = np.isin(np.arange(12) // 3, np.argsort(-groups)[:2])
        chosen = np.argsort(-np.where(allowed, preferred, -np.inf))[:3]
        np.testing.assert_array_equal(routing.expert_ids[token], chosen)
        weights = scores[chosen] / (scores[chosen].sum() if normalize else 1)
        np.testing.assert_allclose(routing.weights[token], 1.5 * weights, rtol=1e-5)


def test_the_correction_has_no_gradient():
    def total(logits, correction):
        return route(logits, 3, order="sigmoid_topk", correction=correction).weights.sum()

    logits, zeros = random_logits(), jnp.zeros(7)
    by_logits, by_correction = jax.grad(total, argnums=(0, 1))(logits, zeros)
    scores = jax.nn.sigmoid(logits)
    chosen = jax.nn.one_hot(jax.lax.top_k(scores, 3)[1], 7).sum(1)
    np.testing.assert_allclose(by_logits, chosen * scores * (1 - scores), atol=1e-6)
    np.testing.assert_array_equal(by_correction, zeros)


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="1 of 2 groups must divide 7 experts and leave 3 of them"):
        route(random_logits(), 3, order="sigmoid_topk", groups=Groups(2, 1))
    with pytest.raises(ValueError, match="1 of 4 groups must divide 8 experts and leave 3 of them"):
        route(random_logits(experts=8), 3, order="sigmoid_topk", groups=Groups(4, 1))


LOADS = {
    "random": random_logits(),
    "all tokens on two experts": jnp.zeros((33, 7)).at[:, 2].set(5.0).at[:, 5].set(4.0),
    "one token": random_logits(tokens=1),
}


@pytest.mark.parametrize("load", LOADS)
def test_rows_are_grouped_by_expert_in_the_order_of_tokens(load):
    routing = route(LOADS[load], 2)
    assigned = np.asarray(routing.expert_ids).reshape(-1)
    np.testing.assert_array_equal(routing.permutation, np.argsort(assigned, kind="stable"))
    np.testing.assert_array_equal(
        np.asarray(routing.inverse).reshape(-1)[routing.permutation], np.arange(assigned.size)
    )
    np.testing.assert_array_equal(routing.group_sizes, np.bincount(assigned, minlength=7))
    np.testing.assert_array_equal(routing.tokens, np.asarray(routing.permutation) // 2)
    np.testing.assert_array_equal(routing.row_weights, np.asarray(routing.weights).reshape(-1)[routing.permutation])
    np.testing.assert_array_equal((np.asarray(routing.dense_weights) > 0).sum(1), 2)


@pytest.mark.parametrize("load", LOADS)
def test_tiles_cover_every_row_once_within_one_group(load):
    groups = route(LOADS[load], 2).groups
    offsets, rows, covered = np.asarray(groups.offsets), groups.tiles.rows, []
    for tile, (group, start, end, first_tile) in enumerate(np.asarray(groups.tiles.table).T):
        if group < 7:
            assert (start, end) == (offsets[group], offsets[group + 1])
            first = start + rows * (tile - first_tile)
            covered += range(first, min(first + rows, end))
    assert covered == list(range(offsets[-1]))


@pytest.mark.parametrize(("rows", "tile"), [(8, 16), (4 * 63, 32), (4 * 64, 64), (4 * 191, 128), (4 * 1000, 192)])
def test_tile_size_follows_the_mean_group(rows, tile):
    groups = GroupMetadata.of(np.array([rows, 0, 0, 0]), rows)
    assert (groups.tiles.rows, groups.gathered_tiles.rows) == (tile, min(tile, 128))


def test_auxiliary_loss_matches_hugging_face_and_is_k_when_even():
    logits = random_logits()
    routing = route(logits, 3)
    probabilities = np.asarray(jax.nn.softmax(logits, axis=-1))
    load = np.bincount(np.asarray(routing.expert_ids).reshape(-1), minlength=7) / 33
    np.testing.assert_allclose(auxiliary_loss(logits, routing), 7 * (load * probabilities.mean(0)).sum(), rtol=1e-5)
    np.testing.assert_allclose(auxiliary_loss(jnp.zeros((33, 7)), route(jnp.zeros((33, 7)), 3)), 3.0, rtol=1e-6)


def test_masked_tokens_do_not_count():
    logits = random_logits()
    mask = jnp.arange(33) < 20
    routing, shorter = route(logits, 2), route(logits[:20], 2)
    np.testing.assert_allclose(auxiliary_loss(logits, routing, mask), auxiliary_loss(logits[:20], shorter), rtol=1e-5)
    np.testing.assert_allclose(z_loss(logits, mask), z_loss(logits[:20]), rtol=1e-5)
    masked, plain = routing_statistics(routing, mask), routing_statistics(shorter)
    for name, value in plain.items():
        np.testing.assert_allclose(masked[name], value, rtol=1e-5)


def test_statistics_distinguish_even_load_from_one_expert():
    even = routing_statistics(route(jnp.eye(4), 1))
    assert (even["load_max"], even["load_entropy"]) == pytest.approx((1.0, 1.0))
    one = routing_statistics(route(jnp.zeros((8, 4)).at[:, 2].set(1.0), 1))
    assert (one["load_max"], one["load_entropy"]) == pytest.approx((4.0, 0.0))


def test_losses_push_toward_even_load_and_small_logits():
    logits = jnp.zeros((16, 4)).at[:, 1].set(2.0)
    balance = jax.grad(lambda logits: auxiliary_loss(logits, route(logits, 1)))(logits)
    assert (balance[:, 1] > 0).all()
    assert (balance[:, 0] < 0).all()
    assert (jax.grad(z_loss)(logits) > 0).all()


@pytest.mark.parametrize("k", [0, 8])
def test_k_outside_the_experts_is_refused(k):
    with pytest.raises(ValueError, match=f"k must be between 1 and the 7 experts, got {k}"):
        route(random_logits(), k)


def test_an_unknown_order_is_refused():
    with pytest.raises(
        ValueError, match="order must be one of softmax_topk, topk_softmax, sigmoid_topk, got 'sigmoid'"
    ):
        route(random_logits(), 2, order="sigmoid")
