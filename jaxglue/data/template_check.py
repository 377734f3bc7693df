"""The check that a chat template shows every message of a conversation."""

import json
import logging
from typing import Any

from jaxglue.data.messages import REASONING, Messages, Tools, content_texts
from jaxglue.data.template import ChatTemplate, conversation_shape

Message = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIRST_ROWS = 64
"""Rows whose messages are all checked by probes; later ones only if they have another shape."""
_PROBE = "jaxglue{}probe"
_THINKING = "</think>"
"""Ends the thinking in a content, which templates drop from earlier turns."""
_log = logging.getLogger(__name__)


class TemplateCheck:
    """Check of renderings: a template may leave out roles, positions, contents or tool calls without an error.

    Official templates leave out texts beside tool calls, and reasoning: these are reported once, and so are tools.

    Args:
        template: of the renderings.
        needs_tools: refuse tools that are left out.
    """

    def __init__(self, template: ChatTemplate, *, needs_tools: bool = False):
        self._template, self._needs_tools = template, needs_tools
        self._shapes: set[tuple] = set()
        self._reported: set[str] = set()
        self._rows = 0

    def __call__(self, messages: Messages, tools: Tools, text: str) -> None:
        """Check a conversation's rendering.

        Raises:
            ValueError: an unknown role, or a message, tool call or needed tool that is not in the text.
        """
        shape = conversation_shape(messages, tools)
        if self._rows < _FIRST_ROWS or shape not in self._shapes:
            self._refuse_unknown({message["role"] for message in messages})
            self._probe(messages, tools)
        self._rows += 1
        self._shapes.add(shape)
        self._find_contents(messages, text)

    def _refuse_unknown(self, roles: set[str]) -> None:
        if unknown := roles - {*_ROLES, *self._template.constants}:
            raise ValueError(f"unknown role {min(unknown)!r:.100}: the chat template renders {self._rendered_roles()}")

    def _probe(self, messages: Messages, tools: Tools) -> None:
        """Render unique words in place of contents and names: a short content may be in the text by chance."""
        probes = [_marked(message, index) for index, message in enumerate(messages)]
        marked_tools, names = _marked_tools(tools)
        try:
            text = self._template.render(probes, marked_tools)
        except ValueError:
            return  # the template reads the contents; `_find_contents` remains
        for index, probe in enumerate(probes):
            if call := next((n for n, name in enumerate(_called(probe), 1) if name not in text), None):
                raise self._missing(f"tool call {call} of message {index + 1}", probe["role"])
            if probe["content"] not in text:
                self._miss_content(index, probe)
            if index == len(probes) - 1 and any(probe.get(key, "") not in text for key in REASONING):
                self._report("reasonings of assistant messages")
        if absent := [name for name, probe in names.items() if probe not in text]:
            if self._needs_tools:
                raise ValueError(f"the chat template leaves out tools, such as {absent[0]!r:.100}: leave out tools")
            self._report("tools")

    def _find_contents(self, messages: Messages, text: str) -> None:
        end = 0
        for index, message in enumerate(messages):
            for part in content_texts(message["content"]):
                content = part.rpartition(_THINKING)[2].strip()
                start = max(text.find(content, end), text.find(content))
                if start >= 0:
                    end = start + len(content)
                elif not any(form in text for form in _escaped(content)):
                    self._miss_content(index, message)

    def _miss_content(self, index: int, message: Message) -> None:
        if not _called(message):
            raise self._missing(f"message {index + 1}", message["role"])
        self._report("texts beside tool calls")

    def _report(self, what: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            _log.warning("the chat template leaves out %s, and training will not see them", what)

    def _missing(self, what: str, role: str) -> ValueError:
        return ValueError(
            f"the chat template leaves out {what}, of role {role!r:.100}; it renders {self._rendered_roles()}: "
            "change the row, or give another template with --chat-template"
        )

    def _rendered_roles(self) -> str:
        return f"the roles {', '.join(filter(self._is_rendered, _ROLES)) or '(none)'}"

    def _is_rendered(self, role: str) -> bool:
        probe = {"role": role, "content": _PROBE}
        user, assistant = ({"role": name, "content": "a"} for name in ("user", "assistant"))
        return any(self._shows_probe(chat) for chat in ([probe, user], [user, assistant, probe]))

    def _shows_probe(self, messages: Messages) -> bool:
        try:
            return _PROBE in self._template.render(messages)
        except ValueError:
            return False


def _marked(message: Message, index: int) -> Message:
    """Put unique words in place of a message's content, reasoning and names of tool calls."""
    word = _PROBE.format(index)
    marked = {**message, "content": message["content"] and word}
    marked |= {key: f"{word}{key}" for key in REASONING if message.get(key)}
    if calls := message.get("tool_calls"):
        functions = [{**call["function"], "name": f"{word}call{n}"} for n, call in enumerate(calls)]
        marked["tool_calls"] = [{**call, "function": f} for call, f in zip(calls, functions, strict=True)]
    return marked


def _called(message: Message) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls") or ()]


def _marked_tools(tools: Tools) -> tuple[Tools, dict[str, str]]:
    """Put unique words in place of the names of tools; return also the word for each name."""
    marked, words = list[Any](), dict[str, str]()
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            function = {**function, "name": words.setdefault(name, _PROBE.format(f"tool{len(words)}"))}
            tool = {**tool, "function": function} if "function" in tool else function
        marked.append(tool)
    return (None if tools is None else marked), words


def _escaped(content: str) -> list[str]:
    """Return the content inside a JSON string, as templates write the answers of tools."""
    return [json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
