"""Tool calls as families' templates write them come back equal, whatever their arguments hold, or are text."""

import json

import hostile
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from jaxglue.text.tool_calls import format_of, parameters_of, schemas_of, shown_before_calls, split_calls

_JSON = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
_GEMMA = (
    "{%- macro value(v) -%}{%- if v is string -%}QUOTE{{ v }}QUOTE"
    "{%- elif v is boolean -%}{{ 'true' if v else 'false' }}"
    "{%- elif v is mapping -%}{{ '{' }}{%- for k, item in v.items() -%}QUOTE{{ k }}QUOTE:{{ value(item) }}"
    "{%- if not loop.last %},{% endif -%}{%- endfor -%}{{ '}' }}"
    "{%- elif v is sequence -%}[{%- for item in v -%}{{ value(item) }}"
    "{%- if not loop.last %},{% endif -%}{%- endfor -%}]"
    "{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}"
    "BEGINcall:{{ c.name }}{{ '{' }}{%- for k, v in c.arguments.items() -%}{{ k }}:{{ value(v) }}"
    "{%- if not loop.last %},{% endif -%}{%- endfor -%}{{ '}' }}END"
)
CALLS = {
    "hermes": f"<tool_call>\n{_JSON}\n</tool_call>",
    "coder": "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n"
    "{{ (v | tojson if v is mapping or (v is sequence and v is not string) else v | string) + '\n' }}</parameter>\n"
    "{% endfor %}</function>\n</tool_call>",
    "coder, by Python": "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}"
    "<parameter={{ k }}>\n{{ (v | string) + '\n' }}</parameter>\n{% endfor %}</function>\n</tool_call>",
    "glm": "<tool_call>{{ c.name }}\n{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
    "glm 4.7": "<tool_call>{{ c.name }}{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>",
    "llama": '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}',
    "glm 4": "{{ c.name }}\n{{ c.arguments | tojson }}",
    "mistral": f"[TOOL_CALLS][{_JSON}]",
    "mistral 3": "[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}",
    "mistral small": "[TOOL_CALLS]{{ c.name }}[CALL_ID]a1B2c3D4e[ARGS]{{ c.arguments | tojson }}",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
    "{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek 3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ c.name }}:0<|tool_call_argument_begin|>"
    "{{ c.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "gemma 4": _GEMMA.replace("QUOTE", '<|"|>').replace("BEGIN", "<|tool_call>").replace("END", "<tool_call|>"),
    "functiongemma": _GEMMA.replace("QUOTE", "<escape>")
    .replace("BEGIN", "<start_function_call>")
    .replace("END", "<end_function_call>"),
    "granite": f"<|tool_call|>[{_JSON}]",
    "phi": f"<|tool_call|>{_JSON}<|/tool_call|>",
    "olmo": "<function_calls>\n{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})\n</function_calls>",
    "harmony": "<|channel|>commentary to=functions.{{ c.name }} <|constrain|>json<|message|>{{ c.arguments | tojson }}",
}
"""A call `c` in the words of each family's template."""
_TAGS = ("coder", "coder, by Python", "glm", "glm 4.7", "gemma 4", "functiongemma")
"""Formats in which a text stands as it is: the whole of another call in it may read as text, never as another call."""
TYPES = {"s": "string", "n": "integer", "b": "boolean", "x": "number", "l": "array", "o": "object", "z": "null"}
TOOL = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in TYPES.items()}
        | {
            "both": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "chosen": {"$ref": "#/$defs/unit"},
            "maybe": {"type": ["integer", "null"]},
        },
        "$defs": {"unit": {"enum": ["1", "2"]}},
    },
}
FUNCTIONS = parameters_of(schemas_of([TOOL]))


def written(family: str, arguments: dict) -> str:
    template = "{% for m in messages %}{% set c = m.call %}" + CALLS[family] + "{% endfor %}"
    ((text,), _) = render_jinja_template([[{"call": {"name": "f", "arguments": arguments}}]], chat_template=template)
    return text


def read(family: str, text: str) -> tuple[str, list]:
    rest, calls = split_calls(text, FUNCTIONS, format_of(CALLS[family]), opened=False)
    return rest, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("family", CALLS)
def test_values_of_all_types_come_back(family):
    for arguments in (
        {},
        {"s": "Ulm", "n": -2, "b": True, "x": 2.5, "l": ["x", 1, None], "o": {"a": {"b": [False]}}, "z": None},
        {"both": "90210", "chosen": "1", "maybe": None},
        {"both": None, "b": False, "l": [], "o": {}, "maybe": 3},
        {"both": "true", "s": "None", "n": 10**20},
    ):
        assert read(family, written(family, arguments)) == ("", [("f", arguments)])


@pytest.mark.parametrize("family", CALLS)
def test_hostile_texts_come_back(family):
    for value in hostile.TEXTS:
        if family in _TAGS and value in ("<escape>", '<|"|>'):
            continue  # the format's own quotes
        for arguments in ({"s": value}, {"n": 1, "s": f"a {value} b", "b": True}, {"s": f"\n {value}\n\n"}):
            assert read(family, written(family, arguments)) == ("", [("f", arguments)]), arguments


@pytest.mark.parametrize("family", CALLS)
def test_mixtures_come_back_or_are_text(family):
    equal = 0
    for index, value in enumerate(hostile.mixtures(7, 60)):
        arguments = {"s": value} if index % 2 else {"s": value, "n": 3}
        text = written(family, arguments)
        result = read(family, text)
        assert result in [("", [("f", arguments)]), (text, [])], arguments
        equal += result[1] != []
    assert equal == 60 or (family in _TAGS and equal > 50)


@pytest.mark.parametrize("family", CALLS)
def test_calls_that_are_cut_are_text(family):
    text = written(family, {"s": "a\nb", "n": 12, "l": ["x"]})
    whole = [end for end in range(len(text)) if read(family, text[:end])[1]]
    for end in whole:  # nothing but the marks behind its arguments is missing
        assert read(family, text[:end])[1] == [("f", {"s": "a\nb", "n": 12, "l": ["x"]})]
    for end in set(range(len(text))) - {*whole}:
        assert read(family, text[:end]) == (text[:end], [])


@pytest.mark.parametrize("family", CALLS)
def test_no_part_of_a_call_is_shown_whatever_it_holds(family):
    form = format_of(CALLS[family])
    for value in hostile.MARKUP:
        text = "So.\n" * (family not in ("llama", "glm 4")) + written(family, {"s": f"a {value} b"})
        rest, calls = split_calls(text, FUNCTIONS, form, opened=False)
        assert calls and all(
            rest.startswith(shown_before_calls(text[:end], FUNCTIONS, form=form, opened=False))
            for end in range(0, len(text) + 1, 7)
        )
