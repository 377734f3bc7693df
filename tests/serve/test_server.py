"""The server for OpenAI's clients, without a network."""

import asyncio
import json
import queue
import threading
from dataclasses import replace
from types import SimpleNamespace

import hostile
import jax
import numpy as np
import pytest
from selection import repeats_parts_of

from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.generation import grammar
from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.scheduler import Request
from jaxglue.serve.config import ServeConfig
from jaxglue.text.stream import decode, without
from jaxglue.text.thinking import Thought

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from local_client import TestClient
from told import Told

from jaxglue.serve import call as calls
from jaxglue.serve import under_way
from jaxglue.serve.server import make_app
from jaxglue.serve.service import EndedError, Event, Service, require_short

GREEDY = SamplingConfig(temperature=0.0, top_p=1.0)
MESSAGES = [{"role": "user", "content": "Hello"}]
SHOWN = "{{ messages | map(attribute='content') | join(' ') }}"
"""Part of a template that shows all contents."""


@pytest.fixture(scope="module")
def served(folders):
    """(assistant, service, configuration)."""
    config = ServeConfig(model=folders[0], adapter=folders[1], name="tiny", sampling=GREEDY)
    assistant = Assistant(config)
    tools = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    assistant.tokenizer.chat_template = tools + assistant.tokenizer.chat_template
    service = Service(assistant, slots=4, length=64, most=8)
    yield assistant, service, config
    service.close()


@pytest.fixture
def client(served):
    return TestClient(make_app(*served))


def post(client, path="/v1/chat/completions", **body):
    return client.post(path, json={"model": "tiny", "max_tokens": 8, **body})


def events(response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_answers_equal_those_of_generate_streamed_or_whole(served, client):
    assistant = served[0]
    tokens = assistant.tokenizer.encode("Once upon")
    wanted = "".join(assistant.answer(tokens, replace(GREEDY, max_tokens=8)))
    whole = post(client, "/v1/completions", prompt="Once upon", logprobs=0).json()
    assert whole["choices"][0]["text"] == wanted != ""
    assert whole["usage"]["prompt_tokens"] == len(tokens)
    found = whole["choices"][0]["logprobs"]["token_logprobs"]
    assert len(found) == whole["usage"]["completion_tokens"] and (np.array(found) < 0).all()
    streamed = events(post(client, "/v1/completions", prompt=tokens, stream=True))
    assert "".join(choice["text"] for event in streamed for choice in event["choices"]) == wanted
    assert streamed[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"


def test_texts_of_tokens_join_to_the_answer(served):
    assistant, _, config = served
    tokens = [*assistant.tokenizer.encode("naïve 東京"), min(assistant.stops)]
    client = TestClient(make_app(assistant, Told(tokens[:3], [*tokens[3:-1]], tokens[-1:]), config))
    (choice,) = post(client, messages=MESSAGES, logprobs=True).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(tokens) and "".join(e["token"] for e in entries[:-1]) == "naïve 東京"
    assert bytes(byte for e in entries[:-1] for byte in e["bytes"]).decode() == "naïve 東京"
    for cut in (tokens[:-2], [*tokens[:-2], tokens[-1]]):  # the last character is not whole
        client = TestClient(make_app(assistant, Told(cut), config))
        (choice,) = post(client, messages=MESSAGES, logprobs=True).json()["choices"]
        texts = [entry["token"] for entry in choice["logprobs"]["content"]][: len(tokens) - 2]
        assert "".join(texts) == choice["message"]["content"] == "naïve 東\ufffd"
    client = TestClient(make_app(*served))
    for wanted, reported in ((0, True), (False, False)):
        answer = post(client, "/v1/completions", prompt="a", logprobs=wanted).json()["choices"][0]
        assert (answer["logprobs"] is not None) == reported


def test_likely_tokens_come_beside_those_of_an_answer(client):
    ask = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}
    greedy, drawn = (
        post(client, **ask, max_tokens=4, temperature=heat, top_k=5, seed=2).json()["choices"][0]["logprobs"]["content"]
        for heat in (0, 5)
    )
    for entry in greedy:
        values = [likely["logprob"] for likely in entry["top_logprobs"]]
        assert len(values) == 20 and values == sorted(values, reverse=True) and sum(np.exp(values)) < 1
        assert values[0] == entry["logprob"]
    first = {likely["token"]: likely["logprob"] for likely in greedy[0]["top_logprobs"]}
    assert drawn[0]["logprob"] == pytest.approx(first[drawn[0]["token"]], abs=1e-5)  # at temperature 1, too
    (choice,) = post(client, "/v1/completions", prompt="Once upon", logprobs=2).json()["choices"]
    found = choice["logprobs"]
    for text, value, likely in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert likely[text] == value == max(likely.values()) and 2 <= len(likely) <= 3
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(8)]
    assert (
        post(client, messages=MESSAGES, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        == []
    )


def test_tokens_after_a_stop_text_are_not_counted(served):
    assistant, _, config = served
    tokens = assistant.tokenizer.encode("one two three four")
    before = next(n for n in range(len(tokens) + 1) if "two" in assistant.tokenizer.decode(tokens[:n]))
    client = TestClient(make_app(assistant, Told(tokens, [min(assistant.stops)]), config))
    answer = post(client, messages=MESSAGES, stop="two", logprobs=True).json()
    assert answer["choices"][0]["message"]["content"] == "one " and answer["usage"]["completion_tokens"] == before
    assert len(answer["choices"][0]["logprobs"]["content"]) == before < len(tokens)


def test_a_completion_takes_several_prompts(served, client):
    assistant, _, config = served
    prompts = ["Once upon", "The weather"]
    alone = [post(client, "/v1/completions", prompt=prompt).json() for prompt in prompts]
    both = post(client, "/v1/completions", prompt=prompts, n=2).json()
    assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in both["choices"]] == [alone[i]["choices"][0]["text"] for i in (0, 0, 1, 1)]
    assert both["usage"]["completion_tokens"] == 2 * sum(answer["usage"]["completion_tokens"] for answer in alone)
    client = TestClient(make_app(assistant, Told([min(assistant.stops)]), config))
    for prompt, status in (("", 400), ([], 400), ([[]], 400), (["a", 5], 400), (["a"] * 129, 400), ([["a"]], 400)):
        assert post(client, "/v1/completions", prompt=prompt).status_code == status


