"""Runs on clips of audio: features that are kept, adapters of the text, and the tower in merged folders."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hearing import make_hearing, wav
from safetensors.numpy import load_file
from tiny_runs import QUICKSTART

from jaxglue.hf.merge import export_adapter
from jaxglue.settings.recipe import from_settings
from jaxglue.training import step
from jaxglue.training.config import TrainConfig
from jaxglue.training.record import read_metrics
from jaxglue.training.train import train


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


def test_clips_are_heard_once_and_train_as_a_tower_in_each_step(folder, tmp_path, monkeypatch):
    made, see_images = [], step.see_images

    def see(parts, *trees):
        see_images(parts, *trees)
        made.append(parts.features)

    monkeypatch.setattr(step, "see_images", see)
    _, kept = run(folder, tmp_path / "kept")
    assert made[0].computed == 4 and kept[-1] < kept[0]
    _, in_steps = run(folder, tmp_path / "steps", image_features="off")
    np.testing.assert_allclose(kept, in_steps, rtol=1e-5)
    export_adapter(tmp_path / "kept" / "adapter", tmp_path / "kept" / "base", tmp_path / "merged")
    base, merged = (load_file(path / "model.safetensors") for path in (tmp_path / "kept" / "base", tmp_path / "merged"))
    names = [name for name in base if name.startswith(("model.audio_tower.", "model.embed_audio."))]
    assert base.keys() == merged.keys() and len(names) > 40
    for name in names:
        np.testing.assert_array_equal(base[name], merged[name])
