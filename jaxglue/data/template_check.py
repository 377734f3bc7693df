"""Check that a chat template shows every message."""

import json

from jaxglue.data.messages import Messages, Tools
from jaxglue.data.template import ChatTemplate

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIRST_ROWS = 64
"""Rows whose messages are all checked by probes; later ones only if they have new roles."""
_PROBE = "jaxglue{}probe"
_THINKING = "</think>"
"""Ends the thinking in a content, which templates drop from earlier turns."""


class TemplateCheck:
    """Check of renderings: a template may leave out roles, positions or contents without an error.

    Messages with tool calls are exempt: official templates render the calls alone.
    """

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._roles: set[str] = set()
        self._rows = 0

    def __call__(self, messages: Messages, tools: Tools, text: str) -> None:
        """Check a conversation's rendering.

        Raises:
            ValueError: an unknown role, or a message that is not in the text.
        """
        roles = {message["role"] for message in messages}
        if self._rows < _FIRST_ROWS or not roles <= self._roles:
            self._refuse_unknown(roles)
            self._probe(messages, tools)
        self._rows += 1
        self._roles |= roles
        self._find_contents(messages, text)

    def _refuse_unknown(self, roles: set[str]) -> None:
        if unknown := roles - {*_ROLES, *self._template.constants}:
            raise ValueError(f"unknown role {min(unknown)!r:.100}: the chat template renders {self._rendered_roles()}")

    def _probe(self, messages: Messages, tools: Tools) -> None:
        """Render unique words in place of the contents: a short content may be in the text by chance."""
        probes = [{**m, "content": m["content"] and _PROBE.format(i)} for i, m in enumerate(messages)]
        try:
            text = self._template.render(probes, tools)
        except ValueError:
            return  # the template reads the contents; `_find_contents` remains
        for index, probe in enumerate(probes):
            if probe["content"] not in text and not _has_calls(probe):
                raise self._missing(index, probe["role"])

    def _find_contents(self, messages: Messages, text: str) -> None:
        end = 0
        for index, message in enumerate(messages):
            content = message["content"].rpartition(_THINKING)[2].strip()
            found = max(text.find(content, end), text.find(content))
            if found >= 0:
                end = found + len(content)
            elif not _has_calls(message) and not any(form in text for form in _escaped(content)):
                raise self._missing(index, message["role"])

    def _missing(self, index: int, role: str) -> ValueError:
        return ValueError(
            f"the chat template leaves out message {index + 1}, of role {role!r:.100}; it renders "
            f"{self._rendered_roles()}: change the row, or give another template with --chat-template"
        )

    def _rendered_roles(self) -> str:
        return "the roles " + ", ".join(filter(self._is_rendered, _ROLES))

    def _is_rendered(self, role: str) -> bool:
        probe = {"role": role, "content": _PROBE}
        user, assistant = ({"role": name, "content": "a"} for name in ("user", "assistant"))
        return any(self._shows_probe(chat) for chat in ([probe, user], [user, assistant, probe]))

    def _shows_probe(self, messages: Messages) -> bool:
        try:
            return _PROBE in self._template.render(messages)
        except ValueError:
            return False


def _has_calls(message: dict) -> bool:
    return bool(message.get("tool_calls"))


def _escaped(content: str) -> list[str]:
    """Return the content inside a JSON string, as templates write the answers of tools."""
    return [json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
