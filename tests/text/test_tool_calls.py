"""Tool calls in the texts of model families."""

import json
from itertools import pairwise

import pytest

from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.generation.grammar import Grammars
from jaxglue.text.thinking import Thought
from jaxglue.text.tool_calls import call_grammar, format_of, parameters_of, schemas_of, shown_before_calls, split_calls

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
FUNCTIONS = parameters_of(schemas_of(TOOLS))
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
    "coder without its beginning": "<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama, in a tag": f"<function=weather>{json.dumps(CALL)}</function>",
    "llama, in Python": "[weather(city='Ulm', days=2)]",
    "llama, a built-in tool": '<|python_tag|>weather.call(city="Ulm", days=2)',
    "llama, after the token of tools": "<|python_tag|>" + json.dumps({"name": "weather", "parameters": CALL}),
    "glm 4": f"weather\n{json.dumps(CALL)}",
    "glm 4.7": "<tool_call>weather<arg_key>city</arg_key><arg_value>Ulm</arg_value><arg_key>days</arg_key>"
    "<arg_value>2</arg_value></tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{json.dumps(CALL)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek 3.1": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{json.dumps(CALL)}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{json.dumps(CALL)}<|tool_call_end|><|tool_calls_section_end|>",
    "gemma 4": '<|tool_call>call:weather{city:<|"|>Ulm<|"|>,days:2}<tool_call|>',
    "functiongemma": "<start_function_call>call:weather{city:<escape>Ulm<escape>,days:2}<end_function_call>",
    "granite": f"<|tool_call|>[{JSON}]",
    "phi": f"<|tool_call|>{JSON}<|/tool_call|>",
    "phi without its tokens": f"functools[{JSON}]",
    "olmo": "<function_calls>\nweather(city='Ulm', days=2)\n</function_calls>",
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


def test_several_calls_are_read_where_a_format_puts_them_together():
    def section(*calls):
        return f"So.<｜tool▁calls▁begin｜>{'\n'.join(calls)}<｜tool▁calls▁end｜>"

    one, two = ("function<｜tool▁sep｜>{}\n```json\n{}\n```".format(*call) for call in (("weather", CALL), ("now", {})))
    for text, rest in [
        (
            section(*(f"<｜tool▁call▁begin｜>{c.replace(chr(39), chr(34))}<｜tool▁call▁end｜>" for c in (one, two))),
            "So.",
        ),
        (TEXTS["gemma 4"] + "<|tool_call>call:now{}<tool_call|>", ""),
        ("<function_calls>\nweather(city='Ulm', days=2)\nnow()\n</function_calls>", ""),
        ("[weather(city='Ulm', days=2), now()]", ""),
        ("[weather('Ulm', 2), now()]", ""),
    ]:
        found, calls = split_calls(text, FUNCTIONS)
        assert (found, [(call.name, json.loads(call.arguments)) for call in calls]) == (
            rest,
            [("weather", CALL), ("now", {})],
        )


def test_values_of_every_kind_are_read_from_gemmas_objects_and_from_python():
    value = {"a": ['x "y" {z: 1}, b:', True, None, -1.5e3], "b": {"c": "ü\n", "d": []}}
    gemma = '{a:[<|"|>x "y" {z: 1}, b:<|"|>,true,None,-1.5e3],b:{c:<|"|>ü\n<|"|>,d:[]}}'
    python = "weather(a=['x \"y\" {z: 1}, b:', true, null, -1.5e3], b={'c': 'ü\\n', 'd': []})"
    for text in (f"<|tool_call>call:weather{gemma}<tool_call|>", f"<function_calls>{python}</function_calls>"):
        _, ((_, arguments),) = split_calls(text, FUNCTIONS)
        assert json.loads(arguments) == value


