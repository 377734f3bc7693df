"""Grammars of answers that call a tool, in the format that a model's chat template writes calls in."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxglue.text.lark import Rules, quoted
from jaxglue.text.tool_calls import (
    CALL,
    CALL_END,
    CALLS,
    GEMMA,
    JSON_CALL,
    JSON_CALL_END,
    KIMI,
    NAME_END,
    PYTHON,
    PYTHON_END,
    SECTION,
    SECTION_END,
)
from jaxglue.text.tool_values import as_object

_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""White space between parts of JSON, of which a model could otherwise write any number."""


class _Format(NamedTuple):
    """Describes how a family writes calls."""

    call: Callable[[str, Any], str]
    """Rule's body of a call, from the function's name and its schema."""
    begin: str = ""
    between: str = ""
    end: str = ""
    several: bool = True


def call_grammar(tokenizer: PreTrainedTokenizerBase, schemas: Mapping[str, dict[str, Any]], *, several: bool) -> str:
    """Return the grammar, in Lark's notation as llguidance reads it, of calls of some functions.

    Args:
        tokenizer: of the model, whose template shows the format: one of those that `split_calls` reads, with JSON alone
            (Llama) where it shows none.
        schemas: of the functions' arguments, by name; at least one.
        several: allow further calls.
    """
    rules = _Rules(tokenizer)
    form = _format(str(tokenizer.get_chat_template(tools=[])), rules)
    calls = [rules.add(form.call(name, _closed(schema))) for name, schema in schemas.items()]
    call = f"({' | '.join(calls)})"
    parts = [form.begin, call, form.end]
    if several and form.several:
        parts.insert(2, f"({form.between} {call})*")
    return "\n".join([f"start: {' '.join(parts)}", *rules.lines])


class _Rules(Rules):
    """Rules of calls."""

    def json(self, schema: dict[str, Any]) -> str:
        """Return the body of JSON of a schema."""
        return self.add("%json " + json.dumps({"x-guidance": _SPACING, **schema}))

    def parameters(self, schema: dict[str, Any], before: Callable[[str], str], end: str) -> str:
        """Return the body of parameters one after the other, in text if they are strings, with tags around each."""
        properties, required = _properties(schema)
        found = {name: f"{self.text(before(name))} {self.until_end(own, end)}" for name, own in properties.items()}
        return " ".join(f"({body}){'' if name in required else '?'}" for name, body in found.items())

    def until_end(self, schema: dict[str, Any], end: str) -> str:
        """Return the body of a value and its end: text if it is a string, else JSON."""
        if schema.get("type") != "string":
            return f"{self.json(schema)} {self.text(end)}"
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if not choices:
            return self.until(end)
        return f"({' | '.join(self.text(str(choice)) for choice in choices)}) {self.text(end)}"

    def pairs(self, schema: dict[str, Any], sign: str, comma: str, value: Callable[[dict[str, Any]], str]) -> str:
        """Return the body of names and values between commas, first the required ones."""
        properties, required = _properties(schema)
        bodies = {name: self.add(f"{self.text(name + sign)} {value(own)}") for name, own in properties.items()}
        first = [body for name, body in bodies.items() if name in required]
        others = [body for name, body in bodies.items() if name not in required]
        further = [f"({self.text(comma)} {body})?" for body in others]
        if first:
            return " ".join([f" {self.text(comma)} ".join(first), *further])
        options = [" ".join([body, *further[index + 1 :]]) for index, body in enumerate(others)]
        return f"({' | '.join(options)})?" if options else ""

    def quoted(self, schema: dict[str, Any], quote: str) -> str:
        """Return the body of a value in which strings, also of a list, stand between quotes of their own."""
        items = as_object(schema.get("items"))
        if schema.get("type") == "array" and items.get("type") == "string":
            item = self.add(self.quoted(items, quote))
            return f'"[" ({item} ("," {item})*)? "]"'
        text = schema.get("type") == "string"
        return f"{self.text(quote)} {self.until_end(schema, quote)}" if text else self.json(schema)


