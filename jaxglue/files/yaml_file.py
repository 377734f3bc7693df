"""YAML from files of strangers: plain values alone, and every defect one line."""

import re
from collections import Counter
from typing import Any

import yaml

_AMBIGUOUS = re.compile(r"[-+]?(0[0-7_]+|.*:.*)")
"""Numbers that YAML 1.1 and 1.2 read differently."""


class _Loader(yaml.SafeLoader):
    """Loader without aliases, which multiply where nested, and without tags, whose constructors trust their text."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read: write the value out")
        if tag := getattr(self.peek_event(), "tag", None):
            raise yaml.YAMLError(f"tags ({tag:.50}) are not read: leave it out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := next((key for key, count in keys.items() if count > 1), None):
            raise yaml.YAMLError(f"the key {twice!r:.100} is there twice: remove one")
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> Any:
        if _AMBIGUOUS.fullmatch(node.value):
            raise yaml.YAMLError(f"{node.value:.50} is octal, or of base 60, in YAML 1.1: write it as a decimal number")
        integer = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if integer else self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def parse_yaml(text: str) -> dict[str, Any]:
    """Parse keys and values, with keys that have no value left out.

    Raises:
        ValueError: not YAML, no keys and values, a key that is there twice, an alias or a tag.
        RecursionError: nested too deeply.
    """
    try:
        values = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(values, dict):
        raise ValueError("expected keys and values")
    return {key: _number(value) for key, value in values.items() if value is not None}


def lines_of_keys(text: str) -> dict[str, int]:
    """Return the line of each outermost key of a text that `parse_yaml` reads."""
    node = yaml.compose(text, _Loader)
    return {key.value: key.start_mark.line + 1 for key, _ in node.value}


def _number(value: Any) -> Any:
    """Return the number that a text stands for: YAML reads 2e-4 as text, for want of a dot."""
    if isinstance(value, dict):
        return {key: _number(item) for key, item in value.items() if item is not None}
    if not isinstance(value, str) or "e" not in value.lower():
        return value
    try:
        return float(value)
    except ValueError:
        return value
