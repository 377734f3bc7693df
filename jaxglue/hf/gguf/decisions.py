"""Metadata by which llama.cpp's server answers the questions of a decision model at /v1/systemone."""

import logging
import string
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.data.decide_rows import DecisionEncoder
from jaxglue.data.questions import CHOICE, SCORE, YES_NO, question_end

_TYPE = "lfm2-d1"
"""Type of decision models whose labels are those of training: yes and no, letters, and digits, at the output head."""
_TEMPLATE = "systemone"
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
    template = decision_template(encoder, "" if tokenizer.chat_template else tokenizer.bos_token or "")
    return found | {"tokenizer.chat_templates": [_TEMPLATE], f"tokenizer.chat_template.{_TEMPLATE}": template}


def decision_template(encoder: DecisionEncoder, begins: str = "") -> str:
    """Return the prompt of a question as a Jinja template of its state, type, instructions and options."""
    frame = encoder.frame
    asks = f"{{% if instructions %}}{_literal('Question: ')}{_text('instructions')}{_literal('\n')}{{% endif %}}"
    description = f"{{% if o.description %}}{_literal(' - ')}{_text('o.description')}{{% endif %}}"
    choices = f"{{{{ o.label }}}}{_literal(': ')}{_text('o.key')}{description}"
    levels = f"{{{{ o.key }}}}{_literal(': ')}{_text('o.description')}"
    word = "{% if o.key == 'true' %}yes{% else %}no{% endif %}"
    means = f"{{% if o.description %}}{word}{_literal(': ')}{_text('o.description')}{_literal('\n')}{{% endif %}}"
    ends = {kind: _literal(question_end(kind, encoder.labels.names[kind])) for kind in (YES_NO, CHOICE, SCORE)}
    lines = {YES_NO: means, CHOICE: choices + _literal("\n"), SCORE: levels + _literal("\n")}
    of_type = {kind: f"{{% for o in options %}}{lines[kind]}{{% endfor %}}{ends[kind]}" for kind in lines}
    question = (
        f"{{% if type == '{YES_NO}' %}}{of_type[YES_NO]}{{% elif type == '{CHOICE}' %}}{of_type[CHOICE]}"
        f"{{% else %}}{of_type[SCORE]}{{% endif %}}"
    )
    state = f"{_literal(begins + frame.head)}{_text('state')}{_literal(frame.between)}"
    return f"{state}{asks}{question}{_literal(frame.tail)}"


def _literal(text: str) -> str:
    """Return a text as an expression of a template."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"{{{{ '{escaped}' }}}}" if text else ""


def _text(name: str) -> str:
    """Return the expression of a text, or of other values as JSON."""
    return f"{{% if {name} is string %}}{{{{ {name} | trim }}}}{{% else %}}{{{{ {name} | tojson }}}}{{% endif %}}"