def test_a_completion_repeats_its_prompt(served, client):
    prompts = ["Once upon", "The weather"]
    plain = [choice["text"] for choice in post(client, "/v1/completions", prompt=prompts).json()["choices"]]
    repeated = post(client, "/v1/completions", prompt=prompts, echo=True).json()["choices"]
    wanted = [prompt + text for prompt, text in zip(prompts, plain, strict=True)]
    assert [choice["text"] for choice in repeated] == wanted
    tokens = served[0].tokenizer.encode(prompts[1])
    chunks = [
        event["choices"][0]["text"]
        for event in events(post(client, "/v1/completions", prompt=tokens, echo=True, stream=True))
    ]
    assert "".join(chunks) == wanted[1]


def test_a_chat_sets_variables_of_the_template(served, monkeypatch):
    assistant, _, config = served
    service = Told([min(assistant.stops)])
    client = TestClient(make_app(assistant, service, config))
    monkeypatch.setattr(
        assistant.tokenizer, "chat_template", f"{SHOWN}{{% if think is false %}}quiet{{% else %}}loud{{% endif %}}"
    )
    for variables, text in ({"think": False}, "quiet"), ({}, "loud"), (None, "loud"):
        assert post(client, messages=MESSAGES, chat_template_kwargs=variables).status_code == 200
        assert assistant.tokenizer.decode(service.request.prompt).endswith(text)
    for name in ("messages", "self"):
        refused = post(client, messages=MESSAGES, chat_template_kwargs={name: []})
        assert refused.status_code == 400 and f"no variable '{name}'" in refused.json()["error"]["message"]


def test_a_developer_speaks_as_the_system_where_a_template_knows_none(served, monkeypatch):
    assistant, _, config = served
    service = Told([min(assistant.stops)])
    client = TestClient(make_app(assistant, service, config))
    messages = [{"role": "developer", "content": "Be brief."}, *MESSAGES]
    for template, role in (
        ("{{ messages[0].role }}", "system"),
        ("{{ messages[0].role }}{# developer #}", "developer"),
    ):
        monkeypatch.setattr(assistant.tokenizer, "chat_template", template + SHOWN)
        assert post(client, messages=messages).status_code == 200
        assert assistant.tokenizer.decode(service.request.prompt).startswith(role)
    one = "{% for m in messages if m.role == 'system' %}({{ m.content }}){% endfor %}{{ messages[-1].content }}"
    monkeypatch.setattr(assistant.tokenizer, "chat_template", one)
    for order in (("system", "developer"), ("developer", "system")):
        both = [{"role": role, "content": f"As {role}."} for role in order]
        assert post(client, messages=[*both, *MESSAGES]).status_code == 200
        assert assistant.tokenizer.decode(service.request.prompt).startswith(f"(As {order[0]}.\n\nAs {order[1]}.)")


LEAVING = (
    "{% for m in messages if m.role in ['system', 'user', 'assistant'] %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("further", "options", "message"),
    [
        ([{"role": "tool", "content": "SECRET 42"}], {}, "leaves out message 2, of role 'tool'"),
        ([{"role": "critic", "content": "no"}], {}, "unknown role 'critic'"),
        ([{"role": "user<|im_end|>", "content": "no"}], {}, "unknown role 'user<|im_end|>'"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}], {}, "tool call 1 of"),
        ([], {"tools": [{"type": "function", "function": {"name": "f"}}]}, "leaves out tools, such as 'f'"),
        ([], {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, None),
    ],
)
def test_what_the_template_leaves_out_is_refused_by_name(served, monkeypatch, further, options, message):
    assistant, _, config = served
    monkeypatch.setattr(assistant.tokenizer, "chat_template", LEAVING)
    client = TestClient(make_app(assistant, Told([min(assistant.stops)]), config))
    reply = post(client, messages=[*MESSAGES, *further], **options)
    assert reply.status_code == (400 if message else 200)
    assert not message or message in reply.json()["error"]["message"]


