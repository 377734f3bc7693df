"""Anthropic's messages, of answers that are given."""

import json
from types import SimpleNamespace

import hostile
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from local_client import TestClient
from selection import repeats
from told import Told

from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.server import make_app

GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATE = "{{ messages | tojson }}{{ tools | tojson if tools }}" + GENERATION
HEADERS = {"anthropic-version": "2023-06-01"}
WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


@pytest.fixture
def server(quickstart):
    """server(answer, …) → (client, service)."""

    def make(answer="Seven.", template=TEMPLATE, finish="stop", **settings):
        tokenizer = load_tokenizer(quickstart)
        tokenizer.chat_template = template
        tokens = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        service = Told(*([token] for token in tokens), finish=finish, length=4096)
        parts = {"tokenizer": tokenizer, "stops": {tokenizer.eos_token_id}, "ranks": 0, "voices": {}, "sight": None}
        assistant = SimpleNamespace(**parts, config=SimpleNamespace(vocab_size=1024))
        app = make_app(assistant, service, ServeConfig(model=quickstart, name="tiny", **settings))
        return TestClient(app), service

    return make


def create(client, path="/v1/messages", headers=HEADERS, **body):
    asked = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "3 + 4?"}], **body}
    return client.post(path, json=asked, headers=headers)


def events_of(reply):
    """Return a stream's events, of whose kinds the names tell, too."""
    blocks = [block.split("\n") for block in reply.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    return events


def prompt_of(service, quickstart):
    return load_tokenizer(quickstart).decode(service.request.prompt)


def seen(service, quickstart):
    return json.JSONDecoder().raw_decode(prompt_of(service, quickstart))[0]


def test_a_message_is_answered_whole_or_as_events(server, quickstart):
    client, service = server()
    reply = create(client, system="Add.", temperature=0.5, top_k=3, metadata={"user_id": "a"}).json()
    assert reply["content"] == [{"type": "text", "text": "Seven."}] and reply["stop_reason"] == "end_turn"
    assert reply["usage"]["input_tokens"] == len(service.request.prompt) and reply["usage"]["output_tokens"] > 1
    assert [message["role"] for message in seen(service, quickstart)] == ["system", "user"]
    assert (service.request.sampling.temperature, service.request.sampling.top_k) == (0.5, 3)
    start, block, *deltas, stop, ended, last = events_of(create(client, stream=True))
    assert (start["type"], block["type"], stop["type"]) == (
        "message_start",
        "content_block_start",
        "content_block_stop",
    )
    assert "".join(delta["delta"]["text"] for delta in deltas) == "Seven."
    assert ended["delta"] == {"stop_reason": "end_turn", "stop_sequence": None} and last == {"type": "message_stop"}
    assert ended["usage"]["output_tokens"] == reply["usage"]["output_tokens"]
    assert create(server(finish="length")[0]).json()["stop_reason"] == "max_tokens"


def test_a_stop_sequence_is_named(server):
    reply = create(server("One, two, three.")[0], stop_sequences=["zwei", "two"]).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "two")
    assert reply["content"][0]["text"] == "One, "


