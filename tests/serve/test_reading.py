"""Endpoints that answer in one pass: decisions, embeddings and relevance, of requests that are read together."""

import asyncio
import base64
import io
import json
import re
import shutil
import threading

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from local_client import TestClient

from jaxglue.data.config import Source
from jaxglue.data.files import Row
from jaxglue.data.questions import read_questions
from jaxglue.generation.config import AssistantConfig
from jaxglue.generation.reading import (
    LoadedModel,
    PartReader,
    decisions,
    judged,
    probabilities,
    relevances,
    texts,
    vectors,
)
from jaxglue.generation.scoring import PromptScorer
from jaxglue.hf.reading import read_record
from jaxglue.serve.config import EmbedConfig, ServeConfig
from jaxglue.serve.measured import embedded_rows
from jaxglue.serve.reading import ReadService, make_readers, warm_up
from jaxglue.serve.server import make_read_app
from jaxglue.settings.recipe import SHIPPED
from jaxglue.vision import records

TEMPERATURES = {"noul": 2.0, "choice": 0.5, "score": 1.0}
DESCRIBED = {"type": "score", "levels": [{"label": "a", "description": {"b": 1}}, {"label": "c"}]}
QUESTIONS = {
    "urgent": {"type": "noul", "instructions": "Is it urgent?", "criteria": {"true": "now", "false": None}},
    "color": {"type": "choice", "instructions": "Which?", "criteria": {"red": None, "blue": "sky", "green": None}},
    "many": {"type": "score", "instructions": "How many?", "criteria": ["none", "some", "all"]},
}


@pytest.fixture(scope="module")
def model(folders):
    return LoadedModel.load(AssistantConfig(model=folders[0]))


@pytest.fixture(scope="module")
def service(model):
    readers = {
        "decide": PartReader(model, {"kind": "decide", "temperatures": TEMPERATURES}),
        "rerank": PartReader(model, {"kind": "rerank"}),
        "embed": PartReader(model, {"kind": "embed", "pooling": "mean", "query_prompt": "ask "}),
    }
    service = ReadService(readers, most=8)
    yield service
    service.close()


@pytest.fixture
def client(service, folders):
    return TestClient(make_read_app(service, ServeConfig(model=folders[0], name="tiny")))


def ask(client, **body):
    return client.post("/v1/systemone", json={"model": "tiny", "state": "It is red.", **body})


def test_system_one_answers_by_id(client):
    answers = ask(client, questions=QUESTIONS).json()["answers"]
    assert [*answers] == ["urgent", "color", "many"]
    assert answers["urgent"].keys() == {"type", "noul"} and 0 < answers["urgent"]["noul"] < 1
    color = answers["color"]
    assert [*color["probabilities"]] == ["red", "blue", "green"]
    assert sum(color["probabilities"].values()) == pytest.approx(1)
    assert color["confidence"] == max(color["probabilities"].values()) == color["probabilities"][color["choice"]]
    many = answers["many"]
    assert many["legend"] == {"0": "none", "1": "some", "2": "all"}
    assert many["score"] == pytest.approx(many["probabilities"]["1"] + 2 * many["probabilities"]["2"])


def test_the_mass_of_labels_and_the_system_message_are_those_of_the_model(client, service):
    body = {"questions": {"urgent": QUESTIONS["urgent"]}, "instructions": "Be brief."}
    found = ask(client, **body).json()
    reader = service.readers["decide"]
    chat = [{"role": "system", "content": "Be brief."}]
    labels = reader.encoder.labels
    words = labels.names["noul"]
    question = f"Question: Is it urgent?\n{words[0]}: now\nAnswer with {words[0]} or {words[1]} only."
    chat.append({"role": "user", "content": f"It is red.\n\n{question}"})
    tokens = reader.model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    scorer = PromptScorer(reader.model.graphdefs, reader.model.config, reader.model.frozen, reader.model.dtype)
    asked = [[[*tokens, label] for label in group] for group in labels.groups["noul"]]
    found_of = [scorer.score(reader.model.trainable, texts, None, 0) for texts in asked]
    yes, no = (sum(np.exp(score.log_probs[-1]) for score in scores) for scores in found_of)
    assert found["diagnostics"]["urgent"]["label_mass"] == pytest.approx(yes + no, rel=1e-4)
    p = np.array([yes, no]) ** (1 / TEMPERATURES["noul"])
    assert found["answers"]["urgent"]["noul"] == pytest.approx(p[0] / p.sum(), rel=1e-4)


