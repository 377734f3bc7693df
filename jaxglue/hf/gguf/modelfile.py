"""The Modelfile, from which Ollama makes a model: file, template, stop tokens."""

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxglue.data.template import ChatTemplate
from jaxglue.hf.gguf.vocabulary import adds_bos

_CONTENTS = {"system": "⟦system⟧", "user": "⟦user⟧", "assistant": "⟦assistant⟧"}
_CHECKED = ("u", "uau", "uauau", "su", "suau")
"""Conversations that the template must render as Hugging Face's does, by their roles' initials."""
_ROLES = {"s": "system", "u": "user", "a": "assistant"}


class _Texts(NamedTuple):
    """Texts around messages."""

    begin: str
    default: str
    """Text in place of a system message, where there is none."""
    around: dict[str, tuple[str, str]]
    """Texts before and after the content, by role."""
    prompt: str
    """Before the answer."""


def modelfile(file: str, tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> str:
    """Return the text of a Modelfile.

    Args:
        file: name of the GGUF file beside it.
        tokenizer: of the model.
        stops: tokens that end an answer.
    """
    lines = [f"FROM ./{file}"]
    if tokenizer.chat_template:
        template = ollama_template(tokenizer)
        if template is None:
            lines.append(
                "# The chat template has no counterpart in Ollama's language; llama.cpp reads it from the file."
            )
        else:
            lines.append(f'TEMPLATE """{template}"""')
    lines += [
        f"PARAMETER stop {json.dumps(token, ensure_ascii=False)}"
        for token in tokenizer.convert_ids_to_tokens(sorted(stops))
    ]
    return "\n".join(lines) + "\n"


def ollama_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a chat template in Ollama's language, of texts around messages; None where it would render otherwise.

    Tools and thinking are left to llama.cpp's own server, which reads Hugging Face's template. A date is training's.
    """
    try:
        texts = _derive(tokenizer)
        same = all(_assemble(texts, roles) == _render(tokenizer, roles) for roles in _CHECKED)
    except Exception:  # a template may refuse any of these conversations with errors of its own
        return None
    if not same:
        return None
    begin = texts.begin
    if adds_bos(tokenizer):
        begin = begin.removeprefix(str(tokenizer.bos_token))  # Ollama adds it, as the file says
    default = f"{{{{- if not .System }}}}{_go(texts.default)}{{{{- end }}}}" if texts.default else ""
    parts = [_go(begin), default, "{{- range .Messages }}"]
    for index, (role, (before, after)) in enumerate(texts.around.items()):
        test = f'{{{{- {"else if" if index else "if"} eq .Role "{role}" }}}}'
        parts.append(f"{test}{_go(before)}{{{{- .Content }}}}{_go(after)}")
    parts += ["{{- end }}", "{{- end }}", _go(texts.prompt)]
    return "".join(parts)


def _go(text: str) -> str:
    """Return an action that prints a text: outside of actions, spaces beside them would be lost."""
    return f"{{{{- {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def _render(tokenizer: PreTrainedTokenizerBase, roles: Sequence[str]) -> str:
    messages: list[dict[str, Any]] = [{"role": _ROLES[role], "content": _CONTENTS[_ROLES[role]]} for role in roles]
    return ChatTemplate(tokenizer).render_prompt(messages, None)


def _assemble(texts: _Texts, roles: Sequence[str]) -> str:
    names = [_ROLES[role] for role in roles]
    parts = [f"{texts.around[name][0]}{_CONTENTS[name]}{texts.around[name][1]}" for name in names]
    default = "" if "system" in names else texts.default
    return texts.begin + default + "".join(parts) + texts.prompt


def _derive(tokenizer: PreTrainedTokenizerBase) -> _Texts:
    """Return the texts around messages, from two renderings."""
    alone, _ = _render(tokenizer, "u").split(_CONTENTS["user"])
    rest = _render(tokenizer, "suau")
    gaps = []
    for role in "suau":
        gap, rest = rest.split(_CONTENTS[_ROLES[role]], 1)
        gaps.append(gap)
    first, after_system, after_user, after_assistant = gaps
    before_user = _common_suffix(_common_suffix(after_system, after_assistant), alone)
    without_system = alone.removesuffix(before_user)
    begin = _common_prefix(without_system, first)
    end = after_assistant.removesuffix(before_user)
    ends_alike = after_user.startswith(end) and rest.startswith(end)
    after = end if ends_alike else _common_prefix(after_user, rest)
    around = {
        "system": (first.removeprefix(begin), after_system.removesuffix(before_user)),
        "user": (before_user, after),
        "assistant": (after_user.removeprefix(after), end),
    }
    return _Texts(begin, without_system.removeprefix(begin), around, rest.removeprefix(after))


def _common_prefix(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _common_suffix(one: str, other: str) -> str:
    return _common_prefix(one[::-1], other[::-1])[::-1]
