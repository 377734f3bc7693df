"""Loss masks with a GPT-OSS template: channels, reasoning only in the last turn, three end-of-turn tokens."""

import numpy as np
import pytest

from jaxglue.data.encode import Encoder
from jaxglue.data.files import Row
from jaxglue.generation.prompts import encode_prompt
from jaxglue.hf.serving import stop_tokens
from jaxglue.text.stream import stream_text

SPECIAL = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
TEMPLATE = """
{%- macro part(header, content, end) -%}
{{ '<|start|>' + header + '<|message|>' + content + end }}
{%- endmacro -%}
{{- part('system', 'Valid channels: analysis, commentary, final.', '<|end|>') }}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.thinking and not (messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | list) %}
{{- part('assistant<|channel|>analysis', message.thinking, '<|end|>') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- part('assistant to=functions.' + call.name + '<|channel|>commentary json', call.arguments | tojson, '<|call|>') }}
{%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}
{%- if message.thinking %}{{ part('assistant<|channel|>analysis', message.thinking, '<|end|>') }}{% endif %}
{{- part('assistant<|channel|>final', message.content, '<|return|>') }}
{%- elif message.role == 'assistant' %}{{ part('assistant<|channel|>final', message.content, '<|end|>') }}
{%- elif message.role == 'tool' %}
{{- part('functions.add to=assistant<|channel|>commentary', message.content, '<|end|>') }}
{%- else %}{{ part(message.role, message.content, '<|end|>') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
USER = {"role": "user", "content": "What is 1?"}
ANSWER = {"role": "assistant", "content": "It is 2.", "thinking": "question"}
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
FINAL = "<|channel|>final<|message|>It is 2."
ANALYSIS = "<|channel|>analysis<|message|>question<|end|><|start|>assistant"


@pytest.fixture
def tokenizer(make_tokenizer):
    tokenizer = make_tokenizer(None, eos_token="<|return|>", extra_special_tokens=SPECIAL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def trained(tokenizer, messages):
    """Return the conversation's text and its trained parts."""
    encoder = Encoder(tokenizer, format="messages", loss_on="assistant")
    encoded = encoder.encode([Row("data.jsonl:7", {"messages": messages})])
    edges = np.flatnonzero(np.diff(encoded.mask, prepend=0, append=0))
    return tokenizer.decode(encoded.tokens), [tokenizer.decode(encoded.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


def test_last_turn_has_both_channels_and_ends_with_return(tokenizer):
    text, parts = trained(tokenizer, [USER, ANSWER])
    assert parts == [f"{ANALYSIS}{FINAL}<|return|>"]
    assert text.endswith(f"<|start|>assistant{parts[0]}")


def test_earlier_turns_end_with_end_without_reasoning(tokenizer):
    _, parts = trained(tokenizer, [USER, ANSWER, USER, ANSWER])
    assert parts == [f"{FINAL}<|end|>", f"{ANALYSIS}{FINAL}<|return|>"]


def test_final_user_message_is_not_trained_on(tokenizer):
    _, parts = trained(tokenizer, [USER, ANSWER, USER])
    assert parts == [f"{FINAL}<|end|>"]


def test_a_tool_call_ends_with_call(tokenizer):
    _, parts = trained(tokenizer, [USER, CALL, {"role": "tool", "content": "2"}, ANSWER])
    call = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    assert parts == [call, f"{ANALYSIS}{FINAL}<|return|>"]


def test_reasoning_before_an_answered_tool_call_is_dropped(tokenizer):
    messages = [USER, {**CALL, "thinking": "question"}, {"role": "tool", "content": "2"}, ANSWER]
    text, parts = trained(tokenizer, messages)
    call = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    assert parts == [call, f"{ANALYSIS}{FINAL}<|return|>"] and text.count("question") == 1
    quoting = [*messages[:2], {"role": "tool", "content": "<|call|>"}, ANSWER]
    assert trained(tokenizer, quoting)[1] == parts


def test_generation_shows_channels_and_stops_at_return(tokenizer):
    assert tokenizer.decode(encode_prompt(tokenizer, "What is 1?")).endswith("What is 1?<|end|><|start|>assistant")
    answer = tokenizer.encode(f"{ANALYSIS}{FINAL}")
    assert "".join(stream_text(tokenizer, answer)) == f"{ANALYSIS}{FINAL}"
    assert tokenizer.convert_tokens_to_ids("<|return|>") in stop_tokens(tokenizer)
