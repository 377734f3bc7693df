"""Runs on pictures: features that are kept, resume, adapters of text and tower, their files."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from selection import repeats_parts_of, thorough
from tiny_runs import make_seeing

from jaxglue.api.session import Session
from jaxglue.hf.merge import export_adapter
from jaxglue.serve.config import EvaluateConfig, ScoreConfig
from jaxglue.serve.measured import measure_rows
from jaxglue.serve.scores import score_rows
from jaxglue.settings.recipe import from_settings
from jaxglue.training import features, step
from jaxglue.training.config import TrainConfig
from jaxglue.training.record import read_metrics
from jaxglue.training.setup import resolve
from jaxglue.training.train import train
from jaxglue.vision.images import image_source

QUICKSTART = Path(__file__).parents[2] / "jaxglue" / "recipes" / "quickstart"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A smaller model, and the first pictures."""
    make_seeing((folder := tmp_path_factory.mktemp("seeing")) / "model")
    write_pictures(folder)
    return folder


def write_pictures(folder):
    lines = (QUICKSTART / "pictures.jsonl").read_text().splitlines()[:10]
    texts = [{"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A red cross."}]}]
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in [*lines, *map(json.dumps, texts)]))


def config_of(folder, output, **settings):
    settings = {
        **{
            "model": str(folder / "model"),
            "random_weights": True,
            "data": [str(folder / "rows.jsonl")],
            "seq_len": 128,
        },
        **{"batch_size": 2, "epochs": 2, "remat": "full", "lora_rank": 4, "cache_dir": str(folder / "cache")},
        **{"output": str(output), "overwrite": True, "log_every": 1, "learning_rate": 1e-2, **settings},
    }
    return from_settings(TrainConfig, settings)


def run(folder, output, **settings):
    summary = train(config_of(folder, output, **settings))
    return summary, [row["loss"] for row in read_metrics(Path(output) / "metrics.jsonl") if "loss" in row]