def test_a_question_alone_and_other_states_beside_it_change_nothing(client, service):
    together = ask(client, questions=QUESTIONS).json()["answers"]
    for name, question in QUESTIONS.items():
        alone = ask(client, questions={name: question}).json()["answers"][name]
        assert alone == pytest.approx(together[name]) if "noul" in alone else True
        if "probabilities" in alone:
            assert alone["probabilities"] == pytest.approx(together[name]["probabilities"], abs=1e-5)
    found, threads = {}, []
    for index in range(4):

        def run(index=index):
            found[index] = ask(client, state=f"state {index} " * (1 + index), questions=QUESTIONS).json()["answers"]

        threads.append(threading.Thread(target=run))
        threads[-1].start()
    for thread in threads:
        thread.join()
    again = ask(client, state="state 2 " * 3, questions=QUESTIONS).json()["answers"]
    assert found[2]["color"]["probabilities"] == pytest.approx(again["color"]["probabilities"], abs=1e-5)


def test_openai_decisions_answer_in_order_with_values_of_their_types(client):
    questions = [
        {"type": "predicate", "name": "urgent", "instructions": "Is it urgent?"},
        {"type": "choice", "choices": [{"value": True}, {"value": "true", "description": "the word"}]},
        {"type": "score", "levels": [{"label": "none"}, {"label": "some"}]},
    ]
    body = {"model": "tiny", "input": [{"role": "user", "content": "Help!"}], "questions": questions}
    answer = client.post("/v1/decisions", json=body).json()
    first, second, third = answer["answers"]
    assert first["type"] == "predicate" and first["name"] == "urgent" and 0 < first["probability"] < 1
    assert [each["value"] for each in second["probabilities"]] == [True, "true"] and second["name"] is None
    assert [each["value"] for each in third["probabilities"]] == [0, 1]
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + 3


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("systemone", {"state": "", "questions": QUESTIONS}, "'state' is missing"),
        ("systemone", {"state": "x", "questions": {"a": {"type": "pick"}}}, "question 'a': type 'pick' is none"),
        ("systemone", {"state": "x", "questions": QUESTIONS, "model": "other"}, "model 'other' is not served"),
        ("systemone", {"state": "a\ud800", "questions": QUESTIONS}, "half of a surrogate pair"),
        (
            "decisions",
            {"input": "x", "questions": [{"type": "noul"}]},
            r"questions\[0\]: type must be one of",
        ),
        ("decisions", {"input": "x", "questions": [{"type": ["choice"]}]}, r"questions\[0\]: type must be one of"),
        ("decisions", {"input": "x", "questions": [DESCRIBED]}, r"questions\[0\].levels: descriptions must be texts"),
        ("decisions", {"input": "x", "questions": []}, "questions must be a list of 1 to 400"),
        ("embeddings", {"input": [""]}, "not empty"),
        ("embeddings", {"input": "x", "dimensions": 10_000}, "dimensions"),
        ("embeddings", {"input": [[10**6]]}, "outside of the vocabulary"),
        ("rerank", {"query": "x", "documents": ["a", " "]}, r"documents\[1\] must be a text"),
        ("rerank", {"query": "", "documents": ["a"]}, "query must be a text"),
        ("rerank", {"query": "x", "documents": ["\ud800"]}, "half of a surrogate pair"),
        ("embeddings", {"input": ["\ud800"]}, "half of a surrogate pair"),
        ("chat/completions", {"messages": []}, "is not served"),
    ],
)
def test_bad_requests_are_refused_by_field(client, path, body, message):
    response = client.post(f"/v1/{path}", content=json.dumps(body))
    assert response.status_code in (400, 404)
    assert re.search(message, response.json()["error"]["message"])


def test_embeddings_are_normalized_and_truncated_and_come_in_both_encodings(client, service):
    body = {"model": "tiny", "input": ["red", "blue sky"]}
    found = client.post("/v1/embeddings", json=body).json()
    rows = np.array([each["embedding"] for each in found["data"]], np.float32)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    coded = client.post("/v1/embeddings", json={**body, "encoding_format": "base64", "dimensions": 8}).json()["data"]
    short = np.stack([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in coded])
    np.testing.assert_allclose(short, rows[:, :8] / np.linalg.norm(rows[:, :8], axis=1, keepdims=True), atol=1e-6)
    reader = service.readers["embed"]
    asked = client.post("/v1/embeddings", json={"input": "red", "input_type": "query"}).json()["data"][0]["embedding"]
    plain = reader.read(reader.encode(texts(reader, ["ask red"]))).outputs[0]
    np.testing.assert_allclose(asked, plain / np.linalg.norm(plain), atol=1e-5)