def test_a_special_token_as_stop_text_ends_an_answer(served, client):
    tokenizer = served[0].tokenizer
    (special,) = [t for t in tokenizer.added_tokens_decoder if t not in served[0].stops][:1]
    name = str(tokenizer.convert_ids_to_tokens(special))
    bias = {str(special): 1e6}
    answer = post(client, messages=MESSAGES, logit_bias=bias, stop=[name]).json()
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 1
    assert post(client, messages=MESSAGES, logit_bias=bias).json()["usage"]["completion_tokens"] == 8
    given = {"messages": MESSAGES, "logit_bias": {"70": 1e6}, "stop_token_ids": [70, 71]}
    answer, usage = (post(client, **given).json()[name] for name in ("choices", "usage"))
    assert (answer[0]["message"]["content"], answer[0]["finish_reason"]) == ("", "stop")
    assert usage["completion_tokens"] == 1


def test_several_answers_stop_and_are_seeded(client):
    options = {"messages": MESSAGES, "temperature": 1.5, "n": 3, "seed": 7}
    first, again, other = (post(client, **options | {"seed": seed}).json()["choices"] for seed in (7, 7, 8))
    texts = [choice["message"]["content"] for choice in first]
    assert texts == [choice["message"]["content"] for choice in again] and len(set(texts)) > 1
    assert texts != [choice["message"]["content"] for choice in other]
    stop = texts[0][2:5]
    (cut, *_) = post(client, **options, stop=stop).json()["choices"]
    assert cut["message"]["content"] == texts[0][: texts[0].index(stop)] and cut["finish_reason"] == "stop"
    *chunks, usage = events(post(client, **options, stream=True, stream_options={"include_usage": True}))
    assert usage["usage"]["completion_tokens"] >= 3 and all(chunk["usage"] is None for chunk in chunks)
    streamed = [
        "".join(c["delta"]["content"] for chunk in chunks for c in chunk["choices"] if c["index"] == i)
        for i in range(3)
    ]
    assert streamed == texts


def test_tool_calls_are_parsed_streamed_or_whole(served):
    assistant, _, config = served
    text = 'I look.<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    tokens, stop = assistant.tokenizer.encode(text), min(assistant.stops)
    service = Told(tokens[:5], tokens[5:9], tokens[9:], [stop])
    client = TestClient(make_app(assistant, service, config))
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    (choice,) = post(client, messages=MESSAGES, tools=tools).json()["choices"]
    message, (found,) = choice["message"], choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "I look."
    assert found.pop("id").startswith("call_") and found == call
    chunks = [event["choices"][0] for event in events(post(client, messages=MESSAGES, tools=tools, stream=True))]
    assert "".join(chunk["delta"]["content"] for chunk in chunks) == "I look."
    (streamed,) = chunks[-1]["delta"]["tool_calls"]
    assert streamed["function"] == call["function"] and streamed["index"] == 0
    assert chunks[-1]["finish_reason"] == "tool_calls"
    twice = TestClient(make_app(assistant, Told(tokens, tokens, [stop]), config))
    for together, count in ((None, 2), (True, 2), (False, 1)):
        (choice,) = post(twice, messages=MESSAGES, tools=tools, parallel_tool_calls=together).json()["choices"]
        assert [called["function"] for called in choice["message"]["tool_calls"]] == [call["function"]] * count
    for options in ({"tools": tools, "tool_choice": "none"}, {}):
        (choice,) = post(client, messages=MESSAGES, **options).json()["choices"]
        assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"


