"""Routing against its definition, losses against Hugging Face's formula, and extreme loads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.moe import GroupMetadata, auxiliary_loss, route, routing_statistics, z_loss


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
    with pytest.raises(ValueError, match="order must be softmax_topk or topk_softmax, got 'sigmoid'"):
        route(random_logits(), 2, order="sigmoid")
