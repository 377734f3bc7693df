"""Formats of tool calls, one object for each way in which model families write them: marks, reader and grammar.

A call is read whole or not at all: a text that begins like a call, and of which a part cannot be read, is text.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self

from jaxglue.text.call_rules import CallRules
from jaxglue.text.lark import quoted
from jaxglue.text.tool_values import (
    NoCallError,
    read_gemma,
    read_json,
    read_parameter,
    read_python_calls,
    skip_space,
)

Functions = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Functions that may be called, with the schema of each parameter."""
_MOST_MARKS = 1000
"""Tags in a text of calls, at most: each may be a part of any value."""
_MOST_ENDS = 64
"""Ends of calls of Python that are tried, at most."""
_CALL_KEYS = {"name", "arguments", "parameters", "id", "type"}


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: str
    """JSON."""

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> Self:
        """Return the call with an object of arguments; halves of surrogate pairs are escaped."""
        text = json.dumps(arguments, ensure_ascii=False)
        return cls(name, text if text.isascii() or _is_unicode(text) else json.dumps(arguments))


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


class CallReading(NamedTuple):
    """Calls in a text, and the text beside them."""

    rest: str
    calls: list[ToolCall]


class Frame(NamedTuple):
    """Bodies of rules around a list of calls."""

    begin: str = ""
    between: str = ""
    end: str = ""


class ToolFormat(ABC):
    """A way of writing calls of tools."""

    begins: ClassVar[tuple[str, ...]] = ()
    """Texts at which a call may begin."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Texts in and around calls, which may be special tokens."""
    several: ClassVar[bool] = True
    """Whether an answer may have several calls."""

    @classmethod
    @abstractmethod
    def of(cls, template: str) -> Self | None:
        """Return the format as a chat template shows it; None for a template of other formats."""

    @abstractmethod
    def read(self, text: str, functions: Functions) -> CallReading:
        """Return the calls in a text, and the text beside them.

        Raises:
            NoCallError: no call, or one that is not whole.
        """

    @abstractmethod
    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call of a function whose arguments follow a schema."""

    def frame(self, rules: CallRules) -> Frame:
        """Return what stands around and between calls."""
        return Frame()


class MarkedFormat(ToolFormat):
    """A format in which a mark precedes each call, or several, which say by themselves where they end."""

    begin: ClassVar[re.Pattern[str]]

    @abstractmethod
    def read_call(self, text: str, begin: re.Match[str], functions: Functions) -> tuple[list[ToolCall], int]:
        """Return the calls behind a mark, and their end; raise NoCallError where one is not whole."""

    def read(self, text: str, functions: Functions) -> CallReading:
        """Return the calls in a text, and the text beside them; see `ToolFormat.read`."""
        rest, calls, end = "", list[ToolCall](), 0
        while begin := self.begin.search(text, end):
            between = text[end : begin.start()]
            rest += between if between.strip() or not calls else ""
            further, end = self.read_call(text, begin, functions)
            calls += further
        if not calls:
            raise NoCallError("no call")
        return CallReading(rest + text[end:], calls)


def _skip(text: str, start: int, *marks: str) -> int:
    """Return the end of marks at an index, each of which may be missing, behind white space."""
    for mark in marks:
        position = skip_space(text, start)
        if text.startswith(mark, position):
            start = position + len(mark)
    return start


def _arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a call; null and an empty text are none."""
    if isinstance(value, str) and value:
        value, end = read_json(text := value, 0)
        if skip_space(text, end) < len(text):
            raise NoCallError("arguments with a text behind them")
    if not value and (value is None or value == ""):
        return {}
    if not isinstance(value, dict):
        raise NoCallError("arguments that are no object")
    return value


def _record_call(record: Any, *, bare: bool) -> ToolCall:
    """Return the call that a record of JSON is; a bare one must have nothing but a name and arguments."""
    if not isinstance(record, dict) or not isinstance(name := record.get("name"), str):
        raise NoCallError("a record without a name")
    keys = record.keys() & {"arguments", "parameters"}
    further = record.keys() - _CALL_KEYS
    odd = further or len(keys) > 1 or record.get("type", "function") != "function"
    if odd or (bare and (not keys or "id" in record)):
        raise NoCallError("a record that is no call")
    return ToolCall.of(name, _arguments(record[keys.pop()] if keys else None))


