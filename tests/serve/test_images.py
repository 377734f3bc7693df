"""Images of requests: the same prompt from every protocol, their bytes in the cache's keys, bounds."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from selection import thorough

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from local_client import TestClient

from jaxglue.data.messages import read_chat
from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import SamplingConfig
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.server import make_app
from jaxglue.serve.service import Service
from jaxglue.settings.recipe import SHIPPED

pytestmark = thorough("serve/test_messages.py")


FEW = {"model": "tiny", "max_tokens": 4}


def png(color, size=(64, 64)):
    """Return a plain image's bytes as base64."""
    Image.new("RGB", size, color).save(data := io.BytesIO(), "PNG")
    return base64.b64encode(data.getvalue()).decode()


def part(data):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


@pytest.fixture(scope="module")
def served():
    config = ServeConfig(
        model=SHIPPED / "quickstart" / "seeing", random_weights=0, name="tiny", sampling=SamplingConfig(temperature=0)
    )
    assistant = Assistant(config)
    service = Service(assistant, slots=2, length=256, most=8)
    yield assistant, service, config
    service.close()


@pytest.fixture
def client(served):
    return TestClient(make_app(*served))


def chat(client, *parts, **body):
    content = [*parts, {"type": "text", "text": "What is this?"}]
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": content}], **body}
    return client.post("/v1/chat/completions", json=body)


def likely(reply):
    """Return the log-probabilities of an answer's first token."""
    assert reply.status_code == 200, reply.text
    first = reply.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {entry["token"]: entry["logprob"] for entry in first}


def test_an_image_answers_alike_in_every_protocol_and_unlike_another(client):
    options = {"logprobs": True, "top_logprobs": 5}
    red, again, blue = (likely(chat(client, part(png(color)), **options)) for color in ("red", "red", "blue"))
    assert red == again != blue
    text = likely(chat(client, **options))
    assert text != red
    counted = chat(client, part(png("red"))).json()
    data, ask = png("red"), {"type": "text", "text": "What is this?"}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    message = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [block, ask]}]}
    anthropic = client.post("/v1/messages", json=message).json()
    assert anthropic["content"][0]["text"] == counted["choices"][0]["message"]["content"]
    assert anthropic["usage"]["input_tokens"] == counted["usage"]["prompt_tokens"] > 4
    url = f"data:image/png;base64,{data}"
    inputs = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is this?"}]
    response = {"model": "tiny", "max_output_tokens": 4, "input": [{"role": "user", "content": inputs}]}
    responses = client.post("/v1/responses", json=response).json()
    assert responses["usage"]["input_tokens"] == counted["usage"]["prompt_tokens"]


