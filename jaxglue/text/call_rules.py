"""Rules of grammars of tool calls: arguments as JSON, in tags, or as named values, as their schemas say."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxglue.text.lark import SPACING, Rules
from jaxglue.text.tool_values import as_object, properties_of, types_of

_LISTS = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"}
_TEXT = frozenset({"string", "null"})


class CallRules(Rules):
    """Rules of calls; arguments as of `Rules`."""

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return the body of JSON of a schema."""
        return self.add("%json " + json.dumps({"x-guidance": SPACING, **schema}))

    def parameters(self, schema: Mapping[str, Any], before: Callable[[str], str], end: str) -> str:
        """Return the body of parameters one after the other, in text if they are strings, with tags around each."""
        properties, required = _properties(schema)
        bodies = {name: f"{self.text(before(name))} {self.until_end(value, end)}" for name, value in properties.items()}
        return " ".join(f"({body}){'' if name in required else '?'}" for name, body in bodies.items())

    def until_end(self, schema: Mapping[str, Any], end: str) -> str:
        """Return the body of a value and its end: text if it may be a string, else JSON."""
        if "string" not in (types_of(schema) or ()):
            return f"{self.json(schema)} {self.text(end)}"
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if not choices:
            return self.until(end)
        texts = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
        return f"({' | '.join(map(self.text, texts))}) {self.text(end)}"

    def pairs(self, schema: Mapping[str, Any], sign: str, comma: str, value: Callable[[Mapping[str, Any]], str]) -> str:
        """Return the body of names and values between commas, first the required ones."""
        properties, required = _properties(schema)
        bodies = {name: self.add(f"{self.text(name + sign)} {value(of_name)}") for name, of_name in properties.items()}
        first = [body for name, body in bodies.items() if name in required]
        others = [body for name, body in bodies.items() if name not in required]
        further = [f"({self.text(comma)} {body})?" for body in others]
        if first:
            return " ".join([f" {self.text(comma)} ".join(first), *further])
        options = [" ".join([body, *further[index + 1 :]]) for index, body in enumerate(others)]
        return f"({' | '.join(options)})?" if options else ""

    def quoted(self, schema: Mapping[str, Any], quote: str) -> str:
        """Return the body of a value in which strings, also of a list, stand between quotes of their own."""
        types, items = types_of(schema) or frozenset(), as_object(schema.get("items"))
        if types == {"array"} and types_of(items) == {"string"}:
            item = self.add(self.quoted(items, quote))
            return f'"[" ({item} ("," {item})*)? "]"'
        if "string" not in types or not types <= _TEXT:
            return self.json(schema)
        text = f"{self.text(quote)} {self.until_end(_without_null(schema), quote)}"
        return f'({text} | "null")' if "null" in types else text


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of strings, those that another one of strings and null lists."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum", ())
    texts = [choice for choice in choices if choice is not None]
    return {"type": "string", **({"enum": texts} if texts else {})}


def _properties(schema: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """Return the schemas of an object's properties, each with the definitions that it may name, and the required."""
    required = schema.get("required")
    return properties_of(schema), required if isinstance(required, list) else []


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of arguments without others than those that it lists, if it is a list alone."""
    only_lists = schema.keys() <= _LISTS
    return {"type": "object", **({"properties": {}, "additionalProperties": False} if only_lists else {}), **schema}