def read_records(text: str, start: int, *, bare: bool = False) -> tuple[list[ToolCall], int]:
    """Return the calls of records from an index on, perhaps in lists or between semicolons, and their end.

    Args:
        text: JSON, perhaps with another text behind it.
        start: the index.
        bare: no mark says that these are calls.

    Raises:
        NoCallError: another text, or a record that is no call.
    """
    calls, end = list[ToolCall](), start
    while text[(position := skip_space(text, _skip(text, end, ";"))) : position + 1] in (
        ("{",) if calls else ("{", "[")
    ):
        value, end = read_json(text, position)
        calls += [_record_call(record, bare=bare) for record in (value if isinstance(value, list) else [value])]
    if not calls:
        raise NoCallError("no call")
    return calls, end


def _as_json(rules: CallRules, name: str, schema: Mapping[str, Any], key: str, *marks: str) -> str:
    """Return the body of a record that is a call, between two marks if there are any."""
    before, after = marks or ("", "")
    begin, end = f'{before}{{"name": {quoted(name)}, "{key}": ', f"}}{after}"
    return f"{rules.text(begin)} {rules.json(schema)} {rules.text(end)}"


@dataclass(frozen=True)
class TaggedJson(MarkedFormat):
    """JSON in `<tool_call>` (Hermes, Qwen)."""

    begins = marks = ("<tool_call>", "</tool_call>")
    begin = re.compile("<tool_call>")

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Return the format of a template; see `ToolFormat.of`."""
        return cls() if "<tool_call>" in template else None

    def read_call(self, text: str, begin: re.Match[str], functions: Functions) -> tuple[list[ToolCall], int]:
        """Return the calls in a tag; see `MarkedFormat.read_call`."""
        calls, end = read_records(text, begin.end())
        return calls, skip_space(text, _skip(text, end, "</tool_call>"))

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        return _as_json(rules, name, schema, "arguments", "<tool_call>\n", "\n</tool_call>")

    def frame(self, rules: CallRules) -> Frame:
        """Return what stands between calls; see `ToolFormat.frame`."""
        return Frame(between=rules.text("\n"))


class TagFormat(ToolFormat):
    """A format in which each parameter stands in tags.

    A value ends at the first closing tag from which on all is read whole: values may hold any tags themselves.
    """

    tags: ClassVar[re.Pattern[str]]
    """All tags, with the groups `call` and `name`, `parameter` and `key`, `value_end` and `call_end`."""
    padding: ClassVar[str]
    """Stands between a value and its tags."""

    def read(self, text: str, functions: Functions) -> CallReading:
        """Return the calls in a text, and the text beside them; see `ToolFormat.read`."""
        tags = [*self.tags.finditer(text)]
        if not tags or len(tags) > _MOST_MARKS:
            raise NoCallError("no call, or too many tags")
        follows = self._follow(text, tags, {key for parameters in functions.values() for key in parameters})
        if tags[0].lastgroup != "call" or not follows[0]:
            raise NoCallError("tags of no whole call")
        rest, calls, index, end = "", list[ToolCall](), 0, 0
        while index < len(tags):
            name, start = tags[index]["name"], tags[index].start()
            rest, parameters = rest + text[end:start], functions.get(name, {})
            pairs, index = list[tuple[str, Any]](), index + 1
            while tags[index].lastgroup != "call_end":
                key, closing = tags[index]["key"], follows[index]
                value = text[tags[index].end() : tags[closing].start()]
                value = value.removeprefix(self.padding).removesuffix(self.padding)
                key = key if key in parameters else key.strip()
                pairs.append((key, read_parameter(value, parameters.get(key, {}))))
                index = closing + 1
            if len(dict(pairs)) < len(pairs):
                raise NoCallError("a parameter comes twice")
            calls.append(ToolCall.of(name, dict(pairs)))
            end, index = skip_space(text, tags[index].end()), index + 1
        return CallReading(rest + text[end:], calls)

    def _follow(self, text: str, tags: list[re.Match[str]], keys: set[str]) -> list[int]:
        """Return for each tag that of the end of what it begins, if all from there on is whole, else 0.

        For the beginning of a call, this is the tag behind its beginning, and for the end of one, that behind it.
        """
        count = len(tags)
        joined = [not text[a.end() : b.start()].strip() for a, b in pairwise(tags)] + [False]
        follows = [0] * count
        for index in range(count - 1, -1, -1):
            tag = tags[index]
            if tag.lastgroup == "call_end":
                begins = index + 1 < count and tags[index + 1].lastgroup == "call"
                follows[index] = index + 1 if index + 1 == count or (begins and follows[index + 1]) else 0
            elif tag.lastgroup == "call":
                inner = index + 1 < count and tags[index + 1].lastgroup in ("key", "call_end")
                follows[index] = index + 1 if inner and joined[index] and follows[index + 1] else 0
            elif tag.lastgroup == "key":
                follows[index] = self._closing(text, tags, joined, follows, index, keys)
        return follows

    def _closing(
        self,
        text: str,
        tags: list[re.Match[str]],
        joined: list[bool],
        follows: list[int],
        index: int,
        keys: set[str],
    ) -> int:
        """Return the closing tag of a parameter's value, 0 without one: as many tags are open in it as are closed."""
        is_open = 0
        for closing in range(index + 1, len(tags) - 1):
            kind = tags[closing].lastgroup
            if kind == "value_end":
                inner = tags[closing + 1].lastgroup in ("key", "call_end")
                if is_open <= 0 and inner and joined[closing] and follows[closing + 1]:
                    return closing
                is_open -= 1
            elif kind == "key" and self._begins_parameter(text, tags[closing], keys):
                is_open += 1
        return 0

    def _begins_parameter(self, text: str, tag: re.Match[str], keys: set[str]) -> bool:
        """Return whether a tag in a value may begin a parameter, whose value then swallows what precedes it."""
        return tag["key"].strip() in keys and text.endswith(self.padding, 0, tag.start())


