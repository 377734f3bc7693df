"""Tool calls in the texts of model families."""

import json

import pytest

from jaxglue.generation.tool_calls import parameters_of, shown_before_calls, split_calls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
FUNCTIONS = parameters_of(TOOLS)
CALL = {"city": "Ulm", "days": 2}
JSON = json.dumps({"name": "weather", "arguments": CALL})
TEXTS = {
    "hermes": f"<tool_call>\n{JSON}\n</tool_call>",
    "hermes without its end": f"<tool_call>\n{JSON}\n",
    "coder": "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama": json.dumps({"name": "weather", "parameters": CALL}),
    "mistral": f"[{JSON}]",
    "mistral with its token": f"[TOOL_CALLS][{JSON}]",
    "openai": json.dumps({"name": "weather", "arguments": json.dumps(CALL)}),
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    + json.dumps(CALL)
    + "<|call|>",
}


@pytest.mark.parametrize("family", TEXTS)
def test_calls_are_read_in_the_format_of_each_family(family):
    rest, ((name, arguments),) = split_calls(TEXTS[family], FUNCTIONS)
    assert (rest, name, json.loads(arguments)) == ("", "weather", CALL)


def test_several_calls_and_text_beside_them():
    now = '<tool_call>{"name": "now"}</tool_call>'
    rest, calls = split_calls(f"I look.\n{TEXTS['hermes']}\n{now}", FUNCTIONS)
    assert rest == "I look.\n" and [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", CALL),
        ("now", {}),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        '{"name": "unknown", "arguments": {}}',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        "<tool_call>{broken</tool_call>",
        "[1, 2]",
        "[" * 100_000,
        "<tool_call>" + "<function=" * 1000,
    ],
)
def test_text_that_is_no_call_of_an_offered_tool_stays_text(text):
    assert split_calls(text, FUNCTIONS) == (text, [])


def test_text_is_held_back_from_where_a_call_may_begin():
    text = f"I look.\n{TEXTS['hermes']}"
    shown = [shown_before_calls(text[:end]) for end in range(len(text) + 1)]
    assert shown[5] == text[:5] and shown[9] == shown[-1] == "I look.\n"
    assert shown_before_calls("a < b") == "a < b"
    assert shown_before_calls(TEXTS["llama"][:9]) == shown_before_calls(" [") == ""
    analysis = "<|channel|>analysis<|message|>Hm<|end|>"
    assert shown_before_calls(analysis) == analysis
    assert shown_before_calls(f"{analysis}<|start|>assistant{TEXTS['harmony']}") == analysis


@pytest.mark.parametrize("tools", [None, ["x"], [{"function": {"name": 3}}], [{"function": 3}]])
def test_odd_tools_offer_no_function(tools):
    assert parameters_of(tools) == {}