@pytest.mark.parametrize("text", [*TEXTS.values(), f"<think>x</think>{TEXTS['hermes']}", '{"a": 1}', "to go"])
def test_shown_text_only_grows_and_is_in_the_result(text):
    rest, calls = split_calls(text, FUNCTIONS)
    shown = [shown_before_calls(text[:end], FUNCTIONS) for end in range(len(text) + 1)]
    for end, before in enumerate(shown[:-1], start=1):
        assert shown_before_calls(text[:end], FUNCTIONS, known=len(before)) == shown[end]
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
        "[weather(city=other)]",
        "[weather(1, 2, 3)]",
        "[weather(city=1e999)]",
        "[weather(**x)]",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n{broken",
        "<|tool_call>call:weather{city:Ulm}<tool_call|>",
        "<|tool_call|>weather",
        "weather(city='Ulm')",
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
    assert shown_before_calls("now", ["now"]) == shown_before_calls("now\n{", ["now"]) == ""
    assert shown_before_calls("now or", ["now"]) == "now or"
    assert shown_before_calls(TEXTS["llama"][:9]) == shown_before_calls(" [") == ""
    analysis = "<|channel|>analysis<|message|>Hm<|end|>"
    assert shown_before_calls(analysis) == analysis
    assert shown_before_calls(f"{analysis}<|start|>assistant{TEXTS['harmony']}") == analysis


@pytest.mark.parametrize("tools", [None, ["x"], [{"function": {"name": 3}}], [{"function": 3}]])
def test_odd_tools_offer_no_function(tools):
    assert schemas_of(tools) == {}


SPECIALS = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"] + [
    f"<|{name}|>" for name in ("channel", "message", "constrain", "start", "end", "call")
]
SPECIALS += [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
]
SPECIALS += ["<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call|>"]
TEMPLATES = {
    "hermes": "<tool_call>",
    "coder": "<tool_call><function=",
    "glm": "<tool_call><arg_key>",
    "llama": '"parameters"',
    "mistral with its token": "[TOOL_CALLS]",
    "mistral 3": "[TOOL_CALLS][ARGS]",
    "mistral small": "[TOOL_CALLS][CALL_ID][ARGS]",
    "harmony": "<|channel|>",
    "glm 4.7": "<tool_call></arg_key><arg_value><arg_key>",
    "deepseek": "<｜tool▁calls▁begin｜>```json",
    "deepseek 3.1": "<｜tool▁calls▁begin｜>",
    "kimi": "<|tool_calls_section_begin|>",
    "gemma 4": "<|tool_call>",
    "functiongemma": "<start_function_call>",
    "granite": "<|tool_call|>",
    "phi": "<|tool_call|><|/tool_call|>",
    "olmo": "<function_calls>",
}


TAGS = [f"<{slash}{name}>" for name in ("tool_call", "arg_key", "arg_value", "think") for slash in ("", "/")]


@pytest.fixture(scope="module", params=["text", "tokens"])
def special(quickstart, request):
    """(tokenizer, what makes grammars of it)."""
    pytest.importorskip("llguidance")
    tokenizer = load_tokenizer(quickstart)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS})
    tokenizer.add_tokens(TAGS if request.param == "tokens" else [], special_tokens=False)
    stops = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|call|>")}
    return tokenizer, Grammars(tokenizer, len(tokenizer), stops)


@pytest.fixture
def rest_of(special, monkeypatch):
    """A function that returns the part of a text which a grammar refuses, and whether the answer may end before it."""
    tokenizer, grammars = special

    def rest(template, text, tools=TOOLS, *, several=True, thinks=Thought.POSSIBLE):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        grammar = call_grammar(tokenizer, schemas_of(tools), several=several)
        matcher = grammars.calls(grammar, thinks=thinks).start()
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return tokenizer.decode(tokens[matcher.take(tokens) :]), matcher.is_complete

    return rest


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_are_taken_in_the_format_of_each_family(rest_of, family):
    template, call = TEMPLATES[family], TEXTS[family].removesuffix("<|call|>").replace("'", '"')
    assert rest_of(template, call) == ("", True)
    assert rest_of(template, "No, I will not.") == ("No, I will not.", False)
    assert not rest_of(template, call.replace("weather", "wether"))[1]
    assert not rest_of(template, call.replace("2", '"two"'))[1]