def test_calls_and_thinking_between_special_tokens_are_told_from_others(served, quickstart):
    assistant, _, config = served
    tokenizer = load_tokenizer(quickstart)
    specials = ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|image|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = f"{SHOWN}{{{{ tools | tojson }}}}"
    thought, call = "<|channel>thought\nHm.\n<channel|>", '<|tool_call>call:now{zone:<|"|>é<|"|>}<tool_call|>'
    tokens, stop = tokenizer.encode(f"{thought}I look.<|image|>{call}"), tokenizer.eos_token_id
    parts = {
        "tokenizer": tokenizer,
        "stops": {stop},
        "ranks": 0,
        "voices": {},
        "sight": None,
        "config": assistant.config,
    }
    service = Told(*([token] for token in tokens), [stop])
    client = TestClient(make_app(SimpleNamespace(**parts), service, config))
    tools = [{"type": "function", "function": {"name": "now"}}]
    deltas = [
        event["choices"][0]["delta"] for event in events(post(client, messages=MESSAGES, tools=tools, stream=True))
    ]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert deltas[-1]["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"zone": "é"}'}


def test_thinking_comes_apart_from_the_answer(served, monkeypatch):
    assistant, _, config = served
    tokens = assistant.tokenizer.encode("Three and four.</think>\n\nSeven.")
    client = TestClient(make_app(assistant, Told(tokens[:4], tokens[4:9], tokens[9:], [min(assistant.stops)]), config))
    (plain,) = post(client, messages=MESSAGES).json()["choices"]
    assert "reasoning_content" not in plain["message"] and "</think>" in plain["message"]["content"]
    monkeypatch.setattr(assistant.tokenizer, "chat_template", f"{SHOWN}<think>\n")
    (choice,) = post(client, messages=MESSAGES).json()["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Three and four.", "Seven.")
    deltas = [event["choices"][0]["delta"] for event in events(post(client, messages=MESSAGES, stream=True))]
    for name, text in (("reasoning_content", "Three and four."), ("content", "Seven.")):
        assert "".join(delta.get(name, "") for delta in deltas) == text
    asked = []
    grammars = SimpleNamespace(regex=lambda _, thinks: asked.append(thinks))
    monkeypatch.setitem(vars(assistant), "grammars", SimpleNamespace(of=lambda _: grammars))
    post(client, messages=MESSAGES, guided_regex="Seven.")
    monkeypatch.setattr(assistant.tokenizer, "chat_template", f"{SHOWN}<think></think>")
    post(client, messages=MESSAGES, guided_regex="Seven.")
    monkeypatch.setattr(assistant.tokenizer, "chat_template", f"{SHOWN}<im_start>assistant")
    post(client, messages=MESSAGES, guided_regex="Seven.")
    post(client, "/v1/completions", prompt="<think>", guided_regex="Seven.")
    assert asked == [Thought.BEGUN, Thought.NONE, Thought.POSSIBLE, Thought.NONE]


def test_a_call_of_a_tool_is_forced(served, monkeypatch):
    assistant, _, config = served
    given, call = [], '{"name": "now", "arguments": {}}'
    monkeypatch.setitem(
        vars(assistant),
        "grammars",
        SimpleNamespace(of=lambda _: SimpleNamespace(calls=lambda text, **_: given.append(text) or text)),
    )
    service = Told(assistant.tokenizer.encode(f"{call}; {call}"), [min(assistant.stops)])
    client = TestClient(make_app(assistant, service, config))
    ask = {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": {"name": name}} for name in ("now", "later")],
    }
    now = {"type": "function", "function": {"name": "now"}}
    for choice, finish, later in (("required", "tool_calls", True), (now, "stop", False)):
        (answer,) = post(client, **ask, tool_choice=choice).json()["choices"]
        assert [called["function"]["name"] for called in answer["message"]["tool_calls"]] == ["now", "now"]
        assert answer["finish_reason"] == finish and service.request.grammar == given[-1]
        assert "now" in given[-1] and ("later" in given[-1]) == later
    post(client, **ask, tool_choice="required", parallel_tool_calls=False)
    assert ")*" in given[0] and ")*" not in given[1] and ")*" not in given[2]
    post(client, **ask, tool_choice="auto")
    assert service.request.grammar is None
    for choice, message in [
        ({"type": "function", "function": {"name": "never"}}, "tool_choice names 'never', which tools do not offer"),
        ("any", "tool_choice must be none, auto, required or"),
        ({"type": "function"}, "tool_choice must be none, auto, required or"),
    ]:
        refused = post(client, **ask, tool_choice=choice)
        assert refused.status_code == 400 and message in refused.json()["error"]["message"]
    refused = post(client, **ask, tool_choice="required", guided_regex="a")
    assert refused.status_code == 400 and "one grammar" in refused.json()["error"]["message"]


def test_a_model_that_would_not_call_a_tool_calls_it(client):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {**schema, "additionalProperties": False}}}]
    ask = {"messages": MESSAGES, "tools": tools, "max_tokens": 40, "temperature": 1.0, "tool_choice": "required"}
    reply = post(client, **ask, parallel_tool_calls=False).json()
    assert "choices" in reply, reply
    (choice,) = reply["choices"]
    ((called,), reason) = choice["message"]["tool_calls"], choice["finish_reason"]
    assert reason == "tool_calls" and json.loads(called["function"]["arguments"]) in ({"on": True}, {"on": False})


