"""Runs on clips of audio: features that are kept, adapters of the text, and the tower in merged folders."""

import base64
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hearing import make_hearing, wav
from safetensors.numpy import load_file
from selection import repeats_parts_of, thorough
from tiny_runs import QUICKSTART

from jaxglue.data.batch import Batch
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policies
from jaxglue.hf.merge import export_adapter
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, hf_name, split_model
from jaxglue.settings.recipe import from_settings
from jaxglue.training import step
from jaxglue.training.config import TrainConfig
from jaxglue.training.record import read_metrics
from jaxglue.training.train import train
from tests.models.test_vision import documents_of, drawn_model, packed, read_golden


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    make_hearing((folder := tmp_path_factory.mktemp("hearing")) / "model")
    image = json.loads((QUICKSTART / "pictures.jsonl").read_text().splitlines()[0])["images"][0]
    write_rows(folder / "rows.jsonl", image)
    return folder


def clip(tone, seconds):
    samples = np.sin(tone * np.arange(int(16_000 * seconds))) * 0.5
    return f"data:audio/wav;base64,{base64.b64encode(wav(samples)).decode()}"


def write_rows(path, image, last=0.9):
    contents = [[{"type": "audio", "audio": clip(tone, 0.2 + tone)}] for tone in (0.1, 0.3, last)]
    contents[1] = [{"type": "image", "image": image}, *contents[1]]
    contents.append([{"type": "text", "text": "Hello."}])
    answers = ["A low tone.", "A picture, and a tone.", "A high tone.", "Hello."]
    rows = [
        {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}
        for content, answer in zip(contents, answers, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder, output, **settings):
    common = {"model": str(folder / "model"), "random_weights": True, "data": [str(folder / "rows.jsonl")]}
    common |= {"seq_len": 256, "batch_size": 1, "epochs": 3, "remat": "full", "lora_rank": 4, "learning_rate": 1e-2}
    common |= {"cache_dir": str(folder / "cache"), "output": str(output), "overwrite": True, "log_every": 1}
    summary = train(from_settings(TrainConfig, common | settings))
    return summary, [row["loss"] for row in read_metrics(Path(output) / "metrics.jsonl") if "loss" in row]


def stored(folder):
    """Return the tensors of a model folder, and the names of those of the tower of clips and its projector."""
    tensors = load_file(folder / "model.safetensors")
    return tensors, [name for name in tensors if name.startswith(("model.audio_tower.", "model.embed_audio."))]


@repeats_parts_of("test_features_are_those_of_each_image_alone_and_made_once")
def test_clips_are_heard_once_and_their_tower_is_merged_as_it_was(folder, tmp_path, monkeypatch):
    made, see_images = [], step.see_images

    def see(parts, *trees):
        see_images(parts, *trees)
        made.append(parts.features)

    monkeypatch.setattr(step, "see_images", see)
    _, kept = run(folder, tmp_path / "kept")
    assert made[0].computed == 4 and kept[-1] < kept[0]
    export_adapter(tmp_path / "kept" / "adapter", tmp_path / "kept" / "base", tmp_path / "merged")
    (base, names), (merged, _) = stored(tmp_path / "kept" / "base"), stored(tmp_path / "merged")
    assert base.keys() == merged.keys() and len(names) > 40
    for name in names:
        np.testing.assert_array_equal(base[name], merged[name])


@thorough("training/test_features.py")
def test_a_tower_in_each_step_trains_alike_and_by_adapters_of_its_own(folder, tmp_path):
    _, kept = run(folder, tmp_path / "kept")
    _, in_steps = run(folder, tmp_path / "steps", image_features="off")
    np.testing.assert_allclose(kept, in_steps, rtol=1e-5)
    _, trained = run(folder, tmp_path / "trained", train_vision="all", steps=2)
    assert trained[0] == pytest.approx(kept[0], rel=1e-5) and trained[1] != pytest.approx(kept[1], rel=1e-6)
    moved = load_file(tmp_path / "trained" / "adapter" / "adapter_model.safetensors")
    names = [name for name in moved if "lora_B" in name and ("audio" in name or "vision" in name)]
    assert len(names) == 23 and all(moved[name].any() for name in names)
    export_adapter(tmp_path / "trained" / "adapter", tmp_path / "trained" / "base", tmp_path / "moved")
    (base, names), (merged, _) = stored(tmp_path / "trained" / "base"), stored(tmp_path / "moved")
    changed = [name for name in names if not np.array_equal(base[name], merged[name])]
    assert len(changed) == 14  # of a block, the linear layers around it, and the projector


@thorough("models/test_vision.py")
def test_adapters_of_towers_have_the_gradients_of_the_whole_model():
    """Through the embeddings that each layer has of its own, too."""
    raw, golden = read_golden("audio")
    few = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    raw["text_config"] |= few | {"per_layer_config": None}
    for part in ("vision_config", "audio_config"):
        raw[part]["num_hidden_layers"] = 1
    processor, documents = documents_of(raw, golden)
    model = drawn_model(raw, trains="all", hears=True)
    add_lora(model, LoraConfig(rank=2, targets=("all-linear",)), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(
        lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype), nnx.state(model, nnx.LoRAParam)
    )
    nnx.update(model, drawn)
    tokens, segments, images = packed(raw, processor, documents)
    ids = np.asarray(segments.segment_ids)
    weights = np.pad((ids[:, :-1] == ids[:, 1:]) & (ids[:, :-1] > 0), ((0, 0), (0, 1))).astype(np.float32)
    targets = np.zeros_like(tokens)
    targets[0, : len(golden["tokens"]) - 1] = golden["tokens"][1:]
    graphdef, adapters, others = nnx.split(model, nnx.LoRAParam, ...)

    @jax.jit
    @jax.value_and_grad
    def whole(adapters):
        scores = jax.nn.log_softmax(nnx.merge(graphdef, adapters, others)(tokens, segments, images=images)[0])
        return -(scores[np.arange(len(targets[0])), targets[0]] * weights[0]).sum() / weights.sum()

    expected_loss, gradients = whole(adapters)
    expected = {hf_name(".".join(map(str, path))): g[...] for path, g in nnx.to_flat_state(gradients)}
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    policies = parse_policies("dots", len(graphdefs.layers))
    executor = Executor(graphdefs, model.config, policy=policies, dtype=jnp.float32)
    batch = Batch(tokens=tokens, targets=targets, loss_weights=weights, segments=segments, images=images)
    loss, found = executor.loss_and_gradients(trainable, frozen, [batch], float(weights.sum()))
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    found = flatten_names(found)
    assert found.keys() == expected.keys() and any("audio_tower" in name for name in found)
    for name, gradient in found.items():
        scale = np.abs(expected[name]).max()
        assert scale > 0
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-4 * scale, err_msg=name)
