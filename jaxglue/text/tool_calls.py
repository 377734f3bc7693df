"""Tool calls in the text of an answer, for OpenAI's clients and environments.

Text that is no whole call of a tool that the request offers stays text.
"""

from collections.abc import Collection, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.text.call_rules import CallRules, closed
from jaxglue.text.stream import TAGS, cut
from jaxglue.text.tool_formats import MARKED, BareCalls, CallReading, Channels, Functions, ToolCall, ToolFormat
from jaxglue.text.tool_values import NoCallError, as_object, properties_of

MARKS = frozenset(mark for form in MARKED for mark in form.marks)
"""Texts in and around calls, which may be special tokens."""
_BEGINS = tuple(dict.fromkeys(begin for form in MARKED for begin in form.begins))
_ADDRESSED = "to=functions."


def format_of(template: str) -> ToolFormat:
    """Return the format in which a chat template writes calls: bare ones where it shows no marks."""
    shown = (form.of(template) for form in MARKED)
    return next((form for form in shown if form is not None), BareCalls.of(template))


def schemas_of(tools: Any) -> dict[str, dict[str, Any]]:
    """Return the functions that tools offer, with the schemas of their arguments."""
    functions = [tool.get("function", tool) for tool in tools or () if isinstance(tool, dict)]
    named = [function for function in functions if isinstance(function, dict) and isinstance(function.get("name"), str)]
    return {function["name"]: as_object(function.get("parameters")) for function in named}


def parameters_of(schemas: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the functions of `schemas_of` with the schema of each parameter."""
    return {name: properties_of(schema) for name, schema in schemas.items()}


def shown_before_calls(
    text: str,
    functions: Collection[str] = (),
    *,
    known: int = 0,
    form: ToolFormat | None = None,
    opened: bool | None = None,
) -> str:
    """Return the beginning of a growing text that certainly is no tool call.

    Args:
        text: received so far.
        functions: names of those that may be called.
        known: length of an earlier beginning, which is not searched again.
        form, opened: as of `split_calls`.
    """
    end = _thinking_end(text, opened)
    thinking, answer = text[:end], text[end:]
    start = max(known - end, 0)
    begin = answer.lstrip()
    if isinstance(form, BareCalls | None) and _may_be_bare(begin, functions):
        return thinking
    if isinstance(form, Channels | None) and _ADDRESSED.startswith(begin[: len(_ADDRESSED)]):
        return thinking
    return thinking + answer[:start] + cut(answer[start:], _BEGINS)[0]


def _may_be_bare(begin: str, functions: Collection[str]) -> bool:
    """Return whether a text may go on to calls without marks."""
    return begin[:1] in ("{", "[") or any(_may_call(begin, name) for name in (*BareCalls.words, *functions))


def _may_call(begin: str, name: str) -> bool:
    """Return whether a text may go on to a function's name and an object, or a list."""
    return name.startswith(begin) or (begin.startswith(name) and begin[len(name) :].lstrip()[:1] in ("", "{", "["))


def split_calls(
    text: str, functions: Functions, form: ToolFormat | None = None, *, opened: bool | None = None
) -> tuple[str, list[ToolCall]]:
    """Return the text beside tool calls, and these; all of the text if anything that looks like one is none.

    Thinking, which may try calls, is text.

    Args:
        text: of an answer.
        functions: that may be called, as of `parameters_of`.
        form: of the model's template, as of `format_of`; by default any. Calls without marks are read in no other.
        opened: the prompt has begun the thinking; by default, the text tells.
    """
    forms = [*([form] if form else []), *(other() for other in MARKED if not isinstance(form, other))]
    forms += [BareCalls()] if form is None else []
    for end in _ends_of_thinking(text, opened):
        for other in forms:
            if (reading := _read(other, text[end:], functions)) and not _thinks_on(reading.rest, end, opened):
                return text[:end] + reading.rest, reading.calls
    return text, []


def _read(form: ToolFormat, text: str, functions: Functions) -> CallReading | None:
    try:
        reading = form.read(text, functions)
    except (NoCallError, RecursionError):
        return None
    return reading if all(call.name in functions for call in reading.calls) else None


def _first_end(text: str) -> int:
    """Return the end of the first tag that ends thinking; 0 without one."""
    places = [(position, position + len(tags.end)) for tags in TAGS if (position := text.find(tags.end)) >= 0]
    return min(places)[1] if places else 0


def _thinking_end(text: str, opened: bool | None) -> int:
    """Return the end of the thinking with which a text begins; where nothing tells, that before the first call."""
    end = _first_end(text)
    if text.lstrip().startswith(tuple(tags.begin.rstrip() for tags in TAGS)) or opened:
        return end or len(text)
    calls = [position for begin in _BEGINS if (position := text.find(begin)) >= 0] if end and opened is None else []
    return end if opened is None and end <= min(calls, default=len(text)) else 0


def _ends_of_thinking(text: str, opened: bool | None) -> list[int]:
    """Return where the thinking may end, the likeliest first."""
    end = _thinking_end(text, opened)
    return [end] if end or opened is not None else [*dict.fromkeys((0, _first_end(text)))]


def _thinks_on(rest: str, end: int, opened: bool | None) -> bool:
    """Return whether a text beside calls has the end of a thinking that nothing before told of."""
    return opened is None and not end and bool(_first_end(rest))


def call_grammar(tokenizer: PreTrainedTokenizerBase, schemas: Mapping[str, dict[str, Any]], *, several: bool) -> str:
    """Return the grammar, in Lark's notation as llguidance reads it, of calls of some functions.

    Args:
        tokenizer: of the model, whose template shows the format.
        schemas: of the functions' arguments, by name; at least one.
        several: allow further calls.
    """
    rules, form = CallRules(tokenizer), format_of(str(tokenizer.get_chat_template(tools=[])))
    frame = form.frame(rules)
    calls = [rules.add(form.rule(rules, name, closed(schema))) for name, schema in schemas.items()]
    call = f"({' | '.join(calls)})"
    parts = [frame.begin, call, frame.end]
    if several and form.several:
        parts.insert(2, f"({frame.between} {call})*")
    return "\n".join([f"start: {' '.join(parts)}", *rules.lines])