def test_calls_and_results_of_tools_reach_the_template_as_in_training(served, monkeypatch):
    assistant, _, config = served
    monkeypatch.setattr(assistant.tokenizer, "chat_template", "{{ messages | tojson }}")
    service = Told([min(assistant.stops)])
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "noon"}]},
    ]
    reply = post(TestClient(make_app(assistant, service, config)), messages=history)
    assert reply.status_code == 200, reply.json()
    assert "noon" in assistant.tokenizer.decode(service.request.prompt)
    broken = [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": "{"}}]}]
    assert post(TestClient(make_app(assistant, service, config)), messages=broken).status_code == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages must be a list of objects"),
        ({"messages": MESSAGES, "temperature": -1}, "temperature must be a number from 0 to 100, got -1"),
        ({"messages": MESSAGES, "n": True}, "n must be a number from 1 to 16, got True"),
        ({"messages": MESSAGES, "max_tokens": -1}, "max_tokens must be a number from 1 to"),
        ({"messages": MESSAGES, "suffix": "end"}, "suffix is not supported, and would change the answer"),
        ({"messages": MESSAGES, "skip_special_tokens": False}, "skip_special_tokens is not supported"),
        ({"messages": MESSAGES, "prompt": "a"}, "prompt is not supported"),
        ({"messages": MESSAGES, "temperatur": 1}, "unknown parameter: temperatur; did you mean temperature?"),
        ({"messages": MESSAGES, "continue_final_message": True}, "only an assistant's text can be continued"),
        (
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "set add_generation_prompt to false",
        ),
        ({"messages": MESSAGES, "seed": 2**62}, "seed must be a number from"),
        (
            {"messages": MESSAGES, "response_format": {"type": "json_schema"}},
            "response_format must have the type text,",
        ),
        (
            {"messages": MESSAGES, "guided_choice": ["a", ""]},
            "guided_choice must be a list of texts that are not empty",
        ),
        ({"messages": MESSAGES, "guided_json": "{"}, "guided_json is no JSON"),
        (
            {"messages": MESSAGES, "structured_outputs": {"xml": 1}},
            "an object with one of: json, regex, choice, grammar",
        ),
        (
            {"messages": MESSAGES, "guided_regex": "a", "response_format": {"type": "json_object"}},
            "an answer follows one grammar",
        ),
        ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens must be a number from 1 to"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice is required, but tools offer no function"),
        ({"messages": MESSAGES, "stream_options": "all"}, "stream_options must be an object"),
        ({"messages": MESSAGES, "structured_outputs": []}, "structured_outputs must be an object with one of"),
        ({"messages": MESSAGES, "structured_outputs": {"json": None}}, "structured_outputs must be an object with one"),
        ({"messages": MESSAGES, "response_format": {}}, "response_format must have the type text"),
        ({"messages": MESSAGES, "logit_bias": []}, "logit_bias must map token ids to numbers"),
        ({"messages": MESSAGES, "logit_bias": {"1": 10**400}}, "logit_bias must map token ids to numbers"),
        ({"messages": MESSAGES, "stop": ""}, "stop must be a text or a list"),
        ({"messages": MESSAGES, "stop": "\ud83d"}, "stop must be a text or a list"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs come with logprobs"),
        ({"messages": MESSAGES, "top_logprobs": 21}, "top_logprobs must be a number from 0 to 20"),
        ({"messages": MESSAGES, "stop_token_ids": [1024]}, "stop_token_ids must be a list of token ids below 1024"),
        ({"messages": MESSAGES, "stop_token_ids": list(range(40))}, "32 end an answer"),
        ({"messages": MESSAGES, "stream": "yes"}, "stream must be true or false"),
        ({"messages": MESSAGES, "parallel_tool_calls": 1}, "parallel_tool_calls must be true or false"),
        ({"messages": MESSAGES, "chat_template_kwargs": []}, "chat_template_kwargs must be an object"),
        ({"messages": MESSAGES, "stop": ["a"] * 17}, "at most 16 texts"),
        ({"messages": MESSAGES, "logit_bias": {"x": 1}}, "logit_bias must map token ids to numbers"),
        ({"messages": MESSAGES, "logit_bias": {"5000": 1}}, "logit_bias must map token ids below 1024"),
        ({"messages": [{"role": "user", "content": "word " * 100}]}, "texts may have 64"),
    ],
)
def test_bad_requests_are_refused(client, body, message):
    content = json.dumps({"model": "tiny", "max_tokens": 8, **body})  # with halves of surrogate pairs, too
    response = client.post("/v1/chat/completions", content=content)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def test_answers_follow_a_schema_or_expression_streamed_or_whole(client):
    pytest.importorskip("llguidance")
    ask = {"messages": MESSAGES, "max_tokens": 40, "seed": 3, "temperature": 1.0}
    for form in ({"response_format": FORMAT}, {"guided_json": json.dumps(SCHEMA)}):
        (choice,) = post(client, **ask, **form, logit_bias={"1": 5}).json()["choices"]
        assert choice["finish_reason"] in ("stop", "length")
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]) in ({"ok": True}, {"ok": False})
    for form, texts in [
        ({"guided_choice": ["cold", "hot"]}, {"cold", "hot"}),
        ({"structured_outputs": {"regex": "(ab){2}"}}, {"abab"}),
        ({"guided_grammar": 'start: "x" "y"'}, {"xy"}),
    ]:
        (choice,) = post(client, **ask, **form).json()["choices"]
        assert choice["message"]["content"] in texts and choice["finish_reason"] == "stop"
        chunks = [event["choices"][0] for event in events(post(client, **ask, **form, stream=True))]
        assert "".join(chunk["delta"]["content"] for chunk in chunks) == choice["message"]["content"]
    refused = post(client, messages=MESSAGES, guided_regex="(a")
    assert refused.status_code == 400 and "is not understood" in refused.json()["error"]["message"]


