"""Rows with images: every form makes the same document, and tokens of images are not trained on."""

import base64
import json

import numpy as np
import pytest

from jaxglue.data.config import AnswerTask, DataConfig
from jaxglue.data.iterator import EvalBatches
from jaxglue.data.packing import plan_packing
from jaxglue.data.prepare import prepare_data, read_vision
from jaxglue.data.report import count_duplicates, trained_parts
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.vision.rows import RowImages, image_positions

QUESTION, ANSWER = "What is this?", "A red circle."
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
    def prepare(*rows, task=None, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"seq_len": 128, "cache_dir": str(tmp_path / "cache"), **settings}
        config = DataConfig(data=(str(path),), **settings)
        tokenizer = load_tokenizer(seeing)
        processor = read_vision(seeing, config.image_max_tokens, tokenizer)
        return prepare_data(config, tokenizer, task=task, processor=processor)

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
        ({"images": []}, "0 images in its columns, and 1 places"),
        ({"images": ["b.png"]}, "rows.jsonl:1: image .*b.png: No such file"),
        ({"images": ["data:image/png;base64,aGVsbG8="]}, "rows.jsonl:1: image 1: no image"),
        ({"images": ["https://example.org/a.png"]}, "not fetched from the network"),
        ({"videos": ["a.mp4"]}, "'videos' is not read"),
    ],
)
def test_rows_that_cannot_be_seen_are_named(prepare, urls, change, message):
    row = {"messages": [{"role": "user", "content": [{"type": "image"}]}, TEXT[1]], "images": urls[:1]} | change
    with pytest.raises(ValueError, match=message):
        prepare(row)


def test_tags_and_images_of_other_numbers_are_refused(prepare, urls):
    with pytest.raises(ValueError, match="2 images and 1 tags"):
        prepare({"messages": [{"role": "user", "content": "<image>a"}, TEXT[1]], "images": urls[:2]})


def test_text_that_names_the_token_is_no_image(prepare, urls):
    row = {"messages": [{"role": "user", "content": "<|image_pad|> a"}, TEXT[1]], "images": urls[:1]}
    data = prepare(row).train
    assert (data.store.tokens[data.indices(0)] == data.reader.rules.tokens[0]).sum() == data.reader.counts[0]


def test_no_image_is_cut(prepare, urls):
    content = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    answer = {"role": "assistant", "content": ANSWER}
    row = {
        "messages": [{"role": "user", "content": "b"}, answer, {"role": "user", "content": content}, answer],
        "images": urls[:2],
    }
    whole = prepare(row).train
    found = whole.reader.firsts(0, int(whole.lengths[0]))
    cut = prepare(row, seq_len=found[1][0] + 3).train
    assert cut.lengths[0] == found[1][0] and len(cut.reader.firsts(0, int(cut.lengths[0]))) == 1


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


@pytest.mark.parametrize("shared", [True, False])
def test_answers_are_where_they_are_in_documents_of_their_own(prepare, urls, shared):
    content = [{"type": "text", "text": "b"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    user, answers = {"role": "user", "content": content}, [TEXT[1], {"role": "assistant", "content": "A blue cross."}]
    alone = prepare(*({"messages": [user, answer], "images": urls[:1]} for answer in answers)).train
    own = [
        image_positions(int(length), [entry[:2] for entry in alone.reader.firsts(i, int(length))], 2)
        for i, length in enumerate(alone.lengths)
    ]
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
