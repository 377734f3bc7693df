"""Features of images by a frozen tower: made once, alike in any company, and kept within a limit."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policy
from jaxglue.models.parameters import split_model
from jaxglue.training.features import ImageFeatures
from jaxglue.vision.rows import RowImages, pack_patches
from tests.models.test_vision import documents_of, drawn_model, read_golden


@pytest.fixture(scope="module", params=["qwen3_5", "audio"])
def seen(request):
    raw, golden = read_golden(request.param)
    processor, documents = documents_of(raw, golden)
    model = drawn_model(raw, hears=True)
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    executor = Executor(graphdefs, model.config, policy=parse_policy("full"), dtype=jnp.float32)
    images = [image for _, found in documents for image in found]
    see = jax.jit(lambda patches: model.embed_tokens.vision(patches, jnp.float32))
    alone = [np.asarray(see(pack_patches([[image]], processor, 64)))[0] for image in images]
    expected = [found[: processor.tokens(image.grid)] for found, image in zip(alone, images, strict=True)]
    return processor, executor, trees, images, expected


def features_of(seen, limit=None):
    processor, executor, trees, images, _ = seen
    grids = np.array([image.grid for image in images], np.int32)
    digests = np.array([[number] * 16 for number in range(len(images))], np.uint8)
    store = SimpleNamespace(images=SimpleNamespace(digests=digests, grids=grids))
    reader = SimpleNamespace(store=store, rules=SimpleNamespace(processor=processor), kept=[])
    return ImageFeatures(executor, *trees, None, [reader], limit), reader


def rows_of(seen, *numbers):
    processor, images = seen[0], seen[3]
    chosen = [images[number] for number in numbers]
    count = sum(processor.tokens(image.grid) for image in chosen)
    index = np.full((1, 64), -1, np.int32)
    index[0, :count] = np.arange(count)
    return RowImages([chosen], index, None, processor, [64], count)


def test_features_are_those_of_each_image_alone_and_made_once(seen):
    features, reader = features_of(seen)
    for numbers in ((0, 2), (1, 0, 3), (4, 2)):
        made = features(rows_of(seen, *numbers))
        expected = np.concatenate([seen[4][number] for number in numbers])
        found = np.asarray(made.features)[0]
        np.testing.assert_allclose(found[: len(expected)], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        assert not found[len(expected) :].any()
    assert features.computed == 5 and all(image.cache_key in reader.kept[0] for image in seen[3])
    assert features.bytes == sum(expected.nbytes for expected in seen[4])


def test_known_features_are_laid_ahead_with_the_same_bits(seen):
    features, _ = features_of(seen)
    rows = rows_of(seen, 1, 3)
    assert features.ahead(rows) is rows  # threads leave the device alone
    made = features(rows)
    jax.tree.map(np.testing.assert_array_equal, features.ahead(rows), made)
    assert isinstance(features.ahead(rows_of(seen, 1, 2)), RowImages)


def test_features_that_are_begun_with_have_the_same_bits(seen, monkeypatch):
    made = features_of(seen)[0](rows_of(seen, 1, 3))
    features, _ = features_of(seen)
    features.begin(rows_of(seen, 1, 3))
    assert features.computed == 0 and features._begun
    jax.tree.map(np.testing.assert_array_equal, features(rows_of(seen, 1, 3)), made)
    features.begin(rows_of(seen, 3))  # known
    monkeypatch.setattr("jaxglue.training.features._AHEAD", 0)
    features.begin(rows_of(seen, 2))  # too many
    assert features.computed == 2 and not features._begun


def test_a_tower_in_host_memory_makes_the_same_bits_and_comes_back(seen):
    frozen, rows = seen[2][1], rows_of(seen, 0, 1)
    features, expected = features_of(seen)[0], features_of(seen)[0](rows).features
    moved = features.move_tower(frozen)
    assert not any(leaf.size for leaf in jax.tree.leaves(moved["embed_tokens"]["vision"]))
    np.testing.assert_array_equal(features(rows).features, expected)
    jax.tree.map(np.testing.assert_array_equal, features.with_tower(moved), frozen)


def test_company_changes_no_bit(seen):
    first = features_of(seen)[0](rows_of(seen, 0, 1, 2, 3, 4)).features
    features = features_of(seen)[0]
    parts = [np.asarray(features(rows_of(seen, number)).features)[0] for number in range(5)]
    counts = [len(expected) for expected in seen[4]]
    joined = np.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])
    np.testing.assert_array_equal(np.asarray(first)[0, : len(joined)], joined)


def test_beyond_the_limit_features_are_made_again(seen, caplog):
    features, reader = features_of(seen, limit=float(seen[4][0].nbytes))
    for _ in range(2):
        made = np.asarray(features(rows_of(seen, 0, 1)).features)[0]
        expected = np.concatenate(seen[4][:2])
        np.testing.assert_allclose(made[: len(expected)], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert features.computed > 2 and sum(image.cache_key in reader.kept[0] for image in seen[3]) <= 1
    assert sum("computed again in each epoch" in record.getMessage() for record in caplog.records) == 1