def _properties(schema: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """Return the schemas of an object's properties, each with the definitions that it may name, and the required."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required")
    found = {name: as_object(own) for name, own in as_object(schema.get("properties")).items()}
    return {name: {**shared, **own} for name, own in found.items()}, required if isinstance(required, list) else []


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of arguments without others than those that it lists, if it is a list alone."""
    only_lists = schema.keys() <= {"type", "properties", "required", "title", "description", "$defs", "$schema"}
    return {"type": "object", **({"properties": {}, "additionalProperties": False} if only_lists else {}), **schema}


def _format(template: str, rules: _Rules) -> _Format:
    """Return the format that a template has the tokens or tags of."""
    text = rules.text

    def as_json(key: str, before: str = "", after: str = "") -> Callable[[str, Any], str]:
        def body(name: str, schema: Any) -> str:
            begin, end = f'{before}{{"name": {quoted(name)}, "{key}": ', f"}}{after}"
            return f"{text(begin)} {rules.json(schema)} {text(end)}"

        return body

    def tagged(before: str, parameter: Callable[[str], str], parameter_end: str, after: str) -> _Format:
        def body(name: str, schema: Any) -> str:
            return f"{text(before.format(name))} {rules.parameters(schema, parameter, parameter_end)} {text(after)}"

        return _Format(body, between=text("\n"))

    def named(before: str, after: str = "") -> Callable[[str, Any], str]:
        return lambda name, schema: f"{text(before.format(name))} {rules.json(schema)} {text(after)}"

    if "<arg_key>" in template:
        line = "" if "</arg_key><arg_value>" in template else "\n"
        key = f"<arg_key>{{}}</arg_key>{line}<arg_value>".format
        return tagged(f"<tool_call>{{}}{line}", key, f"</arg_value>{line}", "</tool_call>")
    if "<function=" in template:
        after = "</function>\n</tool_call>"
        return tagged("<tool_call>\n<function={}>\n", "<parameter={}>\n".format, "\n</parameter>\n", after)
    if "<tool_call>" in template:
        return _Format(as_json("arguments", "<tool_call>\n", "\n</tool_call>"), between=text("\n"))
    if "<|channel|>" in template:
        return _Format(named("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"), several=False)
    if SECTION in template:
        fence, line = (
            (("function" + NAME_END + "{}\n```json\n", "\n```"), "\n")
            if "```json" in template
            else (("{}" + NAME_END, ""), "")
        )
        return _Format(named(CALL + fence[0], fence[1] + CALL_END), text(SECTION), text(line), text(SECTION_END))
    if KIMI[0] in template:
        begin, end, call, middle, call_end = KIMI
        return _Format(named(f"{call}functions.{{}}:0{middle}", call_end), text(begin), end=text(end))
    for begin, end, quote in GEMMA:
        if begin in template:

            def called(name: str, schema: Any, begin: str = begin, end: str = end, quote: str = quote) -> str:
                pairs = rules.pairs(schema, ":", ",", lambda own: rules.quoted(own, quote))
                return f"{text(f'{begin}call:{name}{{')} {pairs} {text('}' + end)}"

            return _Format(called)
    if PYTHON in template:

        def in_python(name: str, schema: Any) -> str:
            return f"{text(f'{name}(')} {rules.pairs(schema, '=', ', ', rules.json)} {text(')')}"

        return _Format(in_python, text(f"{PYTHON}\n"), text("\n"), text(f"\n{PYTHON_END}"))
    if JSON_CALL_END in template:
        return _Format(as_json("arguments", JSON_CALL, JSON_CALL_END))
    if JSON_CALL in template:
        return _Format(as_json("arguments"), text(f"{JSON_CALL}["), text(", "), text("]"))
    if "[ARGS]" in template:
        number = f"{text('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/" if "[CALL_ID]" in template else ""

        def numbered(name: str, schema: Any) -> str:
            return f"{text(CALLS + name)} {number} {text('[ARGS]')} {rules.json(schema)}"

        return _Format(numbered)
    if CALLS in template:
        return _Format(as_json("arguments"), begin=text(f"{CALLS}["), between=text(", "), end=text("]"))
    return _Format(as_json("parameters" if '"parameters"' in template else "arguments"), between=text("; "))