def test_calls_have_no_other_arguments_than_the_listed_ones(rest_of):
    now, open_ = '{"name": "now", "arguments": {}}', {"name": "any", "parameters": {"additionalProperties": True}}
    assert rest_of("", now) == ("", True)
    assert not rest_of("", now.replace("{}", '{"zone": 1}'))[1]
    assert rest_of("", JSON) == ("", True) and not rest_of("", JSON.replace("days", "weeks"))[1]
    assert rest_of("", '{"name": "any", "arguments": {"zone": 1}}', [open_]) == ("", True)
    many = [{"name": f"f{i}"} for i in range(500)]
    assert rest_of("", '{"name": "f7", "arguments": {}}', many) == ("", True)


@pytest.mark.parametrize(
    ("family", "both"),
    [
        ("gemma 4", "{0}{0}"),
        ("hermes", "{0}\n{0}"),
        ("llama", "{0}; {0}"),
        ("mistral 3", "{0}{0}"),
        ("mistral with its token", "[TOOL_CALLS][{1}, {1}]"),
    ],
)
def test_further_calls_are_taken_where_they_may_come(rest_of, family, both):
    alone = TEXTS["mistral"].removeprefix("[").removesuffix("]")
    text = both.format(TEXTS[family], alone)
    assert rest_of(TEMPLATES[family], text) == ("", True)
    assert len(split_calls(text, parameters_of(schemas_of(TOOLS)))[1]) == 2
    assert rest_of(TEMPLATES[family], text, several=False)[0]


def test_thinking_that_has_begun_comes_before_calls(rest_of):
    thought = "Ulm < Bonn.\n<tool_call> or not?\n</think>\n\n"
    assert rest_of("<tool_call>", thought + TEXTS["hermes"], thinks=Thought.BEGUN) == ("", True)
    assert not rest_of("<tool_call>", thought + "No.", thinks=Thought.BEGUN)[1]
    analysis = "<|channel|>analysis<|message|>Ulm?<|end|><|start|>assistant"
    assert rest_of("<|channel|>", analysis + TEXTS["harmony"].removesuffix("<|call|>")) == ("", True)


@pytest.mark.parametrize(
    ("family", "begin", "end", "quote", "sign"),
    [
        ("gemma 4", "<|tool_call>call:heat{", "}<tool_call|>", '<|"|>', ":"),
        ("olmo", "<function_calls>\nheat(", ")\n</function_calls>", '"', "="),
    ],
)
def test_named_values_follow_their_schemas(rest_of, family, begin, end, quote, sign):
    string = {"type": "string"}
    properties = {
        "unit": {**string, "enum": ["C", "F"]},
        "at": {"type": "integer"},
        "notes": {"type": "array", "items": string},
    }

    def fits(required, **given):
        tools = [{"name": "heat", "parameters": {"type": "object", "properties": properties, "required": required}}]
        text = begin + (", " if sign == "=" else ",").join(f"{k}{sign}{v}" for k, v in given.items()) + end
        taken = rest_of(TEMPLATES[family], text.replace("'", quote), tools) == ("", True)
        assert not taken or split_calls(text.replace("'", quote), parameters_of(schemas_of(tools)))[1]
        return taken

    assert fits(["at"], at=3, unit="'C'", notes="['a','<b>']") and fits(["at"], at=3, notes="[]") and fits([])
    assert fits([], unit="'F'") and fits([], notes="['a']") and fits([], unit="'C'", at=1)
    assert not fits(["at"], unit="'C'") and not fits([], unit="'K'") and not fits([], at="'x'") and not fits([], by=1)


def test_parameters_in_tags_follow_their_schemas(rest_of):
    properties = {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "at": {"$ref": "#/$defs/at"},
        "note": {"type": "string"},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["unit", "at"],
        "$defs": {"at": {"type": "integer"}},
    }
    tools = [{"type": "function", "function": {"name": "heat", "parameters": schema}}]

    def call(*pairs):
        parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in pairs)
        return f"<tool_call>\n<function=heat>\n{parameters}</function>\n</tool_call>"

    for pairs, fits in [
        ([("unit", "C"), ("at", "3")], True),
        ([("unit", "F"), ("at", "3"), ("note", "a < b\n</b>")], True),
        ([("unit", "K"), ("at", "3")], False),
        ([("unit", "C"), ("at", "three")], False),
        ([("unit", "C")], False),
    ]:
        assert rest_of(TEMPLATES["coder"], call(*pairs), tools)[1] == fits


