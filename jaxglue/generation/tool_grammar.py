"""Grammars of answers that call a tool, in the format that a model's chat template writes calls in."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxglue.generation.grammar import Rules, quoted
from jaxglue.generation.tool_calls import CALLS, as_object

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
        tokenizer: of the model, whose template shows the format: tags with JSON (Hermes, Qwen), with parameters
            (Qwen3-Coder) or with keys and values (GLM), messages to functions (GPT-OSS), calls after a special token
            (Mistral); otherwise JSON alone (Llama).
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
        shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        required, found = schema.get("required"), []
        for name, own in as_object(schema.get("properties")).items():
            value = self._value(as_object(own), shared, end)
            optional = "" if isinstance(required, list) and name in required else "?"
            found.append(f"({self.text(before(name))} {value}){optional}")
        return " ".join(found)

    def _value(self, schema: dict[str, Any], shared: dict[str, Any], end: str) -> str:
        if schema.get("type") != "string":
            return f"{self.json({**shared, **schema})} {self.text(end)}"
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if not choices:
            return self.until(end)
        return f"({' | '.join(self.text(str(choice)) for choice in choices)}) {self.text(end)}"


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

    if "<arg_key>" in template:
        return tagged("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>".format, "</arg_value>\n", "</tool_call>")
    if "<function=" in template:
        after = "</function>\n</tool_call>"
        return tagged("<tool_call>\n<function={}>\n", "<parameter={}>\n".format, "\n</parameter>\n", after)
    if "<tool_call>" in template:
        return _Format(as_json("arguments", "<tool_call>\n", "\n</tool_call>"), between=text("\n"))
    if "<|channel|>" in template:
        header = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"

        def message(name: str, schema: Any) -> str:
            return f"{text(header.format(name))} {rules.json(schema)}"

        return _Format(message, several=False)
    if "[ARGS]" in template:
        number = f"{text('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/" if "[CALL_ID]" in template else ""

        def named(name: str, schema: Any) -> str:
            return f"{text(CALLS + name)} {number} {text('[ARGS]')} {rules.json(schema)}"

        return _Format(named)
    if CALLS in template:
        return _Format(as_json("arguments"), begin=text(f"{CALLS}["), between=text(", "), end=text("]"))
    return _Format(as_json("parameters" if '"parameters"' in template else "arguments"), between=text("; "))
