"""Clips of audio in requests: in OpenAI's and vLLM's forms, and refused by models that hear none."""

import base64

import numpy as np
import pytest
from hearing import make_hearing, wav

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from local_client import TestClient

from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import SamplingConfig
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.server import make_app
from jaxglue.serve.service import Service


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    make_hearing(folder := tmp_path_factory.mktemp("hearing"))
    config = ServeConfig(model=folder, random_weights=0, name="tiny", sampling=SamplingConfig(temperature=0))
    assistant = Assistant(config)
    service = Service(assistant, slots=1, length=128, most=4)
    yield TestClient(make_app(assistant, service, config))
    service.close()


def clip(tone):
    return base64.b64encode(wav(np.sin(tone * np.arange(6000)))).decode()


def ask(client, *parts):
    content = [*parts, {"type": "text", "text": "What is this?"}]
    body = {"model": "tiny", "max_tokens": 1, "logprobs": True, "top_logprobs": 5}
    return client.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": content}]})


def test_clips_of_either_form_answer_alike_and_unlike_another(client):
    def heard(part):
        reply = ask(client, part)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        return found["choices"][0]["logprobs"]["content"][0]["top_logprobs"], found["usage"]["prompt_tokens"]

    low, other, high = (
        heard(part)
        for part in (
            {"type": "input_audio", "input_audio": {"data": clip(0.1), "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{clip(0.1)}"}},
            {"type": "input_audio", "input_audio": {"data": clip(0.7), "format": "wav"}},
        )
    )
    assert low == other != high and low[1] == high[1]


def test_clips_that_cannot_be_heard_are_refused(client):
    for data, message in (
        ("bm8=", "clip 1: no WAV file"),
        (None, "message 1: a part of type 'audio' has nothing under"),
    ):
        reply = ask(client, {"type": "input_audio", "input_audio": {"data": data, "format": "mp3"}})
        assert reply.status_code == 400 and message in reply.json()["error"]["message"]
    reply = ask(client, {"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}})
    assert reply.status_code == 400 and "files are not read here" in reply.json()["error"]["message"]
