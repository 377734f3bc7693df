"""Images in requests of the `tinker` SDK: sampling and losses see the same."""

import base64
import json

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from jaxglue.tinker.server import TinkerServer
from jaxglue.tinker.wire import _bytes, _fields, _number
from jaxglue.vision.images import image_source
from tests.tinker_server.test_server import KEY, LORA, Client, read_answers, read_loss
from tests.tinker_server.test_wire import loss_request
from tests.training.test_vision_rollouts import folder  # noqa: F401

TEXT, BEHIND = [5, 6, 7], [8, 9]


@pytest.fixture
def pictures(folder):  # noqa: F811
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return [image_source(image, None).data for line in lines for image in line.get("images", ())]


@pytest.fixture
def make_client(folder):  # noqa: F811
    """A client of a server, and a model's name and sampler there."""
    servers = []

    def make(**settings):
        given = {"model": str(folder / "model"), "random_weights": True, "dtype": "float32", "seq_len": 128}
        servers.append(TinkerServer(api_key=KEY, **given, compilation_cache=None, **settings))
        client = Client(servers[-1])
        model = client.call("create_model", {"session_id": "s", "lora_config": LORA})["model_id"]
        asked = {"model_id": model, "sampling_session_seq_id": 1}
        return client, model, client.call("save_weights_for_sampler", asked)["sampling_session_id"]

    yield make
    for server in servers:
        server.close()


def asked(session, data, **chunk):
    image = {"type": "image", "data": base64.b64encode(data).decode(), "format": "png", **chunk}
    texts = [{"type": "encoded_text", "tokens": tokens} for tokens in (TEXT, BEHIND)]
    params = {"max_tokens": 5, "temperature": 1.0, "seed": 3, "stop": []}
    prompt = {"chunks": [texts[0], image, texts[1]]}
    return {"prompt": prompt, "num_samples": 2, "sampling_params": params, "sampling_session_id": session}


def with_image(request: bytes, data: bytes) -> bytes:
    """Return a request of losses with a text and an image before each document's tokens."""
    text = _bytes(1, _bytes(1, _bytes(1, np.asarray(TEXT, np.int32).tobytes())))
    image, body = _bytes(1, _bytes(2, _bytes(1, data) + _bytes(2, b"png"))), b""
    for number, value in _fields(request):
        content = text + image + value if number == 3 else value
        body += _number(number, content) if isinstance(content, int) else _bytes(number, content)
    return body


def count_of(client, session, data):
    """Return the tokens of an image, which an error tells."""
    error = client.call("asample", asked(session, data, expected_tokens=1))["error"]
    assert error.endswith("and expected_tokens is 1")
    return int(error.split()[3])


def test_an_image_is_seen_alike_in_sampling_and_losses(make_client, pictures):
    client, model, session = make_client(images=True)
    first, other = pictures[:2]
    count = count_of(client, session, first)
    answers = read_answers(client.call("asample", asked(session, first, expected_tokens=count)))

    def losses(data):
        documents, before = [], np.zeros(len(TEXT) + count - 1, int)
        for tokens, _ in answers:
            own = [*BEHIND, *tokens]
            arrays = {"target_tokens": [*before, *own], "weights": [*before, 0, 0, *np.ones(len(tokens))]}
            documents.append((own[:-1], arrays))
        request = loss_request(model, documents, "cross_entropy")
        return read_loss(client.call("forward_backward", with_image(request, data)))

    total, found = losses(first)
    for (tokens, log_probs), each in zip(answers, found, strict=True):
        np.testing.assert_allclose(each[-len(tokens) :], log_probs, atol=1e-4)
    assert total == pytest.approx(-sum(float(log_probs.sum()) for _, log_probs in answers), abs=1e-3)
    assert abs(losses(other)[0] - total) > 1e-3
    assert client.call("optim_step", {"model_id": model, "adam_params": {"learning_rate": 1e-2}})["metrics"]
    assert losses(first)[0] < total
    scored = asked(session, first) | {"prompt_logprobs": True}
    assert "not computed of prompts with images" in client.call("asample", scored)["error"]


def test_images_are_refused_where_nothing_sees_them(make_client, pictures):
    client, _, session = make_client()
    assert (
        "serve a model with a tower, with images=True" in client.call("asample", asked(session, pictures[0]))["error"]
    )
    pointer = {"type": "image_asset_pointer", "location": "tinker://x"}
    body = asked(session, pictures[0])
    body["prompt"]["chunks"][1] = pointer
    assert "addresses and sound are not read" in client.call("asample", body)["error"]
