"""Rows with images on a mesh: loss and gradients are those of one device, whichever tokens a device has."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat, repeats_parts_of

from jaxglue.data.batch import Batch
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policy
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.ops import row_split
from jaxglue.ops.segments import pack_segments
from jaxglue.sharding.mesh import place_batch
from jaxglue.sharding.rules import Layout
from jaxglue.vision.rows import RowImages, image_positions
from tests.models.test_vision import documents_of, drawn_model, read_golden


def batch_of(raw, processor, documents, order, T):
    """Return rows of documents in these orders, with their images' patches."""
    mark, shape = raw.get("image_token_id", raw.get("image_token_index")), (len(order), T)
    tokens, index, positions = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros((*shape, 3), np.int32)
    rows, lengths = [], []
    for b, numbers in enumerate(order):
        own = [documents[number] for number in numbers]
        lengths.append([len(text) for text, _ in own])
        tokens[b, : sum(lengths[b])] = np.concatenate([text for text, _ in own])
        rows.append([image for _, images in own for image in images])
        start = 0
        for text, images in own:
            firsts = np.flatnonzero((text == mark) & (np.roll(text, 1) != mark))
            grids = [(int(first), image.grid) for first, image in zip(firsts, images, strict=False)]
            if raw["model_type"].startswith("qwen"):
                positions[b, start : start + len(text)] = image_positions(len(text), grids, processor.merge)
            start += len(text)
    is_image = tokens == mark
    index[is_image] = (np.cumsum(is_image, axis=1) - 1)[is_image]
    targets = np.roll(tokens, -1, axis=1)
    if processor.stand_in is not None:
        tokens[is_image] = processor.stand_in
    segments = pack_segments(lengths, seq_len=T)
    weights = (np.asarray(segments.ends) - 1 > np.arange(T)).astype(np.float32)
    has_positions = raw["model_type"].startswith("qwen")
    used = [sum(row) for row in lengths]
    images = RowImages(rows, index, positions if has_positions else None, processor, used, int(is_image.sum(1).max()))
    arrays = {"tokens": tokens, "targets": targets, "loss_weights": weights}
    return Batch(**arrays, segments=segments, images=images.with_patches())


def gradients(model, mesh, *batches):
    """Return the loss and the gradients of each batch."""
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    if mesh is not None:
        layout = Layout(mesh, jnp.float32)
        trainable, frozen = (
            jax.device_put(tree, layout.shardings(layout.param_specs(tree))) for tree in (trainable, frozen)
        )
    executor = Executor(graphdefs, model.config, policy=parse_policy("dots"), dtype=jnp.float32, mesh=mesh)
    placed = batches if mesh is None else place_batch(batches, mesh)
    return jax.device_get([executor.loss_and_gradients(trainable, frozen, [batch], 1.0) for batch in placed])


@repeats_parts_of("test_split_rows_equal_whole_rows")
@pytest.mark.parametrize(
    ("name", "mesh", "trains"),
    [
        ("gemma3", "data=2,context=4", "all"),
        repeat("qwen3_5", "data=4,context=2", "all"),
        repeat("qwen3_vl", "data=2,context=4", "none"),
        repeat("gemma4_wide", "data=4,context=2", "none"),
        repeat("qwen3_5", "fsdp=8", "all"),
    ],
)
def test_images_in_split_rows_are_seen_whole(mesh_of, monkeypatch, name, mesh, trains):
    """Images are cut between devices, with their spans, their windows and the gradient to their features."""
    monkeypatch.setattr(row_split, "_LEAST_CHUNK", 1)
    mesh = mesh_of(mesh)
    raw, golden = read_golden(name)
    processor, documents = documents_of(raw, golden)
    model = drawn_model(raw, trains=trains)
    add_lora(model, LoraConfig(rank=2, alpha=8, targets=("all-linear",)), rngs=nnx.Rngs(0))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == "lora_B":
            variable.set_value(jax.random.normal(jax.random.key(len(path)), variable.shape) * 0.1)
    order = [[1, 2, 3], [2, 0, 1], [3, 3], [0, 1, 2], [2, 2], [1], [3, 0], [0]]
    batch = batch_of(raw, processor, documents, order, 96)
    moved = replace(batch, images=replace(batch.images, patches=replace(
        batch.images.patches, values=255 - batch.images.patches.values
    )))  # fmt: skip
    (loss, expected), (other_loss, _) = gradients(model, None, batch, moved)
    assert abs(other_loss - loss) > 1e-3
    (got,) = gradients(model, mesh, batch)
    np.testing.assert_allclose(got[0], loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(got[1]), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-4 * max(1e-3, np.abs(one).max()))
