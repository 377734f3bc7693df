"""Configurations that check themselves: types, choices, ranges and aliases are declared beside each field.

    @dataclass(frozen=True, kw_only=True)
    class RunConfig(Config):
        steps: Annotated[int, Range(ge=1), Alias("max_steps")] = 100

Python, flags and TOML recipes read the same declarations: `RunConfig(steps=0)` fails as `--steps 0` does.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

NONE = "none"
"""Stands for None, which flags and TOML cannot express, wherever a field is optional."""
_ACCEPTS: dict[type, tuple[type, ...]] = {str: (str,), int: (int,), float: (int, float), bool: (bool,), Path: (str,)}
"""Types that each field type is converted from, besides itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds of a number; a bound of None is no bound."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, value: float) -> bool:
        above = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        return above and (self.le is None or value <= self.le) and (self.lt is None or value < self.lt)

    def __str__(self) -> str:
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        bounds = ((sign, getattr(self, name)) for name, sign in signs.items())
        return " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)


class Alias:
    """Further names that flags and recipes accept for a field."""

    def __init__(self, *names: str):
        self.names = names


PositiveInt = Annotated[int, Range(ge=1)]
NonNegativeInt = Annotated[int, Range(ge=0)]
PositiveFloat = Annotated[float, Range(gt=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """The declaration of a field: a scalar or a tuple of scalars, with its choices, range and aliases."""

    scalar: type
    optional: bool = False
    many: bool = False
    choices: tuple[Any, ...] = ()
    range: Range = Range()
    aliases: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = " | ".join(map(str, self.choices)) or f"{self.scalar.__name__} {self.range}".strip()
        return ("list of " if self.many else "") + name + (f" | {NONE}" if self.optional else "")

    def read(self, value: Any) -> Any:
        """Convert a Python or TOML value to the field's type.

        Raises:
            ValueError: the value has another type, is no choice, lies outside the range, or is not finite.
        """
        if self.optional and (value is None or value == NONE):
            return None
        if self.many:
            items = value if isinstance(value, list | tuple) else (value,)
            return tuple(self.read_one(item) for item in items)
        return self.read_one(value)

    def read_text(self, text: str) -> Any:
        """Convert the text of a flag: one item of a list, else the whole value; raises like `read`."""
        if self.optional and text == NONE:
            return None
        try:
            value = self.scalar(text)
        except ValueError:
            value = text
        return self.read_one(value)

    def read_one(self, value: Any) -> Any:
        """Convert one item; raises like `read`."""
        if type(value) not in _ACCEPTS[self.scalar] and not (self.scalar is Path and isinstance(value, Path)):
            raise self._unexpected(value)
        result = self.scalar(value)
        if self.choices and result not in self.choices:
            raise self._unexpected(value, nearest(str(value), map(str, self.choices)))
        if isinstance(result, float) and not math.isfinite(result):
            raise self._unexpected(value, ", which is not finite")
        if isinstance(result, int | float) and result not in self.range:
            raise self._unexpected(value)
        return result

    def _unexpected(self, value: Any, hint: str = "") -> ValueError:
        return ValueError(f"expected {self}, got {value!r}{hint}")


class Config:
    """Base of configuration dataclasses: converts and validates every field on construction."""

    def __post_init__(self) -> None:
        for name, (_, kind) in plain_fields(type(self)).items():
            try:
                object.__setattr__(self, name, kind.read(getattr(self, name)))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        for name, cls in groups(type(self)).items():
            if not isinstance(getattr(self, name), cls):
                raise ValueError(f"{name}: expected {cls.__name__}, got {getattr(self, name)!r}")
        self.validate()

    def validate(self) -> None:
        """Check relations between fields; override it to raise ValueError."""


def groups(cls: type) -> dict[str, type]:
    """Return the fields of a configuration that are configurations themselves."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in _fields(cls) if dataclasses.is_dataclass(hints[field.name])}


def plain_fields(cls: type) -> dict[str, tuple[dataclasses.Field, Kind]]:
    """Return the other fields of a configuration with their declarations."""
    hints, subgroups = typing.get_type_hints(cls, include_extras=True), groups(cls)
    return {field.name: (field, _kind(hints[field.name])) for field in _fields(cls) if field.name not in subgroups}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name most like an unknown one, empty if none is alike."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _fields(cls: type) -> Iterator[dataclasses.Field]:
    return (field for field in dataclasses.fields(cls) if field.init)


def _kind(hint: Any) -> Kind:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _annotated(_kind(args[0]), args[1:])
    if origin in (types.UnionType, typing.Union):
        (inner,) = (arg for arg in args if arg is not types.NoneType)
        return dataclasses.replace(_kind(inner), optional=True)
    if origin is tuple:
        assert args[1:] == (...,), f"{hint}: only tuples of any length"
        return dataclasses.replace(_kind(args[0]), many=True)
    if origin is typing.Literal:
        return Kind(scalar=type(args[0]), choices=args)
    assert hint in _ACCEPTS, f"a configuration field cannot be {hint}"
    return Kind(scalar=hint)


def _annotated(kind: Kind, notes: Iterable[Any]) -> Kind:
    for note in notes:
        match note:
            case Range():
                kind = dataclasses.replace(kind, range=note)
            case Alias():
                kind = dataclasses.replace(kind, aliases=note.names)
    return kind
