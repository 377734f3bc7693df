"""Rows with images: every form makes the same document, and tokens of images are not trained on."""

import base64
import json
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jaxglue.data import stream
from jaxglue.data.config import NO_COLUMNS, AnswerTask, DataConfig, LabelTask
from jaxglue.data.iterator import BatchIterator, EvalBatches
from jaxglue.data.messages import read_chat
from jaxglue.data.packing import plan_packing
from jaxglue.data.prepare import image_rules, prepare_data, read_vision
from jaxglue.data.report import count_duplicates, trained_parts
from jaxglue.data.stream import StreamIterator
from jaxglue.data.tokenize import encode_here
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.rl.pack import Group, TrainedAnswer, pack_groups
from jaxglue.rl.prompts import read_prompts
from jaxglue.vision.images import image_source
from jaxglue.vision.processor import Grid, Processor
from jaxglue.vision.rows import RowImages, image_positions

QUESTION, ANSWER = "What is this?", "A red circle."
CONTENT = [{"type": "text", "text": QUESTION}]
TEXT = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


@pytest.fixture(scope="module")
def seeing(request):
    return request.config.rootpath / "jaxglue" / "recipes" / "quickstart" / "seeing"


@pytest.fixture(scope="module")
def urls(seeing):
    rows = (seeing.parent / "pictures.jsonl").read_text().splitlines()
    return [json.loads(row)["images"][0] for row in rows[:3]]


@pytest.fixture
def prepare(tmp_path, seeing):
    def prepare(*rows, task=None, columns=NO_COLUMNS, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"seq_len": 128, "cache_dir": str(tmp_path / "cache"), **settings}
        config = DataConfig(data=(str(path),), **settings)
        tokenizer = load_tokenizer(seeing)
        processor = read_vision(seeing, tokenizer, **config.image_limits)
        return prepare_data(config, tokenizer, task=task, columns=columns, processor=processor)

    return prepare


def document(prepared):
    data = prepared.train
    return data.store.tokens[data.indices(0)].tolist(), data.store.images.digests.tolist()


def forms(url, folder):
    data = base64.b64decode(url.partition(",")[2])
    (folder / "a.png").write_bytes(data)
    part, text = {"type": "image"}, {"type": "text", "text": QUESTION, "image": None}
    answer = TEXT[1]
    return {
        "trl": {"messages": [{"role": "user", "content": [part, text]}, answer], "images": [url]},
        "inline": {"messages": [{"role": "user", "content": [{"type": "image", "image": url}, text]}, answer]},
        "base64": {
            "messages": [
                {"role": "user", "content": [{"type": "image", "base64": url.partition(",")[2]}, text]},
                answer,
            ]
        },
        "anthropic": {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "base64", "data": url.partition(",")[2]}}, text],
                },
                answer,
            ]
        },
        "openai": {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text]},
                answer,
            ]
        },
        "strings": {"messages": TEXT, "images": [{"bytes": None, "path": "a.png"}]},
        "one image": {"messages": TEXT, "image": "a.png"},
        "tags": {"messages": [{"role": "user", "content": f"<image>{QUESTION}"}, answer], "images": ["a.png"]},
        "sharegpt": {
            "conversations": [{"from": "human", "value": f"<image>{QUESTION}"}, {"from": "gpt", "value": ANSWER}],
            "images": [str(folder / "a.png")],
        },
        "alpaca": {"instruction": f"<image>{QUESTION}", "input": "", "output": ANSWER, "images": ["a.png"]},
        "completion": {"prompt": TEXT[:1], "completion": TEXT[1:], "images": [{"base64": url.partition(",")[2]}]},
    }


def test_every_form_of_a_row_makes_the_same_document(prepare, urls, tmp_path):
    made = {name: document(prepare(row)) for name, row in forms(urls[0], tmp_path).items()}
    assert {name for name, found in made.items() if found != made["trl"]} == set()


def test_images_are_expanded_and_carry_no_loss(prepare, urls):
    content = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    row = {"messages": [{"role": "user", "content": content}, TEXT[1]], "images": urls[:2]}
    data = prepare(row, loss_on="all").train
    tokens, mask = data.store.tokens[data.indices(0)], data.store.mask[data.indices(0)]
    images, (start, end) = data.reader.rules.tokens[0], data.reader.rules.tokens[1:]
    assert (tokens == images).sum() == data.reader.counts[0] > 0
    assert not mask[np.isin(tokens, [images, start, end])].any() and mask[~np.isin(tokens, [images, start, end])].all()
    shown = "".join(text for text, _ in trained_parts(data, 0, load_tokenizer_of(data, prepare)))
    assert shown.count("⟨image of ") == 2 and "<|image_pad|>" not in shown