def test_tools_are_called_and_their_results_read(server, quickstart):
    client, service = server(f"I look.{CALL}")
    reply = create(client, tools=[WEATHER]).json()
    text, call = reply["content"]
    assert text["text"] == "I look." and reply["stop_reason"] == "tool_use"
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Ulm"})
    events = events_of(create(client, tools=[WEATHER], stream=True))
    parts = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
    assert json.loads("".join(parts)) == {"city": "Ulm"}
    (begun,) = [e["content_block"] for e in events if e.get("content_block", {}).get("type") == "tool_use"]
    assert begun["input"] == {} and begun["id"].startswith("toolu_")
    turns = [
        {"role": "user", "content": "Ulm?"},
        {"role": "assistant", "content": reply["content"]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sun"}]},
                {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    assert create(client, messages=turns, tools=[WEATHER]).status_code == 200
    asked = seen(service, quickstart)
    assert [message["role"] for message in asked] == ["user", "assistant", "tool", "user"]
    assert asked[1]["content"] == "I look." and asked[1]["tool_calls"][0]["function"]["name"] == "weather"
    assert asked[2]["content"] == "sun" and asked[3]["content"] == "And now?"


def test_an_assistants_last_message_is_continued(server, quickstart):
    client, service = server(" is seven.")
    turns = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "The sum"}]
    assert create(client, messages=turns).json()["content"][0]["text"] == " is seven."
    assert prompt_of(service, quickstart).endswith("The sum")


def test_thinking_is_a_block_and_set_where_the_template_reads_it(server, quickstart):
    template = "{{ messages | tojson }}{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
    client, service = server("Hm.</think>\n\nSeven.", template)
    reply = create(client, thinking={"type": "enabled", "budget_tokens": 1024}).json()
    assert [block["type"] for block in reply["content"]] == ["thinking", "text"]
    assert reply["content"][0]["thinking"] == "Hm." and reply["content"][1]["text"] == "Seven."
    kinds = [e["content_block"]["type"] for e in events_of(create(client, stream=True)) if "content_block" in e]
    assert kinds == ["thinking", "text"]
    create(client, thinking={"type": "disabled"})
    assert not prompt_of(service, quickstart).rstrip().endswith("<think>")


def test_tokens_are_counted_beyond_the_context_too(server, quickstart):
    client, service = server()
    create(client)
    counted = create(client, "/v1/messages/count_tokens", max_tokens=None).json()
    assert counted == {"input_tokens": len(service.request.prompt)}
    long = [{"role": "user", "content": "a b " * 5000}]
    assert create(client, "/v1/messages/count_tokens", messages=long).json()["input_tokens"] > 4096
    assert create(client, messages=long).status_code == 400


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"max_tokens": None}, 400, "max_tokens is missing"),
        ({"model": "claude"}, 404, "is not served"),
        ({"messages": []}, 400, "messages must not be empty"),
        ({"messages": "Hello"}, 400, "messages must be a list"),
        ({"messages": [{"role": "system", "content": "a"}]}, 400, "a role must be user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "source must be of type base64"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "'web_search_20250305' are not"),
        ({"tool_choice": {"type": "all"}}, 400, "tool_choice must be of type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "no"}}, 400, "tools do not offer"),
        ({"mcp_servers": [{"url": "a"}]}, 400, "mcp_servers are not served"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty is not supported"),
        ({"temperature": "hot"}, 400, "temperature must be a number"),
        ({"thinking": 5}, 400, "thinking must be an object"),
        ({"output_config": {"format": "json"}}, 400, "format must be an object"),
    ],
)
def test_refusals_have_anthropics_form(server, body, status, message):
    reply = create(server()[0], **body)
    assert reply.status_code == status and reply.json()["type"] == "error"
    assert message in reply.json()["error"]["message"]
    kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert reply.json()["error"]["type"] == kind


HOSTILE = {
    "content": lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
    "system": lambda text: {"system": text},
    "prefix": lambda text: {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]},
    "tool": lambda text: {"tools": [{"name": text, "input_schema": {"properties": {text: {"type": text}}}}]},
    "result": lambda text: {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": text, "name": text, "input": {text: text}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": text, "content": text}]},
        ]
    },
    "kind": lambda text: {"messages": [{"role": text, "content": [{"type": text, text: text}]}]},
    "format": lambda text: {"output_config": {"format": {"type": text, "schema": {"type": text}}}},
    "stop": lambda text: {"stop_sequences": [text]},
    "parameter": lambda text: {text: text, "thinking": {"type": text}},
}


@pytest.mark.parametrize("part", repeats([*HOSTILE], "prefix", "stop", "parameter"))
def test_hostile_texts_are_answered_or_refused(server, part):
    client, _ = server(f"I look.{CALL}")
    for text in (*hostile.TEXTS[::3], *hostile.mixtures(7, 20)):
        body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], **HOSTILE[part](text)}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            reply = client.post(path, content=json.dumps(body), headers=HEADERS)
            assert reply.status_code in (200, 400), (text, reply.text)


def test_the_key_may_come_as_anthropics_header(server):
    client, _ = server(api_key="secret")
    assert create(client, headers=HEADERS | {"x-api-key": "secret"}).status_code == 200
    refused = create(client, headers=HEADERS | {"x-api-key": "other"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