@thorough("models/test_vision.py")
def test_kept_features_train_as_a_tower_in_each_step_and_resume_to_the_bit(folder, tmp_path):
    picture = tmp_path / "picture.png"
    picture.write_bytes(
        image_source(json.loads((folder / "rows.jsonl").read_text().splitlines()[0])["images"][0], None).data
    )
    _, kept = run(folder, tmp_path / "kept", sample_prompt=["What?"], sample_image=[str(picture)], sample_tokens=2)
    samples = [json.loads(line) for line in (tmp_path / "kept" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) > 1 and all(line["image"].startswith("data:image/jpeg;base64,") for line in samples)
    assert "data:image/jpeg;base64," in (tmp_path / "kept" / "run.html").read_text()
    _, in_steps = run(folder, tmp_path / "steps", image_features="off")
    np.testing.assert_allclose(kept, in_steps, rtol=1e-5)
    assert len(kept) > 2 and kept[-1] < kept[0]
    run(folder, tmp_path / "resumed", save_every=1, keep_checkpoints=9, steps=len(kept))
    checkpoints = tmp_path / "resumed" / "checkpoints"
    for path in checkpoints.iterdir():
        if path.name.isdigit() and int(path.name) > 2:
            shutil.rmtree(path)
    _, again = run(folder, tmp_path / "resumed", save_every=1, steps=len(kept), resume=True, overwrite=False)
    _, whole = run(folder, tmp_path / "whole", steps=len(kept))
    np.testing.assert_array_equal(again, whole)
    np.testing.assert_array_equal(kept, whole)  # where samples with images kept the tower on the device
    config = json.loads((tmp_path / "kept" / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"].startswith(r"model\.language_model\.layers\.")
    names = load_file(tmp_path / "kept" / "adapter" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    export_adapter(tmp_path / "kept" / "adapter", tmp_path / "kept" / "base", tmp_path / "merged")
    base, merged = (load_file(path / "model.safetensors") for path in (tmp_path / "kept" / "base", tmp_path / "merged"))
    assert base.keys() == merged.keys()
    for name in base:
        if name.startswith("model.visual."):
            np.testing.assert_array_equal(base[name], merged[name])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sample_image": ["none.png"]}, "--sample-image: image none.png: No such file"),
        ({"sample_image": ["rows.jsonl"]}, "--sample-image: image 1 rows.jsonl: no image that can be read"),
        ({"sample_image": ["https://example.org/a.png"]}, "--sample-image: .* not fetched from the network"),
        ({"sample_image": ["none.png"], "data": ["texts.jsonl"]}, "--sample-image: the model sees no images"),
        ({"sample_image": ["none.png"], "sample_prompt": []}, "--sample-image none.png needs --sample-prompt"),
    ],
)
def test_sample_images_are_checked_before_weights_are_loaded(folder, tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(folder)
    (folder / "texts.jsonl").write_text((folder / "rows.jsonl").read_text().splitlines()[-1] + "\n")
    with pytest.raises(ValueError, match=message):
        resolve(config_of(folder, tmp_path / "run", **{"sample_prompt": ["What?"], **settings}))


def test_a_session_sees_the_images_of_its_rows(folder, tmp_path):
    make_seeing(tmp_path / "model", "full_attention", depth=1)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    config = {"model": str(tmp_path / "model"), "random_weights": True, "seq_len": 128, "batch_size": 1}
    config |= {"lora_rank": 4, "remat": "full", "cache_dir": str(tmp_path / "cache")}
    with Session(**config) as session, pytest.raises(ValueError, match="open it with images=True"):
        session.forward_backward(rows[:2])
    one, other = [row for row in rows if len(row.get("images", ())) == 1][:2]
    with Session(**config, images=True) as session:
        losses = [session.forward_backward([one | {"images": row["images"]}]) for row in (one, other)]
        assert np.isfinite(losses).all() and losses[0] != losses[1]
        assert next(session.batches([one])).micro_batches[0].images is not None


@thorough("training/test_feature_files.py")
@pytest.mark.parametrize("fills_memory", [False, True])
def test_features_on_disk_are_those_of_memory_whatever_is_damaged(folder, tmp_path, monkeypatch, caplog, fills_memory):
    """Later runs compute none but those of damaged files, and end with the same losses to the bit."""
    made, see_images = [], step.see_images

    def see(parts, *trees):
        see_images(parts, *trees)
        made.append(parts.features)

    monkeypatch.setattr(step, "see_images", see)
    common = {"steps": 4, "epochs": 1, "cache_dir": str(tmp_path / "cache")}
    _, expected = run(folder, tmp_path / "memory", **common)
    assert not list((tmp_path / "cache").glob("features-*"))
    if fills_memory:
        monkeypatch.setattr(features, "available_memory", lambda: 2 * made[0].planned - 2)
    else:
        common["image_features"] = "disk"
    _, losses = run(folder, tmp_path / "first", **common)
    files = sorted((tmp_path / "cache").glob("features-*/*"))
    assert losses == expected and len(files) == made[-1].computed > 4
    assert sum(path.stat().st_size - 32 for path in files) == made[-1].planned >= made[-1].bytes
    data = bytearray(files[2].read_bytes())
    data[100] ^= 4
    files[2].write_bytes(data)
    files[3].unlink()
    _, losses = run(folder, tmp_path / "second", **common)
    assert losses == expected and made[-1].computed == 2
    assert [line.message for line in caplog.records if "damaged" in line.message] == [
        f"{files[2]} is damaged: the features of its image are computed again"
    ]
    run(folder, tmp_path / "smaller", **common, image_max_tokens=8)
    assert made[-1].computed == len(files)


@thorough("models/test_vision.py")
@pytest.mark.parametrize("trains", ["all", "projector"])
def test_towers_and_projectors_train_and_are_exported(folder, tmp_path, trains):
    run(folder, tmp_path / "first", method="full", steps=1, epochs=1)
    model = {"model": str(tmp_path / "first" / "model"), "random_weights": False}
    _, losses = run(folder, tmp_path / "run", train_vision=trains, **model)
    _, frozen = run(folder, tmp_path / "frozen", **model)
    assert losses[0] == pytest.approx(frozen[0], rel=1e-5) and losses[-1] != pytest.approx(frozen[-1], rel=1e-6)
    adapter = tmp_path / "run" / "adapter"
    names = [name for name in load_file(adapter / "adapter_model.safetensors") if ".visual." in name]
    assert names and all(("lora_" in name) == (trains == "all") for name in names)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config.get("modules_to_save") == (None if trains == "all" else ["merger"])
    export_adapter(adapter, Path(model["model"]), tmp_path / "merged")
    base, merged = (load_file(path / "model.safetensors") for path in (Path(model["model"]), tmp_path / "merged"))
    changed = {name for name in base if not np.array_equal(base[name], merged[name]) and ".visual." in name}
    parts = {name.split(".")[2] for name in changed}
    assert parts == ({"blocks", "merger"} if trains == "all" else {"merger"})


@thorough("models/test_vision.py")
def test_pairs_with_images_train_alike_with_kept_features(folder, tmp_path):
    lines = (folder / "rows.jsonl").read_text().splitlines()[:6]
    pairs = []
    for line in lines:
        row = json.loads(line)
        *prompt, answer = row["messages"]
        worse = {"role": "assistant", "content": "I see nothing."}
        pairs.append({"prompt": prompt, "chosen": [answer], "rejected": [worse], "images": row["images"]})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    common = {"data": [str(tmp_path / "pairs.jsonl")], "objective": "dpo", "seq_len": 512, "epochs": 3}
    runs = [
        run(folder, tmp_path / str(number), **common, **options)[1]
        for number, options in enumerate([{}, {"image_features": "off"}])
    ]
    assert runs[0][0] == pytest.approx(np.log(2), rel=1e-5) and runs[0][-1] < runs[0][0]
    for other in runs[1:]:
        np.testing.assert_allclose(other, runs[0], rtol=1e-4)


@thorough("models/test_vision.py")
def test_videos_beside_images_train_alike_with_kept_features(folder, tmp_path):
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    frames = [image for line in lines for image in line.get("images", ())][:5]
    video = [{"type": "video", "video": frames, "fps": 2}, {"type": "text", "text": "What moves?"}]
    answer = {"role": "assistant", "content": "Nothing."}
    rows = [{"messages": [{"role": "user", "content": video}, answer]}, *lines[:4]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"data": [str(tmp_path / "rows.jsonl")], "seq_len": 256, "epochs": 3}
    _, kept = run(folder, tmp_path / "kept", **common)
    _, in_steps = run(folder, tmp_path / "steps", **common, image_features="off")
    np.testing.assert_allclose(kept, in_steps, rtol=1e-5)
    rows[0]["messages"][0]["content"][0]["video"] = frames[::-1]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, backwards = run(folder, tmp_path / "backwards", **common)
    assert abs(backwards[-1] - kept[-1]) > 1e-4 * kept[-1]


@thorough("models/test_vision.py")
def test_a_tower_that_is_to_train_needs_images(folder, tmp_path):
    (tmp_path / "texts.jsonl").write_text((folder / "rows.jsonl").read_text().splitlines()[-1] + "\n")
    with pytest.raises(ValueError, match="--train-vision all: the data have no images"):
        run(folder, tmp_path / "run", data=[str(tmp_path / "texts.jsonl")], train_vision="all")


@thorough("models/test_vision.py")
@pytest.mark.parametrize("objective", ["decide", "decide_head"])
def test_decisions_about_pictures_read_them_before_the_state(folder, tmp_path, objective):
    rows = []
    for number, line in enumerate((folder / "rows.jsonl").read_text().splitlines()[:6]):
        questions = {
            "color": {"type": "choice", "instructions": "Which color?", "criteria": {"red": None, "blue": None}},
            "many": {"type": "score", "instructions": "How many?", "criteria": ["none", "one", "two"]},
        }
        gold = {"color": ("red", "blue")[number % 2], "many": number % 3}
        state = {"state": "Look closely.", "questions": questions, "gold": gold}
        rows.append(state | ({"images": json.loads(line)["images"]} if number != 3 else {}))
    apart = [
        {**row, "questions": {name: question}, "gold": {name: row["gold"][name]}}
        for row in rows
        for name, question in row["questions"].items()
    ]
    blind = [{**row, "images": None} for row in rows]
    for name, lines in (("rows", rows), ("apart", apart), ("blind", blind)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    common = {
        "objective": objective,
        "seq_len": 512,
        "epochs": 1,
        "batch_size": 1,
        "data": [str(tmp_path / "rows.jsonl")],
    }
    _, kept = run(folder, tmp_path / "kept", **common)
    _, in_steps = run(folder, tmp_path / "steps", **common, image_features="off")
    np.testing.assert_allclose(kept, in_steps, rtol=1e-5)
    held_out, measured = {}, {}
    for name in ("rows", "apart", "blind"):
        settings = common | {"steps": 1, "learning_rate": 1e-9, "eval_data": [str(tmp_path / f"{name}.jsonl")]}
        summary, _ = run(folder, tmp_path / name, **settings)
        config = EvaluateConfig(adapter=summary.adapter, data=(str(tmp_path / f"{name}.jsonl"),))
        measured[name] = measure_rows(config).values["nll/uncalibrated"]
        held_out[name] = [row for row in read_metrics(tmp_path / name / "metrics.jsonl") if "eval_loss" in row][-1]
    assert held_out["apart"]["eval_loss"] == pytest.approx(held_out["rows"]["eval_loss"], rel=1e-5)
    assert held_out["blind"]["eval_loss"] != pytest.approx(held_out["rows"]["eval_loss"], rel=1e-4)
    for name, row in held_out.items():
        assert measured[name] == pytest.approx(row["eval_nll"], rel=1e-5)


def test_plans_know_of_images_whose_tower_runs_in_each_step(folder, tmp_path):
    kept, in_steps, trained = (
        resolve(config_of(folder, tmp_path, **settings))
        for settings in ({}, {"image_features": "off"}, {"train_vision": "all"})
    )
    store = kept.data.train.store
    assert kept.workload.tower is None and in_steps.workload.tower == trained.workload.tower
    assert in_steps.workload.tower.images * len(store.tokens) == pytest.approx(len(store.images))
    assert in_steps.workload.tower.patches * len(store.images) == pytest.approx(store.images.grids.prod(1).sum())


@thorough("data/test_read_images.py")
@pytest.mark.parametrize("objective", ["embed", "rerank", "rerank_score"])
def test_texts_with_images_are_compared_and_measured(folder, tmp_path, objective):
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    pictures = [row for row in rows if len(row.get("images", ())) == 1]
    lines = [{"query": f"Number {i}", "positive": {"image": row["images"][0]}} for i, row in enumerate(pictures)]
    lines = [{**line, "negative": [other["positive"]]} for line, other in pairwise(lines)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"objective": objective, "data": [str(path)], "eval_data": [str(path)], "seq_len": 512, "steps": 8}
    _, losses = run(folder, tmp_path / "run", **settings, epochs=1, learning_rate=3e-2)
    _, in_steps = run(folder, tmp_path / "steps", **settings, epochs=1, learning_rate=3e-2, image_features="off")
    np.testing.assert_allclose(losses, in_steps, rtol=1e-4)
    assert len(losses) == 8 and losses[-1] < losses[0]


def answered(row, answer):
    """Return a row's image with a question, and another answer to it."""
    asked = next(message for message in row["messages"] if message["role"] == "user")
    return {"messages": [asked, {"role": "assistant", "content": answer}], "images": row["images"]}


@thorough("generation/test_scoring.py")
@pytest.mark.parametrize("objective", ["classify", "reward"])
def test_scores_of_pictures_are_those_of_training_from_adapter_and_merge(folder, tmp_path, objective):
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    pictures = [row for row in rows if len(row.get("images", ())) == 1][:4]
    lines = [answered(row, "A shape.") | {"label": number % 2} for number, row in enumerate(pictures)]
    if objective == "reward":
        lines = [
            {"prompt": line["messages"][:1], "images": line["images"]}
            | {key: [{"role": "assistant", "content": text}] for key, text in (("chosen", "Red."), ("rejected", "No."))}
            for line in lines
        ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"objective": objective, "data": [str(path)], "eval_data": [str(path)], "seq_len": 256, "epochs": 8}
    settings |= {"num_labels": 2} if objective == "classify" else {}
    run(folder, tmp_path / "start", method="full", steps=1, epochs=1)
    model = {"model": str(tmp_path / "start" / "model"), "random_weights": False}
    _, losses = run(folder, tmp_path / "run", **settings, **model)
    assert losses[-1] < losses[0] - 0.1
    adapter, merged = tmp_path / "run" / "adapter", tmp_path / "merged"
    export_adapter(adapter, Path(model["model"]), merged)
    configs = [ScoreConfig(adapter=adapter, data=(str(path),)), ScoreConfig(model=merged, data=(str(path),))]
    found, of_merge = ([scores for _, scores in score_rows(config)] for config in configs)
    np.testing.assert_allclose(found, of_merge, atol=1e-4)
    last = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in row][-1]
    if objective == "classify":
        exp = np.exp(found)
        losses = -np.log(exp[np.arange(4), [line["label"] for line in lines]] / exp.sum(1))
    else:
        losses = [np.log1p(np.exp(rejected - chosen)) for chosen, rejected in found]
    assert np.mean(losses) == pytest.approx(last["eval_loss"], rel=1e-3)


def test_a_model_that_sees_is_trained_and_merged(folder, tmp_path):
    summary, _ = run(folder, tmp_path / "run", steps=1)
    export_adapter(summary.adapter, tmp_path / "run" / "base", tmp_path / "merged")
    base, merged = (load_file(path / "model.safetensors") for path in (tmp_path / "run" / "base", tmp_path / "merged"))
    assert base.keys() == merged.keys()


@repeats_parts_of("test_text_model_learns_new_tokens_and_merges_beside_the_vision_tower")
def test_tokens_are_added_to_a_model_that_sees(folder, tmp_path):
    whole, _ = run(folder, tmp_path / "whole", method="full", steps=1)
    (tmp_path / "tokens.txt").write_text("<act>\n<look>\n")
    settings = {"model": str(whole.adapter), "random_weights": False, "new_tokens": str(tmp_path / "tokens.txt")}
    summary, _ = run(folder, tmp_path / "grown", **settings, steps=1)
    export_adapter(summary.adapter, whole.adapter, tmp_path / "merged")
    assert len(load_file(tmp_path / "merged/model.safetensors")["lm_head.weight"]) > 365
