"""Sources of data, each with settings of its own: `chats.jsonl?format=messages&weight=2`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from jaxglue.config import Config, Kind, PositiveFloat, Range, plain_fields
from jaxglue.spelling import nearest

HUB_PREFIX = "hf:"
Format = Literal[
    "auto",
    "messages",
    "conversations",
    "prompt_completion",
    "alpaca",
    "alpaca_chat",
    "question_answer",
    "text",
    "preference",
    "labeled",
]
LossOn = Literal["assistant", "all"]


@dataclass(frozen=True, kw_only=True)
class Source(Config):
    """A file, folder or data set with the settings of its rows."""

    name: str
    """Path, or `hf:owner/name`."""
    split: str = "train"
    """Split of a `datasets` folder or hub data set."""
    format: Format = "auto"
    """Row format."""
    loss_on: LossOn = "assistant"
    """Tokens with loss."""
    system: str = ""
    """System message of chats that have none."""
    rename: str = ""
    """New and old names of columns, `prompt=question,completion=answer`."""
    weight: PositiveFloat = 1.0
    """Passes over the source in an epoch."""
    share: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Share of an epoch's tokens; 0 leaves the choice to `weight`."""

    def validate(self) -> None:
        """Refuse malformed columns, and two kinds of weight."""
        _ = self.columns
        if self.share and self.weight != 1:
            raise ValueError(f"{self.name}: weight and share are both given: leave one out")

    @property
    def columns(self) -> dict[str, str]:
        """Old names of columns, by new name.

        Raises:
            ValueError: not of the form new=old,new=old.
        """
        pairs = [part.strip().split("=") for part in self.rename.split(",") if part.strip()]
        if bad := [pair for pair in pairs if len(pair) != 2 or not all(pair)]:
            raise ValueError(f"columns: expected new=old,new=old, such as prompt=question, got {'='.join(bad[0])!r}")
        return {new.strip(): old.strip() for new, old in pairs}

    def __str__(self) -> str:
        return self.name


_OPTIONS = {
    "columns": "rename",
    **{field.name: field.name for field in fields(Source) if field.name not in ("name", "rename")},
}
"""Fields by the names of their options."""


def parse_source(text: str, **defaults: str) -> Source:
    """Parse `name?option=value&option=value`; values are percent-decoded, and a file of the whole name comes first.

    Raises:
        ValueError: an unknown option, or a value out of its range.
    """
    name, _, query = (text, "", "") if os.path.exists(text) else text.partition("?")
    options = dict(defaults)
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if key not in _OPTIONS or not equals:
            raise ValueError(f"{text}: unknown option {part!r}{nearest(key, _OPTIONS)}: use {', '.join(_OPTIONS)}")
        options[_OPTIONS[key]] = unquote(value)
    known = plain_fields(Source)
    try:
        return Source(name=name, **{key: _read(known[key][1], key, value) for key, value in options.items()})
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error


def short_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return files' names without their folders, and numbered where several sources share one."""
    short = [name if name.startswith(HUB_PREFIX) else os.path.basename(name.rstrip("/")) or name for name in names]
    return tuple(
        name if short.count(name) == 1 else f"{name}#{short[:index].count(name) + 1}"
        for index, name in enumerate(short)
    )


def _read(kind: Kind, key: str, value: str) -> Any:
    try:
        return kind.read_text(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
