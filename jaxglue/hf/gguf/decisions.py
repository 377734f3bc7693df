"""Metadata by which llama.cpp's server answers the questions of a decision model at /v1/systemone."""

import logging
import string
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.data.decide_rows import DecisionEncoder
from jaxglue.data.questions import CHOICE, SCORE, YES_NO, question_end
from jaxglue.data.template import special_texts

_TYPE = "lfm2-d1"
"""Type of decision models whose labels are those of training: yes and no, letters, and digits, at the output head."""
_TEMPLATE = "systemone"
_OTHER_LABELS = "single letters as options have other labels here than in training, as have more than 26: rename them"
_log = logging.getLogger(__name__)


def decision_metadata(
    architecture: str, tokenizer: PreTrainedTokenizerBase, record: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the type, the temperatures and the template of prompts; nothing, with a warning, without these labels.

    Args:
        architecture: llama.cpp's name of the model's.
        tokenizer: of the model.
        record: how the model decides (`jaxglue.hf.reading`).
    """
    encoder = DecisionEncoder(tokenizer, system=record.get("system"))
    names = encoder.labels.names
    wanted = {YES_NO: ("yes", "no"), CHOICE: tuple(string.ascii_uppercase), SCORE: tuple(string.digits)}
    if missing := [kind for kind, labels in wanted.items() if names[kind][: len(labels)] != labels]:
        _log.warning("llama.cpp answers no questions here: the tokenizer splits the labels of %s", ", ".join(missing))
        return {}
    found: dict[str, Any] = {f"{architecture}.decision.type": _TYPE}
    for kind, value in record.get("temperatures", {}).items():
        found[f"{architecture}.decision.temperature.{kind}"] = float(value)
    ends = ("", special_texts(tokenizer)) if tokenizer.chat_template else (tokenizer.bos_token or "", ())
    template = decision_template(encoder, *ends)
    return found | {"tokenizer.chat_templates": [_TEMPLATE], f"tokenizer.chat_template.{_TEMPLATE}": template}


def decision_template(encoder: DecisionEncoder, begins: str = "", special: Sequence[str] = ()) -> str:
    """Return the prompt of a question as a Jinja template of its state, type, instructions and options.

    It refuses options to which llama.cpp gives other labels than training did: single letters, which label themselves
    there, and more than 26.

    Args:
        encoder: of the questions.
        begins: before the prompt.
        special: tokens that get a space behind their first character, as llama.cpp would read them inside of texts.
    """
    frame = encoder.frame
    asks = _where_said("instructions", f"{_literal('Question: ')}{_text('instructions')}{_literal('\n')}")
    description = _where_said("o.description", f"{_literal(' - ')}{_text('o.description')}")
    check = f"{{% if o.label != '{string.ascii_uppercase}'[loop.index0] %}}{_refusal(_OTHER_LABELS)}{{% endif %}}"
    choices = f"{check}{{{{ o.label }}}}{_literal(': ')}{{{{ plain(o.key) }}}}{description}"
    levels = f"{{{{ o.key }}}}{_literal(': ')}{_text('o.description')}"
    word = "{% if o.key == 'true' %}yes{% else %}no{% endif %}"
    means = _where_said("o.description", f"{word}{_literal(': ')}{_text('o.description')}{_literal('\n')}")
    ends = {kind: _literal(question_end(kind, encoder.labels.names[kind])) for kind in (YES_NO, CHOICE, SCORE)}
    lines = {YES_NO: means, CHOICE: choices + _literal("\n"), SCORE: levels + _literal("\n")}
    of_type = {kind: f"{{% for o in options %}}{lines[kind]}{{% endfor %}}{ends[kind]}" for kind in lines}
    question = (
        f"{{% if type == '{YES_NO}' %}}{of_type[YES_NO]}{{% elif type == '{CHOICE}' %}}{of_type[CHOICE]}"
        f"{{% else %}}{of_type[SCORE]}{{% endif %}}"
    )
    state = f"{_literal(begins + frame.head)}{_text('state')}{_literal(frame.between)}"
    return f"{_plain(special)}{state}{asks}{question}{_literal(frame.tail)}"


def _plain(special: Sequence[str]) -> str:
    """Return the macro of a text in which no special token stands."""
    pairs = ", ".join(f"[{_quoted(token)}, {_quoted(f'{token[0]} {token[1:]}')}]" for token in special)
    put = "{% set found.text = found.text | replace(pair[0], pair[1]) %}"
    replaced = f"{{% set found = namespace(text=text) %}}{{% for pair in [{pairs}] %}}{put}{{% endfor %}}"
    return f"{{% macro plain(text) %}}{replaced}{{{{ found.text }}}}{{% endmacro %}}"


def _literal(text: str) -> str:
    """Return a text as an expression of a template."""
    return f"{{{{ {_quoted(text)} }}}}" if text else ""


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


def _refusal(message: str) -> str:
    return f"{{{{ raise_exception('{message}') }}}}"


def _where_said(name: str, part: str) -> str:
    """Return a part that is there where a value is neither none nor an empty text."""
    return f"{{% if {name} is not none and ({name} is not string or {name} | trim) %}}{part}{{% endif %}}"


def _text(name: str) -> str:
    """Return the expression of a text, or of other values as JSON."""
    json = f"{{{{ plain({name} | tojson) }}}}"
    return f"{{% if {name} is string %}}{{{{ plain({name} | trim) }}}}{{% else %}}{json}{{% endif %}}"
