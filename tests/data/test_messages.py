"""Contents, roles, weights and hostile rows of chats."""

import json

import numpy as np
import pytest

from jaxglue.data import limits
from jaxglue.data.encode import Encoder
from jaxglue.data.files import Row
from jaxglue.data.formats import read_row
from jaxglue.data.messages import read_chat

USER, ANSWER = {"role": "user", "content": "What is 1?"}, {"role": "assistant", "content": "It is 2."}
QWEN = """
{%- for message in messages %}
{%- if message.role in ['user', 'system', 'assistant'] %}
{{- '<|im_start|>' + message.role + '\n' + (message.content if message.content is string else '') + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.fixture
def trained(make_tokenizer):
    """Return the decoded trained parts of a row."""

    def parts(value, template="plain", format="messages", loss_on="assistant", source=None):
        tokenizer = make_tokenizer(template)
        tokenizer.chat_template = source or tokenizer.chat_template
        encoded = Encoder(tokenizer, format=format, loss_on=loss_on).encode([Row("data.jsonl:7", value)])
        edges = np.flatnonzero(np.diff(encoded.mask, prepend=0, append=0))
        return [tokenizer.decode(encoded.tokens[a:b]) for a, b in edges.reshape(-1, 2)]

    return parts


def chat(*messages):
    return {"messages": list(messages)}


def test_text_parts_are_joined(trained):
    parts = [{"type": "text", "text": "It is "}, "2", {"text": "."}]
    assert trained(chat(USER, {"role": "assistant", "content": parts})) == ["It is 2.<|im_end|>"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": "a"}], "the 'user' message has a part of type 'image_url': only text"),
        ([3], "part of type 'int'"),
        ([{"type": "text", "text": 3}], "a part of text whose 'text' is none"),
        (3, "the content of the 'user' message must be a string or a list of text parts, got int"),
        ({"a": 1}, "a list of text parts, got dict; write objects as JSON strings"),
        (True, "got bool"),
    ],
)
def test_contents_without_text_are_refused(trained, content, message):
    with pytest.raises(ValueError, match=f"data.jsonl:7: .*{message}"):
        trained(chat({"role": "user", "content": content}, ANSWER))


def test_roles_that_a_template_leaves_out_are_refused(trained):
    message = "leaves out message 1, of role 'developer'; it renders the roles system, user, assistant"
    with pytest.raises(ValueError, match=f"data.jsonl:7: the chat template {message}"):
        trained(chat({"role": "developer", "content": "Good"}, USER, ANSWER), source=QWEN)
    with pytest.raises(ValueError, match="unknown role 'asistant': the chat template renders the roles system, dev"):
        trained(chat(USER, {"role": "asistant", "content": "Good"}, ANSWER))


def test_a_content_that_is_elsewhere_by_chance_does_not_hide_a_dropped_one(trained):
    with pytest.raises(ValueError, match="leaves out message 1, of role 'tool'"):
        trained(chat({"role": "tool", "content": "is"}, USER, ANSWER), source=QWEN)


def test_contents_dropped_by_their_value_are_refused_in_any_row(trained):
    source = QWEN.replace("message.content is string", "'2' not in message.content")
    with pytest.raises(ValueError, match="leaves out message 2, of role 'assistant'"):
        trained(chat(USER, ANSWER), source=source)


def test_thinking_and_white_space_may_be_dropped(trained):
    source = QWEN.replace("message.content if", "message.content.split('</think>')[-1].strip() if")
    thinking = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nIt is 2. "}
    assert trained(chat(USER, thinking), source=source) == ["It is 2.<|im_end|>"]


@pytest.mark.parametrize("flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": "false"}])
@pytest.mark.parametrize("template", ["plain", "marked", "thinking", "closing"])
def test_messages_with_weight_0_are_not_trained_on(trained, template, flag):
    other = {"role": "assistant", "content": "Good."}
    ends = {"thinking": "<think></think>Good.<|im_end|>", "closing": "Good.<|endoftext|>"}
    first_off = chat(USER, {**ANSWER, **flag}, USER, {**other, "weight": 1})
    assert trained(first_off, template) == [ends.get(template, "Good.<|im_end|>")]
    assert trained(chat(USER, ANSWER, USER, {**other, **flag}), template) == ["It is 2.<|im_end|>"]
    assert trained(chat(USER, {**ANSWER, **flag}), template) == []


def test_weights_hold_with_loss_on_all(trained):
    row = chat(USER, {**ANSWER, "weight": 0}, USER, ANSWER)
    before, after = trained(row, loss_on="all")
    assert before.endswith("assistant\n") and after.startswith("\n<|im_start|>user")


def test_rows_with_weight_0_are_not_trained_on(trained):
    assert trained({**chat(USER, ANSWER), "train": False}) == []
    assert trained({"prompt": "a", "completion": "b", "weight": "0"}, format="prompt_completion") == []


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({**ANSWER, "weight": 0.5}, "message 3: 'weight' must be 0, 1, true or false, got '0.5'"),
        ({**ANSWER, "train": "yes"}, "message 3: 'train' must be 0, 1, true or false, got 'yes'"),
        ({**ANSWER, "train_detail": [{"begin_offset": 0}]}, "message 3: 'train_detail' is not supported"),
        ({**USER, "train": True}, "only an assistant's message can have a weight"),
        (
            {**ANSWER, "reasoning_content": 1},
            "message 3: the 'reasoning_content' of the .* must be a string, got int",
        ),
        ({**USER, "value": "another"}, "message 3: the 'user' message has both 'content' and 'value': remove one"),
    ],
)
def test_other_messages_are_refused(trained, message, error):
    with pytest.raises(ValueError, match=f"data.jsonl:7: {error}"):
        trained(chat(USER, ANSWER, message, ANSWER))


@pytest.mark.parametrize("format", ["messages", "conversations", "question_answer", "prompt_completion"])
def test_the_system_text_of_a_row_begins_its_chat(trained, format):
    row = {
        **{"messages": json.dumps([USER, ANSWER]), "conversations": [USER, ANSWER]},
        **{"question": "a", "answer": "b", "prompt": [USER], "completion": [ANSWER]},
    }
    (whole,) = trained({**row, "system": "Be brief."}, format=format, loss_on="all")
    assert whole.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    assert trained({**row, "system": ""}, format=format) == trained(row, format=format)
    with pytest.raises(ValueError, match="'chat_template_kwargs' is not read"):
        trained({**row, "chat_template_kwargs": {"enable_thinking": False}}, format=format)


def test_a_system_text_needs_a_chat(trained):
    with pytest.raises(ValueError, match="'system' has a text, and the prompt is no chat: write the row as 'messages'"):
        trained({"prompt": "a", "completion": "b", "system": "Be brief."}, format="prompt_completion")


def test_a_function_call_is_a_tool_call(trained):
    call = {"role": "assistant", "content": "It is", "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    parts = trained(chat(USER, call, {"role": "function", "name": "add", "content": "2"}, ANSWER))
    assert parts[0] == 'It is<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'


@pytest.mark.parametrize("format", ["question_answer", "alpaca_chat"])
def test_exchanges_are_chats(trained, format):
    row = {
        "question": "What is 1?",
        "answer": "It is 2.",
        "instruction": "What",
        "input": "is 1?",
        "output": "It is 2.",
    }
    assert trained(row, format=format) == ["It is 2.<|im_end|>"]


def test_alpaca_rows_follow_the_alpaca_prompt(trained):
    row = {"instruction": "Add.", "input": "1", "output": "2"}
    (whole,) = trained(row, format="alpaca", loss_on="all")
    assert whole == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1\n\n"
        "### Response:\n2<|im_end|>"
    )
    assert "Input" not in trained({**row, "input": ""}, format="alpaca", loss_on="all")[0]
    assert trained(row, format="alpaca") == ["2<|im_end|>"]
    with pytest.raises(ValueError, match="the Alpaca format has no 'history'"):
        trained({**row, "history": [["a", "b"]]}, format="alpaca")


def test_only_the_completion_of_message_lists_is_trained_on(trained):
    row = {"prompt": [USER, ANSWER, USER], "completion": [{"role": "assistant", "content": "Good."}]}
    assert trained(row, format="prompt_completion") == ["Good.<|im_end|>"]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the conversation: RecursionError"),
        ("{{ 1 // 0 }}", "refuses the conversation: ZeroDivisionError"),
        ("{{ 'a' * 100000000000000 }}", "refuses the conversation: MemoryError"),
        ("{{ messages[0].content[0:1] * 100000000 }}", "renders 100,000,000 characters"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 2 s of CPU"),
    ],
)
def test_templates_that_run_away_are_refused(trained, monkeypatch, source, error):
    monkeypatch.setattr(limits, "SECONDS", 2)
    with pytest.raises(ValueError, match=f"data.jsonl:7: the chat template .*{error}"):
        trained(chat(USER, ANSWER), source=source, loss_on="all")


def test_half_surrogates_are_refused(trained):
    call = {"function": {"name": "f", "arguments": json.dumps({"a": "\ud800"})}}
    for message in ({**ANSWER, "content": "\ud800"}, {"role": "assistant", "tool_calls": [call]}):
        with pytest.raises(ValueError, match=r"data.jsonl:7: a text holds half of a surrogate pair: '\\ud800'"):
            trained(chat(USER, message))


@pytest.mark.parametrize("value", [0, False, [], {}])
def test_false_values_are_not_taken_for_absent_ones(value):
    kind = type(value).__name__
    with pytest.raises(ValueError, match=f"'input' must be a string, got {kind}"):
        read_row({"instruction": "a", "input": value, "output": "b"}, "alpaca")
    with pytest.raises(ValueError, match=f"'system' must be a string, got {kind}"):
        read_row({"question": "a", "answer": "b", "system": value}, "question_answer")
    if value != []:
        with pytest.raises(ValueError, match=f"'tools' must be a list, got {kind}"):
            read_chat([USER, ANSWER], value, "messages")
        with pytest.raises(ValueError, match=f"'tool_calls' must be a list, got {kind}"):
            called = {"role": "assistant", "content": "a", "tool_calls": value, "function_call": {"name": "f"}}
            read_chat([USER, called], None, "messages")
    if value != {}:
        with pytest.raises(ValueError, match="arguments of a tool call must be an object, got"):
            read_chat([USER, _called({"name": "f", "arguments": value})], None, "messages")


def _called(function):
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def test_nulls_that_arrow_fills_into_tools_are_left_out():
    tool = {"name": "wx", "parameters": {"properties": {"city": {"type": "string"}, "zone": None}}}
    row = [USER, _called({"name": "wx", "arguments": {"city": "Rome", "zone": None}})]
    chat = read_chat(row, [tool], "messages")
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert chat.tools == [{"name": "wx", "parameters": {"properties": {"city": {"type": "string"}}}}]
    text = read_chat([USER, _called({"name": "wx", "arguments": '{"zone": null}'})], None, "messages")
    assert text.messages[1]["tool_calls"][0]["function"]["arguments"] == {"zone": None}  # no column of Arrow's


def test_a_function_call_may_be_a_list_of_calls():
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(calls)}]
    chat = read_chat(turns, "[]", "conversations")
    assert [call["function"] for call in chat.messages[1]["tool_calls"]] == calls
    with pytest.raises(ValueError, match="a tool call needs a function"):
        read_chat([turns[0], {"from": "function_call", "value": "[]"}], None, "conversations")