def load_tokenizer_of(data, prepare):
    from pathlib import Path

    return load_tokenizer(Path(__file__).parents[2] / "jaxglue" / "recipes" / "quickstart" / "seeing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": []}, "rows.jsonl:1: message 1: a part of type 'image' has nothing under image, .*column 'images'"),
        ({"images": ["b.png"]}, "rows.jsonl:1: image .*b.png: No such file"),
        ({"images": ["data:image/png;base64,aGVsbG8="]}, "rows.jsonl:1: image 1: no image"),
        ({"images": ["https://example.org/a.png"]}, "not fetched from the network"),
        ({"videos": ["a.mp4"]}, "1 videos in its columns, and 0 places"),
        ({"images": ["iVBORw0KGgo" * 30]}, "is no path: base64 goes under 'base64'"),
        ({"images": ["iVBORw0KGgo/" * 400]}, "is no path: base64 goes under 'base64'"),
    ],
)
def test_rows_that_cannot_be_seen_are_named(prepare, urls, change, message):
    row = {"messages": [{"role": "user", "content": [{"type": "image"}]}, TEXT[1]], "images": urls[:1]} | change
    with pytest.raises(ValueError, match=message):
        prepare(row)


def test_an_image_without_bytes_is_at_its_path(tmp_path):
    assert image_source({"bytes": b"", "path": "a.png"}, tmp_path).path == str(tmp_path / "a.png")


def test_tags_and_images_of_other_numbers_are_refused(prepare, urls):
    with pytest.raises(ValueError, match="2 images and 1 tags"):
        prepare({"messages": [{"role": "user", "content": "<image>a"}, TEXT[1]], "images": urls[:2]})


def test_text_that_names_the_token_is_no_image(prepare, urls):
    row = {"messages": [{"role": "user", "content": "<|image_pad|> a"}, TEXT[1]], "images": urls[:1]}
    data = prepare(row).train
    assert (data.store.tokens[data.indices(0)] == data.reader.rules.tokens[0]).sum() == data.reader.counts[0]


def firsts(data, document=0):
    """Return (first token, patches) of each image of a document."""
    placed = data.reader.placed(document, data.reader.tokens(document, int(data.lengths[document])))
    return [(first, image.grid) for first, image in placed]


def test_no_image_is_cut(prepare, urls):
    content = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    answer = {"role": "assistant", "content": ANSWER}
    row = {
        "messages": [{"role": "user", "content": "b"}, answer, {"role": "user", "content": content}, answer],
        "images": urls[:2],
    }
    whole = prepare(row).train
    found = firsts(whole)
    cut = prepare(row, seq_len=found[1][0] + 3).train
    assert cut.lengths[0] == found[1][0] and len(firsts(cut)) == 1


def test_batches_bring_images_in_the_order_of_their_tokens(prepare, urls):
    rows = [{"messages": TEXT, "images": urls[i : i + 1]} for i in range(3)] + [{"messages": TEXT}]
    data = prepare(*rows).train
    plan = plan_packing(data.lengths, seq_len=128)
    batch = data.build_batch(plan, np.arange(plan.rows), plan.documents, seq_len=128, max_segments=4)
    assert isinstance(batch.images, RowImages)
    images = batch.images.with_patches()
    for row in range(plan.rows):
        tokens = np.flatnonzero(np.asarray(batch.tokens)[row] == data.reader.rules.tokens[0])
        np.testing.assert_array_equal(np.asarray(images.index)[row, tokens], np.arange(len(tokens)))
        np.testing.assert_array_equal(np.asarray(images.owners)[row, : len(tokens)], tokens)
        keys = [image.key for image in batch.images.rows[row]]
        expected = [
            data.store.images.digests[n].tobytes() for d in plan.row(row) for n in data.store.images.of_document(int(d))
        ]
        assert keys == expected
    assert count_duplicates(data) == 0


def test_known_features_of_all_rows_have_one_size(prepare, urls):
    """A last row with few images needs no program of its own, but of a tower that runs in the step."""
    rows = [{"messages": TEXT, "images": [urls[0]] * count} for count in (4, 4, 1)]
    data = prepare(*rows, seq_len=96).train
    batches = BatchIterator(data, seq_len=96, batch_size=1, epochs=1)
    batches.see = batches.ahead = lambda images: images
    seen = [step.micro_batches[0].images for step in batches]
    batches.close()
    known = [images.with_features(lambda image: np.ones((4, 2)), 2, np.float32).features.shape for images in seen]
    assert len(seen) > 1 and len(set(known)) == 1
    assert len({images.with_patches().owners.shape for images in seen}) == 2


