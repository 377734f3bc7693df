"""Configurations that check themselves: types, choices, ranges and aliases are declared beside each field.

    @dataclass(frozen=True, kw_only=True)
    class RunConfig(Config):
        steps: Annotated[int, Range(ge=1), Alias("max_steps")] = 100

Python, flags and recipes read the same declarations: `RunConfig(steps=0)` fails as `--steps 0` does.
"""

import contextlib
import dataclasses
import functools
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from jaxglue.settings.spelling import nearest

NONE = "none"
"""Stands for None, which flags and TOML cannot express, wherever a field is optional."""
KEEP = object()
"""Stands for no change to a field."""
_LARGEST = 2**53
"""Largest whole number: beyond it, numbers that other programs write as floats are not exact."""
_SHOWN = 200
"""Longest part of a wrong value in an error, in characters."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""A byte of a flag, or half of a character of JSON or YAML, that is not UTF-8."""
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


def is_jinja(template: str) -> bool:
    """Tell whether a chat template is given as text rather than as a file's name."""
    return "{%" in template or "{{" in template


class Alias:
    """Further names that flags and recipes accept for a field.

    Args:
        names: that other programs have for it.
        values: their values by ours, where these differ; a False that is not among them leaves the field alone.
    """

    def __init__(self, *names: str, values: Mapping[Any, Any] | None = None):
        self.names, self.values = names, values


class Choices:
    """Values of a text field that are a registry's names, read whenever the field is, after other ones."""

    def __init__(self, names: Collection[str], *others: str):
        self.names, self.others = names, others


class Instead:
    """Remedies for values of other programs that no value of a field replaces, such as lora and NF4 for qlora."""

    def __init__(self, **remedies: str):
        self.remedies = remedies


class Code:
    """Marks texts that name files of code: only a command line, or a shipped recipe, has them run.

    Args:
        file: returns the file that a text names, None for one that names no code.
    """

    def __init__(self, file: Callable[[str], str | None] = str):
        self.file = file


class Synonyms:
    """Values of other programs that stand for values of a field."""

    def __init__(self, **values: Any):
        self.values = values


class CommaSeparated:
    """Splits texts of a list at commas, as other programs write lists of names."""


class Overrules:
    """Switches that a recipe may turn on and that this one, given as a flag, turns off."""

    def __init__(self, *names: str):
        self.names = names


class Excludes(NamedTuple):
    """A setting that does not go with a kind; beside a field's declaration, with values of the field."""

    setting: str
    """A field of a group, or a group with all of its fields."""
    reason: str
    given: Callable[[Any], Any] | None = None
    """Tells the values that do not go with it; by default all but the setting's default."""
    unless: Callable[[Mapping[str, Any]], Any] = lambda _: False
    """Tells from all settings by name whether it is lifted."""
    when: Callable[[Any], Any] | None = None
    """Tells the values of the field that exclude it; by default all but the field's default."""
    remedy: str = "leave it out"


class Requires(NamedTuple):
    """Settings of which a kind, or a value of the field beside whose declaration it stands, needs one."""

    settings: tuple[str, ...]
    reason: str
    when: Callable[[Any], Any] | None = None
    """Of `Excludes`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HelpLayout:
    """Order of the flags in a command's help; the `help_layout` of a configuration, in which groups are looked up."""

    common: tuple[str, ...]
    """Fields of groups that `--help` shows, beside the configuration's own; `--help-all` shows all."""
    sections: Mapping[str, tuple[str, tuple[str, ...]]]
    """Groups of the help alone, by title: a description and the fields, which recipes have in their own groups."""