def test_grammars_ask_for_llguidance(served, client, monkeypatch):
    monkeypatch.setattr(grammar, "is_installed", lambda: False)
    monkeypatch.delitem(vars(served[0]), "grammars", raising=False)
    response = post(client, messages=MESSAGES, response_format={"type": "json_object"})
    assert response.status_code == 400 and "need llguidance" in response.json()["error"]["message"]


def test_bodies_are_bounded_and_json(client):
    half = client.post(
        "/v1/chat/completions", content=rb'{"messages": [{"role": "user", "content": "a"}], "\ud800": 1}'
    )
    assert half.status_code == 200
    big = client.post("/v1/chat/completions", content=b" " * (5 * 2**20))
    assert big.status_code == 413
    assert client.post("/v1/chat/completions", content=b"[").status_code == 400
    assert client.post("/v1/chat/completions", content=b"[" * 100_000).status_code == 400
    many = client.post("/v1/chat/completions", content=b'{"messages": [' + b"[]," * 300_000 + b"[]]}")
    assert many.status_code == 400 and "lists and objects" in many.json()["error"]["message"]


def test_a_client_that_hangs_up_in_its_body_is_no_error(served):
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
    scope["headers"] = [(b"host", b"localhost")]
    asyncio.run(make_app(*served)(scope, receive, send))
    assert sent[0]["status"] == 499


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_before_its_answer_ends_it(served, stream):
    assistant, _, config = served
    body = json.dumps({"messages": MESSAGES, "stream": stream}).encode()
    messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    cancelled, sent = [], []

    class Silent:
        length = 512

        def submit(self, *_):
            return "ticket"

        def cancel(self, ticket, *_):
            cancelled.append(ticket)

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
    scope["headers"] = [(b"host", b"localhost")]
    asyncio.run(asyncio.wait_for(make_app(assistant, Silent(), config)(scope, receive, send), 60))
    assert cancelled and set(cancelled) == {"ticket"}
    assert sent[0]["status"] == (200 if stream else 499)


def test_tokens_of_several_windows_are_sent_together_where_the_loop_is_late(served):
    assistant, _, config = served

    class Late(Told):
        def submit(self, request, listen, owner=None):
            thread = threading.Thread(target=super().submit, args=(request, listen))
            thread.start()
            thread.join()  # in the loop, which is so late

    told = Late(assistant.tokenizer.encode("So"), assistant.tokenizer.encode(" it"), [min(assistant.stops)])
    response = post(TestClient(make_app(assistant, told, config)), "/v1/completions", prompt="a", stream=True)
    assert [event["choices"][0]["text"] for event in events(response)] == ["So it"]


def test_what_came_before_the_end_of_the_service_is_sent(served):
    assistant, _, config = served

    class Ends(Told):
        def submit(self, request, listen, owner=None):
            listen(Event(0, assistant.tokenizer.encode("So"), [0.0], None))
            listen(Event(0, [], [], None, "the service has ended"))

    response = post(TestClient(make_app(assistant, Ends([]), config)), "/v1/completions", prompt="a", stream=True)
    first, last = (json.loads(line.removeprefix("data: ")) for line in response.text.split("\n") if line)
    assert first["choices"][0]["text"] == "So" and "has ended" in last["error"]["message"]


def test_a_stream_is_not_silent_while_its_answer_waits(served, monkeypatch):
    assistant, _, config = served
    monkeypatch.setattr(under_way, "SILENCE", 0.01)

    class Slow(Told):
        def submit(self, request, listen, owner=None):
            threading.Timer(0.2, super().submit, (request, listen)).start()

    client = TestClient(make_app(assistant, Slow(assistant.tokenizer.encode("So"), [min(assistant.stops)]), config))
    response = post(client, "/v1/completions", prompt="a", stream=True)
    comments, rest = response.text.count(": waiting\n\n"), response.text.replace(": waiting\n\n", "")
    assert comments > 2 and "".join(e["choices"][0]["text"] for e in events(SimpleNamespace(text=rest))) == "So"


def test_errors_have_openais_form(served, client):
    assistant, service, config = served
    two = replace(config, name="other")
    client = TestClient(make_app(assistant, service, two), raise_server_exceptions=False)
    long = post(client, model="other", messages=[{"role": "user", "content": "word " * 100}])
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    hot = post(client, model="other", messages=MESSAGES, temperature=-1).json()["error"]
    assert (hot["param"], hot["type"]) == ("temperature", "invalid_request_error")
    for response, status in ((client.get("/v1/none"), 404), (client.get("/v1/completions"), 405)):
        assert response.status_code == status and "is not served" in response.json()["error"]["message"]
    assert client.get("/v1/models/other").json()["id"] == "other"
    absent = client.get("/v1/models/org/none")
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "model_not_found")
    absent = post(client, messages=MESSAGES)
    assert (absent.status_code, absent.json()["error"]["param"]) == (404, "model")
    assert post(client, model=None, messages=MESSAGES).json()["model"] == "other"


