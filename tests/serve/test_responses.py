"""OpenAI's Responses, by its own client, of answers that are given."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
import openai
from local_client import TestClient
from told import Told

from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.server import make_app
from jaxglue.serve.wire.responses import chat_body

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


@pytest.fixture
def ask(quickstart):
    """ask(answer, template, finish) → (OpenAI's client, the service)."""

    def make(answer, template="{{ messages | tojson }}{{ tools | tojson if tools }}", finish="stop"):
        tokenizer = load_tokenizer(quickstart)
        tokenizer.chat_template = template
        tokens = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        service = Told(*([token] for token in tokens), finish=finish, length=4096)
        parts = {"tokenizer": tokenizer, "stops": {tokenizer.eos_token_id}, "ranks": 0, "voices": {}, "sight": None}
        assistant = SimpleNamespace(**parts, config=SimpleNamespace(vocab_size=1024))
        app = TestClient(make_app(assistant, service, ServeConfig(model=quickstart, name="tiny")))
        return openai.OpenAI(base_url="http://localhost/v1", api_key="any", http_client=app).responses, service

    return make


def seen(service, quickstart):
    return json.JSONDecoder().raw_decode(load_tokenizer(quickstart).decode(service.request.prompt))[0]


def test_a_text_is_answered(ask, quickstart):
    responses, service = ask("Seven.")
    found = responses.create(model="tiny", input="What is 3 plus 4?", instructions="Add.", max_output_tokens=20)
    assert (found.output_text, found.status, found.output[0].role) == ("Seven.", "completed", "assistant")
    assert seen(service, quickstart) == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "What is 3 plus 4?"},
    ]
    assert found.usage.output_tokens == len(service.tokens) and service.request.sampling.max_tokens == 20
    cut = ask("Seven.", finish="length")[0].create(model="tiny", input="What?")
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_text_and_calls_are_items(ask, streamed):
    responses, _ = ask(f"<think>\nUlm?\n</think>\n\nI look.{CALL}")
    given = {"model": "tiny", "input": "Weather?", "tools": [TOOL]}
    if streamed:
        with responses.stream(**given) as stream:
            events = list(stream)
            found = stream.get_final_response()
        texts = {
            kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta")
            for kind in ("output_text", "reasoning_text")
        }
        assert texts == {"output_text": "I look.", "reasoning_text": "Ulm?"}
        numbers = [event.sequence_number for event in responses.create(**given, stream=True)]
        assert numbers == list(range(len(numbers)))
    else:
        found = responses.create(**given)
    reasoning, message, call = found.output
    assert (reasoning.content[0].text, message.content[0].text) == ("Ulm?", "I look.")
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Ulm"}, "completed")
    assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens


def test_an_answer_may_be_a_call_alone_or_empty(ask):
    (call,) = ask(f"<think>\n</think>\n\n{CALL}")[0].create(model="tiny", input="?", tools=[TOOL]).output
    assert call.type == "function_call"
    (message,) = ask("")[0].create(model="tiny", input="?").output
    assert message.content[0].text == ""


def test_a_conversation_goes_on_from_items():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Ulm?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
    ]
    messages = chat_body({"input": items})["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[0]["content"] == "Weather?" and messages[2] == {
        "role": "tool",
        "tool_call_id": "a",
        "content": "rain",
    }
    assert messages[1]["reasoning_content"] == "Ulm?" and messages[1]["content"] == "I look."
    assert [[call["id"] for call in message.get("tool_calls", [])] for message in messages] == [
        [],
        ["a", "b"],
        [],
        ["c"],
    ]


def test_formats_and_choices_are_those_of_chats():
    form = {"type": "json_schema", "name": "sum", "schema": {"type": "object"}}
    body = {
        "input": "a",
        "text": {"format": form},
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    chat = chat_body(body)
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}
    function = chat["tools"][0]["function"]
    assert (function["name"], chat["tool_choice"]["function"]["name"]) == ("weather", "weather")
    assert chat_body({"input": "a", "text": {"format": {"type": "json_object"}}})["response_format"] == {
        "type": "json_object"
    }


def test_effort_sets_what_the_template_reads(ask, quickstart):
    for template, effort, wanted in [
        ("{{ messages[0].content }} {{ reasoning_effort }}", "low", "low"),
        ("{{ messages[0].content }} {{ enable_thinking }}", "none", "False"),
        ("{{ messages[0].content }} {{ thinking }}", "high", "True"),
    ]:
        responses, service = ask("Seven.", template)
        responses.create(model="tiny", input="?", reasoning={"effort": effort})
        assert load_tokenizer(quickstart).decode(service.request.prompt) == f"? {wanted}"
    for template, effort in (("{{ messages[0].thinking }}", "low"), ("{{ reasoning_effort }}", "none")):
        with pytest.raises(openai.BadRequestError, match="knows no effort"):
            ask("Seven.", template)[0].create(model="tiny", input="?", reasoning={"effort": effort})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "messages must be a list of objects"),
        ({"input": [1]}, "input must be a list of objects"),
        ({"input": 5}, "input must be a list of objects"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input of type 'item_reference' is not served"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "this model sees no images"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "a part of input has no text"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools of type 'web_search' are not served"),
        ({"input": "a", "text": 5}, "text must be an object"),
        ({"input": "a", "text": {"format": "json"}}, "response_format must have the type"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens must be a number"),
        ({"input": "a", "instructions": 5}, "content of the 'system' message must be a string"),
    ],
)
def test_other_requests_are_refused(ask, body, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask("Seven.")[0].create(model="tiny", **body)
