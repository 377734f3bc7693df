"""Tool calls in the texts of model families."""

import json
from itertools import pairwise

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
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "llama": json.dumps({"name": "weather", "parameters": CALL}),
    "mistral": f"[{JSON}]",
    "mistral with its token": f"[TOOL_CALLS][{JSON}]",
    "mistral 3": f"[TOOL_CALLS]weather[ARGS]{json.dumps(CALL)}",
    "mistral small": f"[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{json.dumps(CALL)}",
    "harmony, in the role": f" to=functions.weather<|channel|>commentary json<|message|>{json.dumps(CALL)}<|call|>",
    "harmony, of thinking": f"<|channel|>analysis to=weather code<|message|>{json.dumps(CALL)}<|call|>",
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


@pytest.mark.parametrize("between", ["; ", "\n", "[TOOL_CALLS]"])
def test_calls_in_a_row_are_all_read(between):
    calls = [JSON, '{"name": "now", "arguments": {}}']
    rest, found = split_calls("[TOOL_CALLS]" * ("TOOL" in between) + between.join(calls), FUNCTIONS)
    assert rest == "" and [call.name for call in found] == ["weather", "now"]


def test_calls_in_thinking_are_no_calls():
    thinking = f"<think>I may say {TEXTS['hermes']} or not.</think>"
    assert split_calls(f"{thinking}{TEXTS['hermes']}", FUNCTIONS)[0] == thinking
    assert split_calls(f"{thinking}Good day.", FUNCTIONS) == (f"{thinking}Good day.", [])


def test_a_parameter_may_hold_the_tag_that_ends_it():
    text = "<tool_call><function=weather><parameter=city>a</parameter> b</parameter></function></tool_call>"
    assert json.loads(split_calls(text, FUNCTIONS)[1][0].arguments) == {"city": "a</parameter> b"}


@pytest.mark.parametrize("text", [*TEXTS.values(), f"<think>x</think>{TEXTS['hermes']}", '{"a": 1}', "to go"])
def test_shown_text_only_grows_and_is_in_the_result(text):
    rest, calls = split_calls(text, FUNCTIONS)
    shown = [shown_before_calls(text[:end]) for end in range(len(text) + 1)]
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    assert (rest if calls else text).startswith(shown[-1])


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        '{"name": "weather", "arguments": {"days": NaN}}',
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
