"""Models that see, compared with transformers; documents apart there, packed here."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file
from selection import repeats, thorough

from jaxglue.models import abstract_model, build_model, config_from_hf, with_vision
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import abstract_parameters, flatten_names, hf_name, set_parameters, split_model
from jaxglue.models.tower_config import TrainedParams
from jaxglue.models.wrapper import ties, with_text
from jaxglue.ops.segments import pack_segments
from jaxglue.vision.processor import Grid, read_processor
from jaxglue.vision.rows import Image, RowImages, image_positions

GOLDENS = Path(__file__).parents[1] / "goldens"
sys.path.append(str(GOLDENS))
from drawn import drawn, frames, pixels, probes, unpacked  # noqa: E402

NAMED = {path.stem: f"vision/{path.stem}" for path in (GOLDENS / "vision").glob("*.safetensors")}
FAMILIES = sorted(path.stem for path in (GOLDENS / "vision").glob("*.safetensors"))


def read_golden(name):
    with safe_open(GOLDENS / f"{NAMED.get(name, name)}.safetensors", "numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        raw, golden = json.loads(file.metadata()["config"]), unpacked(tensors)
    if ties(raw) is None:  # as of a folder, whose files decide
        raw = with_text(raw, tie_word_embeddings="norm.lm_head.weight" not in golden) | {"tie_word_embeddings": None}
    return raw, golden


def drawn_model(raw, **settings):
    config = with_vision(config_from_hf(raw), raw, **settings)
    model = abstract_model(config, dtype=jnp.float32)
    values = {name: jnp.asarray(drawn(name, spec.shape)) for name, spec in abstract_parameters(model).items()}
    return set_parameters(model, values)


def documents_of(raw, golden, first_image=0):
    """Return (tokens, images) of each document, with images and clips numbered from one."""
    processor = read_processor(Path("."), raw)
    ends = np.cumsum(golden["lengths"])
    return processor, [
        (
            golden["tokens"][end - length : end],
            [
                Image(key=b"%d" % number, grid=Grid(*grid), patches=drawn_patches(number, Grid(*grid), processor))
                for number, (owner, grid) in enumerate(
                    zip(golden["owners"], golden["grids"].tolist(), strict=True), first_image
                )
                if owner == document
            ],
        )
        for document, (length, end) in enumerate(zip(golden["lengths"], ends, strict=True))
    ]


def drawn_patches(number, grid, processor):
    """Return the patches of an image, or the frames of a clip, those of a token side by side."""
    if not grid.is_clip:
        return pixels(number, grid, processor.patch)
    values = np.zeros((4 * grid.patches, processor.hearing.bands), np.float32)
    values[: grid.rows] = frames(number, grid.rows, processor.hearing.bands)
    return values.reshape(grid.patches, -1)


def packed(raw, processor, documents, seq_len=None, features=None):
    """Return tokens, segments and images of documents in one row, which has room for so many features."""
    image_id = raw.get("image_token_id", raw.get("image_token_index"))
    lengths = [len(tokens) for tokens, _ in documents]
    T = seq_len or sum(lengths) + 3
    tokens = np.zeros((1, T), np.int32)
    tokens[0, : sum(lengths)] = np.concatenate([tokens for tokens, _ in documents])
    index = np.full((1, T), -1, np.int32)
    audio_id = raw.get("audio_token_id")
    places = np.flatnonzero(np.isin(tokens[0], [image_id] if audio_id is None else [image_id, audio_id]))
    index[0, places] = np.arange(len(places))
    if processor.stand_in is not None:
        tokens[0, places] = processor.stand_in
    positions = None
    if raw["model_type"].startswith("qwen"):
        parts = []
        for own, images in documents:
            firsts = np.flatnonzero((own == image_id) & (np.roll(own, 1) != image_id))
            grids = [(int(first), image.grid) for first, image in zip(firsts, images, strict=True)]
            parts.append(image_positions(len(own), grids, processor.merge))
        positions = np.zeros((1, T, 3), np.int32)
        positions[0, : sum(lengths)] = np.concatenate(parts)
    row = [image for _, images in documents for image in images]
    rows = RowImages([row], index, positions, processor, [sum(lengths)], features or len(places))
    slots = {} if features is None else {"max_segments": 8}
    return tokens, pack_segments([lengths], seq_len=T, **slots), rows.with_patches()


@pytest.mark.parametrize("name", repeats([*FAMILIES, "audio"], "qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_wide"))
def test_logits_loss_and_gradients_match_transformers(name):
    raw, golden = read_golden(name)
    processor, documents = documents_of(raw, golden)
    tokens, segments, images = packed(raw, processor, documents)
    model = drawn_model(raw, hears=True)
    graphdef, state = nnx.split(model)
    real = sum(golden["lengths"])
    same = np.asarray(segments.segment_ids)[0]
    targets = np.flatnonzero((same[:-1] == same[1:]) & (same[:-1] > 0))
    following = golden["tokens"][1:]

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def compute(state):
        logits = nnx.merge(graphdef, state)(tokens, segments, images=images)[0]
        scores = jax.nn.log_softmax(logits[targets])
        return -scores[np.arange(len(targets)), following[targets]].mean(), logits[:real]

    (loss, logits), gradients = compute(state)
    scale = np.abs(golden["logits"]).max()
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4 * scale)
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-5)
    gradients = nnx.filter_state(gradients, nnx.Param)
    flat = {hf_name(".".join(map(str, path))): np.asarray(g[...]) for path, g in nnx.to_flat_state(gradients)}
    norms = {key.removeprefix("norm."): norm for key, norm in golden.items() if key.startswith("norm.")}
    assert flat.keys() == norms.keys()
    least = 1e-4 * max(norms.values())  # biases of keys have none but rounding
    if "model.embed_tokens_per_layer.weight" in flat:  # where transformers lets the padding token's row stay
        flat["model.embed_tokens_per_layer.weight"] = flat["model.embed_tokens_per_layer.weight"].copy()
        flat["model.embed_tokens_per_layer.weight"][processor.stand_in] = 0
    for key, gradient in flat.items():
        np.testing.assert_allclose(np.linalg.norm(gradient), norms[key], rtol=1e-3, atol=1e-3 * least, err_msg=key)
        error = np.linalg.norm(probes(key, gradient) - golden[f"probes.{key}"]) / max(norms[key], least)
        assert error <= 1e-3, f"{key}: {error:.1e}"


@partial(jax.jit, static_argnums=0)
def run(graphdef, state, tokens, segments, images):
    return nnx.merge(graphdef, state)(tokens, segments, images=images)[0]


def logits_of(model, tokens, segments, images):
    return np.asarray(run(*nnx.split(model), tokens, segments, images))


@pytest.fixture(scope="module")
def seeing():
    raw, golden = read_golden("qwen3_5")
    return raw, *documents_of(raw, golden), drawn_model(raw)


def test_documents_of_a_row_see_what_they_see_alone(seeing):
    raw, processor, documents, model = seeing
    T = 96
    order = [3, 1, 2, 0, 1]
    together = logits_of(model, *packed(raw, processor, [documents[i] for i in order], T, features=T))
    start = 0
    for i in order:
        alone = logits_of(model, *packed(raw, processor, [documents[i]], T, features=T))
        length = len(documents[i][0])
        np.testing.assert_allclose(
            together[start : start + length], alone[:length], rtol=0, atol=1e-5 * np.abs(alone).max()
        )
        start += length


def test_another_image_in_the_row_changes_no_bit(seeing):
    raw, processor, documents, model = seeing
    before = logits_of(model, *packed(raw, processor, [documents[1], documents[2]], 96, features=96))
    tokens, images = documents[1]
    changed = tokens, [replace(images[0], patches=255 - images[0].patches)]
    after = logits_of(model, *packed(raw, processor, [changed, documents[2]], 96, features=96))
    first = len(tokens)
    assert (before[:first] != after[:first]).any()
    np.testing.assert_array_equal(before[first:], after[first:])


def random_document(rng, raw, processor, number):
    """Return tokens and images of a document of texts and up to three images, in any order."""
    mark, tokens, images = raw.get("image_token_id", raw.get("image_token_index")), [], []
    for _ in range(rng.integers(1, 5)):
        if rng.random() < 0.5 or len(images) == 3:
            tokens += rng.integers(1, mark, rng.integers(1, 6)).tolist()
            continue
        sides = (1, 1) if raw["model_type"] == "gemma3" else rng.integers(1, 4, 2).tolist()
        grid = processor.grid(1, 1) if raw["model_type"] == "gemma3" else Grid(*(s * processor.merge for s in sides))
        rows, columns = (side // processor.merge for side in grid)
        breaks = [23] if raw["model_type"] == "mistral3" else []
        tokens += [21, *([mark] * columns + breaks) * (rows - 1), *[mark] * columns, 22]
        key = b"%d" % (number + len(images))
        images.append(Image(key=key, grid=grid, patches=pixels(number + len(images), grid, processor.patch)))
    return np.array(tokens, np.int32), images


@thorough("models/test_vision.py")
@pytest.mark.parametrize("name", ["qwen3_5", "gemma3", "gemma4_wide", "mistral3"])
def test_random_mixtures_are_what_their_documents_are_alone(name):
    """In any order, beside any neighbor; another image in a document changes no bit of the others."""
    raw, _ = read_golden(name)
    processor, model, rng = read_processor(Path("."), raw), drawn_model(raw), np.random.default_rng(0)
    T, pictures = 128, 0

    def logits(documents):
        return logits_of(model, *packed(raw, processor, documents, T, features=T))

    for _ in range(50):
        documents, total = [], 0
        for number in range(rng.integers(2, 8)):
            document = random_document(rng, raw, processor, 1000 + 10 * number + pictures)
            if total + len(document[0]) <= T:
                documents.append(document)
                total += len(document[0])
        pictures += 100
        together, start = logits(documents), 0
        for document in documents:
            length, alone = len(document[0]), logits([document])
            found = together[start : start + length]
            np.testing.assert_allclose(found, alone[:length], rtol=0, atol=1e-5 * np.abs(alone).max())
            start += length
        seen = [place for place, (_, images) in enumerate(documents) if images]
        if not seen:
            continue
        place = int(rng.choice(seen))
        tokens, (first, *rest) = documents[place]
        moved = [*documents]
        moved[place] = tokens, [replace(first, patches=255 - first.patches), *rest]
        before = sum(len(text) for text, _ in documents[:place])
        own, after = slice(before, before + len(tokens)), logits(moved)
        assert (after[own] != together[own]).any()
        np.testing.assert_array_equal(np.delete(after, own, 0), np.delete(together, own, 0))


def test_features_stand_in_for_patches(seeing):
    raw, processor, documents, model = seeing
    tokens, segments, images = packed(raw, processor, documents)
    features = jax.jit(lambda patches: model.embed_tokens.vision(patches, jnp.float32))(images.patches)
    expected = logits_of(model, tokens, segments, images)
    found = logits_of(model, tokens, segments, replace(images, patches=None, features=features))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_positions_are_those_of_transformers():
    positions = image_positions(9, [(3, Grid(4, 6))], 2)
    assert positions[:3].tolist() == [[0] * 3, [1] * 3, [2] * 3]
    assert positions[3:].T.tolist() == [[3] * 6, [3, 3, 3, 4, 4, 4], [3, 4, 5, 3, 4, 5]]
    assert image_positions(10, [(3, Grid(4, 6))], 2)[-1].tolist() == [6] * 3


@pytest.mark.parametrize(("trains", "parts"), [("none", ()), ("projector", ("merger",)), ("all", ("blocks", "merger"))])
def test_adapters_reach_the_parts_that_train(seeing, trains, parts):
    raw = seeing[0]
    config = with_vision(config_from_hf(raw), raw, trains=trains)

    def adapted():
        model = build_model(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
        add_lora(model, LoraConfig(rank=2), rngs=nnx.Rngs(0))
        return model

    _, trainable, _ = split_model(nnx.eval_shape(adapted), nnx.LoRAParam)
    names = [name for name in flatten_names(trainable) if name.startswith("model.visual.")]
    assert {name.split(".")[2] for name in names} == set(parts)
    assert all(("lora_" in name) == (trains == "all") for name in names)
    full = split_model(abstract_model(config, dtype=jnp.float32), TrainedParams(config.vision))[1]
    names = {name.split(".")[2] for name in flatten_names(full) if name.startswith("model.visual.")}
    assert names == (set(parts) | {"patch_embed", "pos_embed"} if trains == "all" else set(parts))


@pytest.mark.parametrize("name", repeats(["qwen3_5", "qwen3_vl", "gemma4", "gemma4_wide"], "qwen3_vl", "gemma4"))
def test_frames_are_videos_of_transformers(name):
    """Qwen's models read a pair of frames as an image; features replace the tokens of videos and of images alike."""
    raw, _ = read_golden(name)
    golden = load_file(GOLDENS / "video.safetensors")
    processor, image_id = read_processor(Path("."), raw), raw["image_token_id"]
    tokens = np.where(golden["tokens"] == 19, image_id, golden["tokens"])
    count = 2 if name.startswith("qwen") else 1
    pairs = [np.concatenate([pixels(10 * pair + frame, (2, 4), 4) for frame in range(count)], 1) for pair in range(2)]
    images = [Image(key=b"%d" % number, grid=Grid(2, 4), patches=pair) for number, pair in enumerate(pairs)]
    images.append(Image(key=b"2", grid=Grid(4, 2), patches=pixels(5, (4, 2), 4)))
    found = logits_of(drawn_model(raw), *packed(raw, processor, [(tokens, images)]))[: len(tokens)]
    expected = golden[f"logits.{name}"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