def test_images_of_the_next_step_are_begun_with(prepare, urls):
    data = prepare(*({"messages": TEXT, "images": [url]} for url in urls), seq_len=64).train
    plain, looking = (BatchIterator(data, seq_len=64, batch_size=1, epochs=2) for _ in range(2))
    begun = list[RowImages]()
    for batches in plain, looking:
        batches.ahead = batches.see = lambda images: images
    looking.begin = begun.append
    keys = lambda images: [image.key for row in images.rows for image in row]  # noqa: E731
    found = []
    for expected, step in zip(plain, looking, strict=True):
        assert plain.get_state() == looking.get_state() and plain.epoch == looking.epoch
        np.testing.assert_array_equal(expected.micro_batches[0].tokens, step.micro_batches[0].tokens)
        found.append(keys(step.micro_batches[0].images))
        looking.set_state(looking.get_state())
    firsts = found[1:3] + found[4:]
    assert len(found) == 6 and [keys(images) for images in begun] == firsts
    for batches in plain, looking:
        batches.close()


@pytest.mark.parametrize("shared", [True, False])
def test_answers_are_where_they_are_in_documents_of_their_own(prepare, urls, shared):
    content = [{"type": "text", "text": "b"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    user, answers = {"role": "user", "content": content}, [TEXT[1], {"role": "assistant", "content": "A blue cross."}]
    alone = prepare(*({"messages": [user, answer], "images": urls[:1]} for answer in answers)).train
    own = [image_positions(int(length), firsts(alone, i), 2) for i, length in enumerate(alone.lengths)]
    pair = {"prompt": [user], "chosen": [answers[0]], "rejected": [answers[1]], "images": urls[:1]}
    data = prepare(pair, task=AnswerTask(shared_prompt=shared)).train
    (batch,) = EvalBatches(data, seq_len=256, batch_size=1)
    (first, second), prompt = data.sizes[0].tolist(), int(data.prompts[0])
    begin = prompt if shared else 0
    expected = np.concatenate([own[0][: prompt + first], own[1][begin : prompt + second]])
    np.testing.assert_array_equal(batch.images.positions[0, : len(expected)], expected)
    is_image = np.asarray(batch.tokens)[0] == data.reader.rules.tokens[0]
    assert is_image.sum() == data.reader.counts[0] * (1 if shared else 2) > 0
    np.testing.assert_array_equal(batch.images.index[0][is_image], np.arange(is_image.sum()))


def test_the_cache_knows_images_and_their_sizes(prepare, urls, tmp_path):
    (tmp_path / "a.png").write_bytes(base64.b64decode(urls[0].partition(",")[2]))
    row = {"messages": TEXT, "images": ["a.png"]}
    first = prepare(row)
    assert not first.report.cached and prepare(row).report.cached
    smaller = prepare(row, image_max_tokens=9)
    assert not smaller.report.cached and smaller.train.lengths[0] < first.train.lengths[0]
    (tmp_path / "a.png").write_bytes(base64.b64decode(urls[1].partition(",")[2]))
    assert document(prepare(row))[1] != document(first)[1]


def test_equal_rows_of_another_folder_have_its_images(seeing, urls, tmp_path):
    def digests(folder, url):
        folder.mkdir()
        (folder / "a.png").write_bytes(base64.b64decode(url.partition(",")[2]))
        (folder / "rows.jsonl").write_text(json.dumps({"messages": TEXT, "images": ["a.png"]}))
        config = DataConfig(data=(str(folder / "rows.jsonl"),), seq_len=128, cache_dir=str(tmp_path / "cache"))
        tokenizer = load_tokenizer(seeing)
        prepared = prepare_data(config, tokenizer, processor=read_vision(seeing, tokenizer))
        return document(prepared)[1]

    assert digests(tmp_path / "one", urls[0]) != digests(tmp_path / "other", urls[1])


@pytest.fixture
def here(monkeypatch):
    """Tokenize streams in this process."""
    monkeypatch.setattr(stream, "encode_in_processes", lambda encoder, jobs, workers: encode_here(encoder, jobs))


@pytest.mark.usefixtures("here")
def test_a_stream_brings_the_images_of_each_window(prepare, urls):
    texts = [{"messages": TEXT}] * 70
    rows = [{"messages": TEXT, "images": urls[i % 3 : i % 3 + 1]} for i in range(70)]
    settings = {"streaming": True, "stream_tokens": 1024}
    prepared = prepare(*rows, **settings)
    iterator = StreamIterator(prepared.stream, prepared.window, steps=9, batch_size=2)
    kept = prepared.readers[0].kept
    for _ in range(20):
        (batch,) = next(iterator).micro_batches
        marks = (np.asarray(batch.tokens) == prepared.images.tokens[0]).sum()
        assert batch.images.patches is not None and (np.asarray(batch.images.index) >= 0).sum() == marks > 0
    assert iterator._window.index > 0 and iterator.dataset.reader.kept is kept
    iterator.close()
    assert prepare(*rows, **settings, image_max_tokens=9).stream.fingerprint != prepared.stream.fingerprint
    prepared = prepare(*texts, *rows, **settings)
    iterator = StreamIterator(prepared.stream, prepared.window, steps=9, batch_size=2)
    with pytest.raises(ValueError, match="window 2 has images and the first had none"):
        for _ in range(20):
            next(iterator)
    iterator.close()


@pytest.mark.usefixtures("here")
def test_an_overlong_row_of_a_stream_keeps_whole_images(prepare, urls):
    content = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    answer = {"role": "assistant", "content": ANSWER}
    row = {
        "messages": [{"role": "user", "content": "b"}, answer, {"role": "user", "content": content}, answer],
        "images": urls[:2],
    }
    whole = prepare(row).train
    for more in (-1, 0, 3):
        settings = {"seq_len": firsts(whole)[1][0] + more, "streaming": True, "stream_tokens": 1024}
        cut = prepare(row, **settings).train
        assert cut.lengths[0] == firsts(whole)[1][0] + min(more, 0) and len(firsts(cut)) == 1


@pytest.mark.parametrize("labels", [True, False])
def test_classifiers_and_reward_models_see_the_images_of_their_rows(prepare, urls, labels):
    if labels:
        data = prepare(
            {"messages": TEXT, "images": urls[:1], "label": 1}, task=LabelTask(2), columns={"label": 0.0}
        ).train
    else:
        pair = {"prompt": TEXT[:1], "chosen": TEXT[1:], "rejected": [{"role": "assistant", "content": "b"}]}
        data = prepare(pair | {"images": urls[:1]}, task=AnswerTask(scored=True)).train
    (batch,) = EvalBatches(data, seq_len=256, batch_size=1)
    marks = np.asarray(batch.tokens)[0] == data.reader.rules.tokens[0]
    np.testing.assert_array_equal(np.asarray(batch.images.index)[0][marks], np.arange(data.reader.counts[0]))
    end = int((np.asarray(batch.segments.segment_ids)[0] > 0).sum())
    side = batch.images.positions[0]
    assert marks.sum() and side[marks].max() < side[end - 1].max() < end


def test_prompts_to_answer_share_their_images(prepare, urls, tmp_path, seeing):
    """The model's own tokens of images, behind a prompt, are text."""
    both = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    rows = [{"messages": [{"role": "user", "content": both}], "images": urls[:2], "n": 1}, {"question": QUESTION}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(data=(str(tmp_path / "rows.jsonl"),), cache_dir=str(tmp_path / "cache"))
    tokenizer = load_tokenizer(seeing)
    rules = partial(image_rules, read_vision(seeing, tokenizer), tokenizer=tokenizer)
    data = read_prompts(config, tokenizer, answer=8, limit=256, images=rules)
    asked, text = data.prompts
    assert asked.columns == {"n": 1} and data.images_of(text) == []
    mark, seen = data.reader.rules.tokens[0], data.images_of(asked)
    assert [each.image.patches.shape[0] for each in seen] == [each.image.grid.patches for each in seen]
    np.testing.assert_array_equal(
        np.concatenate([each.places for each in seen]), np.flatnonzero(np.array(asked.tokens) == mark)
    )
    answers = [TrainedAnswer(tokens=np.array([mark, 3]), log_probs=np.zeros(2), counted=np.ones(2, bool))] * 2
    groups = [Group(text.tokens, answers), Group(asked.tokens, answers, [each.image for each in seen])]
    for shared in (True, False):
        ((batch, _),) = pack_groups(groups, seq_len=256, batch_size=1, slots=4, shared=shared, reader=data.reader)
        index = np.asarray(batch.images.index)[0]
        assert (index >= 0).sum() == data.reader.counts[0] * (1 if shared else 2) == index.max() + 1
        assert (np.asarray(batch.tokens)[0] == mark).sum() == (index >= 0).sum() + 4
        alone = image_positions(len(asked.tokens) + 1, firsts(data), 2)
        ends = np.flatnonzero(np.asarray(batch.targets)[0] == 3)
        assert (batch.images.positions[0, ends[2:]] == alone[-1]).all()
    other = replace(
        data, store=replace(data.store, images=replace(data.store.images, digests=data.store.images.digests[::-1]))
    )
    assert other.fingerprint != data.fingerprint
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .*images"):
        read_prompts(config, tokenizer, answer=8, limit=256)


def test_images_are_read_out_of_zip_files(prepare, urls, tmp_path):
    with zipfile.ZipFile(tmp_path / "pictures.zip", "w") as archive:
        for number, url in enumerate(urls):
            archive.writestr(f"some/{number}.png", base64.b64decode(url.partition(",")[2]))
    row = {"messages": TEXT, "images": ["pictures.zip/some/1.png"]}
    first = prepare(row)
    assert document(first) == document(prepare({"messages": TEXT, "images": urls[1:2]}))
    assert first.train.reader.images_of(0)[0].patches is not None and prepare(row).report.cached
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .*pictures.zip has no other.png"):
        prepare({"messages": TEXT, "images": ["pictures.zip/other.png"]})
    content = (tmp_path / "pictures.zip").read_bytes()
    (tmp_path / "pictures.zip").write_bytes(content[:60] + bytes(9) + content[69:])
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .*some/0.png"):
        prepare({"messages": TEXT, "images": ["pictures.zip/some/0.png"]})


def test_videos_are_pairs_of_frames_behind_their_times(prepare, tmp_path, urls):
    for number, url in enumerate([*urls, urls[0]]):
        (tmp_path / f"{number}.png").write_bytes(base64.b64decode(url.partition(",")[2]))
    frames = [f"{number}.png" for number in range(3)]
    parts = [{"type": "image", "image": "3.png"}, {"type": "video", "video": frames, "fps": 2.0, "image": None}]
    content = [*parts, {"type": "text", "text": QUESTION}]
    prepared = prepare({"messages": [{"role": "user", "content": content}, TEXT[1]]})
    data, rules = prepared.train, prepared.images
    text = load_tokenizer(Path(__file__).parents[2] / "jaxglue/recipes/quickstart/seeing").decode(
        data.store.tokens[data.indices(0)]
    )
    counts = [rules.processor.tokens(Grid(*grid)) for grid in data.store.images.grids.tolist()]
    shown = [f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in counts]
    assert f"{shown[0]}<0.2 seconds>{shown[1]}<1.0 seconds>{shown[2]}{QUESTION}" in text
    images = data.reader.images_of(0)
    assert [image.patches.shape[1] // (3 * rules.processor.patch**2) for image in images] == [1, 2, 2]
    half = images[2].patches.shape[1] // 2
    np.testing.assert_array_equal(images[2].patches[:, :half], images[2].patches[:, half:])  # the odd last frame, twice


def test_parts_that_only_describe_their_image_take_the_column_s(prepare, urls):
    part = {"type": "image_url", "image_url": {"url": None, "detail": "low"}}
    row = {"messages": [{"role": "user", "content": [part, *CONTENT]}, TEXT[1]], "images": urls[:1]}
    assert document(prepare(row)) == document(prepare({"messages": TEXT, "images": urls[:1]}))


def test_videos_of_columns_are_those_of_parts(prepare, tmp_path, urls):
    for number, url in enumerate(urls[:2]):
        (tmp_path / f"{number}.png").write_bytes(base64.b64decode(url.partition(",")[2]))
    frames = ["0.png", "1.png"]
    part = {"type": "video", "video": frames}
    expected = document(prepare({"messages": [{"role": "user", "content": [part, *CONTENT]}, TEXT[1]]}))
    for row in (
        {"messages": TEXT, "video": frames},
        {"messages": [{"role": "user", "content": f"<video>{QUESTION}"}, TEXT[1]], "videos": [frames]},
        {"messages": [{"role": "user", "content": [{"type": "video"}, *CONTENT]}, TEXT[1]], "videos": [part]},
    ):
        assert document(prepare(row)) == expected
    found = [
        document(prepare({"messages": [{"role": "user", "content": [video, *CONTENT]}, TEXT[1]], **columns}))
        for video, columns in (({**part, "fps": 0.5}, {}), ({"type": "video", "fps": 0.5}, {"videos": [frames]}))
    ]
    assert found[0] == found[1] != expected  # the part's rate, of the column's frames


def test_videos_are_refused_where_the_model_reads_none(prepare, urls):
    blind = Processor(patch=4, merge=2, max_tokens=4)
    rules = replace(prepare({"messages": TEXT, "images": urls[:1]}).images, processor=blind)
    chat = read_chat([{"role": "user", "content": [{"type": "video", "video": urls[:2]}]}], None, "messages", sees=True)
    with pytest.raises(ValueError, match="Qwen's models and Gemma 4 alone"):
        rules.attach(chat, [])