@dataclass(frozen=True)
class ParameterTags(TagFormat):
    """`<function=name>` with `<parameter=key>` (Qwen3-Coder, Qwen3.5)."""

    begins = ("<tool_call>", "<function=")
    padding = "\n"
    tags = re.compile(
        r"(?P<call>(?:<tool_call>\s*)?<function=(?P<name>[^<>\s]+)>)|<parameter=(?P<key>[^<>\n]+)>"
        r"|(?P<value_end></parameter>)|(?P<call_end></function>(?:\s*</tool_call>)?)|(?P<other></?tool_call>)"
    )

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Return the format of a template; see `ToolFormat.of`."""
        tags = "<parameter=" in template or "<tool_call>" in template
        return cls() if tags and "<function=" in template else None

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        parameters = rules.parameters(schema, "<parameter={}>\n".format, "\n</parameter>\n")
        begin = rules.text(f"<tool_call>\n<function={name}>\n")
        return f"{begin} {parameters} {rules.text('</function>\n</tool_call>')}"

    def frame(self, rules: CallRules) -> Frame:
        """Return what stands between calls; see `ToolFormat.frame`."""
        return Frame(between=rules.text("\n"))


@dataclass(frozen=True)
class KeyTags(TagFormat):
    """`<arg_key>` with `<arg_value>` in `<tool_call>` (GLM)."""

    line: str = "\n"
    """Stands between tags."""
    begins = ("<tool_call>",)
    marks = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    padding = ""
    tags = re.compile(
        r"(?P<call><tool_call>\s*(?P<name>[^<>\s]+))|<arg_key>(?P<key>[^<>]*)</arg_key>\s*<arg_value>"
        r"|(?P<value_end></arg_value>)|(?P<call_end></tool_call>)|(?P<other></?arg_key>|<arg_value>|<tool_call>)"
    )

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Return the format of a template; see `ToolFormat.of`."""
        if "<arg_key>" not in template:
            return None
        return cls("" if "</arg_key><arg_value>" in template else "\n")

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        key = f"<arg_key>{{}}</arg_key>{self.line}<arg_value>".format
        parameters = rules.parameters(schema, key, f"</arg_value>{self.line}")
        return f"{rules.text(f'<tool_call>{name}{self.line}')} {parameters} {rules.text('</tool_call>')}"

    def frame(self, rules: CallRules) -> Frame:
        """Return what stands between calls; see `ToolFormat.frame`."""
        return Frame(between=rules.text("\n"))