def test_a_fault_of_the_server_is_an_error_in_openais_form(served, monkeypatch):
    client = TestClient(make_app(*served), raise_server_exceptions=False)
    monkeypatch.setattr(calls, "read_messages", None)
    response = post(client, messages=MESSAGES)
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"


def test_answers_that_nobody_waits_for_end(served):
    _, service, _ = served
    first, second, seen = threading.Event(), threading.Event(), []
    sampling = replace(GREEDY, max_tokens=60)

    def listen(event):
        seen.extend(event.tokens)
        first.set()

    ticket = service.submit(Request([5], sampling, logit_bias={7: 1e6}), listen)
    first.wait()
    service.cancel(ticket)
    for _ in range(2):
        second.clear()
        service.submit(
            Request([6], sampling, logit_bias={7: 1e6}), lambda event: second.set() if event.finish else None
        )
        second.wait()
    assert 0 < len(seen) < 60


def test_a_request_may_be_left_before_it_begins(served):
    _, service, _ = served
    ended, sampling = threading.Event(), replace(GREEDY, max_tokens=4)
    gate = threading.Event()
    service.submit(Request([9], sampling), lambda _: gate.wait(60))  # the thread waits here
    left = service.submit(Request([5], sampling), lambda event: ended.set() if event.finish else None)
    service.cancel(left)
    gate.set()
    after = threading.Event()
    service.submit(Request([6], sampling), lambda event: after.set() if event.finish else None)
    assert after.wait(60) and not ended.is_set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("part", ["add", "advance"])
def test_any_error_of_the_thread_reaches_those_who_wait(served, monkeypatch, part):
    service, told = Service(served[0], slots=2, length=64, most=8), queue.SimpleQueue()
    monkeypatch.setattr(service._batch, part, lambda *_: 1 // 0)
    service.submit(Request([5], replace(GREEDY, max_tokens=4)), told.put)
    assert "division" in told.get(timeout=60).error and service.failure


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_model_ends_requests_and_the_service(served):
    assistant, _, config = served
    service = Service(assistant, slots=2, length=64, most=8)
    broken = {**assistant.frozen, "norm": jax.tree.map(lambda weight: weight * np.nan, assistant.frozen["norm"])}
    service._batch._trees = assistant.adapter, broken
    client = TestClient(make_app(assistant, service, config))
    for _ in range(2):
        response = post(client, messages=MESSAGES)
        assert response.status_code == 500 and "logits are not finite" in response.json()["error"]["message"]
    assert client.get("/health").status_code == 503


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "[::1]:8000", "origin": "http://localhost:3000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example:8000"}, 403),
        ({"host": ""}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[", "host": "localhost"}, 403),
    ],
)
def test_pages_of_others_are_refused_without_a_key(served, headers, status):
    assistant, service, config = served
    assert TestClient(make_app(assistant, service, config)).get("/v1/models", headers=headers).status_code == status
    keyed = TestClient(make_app(assistant, service, replace(config, api_key="a")))
    assert keyed.get("/v1/models", headers={**headers, "authorization": "Bearer a"}).status_code == 200


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_key_may_have_letters_beyond_ascii(served, encoding):
    client = TestClient(make_app(*served[:2], replace(served[2], api_key="schlüssel")))
    for key, status in (("schlüssel", 200), ("schlussel", 401), ("schlüssel!", 401)):
        headers = {"authorization": f"Bearer {key}".encode(encoding)}
        assert client.get("/v1/models", headers=headers).status_code == status