PositiveInt = Annotated[int, Range(ge=1)]
NonNegativeInt = Annotated[int, Range(ge=0)]
PositiveFloat = Annotated[float, Range(gt=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """The declaration of a field: a scalar or a tuple of scalars, with its choices, range and names."""

    scalar: type
    optional: bool = False
    many: bool = False
    comma_separated: bool = False
    choices: tuple[Any, ...] = ()
    range: Range = Range()
    aliases: Mapping[str, Mapping[Any, Any] | None] = dataclasses.field(default_factory=dict)
    """Further names; each with its values by ours, or None for the same values."""
    remedies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Replacement for a value of another program."""
    synonyms: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of other programs by ours."""
    overrules: tuple[str, ...] = ()
    """Switches of a recipe that this one, given as a flag, turns off."""
    code: Code | None = None
    """Its texts name files of code."""
    relations: tuple[Excludes | Requires, ...] = ()
    """What its values exclude and require of other settings."""

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
            return tuple(self.read_one(part) for item in items for part in self._parts(item))
        return self.read_one(value)

    def read_text(self, text: str) -> Any:
        """Convert the text of a flag: one item of a list, else the whole value; raises like `read`."""
        if self.optional and text == NONE:
            return None
        if self.scalar is Path:
            return self.read_one(text)
        if len(parts := self._parts(text)) > 1:
            return ",".join(map(self.read_one, parts))
        value: Any = text
        with contextlib.suppress(ValueError):
            # Other programs print whole numbers as floats: 3.0 epochs.
            value = self.scalar(text.removesuffix(".0") if self.scalar is int else text)
        return self.read_one(value)

    def from_alias(self, name: str, value: Any) -> Any:
        """Return our value for the one given under a name of the field; KEEP for a switch that is off.

        Raises:
            ValueError: the alias has other values.
        """
        values = self.aliases.get(name)
        if values is None:
            return value
        value = str(value) if type(value) is int else value
        if isinstance(value, str | bool) and value in values:
            return values[value]
        if value is False:
            return KEEP
        raise ValueError(f"expected {' | '.join(map(str, values))}, got {value!r:.100}")

    def _parts(self, item: Any) -> list[Any]:
        """Return the items that one of a list stands for."""
        split = self.comma_separated and isinstance(item, str)
        return [part.strip() for part in item.split(",") if part.strip()] or [item] if split else [item]

    def read_one(self, value: Any) -> Any:
        """Convert one item; raises like `read`."""
        value = self._plain(value)
        if type(value) not in _ACCEPTS[self.scalar] and not (self.scalar is Path and isinstance(value, Path)):
            raise self._unexpected(value)
        if isinstance(value, str | Path) and _LONE_SURROGATE.search(str(value)):
            raise self._unexpected(value, ", which is not UTF-8, so no recipe can hold it")
        if self.scalar is Path and isinstance(value, str) and not value.strip():
            raise self._unexpected(value, ", an empty name, which would stand for the current folder")
        try:
            result = self.scalar(value)
        except OverflowError:
            raise self._unexpected(value) from None
        if self.choices and result not in self.choices and isinstance(result, str) and result.lower() in self.choices:
            result = result.lower()  # Q4_K_M, as other programs write it
        if self.choices and result not in self.choices:
            raise self._unexpected(value, self._remedy(str(value)))
        if isinstance(result, float) and not math.isfinite(result):
            raise self._unexpected(value, ", which is not finite")
        if isinstance(result, int | float) and result not in self.range:
            raise self._unexpected(value)
        if isinstance(result, int) and abs(result) > _LARGEST:
            raise self._unexpected(value, f", which is beyond {_LARGEST:,}")
        return result

    def _plain(self, value: Any) -> Any:
        """Return our value for a synonym, the text of a path, and Python's number for NumPy's or a whole float."""
        if self.scalar is str and isinstance(value, int) and str(value) in {*self.choices, *self.synonyms}:
            value = str(value)  # a recipe's number among choices or synonyms
        if isinstance(value, str):
            return self.synonyms.get(value, value)
        if self.scalar is str and isinstance(value, os.PathLike):
            return os.fspath(value)
        if self.scalar not in (int, float) or isinstance(value, bool) or not isinstance(value, numbers.Real):
            return value
        if isinstance(value, numbers.Integral):
            return int(value)
        number = float(value)
        return int(number) if self.scalar is int and number.is_integer() else number

    def _remedy(self, value: str) -> str:
        return f": {self.remedies[value]}" if value in self.remedies else nearest(value, map(str, self.choices))

    def _unexpected(self, value: Any, hint: str = "") -> ValueError:
        return ValueError(f"expected {self}, got {value!r:.{_SHOWN}}{hint:.{_SHOWN}}")


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
                raise ValueError(f"{name}: expected {cls.__name__}, got {getattr(self, name)!r:.100}")
        self.validate()
        _refuse_by_fields(_Settings(self, members=False))

    def validate(self) -> None:
        """Check what no declaration says; override it to raise ValueError."""


class KindSettings(Config):
    """Base of a group whose class follows from a kind: one of its fields names it, such as an objective.

    Constructing the base makes the settings of the kind named, `ObjectiveConfig(objective="dpo", beta=0.5)` those of
    DPO. A class extends the base by the fields of its kinds.
    """

    named_by: ClassVar[str]
    """The field that names the kind."""

    def __new__(cls, **values: Any) -> Self:
        """Return an object of the kind's class."""
        chosen = cls.of(values.get(cls.named_by)) if cls is cls.base() else cls
        for name in values.keys() - plain_fields(chosen).keys():
            raise ValueError(cls.refusal(name, values.get(cls.named_by)) or f"unknown setting {name!r:.100}")
        return super().__new__(chosen)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, str]]:
        """Let copies be of the same kind."""
        return (), {self.named_by: getattr(self, self.named_by)}

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = self.of(name := getattr(self, self.named_by))
        if type(self) is not chosen:
            raise ValueError(f"{self.named_by} {name} has the settings {chosen.__name__}, not {type(self).__name__}")

    @classmethod
    def base(cls) -> type["KindSettings"]:
        """Return the class that all kinds' settings extend."""
        return next(base for base in reversed(cls.__mro__) if "named_by" in vars(base))

    @classmethod
    def settings_of(cls, name: str) -> type[Self]:
        """Return the settings of a named kind; raise KeyError if there is none."""
        raise NotImplementedError

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all kinds."""
        return [*plain_fields(cls)[cls.named_by][1].choices]

    @classmethod
    def of(cls, name: Any = None) -> type[Self]:
        """Return the class of a named kind's settings, by default of the default kind; itself for a bad name."""
        field, kind = plain_fields(cls)[cls.named_by]
        name = field.default if name is None else kind.synonyms.get(name, name)
        return cls.settings_of(name) if isinstance(name, str) and name in cls.names() else cls

    @classmethod
    def readers(cls, setting: str) -> dict[str, "tuple[dataclasses.Field, Kind]"]:
        """Return the kinds that have a setting, by its name or an alias, each with the setting's declaration."""
        return {
            name: (field, kind)
            for name in cls.names()
            for field, kind in plain_fields(cls.base().of(name)).values()
            if setting in (field.name, *kind.aliases)
        }

    @classmethod
    def refusal(cls, setting: str, name: Any = None) -> str | None:
        """Return why a named kind refuses a setting of others; None for a setting that no kind has."""
        if not (readers := cls.readers(setting)):
            return None
        name = plain_fields(cls)[cls.named_by][0].default if name is None else name
        kinds, named = " or ".join(readers), cls.named_by.replace("_", "-")
        return f"{_flag(setting)} is for --{named} {kinds}, not {name}: name the {named}, or leave it out"