def test_documents_are_ranked(client):
    body = {"query": "red", "documents": ["a red car", {"text": "the sky"}, "cats"], "return_documents": True}
    found = client.post("/v1/rerank", json=body).json()["results"]
    scores = [each["relevance_score"] for each in found]
    assert scores == sorted(scores, reverse=True) and {each["index"] for each in found} == {0, 1, 2}
    assert {each["document"]["text"] for each in found} == {"a red car", "the sky", "cats"}
    assert len(client.post("/v1/rerank", json={**body, "top_n": 1}).json()["results"]) == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"kind": "guess"}, "expected an object with a kind of decide, embed, rerank"),
        ({"kind": "decide", "temperatures": {"noul": 0}}, "temperatures must be positive numbers"),
    ],
)
def test_a_bad_record_is_refused_by_its_file(tmp_path, record, message):
    (tmp_path / "one_pass.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"one_pass.json: {message}"):
        read_record(None, tmp_path)


def test_exact_reads_have_no_company(model, monkeypatch):
    reader, sizes, begin = PartReader(model, {"kind": "embed", "pooling": "mean"}), [], PartReader.begin
    monkeypatch.setattr(PartReader, "begin", lambda self, read: sizes.append(len(read.lengths)) or begin(self, read))
    service = ReadService({"embed": reader}, most=8, alone=True)

    async def ask():
        wanted = ("It is red.", "It is a long and winding road.", "It is red.")
        asked = (service.read("embed", lambda reader, text=text: texts(reader, [text])) for text in wanted)
        return await asyncio.gather(*asked)

    first, _, again = asyncio.run(ask())
    service.close()
    assert sizes == [1, 1, 1]
    np.testing.assert_array_equal(first.found.outputs, again.found.outputs)


def test_no_program_is_compiled_for_requests_after_the_warm_up(model):
    reader = PartReader(model, {"kind": "decide"})
    reader.row = 512
    warm_up(reader)
    compiled = reader._executor.compilations()
    asked = read_questions(QUESTIONS)
    states = [(f"state {index} " * 40, dict(list(asked.items())[: 1 + index % 3])) for index in range(5)]
    for count in (1, 2, 5):
        reader.read(reader.encode(decisions(reader, states[:count])))
    assert reader._executor.compilations() == compiled


def test_requests_fill_rows_and_others_wait_for_the_next_ones(model, monkeypatch):
    reader = PartReader(model, {"kind": "decide"})
    reader.row, asked = 256, read_questions({"a": QUESTIONS["urgent"]})
    taken, begin = [], PartReader.begin

    def watched(self, encoded):
        taken.append(len(encoded.lengths))
        return begin(self, encoded)

    monkeypatch.setattr(PartReader, "begin", watched)
    service = ReadService({"decide": reader}, most=32)

    async def ask_all():
        def one(index):
            return service.read("decide", lambda reader: decisions(reader, [(f"state {index} " * 20, asked)]))

        return await asyncio.gather(*map(one, range(20)))

    found = asyncio.run(ask_all())
    service.close()
    assert sum(taken) == 20 and max(taken) <= 4 * (256 // min(answer.tokens for answer in found))
    alone = [reader.read(reader.encode(decisions(reader, [(f"state {i} " * 20, asked)]))) for i in range(20)]
    for answer, wanted in zip(found, alone, strict=True):
        np.testing.assert_allclose(answer.found.outputs, wanted.outputs, atol=1e-4)


def test_requests_about_one_state_have_one_copy_of_it(model, monkeypatch):
    reader = PartReader(model, {"kind": "decide"})
    asked = list(read_questions(QUESTIONS).items())
    states = [("the same state " * 20, dict([each])) for each in asked] + [("another", dict(asked[:2]))]
    states.insert(1, ("the same state " * 20, dict(asked[1:])))
    read, dataset = [], PartReader._dataset
    monkeypatch.setattr(PartReader, "_dataset", lambda self, encoded: read.append(encoded) or dataset(self, encoded))
    together = reader.read(reader.encode(decisions(reader, states)))
    assert read[0].columns["parts"].tolist() == [5, 2]
    assert read[0].columns["prefix"].sum() + read[0].columns["size"].sum() == len(read[0].tokens)
    alone = [reader.read(reader.encode(decisions(reader, [each]))) for each in states]
    np.testing.assert_array_equal(together.units, np.repeat(range(5), [1, 2, 1, 1, 2]))
    np.testing.assert_array_equal(together.parts, np.concatenate([each.parts for each in alone]))
    for found in (lambda each: each.outputs, lambda each: each.values["kinds"]):
        np.testing.assert_allclose(found(together), np.concatenate([found(each) for each in alone]), atol=1e-4)


@pytest.fixture(scope="module")
def seeing():
    config = ServeConfig(model=SHIPPED / "quickstart" / "seeing", random_weights=0, name="tiny")
    model = LoadedModel.load(config)
    service = ReadService({kind: PartReader(model, {"kind": kind}) for kind in ("decide", "rerank", "embed")}, most=8)
    yield service, TestClient(make_read_app(service, config))
    service.close()


def picture(color):
    """Return a plain image as a part of a content."""
    Image.new("RGB", (64, 64), color).save(data := io.BytesIO(), "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"},
    }


def test_decisions_about_images_are_those_of_rows_in_either_form(seeing, tmp_path):
    """Equal texts about other images share no beginning, whose tokens are the same."""
    (service, client), text = seeing, {"type": "text", "text": "Look closely."}
    reader, color = service.readers["decide"], {"color": QUESTIONS["color"]}
    red, blue = (
        ask(client, state=[picture(each), text], questions=color).json()["answers"]["color"]["probabilities"]
        for each in ("red", "blue")
    )
    assert red != pytest.approx(blue, abs=1e-4)
    content = [{"type": "input_text", "text": "Look closely."}, picture("red")]
    choices = [{"value": name, "description": word} for name, word in QUESTIONS["color"]["criteria"].items()]
    body = {"input": [{"role": "user", "content": content}]}
    body["questions"] = [{"type": "choice", "instructions": "Which?", "choices": choices}]
    other = client.post("/v1/decisions", json=body).json()
    assert other["usage"]["input_tokens"] > 16  # of the image
    rows = []
    for index, each in enumerate(["red", "blue", "red"]):
        Image.new("RGB", (64, 64), each).save(tmp_path / f"{each}.png")
        row = {
            "state": "Look closely.",
            "questions": color,
            "gold": {"color": {"label": "red"}},
            "images": [f"{each}.png"],
        }
        rows.append(Row("", row | ({"state": "user: Look closely."} if index == 2 else {})))
    found, dataset = reader.read_rows([(Source(name=str(tmp_path / "rows.jsonl")), rows)])
    assert dataset.reader is not None
    p = probabilities(reader, found, [read_questions(color)["color"]] * 3)
    np.testing.assert_allclose(p[0], [*red.values()], atol=1e-5)
    np.testing.assert_allclose(p[1], [*blue.values()], atol=1e-5)
    np.testing.assert_allclose(p[2], [each["probability"] for each in other["answers"][0]["probabilities"]], atol=1e-5)


def test_images_of_decisions_are_bounded_before_they_are_decoded(seeing, client, monkeypatch):
    _, sees = seeing
    url = lambda value: {"type": "image_url", "image_url": {"url": value}}  # noqa: E731
    Image.new("1", (8000, 8000)).save(large := io.BytesIO(), "PNG")
    bomb = url("data:image/png;base64," + base64.b64encode(large.getvalue()).decode())
    monkeypatch.setattr(records, "read_image", lambda *_: pytest.fail("an image was decoded"))
    for state, message in (
        ([picture("red")] * 17, "17 images: at most 16"),
        ([bomb], "8000 × 8000 pixels"),
        ([url("https://example.org/cat.png")], "not fetched from the network"),
        ([url("/etc/hostname")], "files are not read here"),
        ([picture("red"), {"type": "text", "text": 3}], "parts beside images must be texts"),
    ):
        reply = ask(sees, state=[*state, {"type": "text", "text": "Look."}], questions=QUESTIONS)
        assert reply.status_code == 400 and message in reply.text, reply.text
    blind = ask(client, state=[picture("red"), {"type": "text", "text": "Look."}], questions=QUESTIONS)
    assert blind.status_code == 400 and "sees no images" in blind.text


def test_a_state_of_many_tokens_is_refused_before_it_is_encoded(client, service, monkeypatch):
    monkeypatch.setattr(PartReader, "encode", lambda *_: pytest.fail("it was encoded"))
    reply = ask(client, state="word " * 400_000, questions=QUESTIONS)
    assert reply.status_code == 400 and "more than" in reply.text, reply.text


def test_many_questions_of_one_state_are_several_rows(model, monkeypatch):
    reader = PartReader(model, {"kind": "decide"})
    asked = {f"{name} {n}": each for n in range(5) for name, each in read_questions(QUESTIONS).items()}
    encoded = reader.encode(decisions(reader, [("a state", asked), ("another", dict(list(asked.items())[:2]))]))
    wanted, longest, read, dataset = reader.read(encoded), 2 * int(encoded.lengths[1]), [], PartReader._dataset
    monkeypatch.setattr(PartReader, "_dataset", lambda self, each: read.append(each) or dataset(self, each))
    reader.row = longest
    found = reader.read(encoded)
    assert read[0].lengths.max() <= longest < encoded.lengths[0] and read[0].columns["parts"].sum() == 17
    np.testing.assert_array_equal(found.units, wanted.units)
    np.testing.assert_array_equal(found.parts, wanted.parts)
    np.testing.assert_allclose(found.outputs, wanted.outputs, atol=1e-4)
    np.testing.assert_array_equal(found.values["kinds"], wanted.values["kinds"])


def test_an_error_of_the_model_ends_the_service_and_all_who_wait(model, monkeypatch):
    service = make_readers(model, {}, most=4)
    assert service is not None and set(service.readers) == {"decide", "rerank"}
    monkeypatch.setattr(PartReader, "begin", lambda *_: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(ValueError, match="the service has ended: division by zero"):
        asyncio.run(service.read("rerank", lambda reader: [judged(reader, "a", ["b"])]))
    assert "division" in service.failure


def shown(color, text="", key="image"):
    return {"text": text, key: picture(color)["image_url"]["url"]}


def test_embeddings_of_images_do_not_depend_on_their_company(seeing):
    reader = seeing[0].readers["embed"]
    values = [shown("red"), "A cross.", shown("blue"), shown("red", "A cross."), shown("red")]
    together = vectors(reader.read(reader.encode(texts(reader, values))))
    alone = np.concatenate([vectors(reader.read(reader.encode(texts(reader, [value])))) for value in values])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(together[0], together[4], atol=1e-6)
    for other in (1, 2, 3):
        assert np.abs(together[0] - together[other]).max() > 1e-3


def test_documents_with_images_are_judged_each_by_its_own(seeing):
    """Units of one query, whose tokens are equal, share no image."""
    reader = seeing[0].readers["rerank"]

    def judge(*pairs):
        units = [judged(reader, query, documents) for query, documents in pairs]
        return relevances(reader.read(reader.encode(units)))

    documents = [shown("red"), "A cross.", shown("blue"), shown("red", "A cross.")]
    found = judge(("What?", documents), ("What?", [shown("blue")]), (shown("red", "What?"), documents[1:2]))
    alone = np.concatenate([judge(("What?", [document])) for document in documents])
    np.testing.assert_allclose(found[:4], alone, atol=1e-5)
    assert found[4] == pytest.approx(found[2], abs=1e-5) and found[5] != pytest.approx(found[1], abs=1e-5)
    assert abs(found[0] - found[2]) > 1e-5


def test_embeddings_of_images_are_those_of_files_in_all_forms_of_clients(seeing, tmp_path):
    folder, text = tmp_path / "model", {"type": "text", "text": "A cross."}
    shutil.copytree(SHIPPED / "quickstart" / "seeing", folder)
    (folder / "one_pass.json").write_text('{"kind": "embed"}')
    values = [shown("red"), "A cross.", shown("blue", "A cross.")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    _, wanted = embedded_rows(EmbedConfig(model=folder, random_weights=0, data=(str(tmp_path / "rows.jsonl"),)))

    def embed(**body):
        reply = seeing[1].post("/v1/embeddings", json=body)
        assert reply.status_code == 200, reply.text
        return np.array([each["embedding"] for each in reply.json()["data"]])

    np.testing.assert_allclose(embed(input=values), wanted, atol=1e-5)
    np.testing.assert_allclose(embed(input=values[0]), wanted[:1], atol=1e-5)
    for content, index in (([picture("red")], 0), ("A cross.", 1), ([text], 1), ([text, picture("blue")], 2)):
        found = embed(messages=[{"role": "user", "content": content}])
        np.testing.assert_allclose(found, wanted[index : index + 1], atol=1e-5)
        np.testing.assert_allclose(embed(input=[{"content": content}]), found, atol=1e-5)


def test_documents_with_images_are_ranked_as_they_are_judged_and_come_back_as_sent(seeing):
    service, client = seeing
    documents = [{"content": [picture("red")]}, "A cross.", shown("blue"), {"text": "A square."}]
    body = {"query": shown("red", "Which?"), "documents": documents, "return_documents": True}
    reply = client.post("/v1/rerank", json=body)
    assert reply.status_code == 200, reply.text
    reader, found = service.readers["rerank"], {each["index"]: each for each in reply.json()["results"]}
    unit = judged(reader, body["query"], [shown("red"), "A cross.", shown("blue"), "A square."])
    wanted = relevances(reader.read(reader.encode([unit])))
    np.testing.assert_allclose([found[index]["relevance_score"] for index in range(4)], wanted, atol=1e-5)
    returned = [found[index]["document"] for index in range(4)]
    assert returned == [documents[0], {"text": "A cross."}, documents[2], documents[3]]


def test_images_to_embed_and_to_rank_are_bounded_before_they_are_decoded(seeing, client, monkeypatch):
    Image.new("1", (8000, 8000)).save(large := io.BytesIO(), "PNG")
    bomb = "data:image/png;base64," + base64.b64encode(large.getvalue()).decode()
    broken = "data:image/png;base64," + base64.b64encode(b"none").decode()
    red, begun = shown("red"), []
    user = {"role": "user", "content": [picture("red")]}
    for kind in ("embed", "rerank"):
        seeing[0].readers[kind].read_files_of(Source(name="/etc/rows.jsonl"))
    monkeypatch.setattr(PartReader, "begin", lambda _, encoded: begun.append(encoded))

    def refused(where, message, path, to=seeing[1], **body):
        reply = to.post(f"/v1/{path}", json=body)
        assert reply.status_code == 400 and message in reply.text and where in reply.text, reply.text

    refused("", "names tokens of images", "embeddings", input="<|image_pad|>")
    refused("input[0]", "sees no images", "embeddings", client, input=[red])
    refused("query", "sees no images", "rerank", client, query=red, documents=["a"])
    Image.new("RGB", (1024, 1024)).save(wide := io.BytesIO(), "PNG")
    refused(
        "",
        "at most 512 are read",
        "embeddings",
        input=[{"images": ["data:image/png;base64," + base64.b64encode(wide.getvalue()).decode()] * 9}],
    )
    monkeypatch.setattr(records, "read_image", lambda *_: pytest.fail("an image was decoded"))
    for value, message in (
        ({"image": bomb}, "8000 × 8000 pixels"),
        ({"image": broken}, "no image that can be read"),
        ({"image": "https://example.org/cat.png"}, "not fetched from the network"),
        ({"image": "/etc/hostname"}, "files are not read here"),
        ({"image": {"path": "file:///etc/hostname"}}, "files are not read here"),
        ({"images": [3]}, "must be a path, a data: URL or bytes"),
        ({"text": "a", "video": "data:video/mp4;base64,"}, "video is not read"),
        ({"content": [picture("red"), {"type": "text", "text": 3}]}, "parts beside images must be texts"),
        ({"content": {"image": bomb}}, "must be a text that is not empty"),
        ({"text": " "}, "must be a text that is not empty"),
    ):
        refused("input[1]", message, "embeddings", input=["a", value])
        refused("query", message, "rerank", query=value, documents=["a"])
        refused("documents[1]", message, "rerank", query="a", documents=["a", value])
    larger = {"user": "a" * 5 * 2**20}  # than bodies of texts may be
    refused("17 images", "at most 16", "embeddings", input=[red] * 17, **larger)
    refused("17 images", "at most 16", "rerank", query=red, documents=[red] * 16, **larger)
    for messages in ([], [user, user], [{"role": "system", "content": "Be brief."}], "a"):
        refused("messages", "must be one of a user", "embeddings", messages=messages)
    refused("messages", "no input beside it", "embeddings", messages=[user], input="a")
    assert not begun