def test_long_texts_are_refused_before_they_are_encoded(served, monkeypatch):
    assistant, _, config = served
    service = Told([min(assistant.stops)])
    monkeypatch.setattr(calls, "render_messages", None)
    client = TestClient(make_app(assistant, service, config))
    for body in ({"messages": [{"role": "user", "content": "a b " * 10**6}]}, {"messages": MESSAGES * 10**5}):
        refused = post(client, **body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    refused = post(client, "/v1/completions", prompt="a b " * 10**6)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    require_short(assistant.tokenizer, "word " * 20_000, 40_000)


def test_prompts_times_answers_are_bounded(served):
    client = TestClient(make_app(*served[:2], replace(served[2], max_requests=8)))
    refused = post(client, "/v1/completions", prompt=["a"] * 5, n=2)
    assert (
        refused.status_code == 400 and "5 prompts with 2 answers each: at most 8" in refused.json()["error"]["message"]
    )


def test_owners_have_turns_and_none_has_all_slots(served):
    service = Service(served[0], slots=8, length=64, most=64)
    order, done = [], threading.Semaphore(0)
    sampling = replace(GREEDY, max_tokens=8)

    def begin(owner, original=service._begin):
        order.append(owner)
        begun = original(owner)
        assert [ticket.owner for ticket, _ in service._running.values()].count("many") <= 6
        return begun

    service._begin = begin
    gate = threading.Event()
    first = service.submit(Request([9], sampling), lambda _: gate.wait(60), "first")  # the thread waits here
    request = Request([5], sampling, logit_bias={7: 1e6})
    for owner in [*["many"] * 20, "one"]:
        service.submit(request, lambda event: event.finish and done.release(), owner)
    gate.set()
    assert all(done.acquire(timeout=60) for _ in range(21)) and first
    assert order.index("one") <= 3
    service.close()
    assert not service._open and not service._waiting


def test_programs_of_a_new_kind_are_compiled_beside_the_answers_of_others(served, monkeypatch):
    service = Service(served[0], slots=2, length=64, most=8)
    service.warm_up()
    compiles, may_end = threading.Event(), threading.Event()

    def compile_window(*arguments, size, original=service._batch._programs.compile_window, **options):
        if options["features"].top:
            compiles.set()
            assert may_end.wait(60)
        return original(*arguments, size=size, **options)

    monkeypatch.setattr(service._batch._programs, "compile_window", compile_window)
    seen = queue.SimpleQueue()
    sampling = replace(GREEDY, max_tokens=4)
    service.submit(Request([6], sampling, top_log_probs=3), lambda event: event.finish and seen.put("new"))
    assert compiles.wait(60)
    service.submit(Request([5], sampling), lambda event: event.finish and seen.put("usual"))
    assert seen.get(timeout=60) == "usual" and seen.empty()
    may_end.set()
    assert seen.get(timeout=60) == "new"
    service.close()


HOSTILE = {
    "content": lambda text: {"messages": [{"role": "user", "content": text}]},
    "role": lambda text: {"messages": [{"role": text, "content": "a"}]},
    "name of a message": lambda text: {"messages": [{"role": "user", "content": "a", text: text}]},
    "result of a tool": lambda text: {"messages": [*MESSAGES, {"role": "tool", "tool_call_id": text, "content": text}]},
    "arguments": lambda text: {
        "messages": [
            *MESSAGES,
            {"role": "assistant", "tool_calls": [{"function": {"name": text, "arguments": json.dumps({text: text})}}]},
        ]
    },
    "tool": lambda text: {
        "messages": MESSAGES,
        "tools": [{"function": {"name": text, "parameters": {"properties": {text: {"type": text}}}}}],
    },
    "stop": lambda text: {"messages": MESSAGES, "stop": [text, text]},
    "variables": lambda text: {"messages": MESSAGES, "chat_template_kwargs": {text: text}},
    "parameter": lambda text: {"messages": MESSAGES, text: text, "seed": text},
    "model": lambda text: {"messages": MESSAGES, "model": text},
}


@repeats_parts_of("test_hostile_texts_are_answered_or_refused")
@pytest.mark.parametrize("place", HOSTILE)
def test_hostile_texts_are_answered_or_refused(served, place):
    assistant, _, config = served
    client = TestClient(make_app(assistant, Told([min(assistant.stops)]), config), raise_server_exceptions=False)
    for text in (*hostile.TEXTS[::3], *hostile.mixtures(9, 30)):
        reply = client.post("/v1/chat/completions", content=json.dumps({"max_tokens": 8, **HOSTILE[place](text)}))
        assert reply.status_code in ((404,) if place == "model" and text else (200, 400)), (text, reply.text)
        assert reply.status_code == 200 or reply.json()["error"]["message"]


def test_a_token_is_asked_for(served):
    assistant, service, config = served
    client = TestClient(make_app(assistant, service, replace(config, api_key="secret")))
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
    models = client.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0 lets other machines in: give --api-key"):
        replace(config, host="0.0.0.0")


def test_requests_beyond_the_limit_are_refused(served, monkeypatch):
    assistant, service, config = served
    monkeypatch.setattr(service, "_most", 0)
    assert post(TestClient(make_app(assistant, service, config)), messages=MESSAGES).status_code == 429


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_ends_the_start(served):
    service = Service(served[0], slots=2, length=64, most=8)

    def fail():
        raise ValueError("logits are not finite")

    service._advance = fail
    with pytest.raises(EndedError, match="logits are not finite"):
        service.warm_up()


def test_openais_client_is_served(client):
    openai = pytest.importorskip("openai")
    user = openai.OpenAI(base_url="http://localhost/v1", api_key="any", http_client=client)
    answer = user.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=6, logprobs=True)
    chunks = user.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=6, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="top_p"):
        user.chat.completions.create(model="tiny", messages=MESSAGES, top_p=2)


def test_requests_that_wait_together_keep_their_prompts(served):
    assistant, service, _ = served
    texts = ("Once upon a time", "The weather", "Numbers are", "Why", "No", "Water")
    prompts = [assistant.tokenizer.encode(text) for text in texts]
    sampling, found, ended = replace(GREEDY, max_tokens=8), [[] for _ in prompts], threading.Semaphore(0)

    def listener(tokens):
        return lambda event: (tokens.extend(event.tokens), event.finish and ended.release())

    for prompt, tokens in zip(prompts, found, strict=True):
        service.submit(Request(prompt, sampling), listener(tokens))
    for _ in prompts:
        ended.acquire()
    for prompt, tokens in zip(prompts, found, strict=True):
        assert decode(assistant.tokenizer, without(tokens, assistant.stops)) == "".join(
            assistant.answer(prompt, sampling)
        )