def xml(key: str, value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def arguments_of(text: str, **properties) -> dict:
    functions = parameters_of(schemas_of([{"name": "f", "parameters": {"properties": properties}}]))
    _, ((_, arguments),) = split_calls(text, functions)
    return json.loads(arguments)


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "string"}, {"90210": "90210", "null": "null", "True": "True", '{"k": 1}': '{"k": 1}'}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"00123": "00123", "true": "true", "null": None}),
        ({"type": ["string", "null"]}, {"1": "1", "None": None, "": ""}),
        ({"enum": ["1", "2"]}, {"1": "1", "null": "null"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"null": "null"}),
        ({"type": "boolean"}, {"False": False, "true": True}),
        ({"type": "integer"}, {"None": None, "": "", "3": 3}),
        ({"type": "array"}, {"['x', 'y']": ["x", "y"], "[1, null]": [1, None]}),
        ({"type": "object"}, {"{'a': True}": {"a": True}}),
        ({"type": "number"}, {"1e999": "1e999", "NaN": "NaN"}),
        ({}, {"True": True, "(1": "(1", "word": "word"}),
    ],
)
def test_a_parameter_in_tags_has_the_type_that_its_schema_says(schema, texts):
    for text, value in texts.items():
        for call in (
            xml("s", text),
            f"<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        ):
            assert arguments_of(call, s=schema) == {"s": value}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=f>\n<parameter=s>\nabc\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=s>\nabc\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n<parameter=s>\nb\n</parameter>\n</function>",
        "<tool_call>\n<function=f>\n<parameter=s/>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f/>\n</tool_call>",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
        '<tool_call>{"name": "f", "age": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"n": 1, "n": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>',
        '{"name": "f", "age": 3}',
        '{"name": "f"}',
        '[{"name": "f", "parameters": {}}, {"name": "f", "team": "b"}]',
        "<function_calls>f(s='a', s='b')</function_calls>",
        "<|tool_call>call:f{n:1,n:2}<tool_call|>",
        "<think>" + xml("s", "a"),
    ],
)
def test_a_call_of_which_a_part_is_not_read_is_text(text):
    functions = {"f": {"s": {"type": "string"}, "n": {"type": "integer"}}}
    assert split_calls(text, functions) == (text, [])


def test_arguments_that_are_null_are_none_and_breaks_of_lines_are_read():
    for text in ('{"name": "f", "arguments": null}', '{"name": "f", "arguments": ""}'):
        assert arguments_of(f"<tool_call>{text}</tool_call>") == {}
    assert arguments_of('<tool_call>{"name": "f", "arguments": {"s": "a\nb"}}</tool_call>') == {"s": "a\nb"}


def test_bare_calls_are_read_where_the_template_shows_no_marks():
    for text in ('{"name": "weather", "parameters": {}}', "weather\n{}", "[weather()]"):
        assert split_calls(text, FUNCTIONS, format_of("x"))[1]
        for family in ("hermes", "coder", "gemma 4", "olmo"):
            assert split_calls(text, FUNCTIONS, format_of(TEMPLATES[family])) == (text, [])
            assert shown_before_calls(text, FUNCTIONS, form=format_of(TEMPLATES[family])) == text


def test_thinking_ends_before_the_first_call():
    call = '<tool_call>{"name": "weather", "arguments": {"city": "a </think> b"}}</tool_call>'
    for thinking, opened in (("", False), ("", None), ("<think>x</think>", None), ("x</think>", True)):
        rest, ((_, arguments),) = split_calls(thinking + call, FUNCTIONS, opened=opened)
        assert (rest, json.loads(arguments)) == (thinking, {"city": "a </think> b"})
        shown = [shown_before_calls((thinking + call)[:end], FUNCTIONS, opened=opened) for end in range(len(call))]
        assert all((thinking + call).startswith(text) and "<tool" not in text for text in shown)
    assert split_calls(call.replace("</think>", ""), FUNCTIONS, opened=True)[1] == []
    assert split_calls(f"I may say {call} or not.</think>{TEXTS['hermes']}", FUNCTIONS, opened=True)[1] != []