_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?P<role>\s*to=[^\s<]+\s*)?<\|channel\|>(?P<channel>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>"
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
"""In a message's role or after its channel."""


@dataclass(frozen=True)
class Channels(ToolFormat):
    """Messages to functions, whatever their channel (GPT-OSS)."""

    begins = (
        "<|start|>assistant to=",
        *(
            f"{start}<|channel|>{name} to="
            for start in ("<|start|>assistant", "")
            for name in ("commentary", "analysis")
        ),
    )
    several = False

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Return the format of a template; see `ToolFormat.of`."""
        return cls() if "<|channel|>" in template else None

    def read(self, text: str, functions: Functions) -> CallReading:
        """Return the calls in a text, and the text beside them; see `ToolFormat.read`."""
        rest, calls, end, position = "", list[ToolCall](), 0, 0
        while header := _HEADER.search(text, position):
            position = header.end()
            if recipient := _RECIPIENT.search(f"{header['role'] or ''} {header['channel']}"):
                arguments, position = read_json(text, position)
                calls.append(ToolCall.of(recipient[1], _arguments(arguments)))
                rest += text[end : header.start()]
                end = position = max(_skip(text, position, mark) for mark in ("<|call|>", "<|end|>"))
                if text[end:].strip() and not text[end:].lstrip().startswith("<|"):
                    raise NoCallError("a text behind the arguments of a call")
        if not calls:
            raise NoCallError("no call")
        return CallReading(rest + text[end:], calls)

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        header = rules.text(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")
        return f"{header} {rules.json(schema)}"


class SectionFormat(MarkedFormat):
    """A format with marks around each call and around all of them, and between a call's name and its JSON."""

    section: ClassVar[tuple[str, str]]
    call: ClassVar[tuple[str, str, str]]
    """Marks before a call, between its name and arguments, and behind it."""

    def read_call(self, text: str, begin: re.Match[str], functions: Functions) -> tuple[list[ToolCall], int]:
        """Return the call behind a mark; see `MarkedFormat.read_call`."""
        _, middle, call_end = self.call
        head, mark, _ = text[begin.end() :].partition(middle)
        if not mark:
            raise NoCallError("a call without arguments")
        name, start, fence = self.read_name(text, head.strip(), begin.end() + len(head) + len(middle))
        arguments, end = read_json(text, start)
        end = _skip(text, end, *fence, call_end, self.section[1])
        return [ToolCall.of(name, _arguments(arguments))], end

    def read_name(self, text: str, head: str, start: int) -> tuple[str, int, tuple[str, ...]]:
        """Return a call's name, the index of its arguments, and what ends these beside the mark."""
        return head, start, ()


_FENCE = re.compile(r"\s*(\S+)\s*```(?:json)?")


@dataclass(frozen=True)
class DeepSeekCalls(SectionFormat):
    """Names and JSON between tokens (DeepSeek), JSON in a fence in the older ones."""

    fenced: bool = False
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    begins = (section[0], call[0])
    marks = (*section, *call)
    begin = re.compile(f"(?:{section[0]}\\s*)?{call[0]}")

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Return the format of a template; see `ToolFormat.of`."""
        return cls("```json" in template) if cls.section[0] in template else None

    def read_name(self, text: str, head: str, start: int) -> tuple[str, int, tuple[str, ...]]:
        """Return a call's name, which may stand before a fence; see `SectionFormat.read_name`."""
        fence = _FENCE.match(text, start)
        return (fence[1], fence.end(), ("```",)) if fence else (head, start, ())

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        call, middle, end = self.call
        before = f"function{middle}{name}\n```json\n" if self.fenced else f"{name}{middle}"
        return f"{rules.text(call + before)} {rules.json(schema)} {rules.text(self.fenced * '\n```' + end)}"

    def frame(self, rules: CallRules) -> Frame:
        """Return what stands around and between calls; see `ToolFormat.frame`."""
        return Frame(rules.text(self.section[0]), rules.text("\n") if self.fenced else "", rules.text(self.section[1]))


_NUMBERED = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


@dataclass(frozen=True)
class KimiCalls(SectionFormat):
    """Numbered names and JSON between tokens (Kimi-K2)."""

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    begins = (section[0], call[0])
    marks = (*section, *call)
    begin = re.compile(f"(?:{re.escape(section[0])}\\s*)?{re.escape(call[0])}")

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Return the format of a template; see `ToolFormat.of`."""
        return cls() if cls.section[0] in template else None

    def read_name(self, text: str, head: str, start: int) -> tuple[str, int, tuple[str, ...]]:
        """Return a call's name without its number; see `SectionFormat.read_name`."""
        name = _NUMBERED.fullmatch(head)
        return name[1] if name else head, start, ()

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        call, middle, end = self.call
        return f"{rules.text(f'{call}functions.{name}:0{middle}')} {rules.json(schema)} {rules.text(end)}"

    def frame(self, rules: CallRules) -> Frame:
        """Return what stands around calls; see `ToolFormat.frame`."""
        return Frame(rules.text(self.section[0]), end=rules.text(self.section[1]))


class GemmaFormat(MarkedFormat):
    """`call:` with a name and an object of bare keys, whose texts stand between quotes of their own."""

    call: ClassVar[tuple[str, str]]
    quote: ClassVar[str]

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Return the format of a template; see `ToolFormat.of`."""
        return cls() if cls.call[0] in template else None

    def read_call(self, text: str, begin: re.Match[str], functions: Functions) -> tuple[list[ToolCall], int]:
        """Return the call behind a mark; see `MarkedFormat.read_call`."""
        arguments, end = read_gemma(text, begin.end(), self.quote)
        return [ToolCall.of(begin["name"], _arguments(arguments))], _skip(text, end, self.call[1])

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        pairs = rules.pairs(schema, ":", ",", lambda value: rules.quoted(value, self.quote))
        return f"{rules.text(f'{self.call[0]}call:{name}{{')} {pairs} {rules.text('}' + self.call[1])}"


@dataclass(frozen=True)
class GemmaCalls(GemmaFormat):
    """Calls of Gemma 4."""

    call, quote = ("<|tool_call>", "<tool_call|>"), '<|"|>'
    begins, marks = (call[0],), (*call, quote)
    begin = re.compile(r"<\|tool_call>\s*(?:call:)?(?P<name>[^{}\s]*)\s*(?=\{)")


@dataclass(frozen=True)
class FunctionGemmaCalls(GemmaFormat):
    """Calls of FunctionGemma."""

    call, quote = ("<start_function_call>", "<end_function_call>"), "<escape>"
    begins, marks = (call[0],), (*call, quote)
    begin = re.compile(r"<start_function_call>\s*(?:call:)?(?P<name>[^{}\s]*)\s*(?=\{)")


@dataclass(frozen=True)
class PythonCalls(MarkedFormat):
    """Calls of Python in `<function_calls>` (OLMo 3)."""

    marks = ("<function_calls>", "</function_calls>")
    begins = marks[:1]
    begin = re.compile("<function_calls>")

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Return the format of a template; see `ToolFormat.of`."""
        return cls() if cls.marks[0] in template else None

    def read_call(self, text: str, begin: re.Match[str], functions: Functions) -> tuple[list[ToolCall], int]:
        """Return the calls in a tag, whose end may also stand in a text; see `MarkedFormat.read_call`."""
        for end in _ends(text, begin.end(), self.marks[1]):
            try:
                pairs = read_python_calls(text[begin.end() : end], functions)
            except NoCallError:
                continue
            return [ToolCall.of(*pair) for pair in pairs], _skip(text, end, self.marks[1])
        raise NoCallError("no calls of Python")

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        return f"{rules.text(f'{name}(')} {rules.pairs(schema, '=', ', ', rules.json)} {rules.text(')')}"

    def frame(self, rules: CallRules) -> Frame:
        """Return what stands around and between calls; see `ToolFormat.frame`."""
        begin, end = self.marks
        return Frame(rules.text(f"{begin}\n"), rules.text("\n"), rules.text(f"\n{end}"))


def _ends(text: str, start: int, mark: str) -> Iterator[int]:
    """Yield where a mark stands, and the end of a text without it."""
    end = text.find(mark, start)
    if end < 0:
        yield len(text)
    for _ in range(_MOST_ENDS):
        if end < 0:
            return
        yield end
        end = text.find(mark, end + 1)


@dataclass(frozen=True)
class TokenJson(MarkedFormat):
    """JSON behind `<|tool_call|>`: each call between it and its end (Phi-4-mini), or a list of all (Granite 3)."""

    listed: bool = False
    marks = ("<|tool_call|>", "<|/tool_call|>")
    begins = marks[:1]
    begin = re.compile(re.escape(marks[0]))

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Return the format of a template; see `ToolFormat.of`."""
        begin, end = cls.marks
        return cls(end not in template) if begin in template else None

    def read_call(self, text: str, begin: re.Match[str], functions: Functions) -> tuple[list[ToolCall], int]:
        """Return the calls behind a mark; see `MarkedFormat.read_call`."""
        calls, end = read_records(text, begin.end())
        return calls, _skip(text, end, self.marks[1])

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        return _as_json(rules, name, schema, "arguments", *(() if self.listed else self.marks))

    def frame(self, rules: CallRules) -> Frame:
        """Return what stands around and between calls; see `ToolFormat.frame`."""
        return Frame(rules.text(f"{self.marks[0]}["), rules.text(", "), rules.text("]")) if self.listed else Frame()


_NAMED = re.compile(r"\s*(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True)
class MistralCalls(MarkedFormat):
    """Calls behind `[TOOL_CALLS]`: a list of JSON, or a name, perhaps a number, and JSON."""

    named: bool = False
    numbered: bool = False
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    begins = marks[:1]
    begin = re.compile(re.escape(marks[0]))

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Return the format of a template; see `ToolFormat.of`."""
        begin, arguments, number = (mark in template for mark in cls.marks)
        return cls(arguments, number) if begin or arguments else None

    def read_call(self, text: str, begin: re.Match[str], functions: Functions) -> tuple[list[ToolCall], int]:
        """Return the calls behind a mark; see `MarkedFormat.read_call`."""
        if named := _NAMED.match(text, begin.end()):
            arguments, end = read_json(text, named.end())
            return [ToolCall.of(named["name"], _arguments(arguments))], end
        return read_records(text, begin.end())

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        begin, arguments, number = self.marks
        if not self.named:
            return _as_json(rules, name, schema, "arguments")
        digits = f"{rules.text(number)} /[a-zA-Z0-9]{{9}}/" if self.numbered else ""
        return f"{rules.text(begin + name)} {digits} {rules.text(arguments)} {rules.json(schema)}"

    def frame(self, rules: CallRules) -> Frame:
        """Return what stands around and between calls; see `ToolFormat.frame`."""
        return Frame() if self.named else Frame(rules.text(f"{self.marks[0]}["), rules.text(", "), rules.text("]"))


@dataclass(frozen=True)
class FunctionTags(MarkedFormat):
    """JSON in `<function=name>` (Llama 3.1's of one's own)."""

    begins = ("<function=",)
    begin = re.compile(r"<function=(?P<name>[^<>\s]+)>")

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Return the format of a template; see `ToolFormat.of`."""
        return cls() if "<function=" in template else None

    def read_call(self, text: str, begin: re.Match[str], functions: Functions) -> tuple[list[ToolCall], int]:
        """Return the call in a tag; see `MarkedFormat.read_call`."""
        arguments, end = read_json(text, begin.end())
        return [ToolCall.of(begin["name"], _arguments(arguments))], _skip(text, end, "</function>")

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        return f"{rules.text(f'<function={name}>')} {rules.json(schema)} {rules.text('</function>')}"


@dataclass(frozen=True)
class PythonTag(MarkedFormat):
    """Calls of Python or JSON behind `<|python_tag|>`, up to the end (Llama 3, beside bare ones)."""

    begins = marks = ("<|python_tag|>",)
    begin = re.compile(re.escape(marks[0]))

    @classmethod
    def of(cls, template: str) -> Self | None:
        """Return the format of a template, unless it shows bare calls, too; see `ToolFormat.of`."""
        return cls() if cls.marks[0] in template and '"parameters"' not in template else None

    def read_call(self, text: str, begin: re.Match[str], functions: Functions) -> tuple[list[ToolCall], int]:
        """Return the calls behind a mark; see `MarkedFormat.read_call`."""
        try:
            pairs = read_python_calls(text[begin.end() :], functions)
        except NoCallError:
            return read_records(text, begin.end())
        return [ToolCall.of(*pair) for pair in pairs], len(text)

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        return f"{rules.text(self.begins[0])} {_as_json(rules, name, schema, 'parameters')}"


_LISTED = "functools"
"""Before a list of calls (Phi-4-mini, whose special tokens are left out)."""


@dataclass(frozen=True)
class BareCalls(ToolFormat):
    """Calls that are all of the text: JSON (Llama 3), a name and JSON (GLM-4), a list of Python's (Llama 4)."""

    key: str = "arguments"
    words: ClassVar[tuple[str, ...]] = (_LISTED,)
    """Words with which such a text may begin, beside names of functions."""

    @classmethod
    def of(cls, template: str) -> Self:
        """Return the format of a template that shows no other."""
        return cls("parameters" if '"parameters"' in template else "arguments")

    def read(self, text: str, functions: Functions) -> CallReading:
        """Return the calls that a text consists of; see `ToolFormat.read`."""
        body = text.strip()
        if (named := _NAMED.match(body)) and named["name"] in functions:
            arguments, end = read_json(body, named.end())
            calls = [ToolCall.of(named["name"], _arguments(arguments))]
        elif body.startswith("[") and (pairs := self._python(body, functions)):
            calls, end = [ToolCall.of(*pair) for pair in pairs], len(body)
        else:
            calls, end = read_records(body.removeprefix(_LISTED), 0, bare=True)
            end = _skip(body, end + len(body) - len(body.removeprefix(_LISTED)), ";")
        if body[end:].strip():
            raise NoCallError("a text behind the calls")
        return CallReading("", calls)

    @staticmethod
    def _python(text: str, functions: Functions) -> list[tuple[str, dict[str, Any]]]:
        try:
            return read_python_calls(text, functions)
        except NoCallError:
            return []

    def rule(self, rules: CallRules, name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of a call; see `ToolFormat.rule`."""
        return _as_json(rules, name, schema, self.key)

    def frame(self, rules: CallRules) -> Frame:
        """Return what stands between calls; see `ToolFormat.frame`."""
        return Frame(between=rules.text("; "))


MARKED: tuple[type[ToolFormat], ...] = (
    KeyTags,
    ParameterTags,
    FunctionTags,
    TaggedJson,
    Channels,
    DeepSeekCalls,
    KimiCalls,
    GemmaCalls,
    FunctionGemmaCalls,
    PythonCalls,
    TokenJson,
    MistralCalls,
    PythonTag,
)
"""Formats with marks, in the order in which a template's is looked for: some have the marks of others."""