def test_results_of_tools_show_images_in_either_protocol(client, served, monkeypatch):
    calls = "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    template = served[0].tokenizer.chat_template
    template = template.replace("{{- '<|im_start|>'", f"{calls}{{{{- '<|im_start|>'", 1)
    monkeypatch.setattr(served[0].tokenizer, "chat_template", template)
    source = {"type": "base64", "media_type": "image/png", "data": png("red")}
    result = [{"type": "image", "source": source}, {"type": "text", "text": "The page."}]
    asked, called = {"role": "user", "content": "Look."}, {"id": "t1", "name": "look"}
    turns = [asked, {"role": "assistant", "content": [{"type": "tool_use", "input": {}, **called}]}]
    turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": result}]})
    body = {"model": "tiny", "max_tokens": 4}
    anthropic = client.post("/v1/messages", json=body | {"messages": turns}).json()
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "t1", "content": [part(png("red")), result[1]]})
    chat = client.post("/v1/chat/completions", json=body | {"messages": turns}).json()
    assert anthropic["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"] > 16
    assert anthropic["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_an_assistants_text_behind_an_image_is_continued_and_an_image_is_not(client):
    asked = {"role": "user", "content": [part(png("red"))]}

    def go_on(*parts):
        turns = [asked, {"role": "assistant", "content": [*parts]}]
        return client.post("/v1/chat/completions", json={"messages": turns, "continue_final_message": True} | FEW)

    said = {"type": "text", "text": "It is"}
    counts = [go_on(*parts).json()["usage"]["prompt_tokens"] for parts in ([said], [part(png("blue")), said])]
    assert counts[0] < counts[1]
    reply = go_on(said, part(png("blue")))
    assert reply.status_code == 400 and "only an assistant's text" in reply.text


def test_a_developers_image_joins_the_systems_message(client):
    def ask(*messages):
        last = {"role": "user", "content": "What is this?"}
        reply = client.post("/v1/chat/completions", json={"messages": [*messages, last]} | FEW)
        return reply.json()["usage"]["prompt_tokens"], reply.json()["choices"][0]["message"]["content"]

    shown = [part(png("red")), {"type": "text", "text": "The page."}]
    whole = [{"type": "text", "text": "Look.\n\n"}, *shown]
    apart = ask({"role": "system", "content": "Look."}, {"role": "developer", "content": shown})
    assert apart == ask({"role": "system", "content": whole})


def test_frames_of_a_video_are_read_in_pairs(client):
    options = {"logprobs": True, "top_logprobs": 5}

    def video(*colors):
        return {"type": "video", "video": [f"data:image/png;base64,{png(color)}" for color in colors], "fps": 2}

    found = [likely(chat(client, video(*colors), **options)) for colors in (("red", "blue"), ("red", "red"))]
    assert found[0] != found[1]
    counts = [chat(client, video(*["red"] * frames)).json()["usage"]["prompt_tokens"] for frames in (2, 3, 4)]
    assert counts[0] < counts[1] == counts[2]


def test_a_completion_of_tokens_sees_images_in_their_places(client, served):
    """Its scores of a prompt's tokens are those of the chat with the image."""
    said = chat(client, part(png("red")), logprobs=True, max_tokens=1).json()["choices"][0]["logprobs"]["content"][0]
    content = [part(png("red")), {"type": "text", "text": "What is this?"}]
    tokens = served[0].encode(read_chat([{"role": "user", "content": content}], None, "m", sees=True)).tokens
    answer = served[0].tokenizer.encode(said["token"], add_special_tokens=False)
    first = tokens.index(served[0].rules.tokens[0])
    body = {"model": "tiny", "prompt": [*tokens, *answer], "echo": True, "logprobs": 1, "max_tokens": 0}

    def score(color, token):
        return client.post("/v1/completions", json={**body, "images": [part(png(color)) | {"token": token}]})

    values = [score(color, first).json()["choices"][0]["logprobs"]["token_logprobs"][-1] for color in ("red", "blue")]
    assert values[0] == pytest.approx(said["logprob"], abs=1e-4) and abs(values[1] - values[0]) > 1e-3
    written = client.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": tokens, "images": [part(png("red")) | {"token": first}]}
        | {"logprobs": 1, "max_tokens": 1, "temperature": 0},
    ).json()["choices"][0]
    assert written["text"] == said["token"]
    assert written["logprobs"]["token_logprobs"] == pytest.approx([said["logprob"]], abs=1e-4)
    for token, message in ((first + 1, "other ones there"), (0, "other ones"), (999, "its first in prompt")):
        reply = score("red", token)
        assert reply.status_code == 400 and message.removesuffix(" there") in reply.text


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part("AAAA")], "no image that can be read"),
        ([{"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}], "example.org"),
        ([{"type": "image_url", "image_url": {"url": "/etc/hostname"}}], "hostname"),
        ([part(png("red"))] * 17, "at most 16"),
        ([part(png("red", (640, 640)))] * 4, "tokens"),
        ([{"type": "video", "video": [f"data:image/png;base64,{png('red')}"] * 130}], "at most 64"),
        ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], "no program decodes"),
    ],
)
def test_images_that_are_none_too_many_or_not_in_the_request_are_refused(client, parts, message):
    reply = chat(client, *parts)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"], reply.text


def test_a_prompts_pages_are_found_again_only_for_its_own_image(served):
    assistant, _, _ = served

    def prompt(color):
        return assistant.encode(read_chat([{"role": "user", "content": [part(png(color))]}], None, "m", sees=True))

    red, again, blue = prompt("red"), prompt("red"), prompt("blue")
    assert red.tokens == blue.tokens and (red.images.keys == again.images.keys).all()
    assert (red.images.keys != blue.images.keys).any()
    np.testing.assert_array_equal(red.images.features, again.images.features)