class _Settings:
    """The settings of a configuration by name, with those of its groups."""

    def __init__(self, config: Config, *, members: bool):
        named = {name: getattr(config, name) for name in groups(type(config))} if members else {}
        self.groups: dict[str, Collection[str]] = {name: plain_fields(type(group)) for name, group in named.items()}
        holders = [
            (holder, field, kind)
            for holder in (config, *named.values())
            for field, kind in plain_fields(type(holder)).values()
        ]
        self.values = {field.name: getattr(holder, field.name) for holder, field, _ in holders}
        self.defaults = {field.name: field.default for _, field, _ in holders}
        self.relations = [(field.name, relation) for _, field, kind in holders for relation in kind.relations]

    def is_given(self, name: str, values: Callable[[Any], Any] | None) -> bool:
        """Tell whether a setting has one of these values; by default another one than its default."""
        value = self.values[name]
        return bool(value != self.defaults[name] if values is None else values(value))

    def flag(self, name: str) -> str:
        """Return a setting as a command line gives it."""
        value = self.values[name]
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return _flag(name) if value is True else f"{_flag(name)} {shown:.100}"

    def refuse(self, by: str, relation: Excludes | Requires) -> None:
        """Raise ValueError where a relation of `by`, a flag, does not hold; absent settings do not count."""
        if isinstance(relation, Requires):
            present = self.values.keys() & set(relation.settings)
            if present and not any(self.values[name] for name in present):
                raise ValueError(f"{by} needs {' or '.join(map(_flag, relation.settings))}: {relation.reason}")
            return
        for name in self.groups.get(relation.setting, (relation.setting,)):
            if name in self.values and self.is_given(name, relation.given) and not relation.unless(self.values):
                flag = self.flag(name) if relation.given else _flag(name)
                raise ValueError(f"{flag} is not for {by}: {relation.reason}: {relation.remedy}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse_by_fields(settings: _Settings) -> None:
    for name, relation in settings.relations:
        if settings.is_given(name, relation.when):
            settings.refuse(settings.flag(name), relation)


def refuse_contradictions(config: Config, kinds: Mapping[str, Iterable[Excludes | Requires]]) -> None:
    """Raise ValueError for settings of a configuration's groups that do not go together.

    Args:
        config: with the settings in its groups.
        kinds: relations of the kinds chosen, by the setting that names each.
    """
    settings = _Settings(config, members=True)
    for name, relations in kinds.items():
        for relation in relations:
            settings.refuse(settings.flag(name), relation)
    _refuse_by_fields(settings)


def kind_names(cls: type) -> dict[str, Kind]:
    """Return the declarations of the fields of a configuration's groups that name kinds."""
    bases = (base for base in groups(cls).values() if issubclass(base, KindSettings))
    return {base.named_by: plain_fields(base)[base.named_by][1] for base in bases}


def names_in(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of kinds among a recipe's nested values."""
    tables = {name: values.get(name, {}) for name in groups(cls)}
    return {name: table[name] for name in kind_names(cls) for table in tables.values() if name in table}


def every_field(cls: type) -> Iterator[tuple[str, dataclasses.Field, Kind]]:
    """Yield (group, field, declaration) of the fields of all groups, of kinds those of every kind, each name once."""
    for group, base in groups(cls).items():
        kinds = [base.of(name) for name in base.names()] if issubclass(base, KindSettings) else []
        fields = {name: each for kind in (base, *dict.fromkeys(kinds)) for name, each in plain_fields(kind).items()}
        yield from ((group, field, kind) for field, kind in fields.values())


def chosen_groups(cls: type, names: Mapping[str, Any]) -> dict[str, type]:
    """Return the groups of a configuration, with those of kinds for the kinds named.

    Args:
        cls: class of the configuration.
        names: of kinds by the field that names them; of others the default is taken.
    """
    return {
        group: base.of(names.get(base.named_by)) if issubclass(base, KindSettings) else base
        for group, base in groups(cls).items()
    }


def refusal_of(chosen: Mapping[str, type], key: str, names: Mapping[str, Any]) -> str | None:
    """Return why the kinds chosen refuse a setting of others; None if no kind has it.

    Args:
        chosen: groups of a configuration.
        key: name of the setting or an alias.
        names: of kinds, by the field that names them.
    """
    groups_of_kinds = (group for group in chosen.values() if issubclass(group, KindSettings))
    return next(filter(None, (group.refusal(key, names.get(group.named_by)) for group in groups_of_kinds)), None)


def is_default(cls: type[KindSettings], key: str, value: Any) -> bool:
    """Tell whether a setting of other kinds has a default of theirs, as records of runs and other programs may say."""
    if value in (False, NONE):
        return True
    for field, kind in cls.readers(key).values():
        with contextlib.suppress(ValueError):
            if kind.from_alias(key, value) is KEEP or kind.read(kind.from_alias(key, value)) == field.default:
                return True
    return False


def groups(cls: type) -> dict[str, type]:
    """Return the fields of a configuration that are configurations themselves."""
    hints = _hints(cls)
    return {field.name: hints[field.name] for field in _fields(cls) if dataclasses.is_dataclass(hints[field.name])}


def plain_fields(cls: type) -> dict[str, tuple[dataclasses.Field, Kind]]:
    """Return the other fields of a configuration with their declarations."""
    return {name: (field, kind or _kind(_hints(cls)[name])) for name, (field, kind) in _declared(cls).items()}


def stable_repr(value: Any, known: Collection[str]) -> str:
    """Return the repr of a dataclass or named tuple; fields outside `known` show only where they differ from defaults.

    A digest of it outlives the addition of fields.
    """
    if dataclasses.is_dataclass(value):
        defaults = {field.name: field.default for field in dataclasses.fields(value)}
    elif hasattr(value, "_field_defaults"):
        defaults = dict.fromkeys(value._fields, dataclasses.MISSING) | value._field_defaults
    else:
        return repr(value)
    shown = [name for name, default in defaults.items() if name in known or getattr(value, name) != default]
    items = (f"{name}={stable_repr(getattr(value, name), known)}" for name in shown)
    return f"{type(value).__qualname__}({', '.join(items)})"


@functools.cache
def _declared(cls: type) -> dict[str, tuple[dataclasses.Field, Kind | None]]:
    """Return fields and declarations, None for those of choices, which later registrations add to."""
    fields = [(field, _hints(cls)[field.name]) for field in _fields(cls) if field.name not in groups(cls)]
    return {field.name: (field, None if _has_choices(hint) else _kind(hint)) for field, hint in fields}


def _has_choices(hint: Any) -> bool:
    notes = getattr(hint, "__metadata__", ())
    return any(isinstance(note, Choices) for note in notes) or any(map(_has_choices, typing.get_args(hint)))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


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
                aliases = {**kind.aliases, **dict.fromkeys(note.names, note.values)}
                kind = dataclasses.replace(kind, aliases=aliases)
            case Choices():
                kind = dataclasses.replace(kind, choices=(*note.others, *note.names))
            case Instead():
                kind = dataclasses.replace(kind, remedies=note.remedies)
            case Synonyms():
                kind = dataclasses.replace(kind, synonyms=note.values)
            case CommaSeparated():
                kind = dataclasses.replace(kind, comma_separated=True)
            case Code():
                kind = dataclasses.replace(kind, code=note)
            case Overrules():
                kind = dataclasses.replace(kind, overrules=note.names)
            case Excludes() | Requires():
                kind = dataclasses.replace(kind, relations=(*kind.relations, note))
    return kind
