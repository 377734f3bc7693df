"""Rows with clips of audio, and Gemma's videos: forms make the same document, and broken clips name their row."""

import base64
import json
import shutil

import numpy as np
import pytest
from hearing import make_hearing, wav
from tiny_runs import QUICKSTART

from jaxglue.data.config import DataConfig
from jaxglue.data.prepare import prepare_data, read_vision
from jaxglue.data.report import trained_parts
from jaxglue.data.tokenizer import load_tokenizer

CLIP = wav(np.sin(np.arange(5000) / 9))
CODED = base64.b64encode(CLIP).decode()
URL = f"data:audio/wav;base64,{CODED}"
ANSWER = {"role": "assistant", "content": "A tone."}
TEXT = {"type": "text", "text": "What is this?"}


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    make_hearing(folder := tmp_path_factory.mktemp("hearing"))
    return folder


@pytest.fixture
def prepare(tmp_path, hearing):
    def prepare(*rows, folder=hearing):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = DataConfig(data=(str(path),), seq_len=512, cache_dir=str(tmp_path / "cache"))
        tokenizer = load_tokenizer(folder)
        return prepare_data(config, tokenizer, processor=read_vision(folder, tokenizer))

    return prepare


def asked(*parts):
    return {"messages": [{"role": "user", "content": [*parts, TEXT]}, ANSWER]}


def test_every_form_of_a_clip_makes_the_same_document(prepare, tmp_path, hearing):
    (tmp_path / "clip.wav").write_bytes(CLIP)
    texts = [{"role": "user", "content": TEXT["text"]}, ANSWER]
    rows = [
        asked({"type": "audio", "audio": "clip.wav"}),
        asked({"type": "audio", "audio": URL}),
        asked({"type": "audio", "path": "clip.wav", "image": None}),
        asked({"type": "input_audio", "input_audio": {"data": CODED, "format": "wav"}}),
        asked({"type": "audio_url", "audio_url": {"url": URL}}),
        asked({"type": "audio"}) | {"audios": ["clip.wav"]},
        asked({"type": "audio"}) | {"audio": {"base64": CODED, "path": None}},
        {"messages": texts, "audio": "clip.wav"},
        {"messages": [{"role": "user", "content": "<audio>What is this?"}, ANSWER], "audios": [URL]},
    ]
    data = prepare(*rows).train
    tokens = [data.store.tokens[data.indices(number)] for number in range(len(rows))]
    for other in tokens[1:]:
        np.testing.assert_array_equal(other, tokens[0])
    frames = (5000 - 161) // 160 + 1
    assert (tokens[0] == 365).sum() == -(-frames // 4)
    marks = np.flatnonzero(np.isin(tokens[0], (366, 367)))
    assert (tokens[0][marks[0] + 1 : marks[1]] == 365).all() and len(marks) == 2
    assert not data.store.mask[data.indices(0)][: marks[1] + 1].any() and data.store.mask[data.indices(0)].any()
    assert len(np.unique(data.store.images.digests, axis=0)) == 1 and data.store.images.grids.tolist()[0] == [frames, 0]
    shown = "".join(text for text, _ in trained_parts(data, 0, load_tokenizer(hearing)))
    assert "⟨clip of 0.3 seconds, 8 tokens⟩" in shown


def test_clips_and_images_keep_their_order(prepare):
    pictures = (QUICKSTART / "pictures.jsonl").read_text().splitlines()
    image = json.loads(pictures[0])["images"][0]
    parts = [{"type": "audio"}, {"type": "image"}, {"type": "audio", "audio": URL}]
    data = prepare(asked(*parts) | {"images": [image], "audios": [URL]}).train
    found = data.store.tokens[data.indices(0)]
    kinds = found[np.isin(found, (364, 365))]
    assert [int(kind) for kind, before in zip(kinds, [0, *kinds], strict=False) if kind != before] == [365, 364, 365]
    assert data.store.images.clips.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (asked({"type": "audio", "audio": "none.wav"}), r"rows.jsonl:2: clip .*none.wav: No such file"),
        (asked({"type": "audio", "audio": URL[:-4000]}), r"rows.jsonl:2: clip 1: a damaged clip"),
        (asked({"type": "audio", "audio": "https://a.b/c.wav"}), r"rows.jsonl:2: .*clips are not fetched"),
        (asked({"type": "audio"}), r"rows.jsonl:2: message 1: a part of type 'audio' has nothing under audio, "),
        (asked({"type": "image"}) | {"audios": [URL]}, r"rows.jsonl:2: message 1: a part of type 'image' has nothing"),
    ],
)
def test_clips_that_are_not_there_name_their_row(prepare, row, message):
    with pytest.raises(ValueError, match=message):
        prepare({"messages": [{"role": "user", "content": "Hello."}, ANSWER]}, row)


def test_models_that_hear_nothing_refuse_clips(prepare, request):
    folder = request.config.rootpath / "jaxglue" / "recipes" / "quickstart" / "seeing"
    with pytest.raises(ValueError, match=r"rows.jsonl:1: clip 1: this model hears no audio, which Gemma 4 E2B"):
        prepare(asked({"type": "audio", "audio": URL}), folder=folder)


def test_frames_of_gemma_stand_behind_their_minutes_and_seconds_within_a_budget_of_their_own(prepare, hearing):
    rows = [json.loads(line) for line in (QUICKSTART / "pictures.jsonl").read_text().splitlines()[:8]]
    frames = [image for row in rows for image in row["images"]][:3]
    video = {"type": "video", "video": frames, "fps": 0.02}
    data = prepare(asked({"type": "text", "text": "Look:"}, video), folder=with_budget(hearing, 280)).train
    tokenizer, tokens = load_tokenizer(hearing), data.store.tokens[data.indices(0)]
    shown = tokenizer.decode(tokens[tokens != 364])
    pair = "<|vision_start|><|vision_end|>"
    assert f"Look:00:00 {pair} 00:50 {pair} 01:40 {pair}What is this?" in shown
    counts = data.store.images.patches // 9
    assert (tokens == 364).sum() == counts.sum() and (counts <= 70).all() and (counts > 30).all()
    larger = prepare(asked({"type": "image", "image": frames[0]}), folder=with_budget(hearing, 280)).train
    assert larger.store.images.patches[0] // 9 > 140


def with_budget(folder, tokens):
    """Return a folder whose images take so many tokens, and frames 70."""
    other = folder.parent / f"{folder.name}-{tokens}"
    shutil.copytree(folder, other, dirs_exist_ok=True)
    (other / "processor_config.json").write_text(json.dumps({"image_processor": {"max_soft_tokens": tokens}}))
    return other
