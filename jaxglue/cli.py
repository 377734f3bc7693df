"""Command lines and recipes from configuration dataclasses: every field is a flag and a TOML key.

A configuration is a frozen keyword-only dataclass whose fields are plain values or groups, that is further such
dataclasses. `--seq-len 4096` and the recipe below mean the same; a flag wins over a recipe, a recipe over a default.

    [data]
    seq_len = 4096
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import itertools
import json
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_ACCEPTS: dict[type, tuple[type, ...]] = {str: (str,), int: (int,), float: (int, float), bool: (bool,), Path: (str,)}
"""For each type of a field the TOML types that it is read from."""
_NONE = "none"
"""Stands for None, which TOML cannot say, wherever a field is optional."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kind:
    """What a field holds: one scalar or a tuple of them, perhaps of named choices, perhaps None."""

    scalar: type
    optional: bool = False
    many: bool = False
    choices: tuple[Any, ...] = ()

    def __str__(self) -> str:
        what = " | ".join(map(str, self.choices)) or self.scalar.__name__
        return ("list of " if self.many else "") + what + (f" | {_NONE}" if self.optional else "")

    def read(self, value: Any, *, text: bool) -> Any:
        """The field's value from a TOML value, or from the text of a flag; `ValueError` if it is of another type."""
        if self.optional and value == _NONE:
            return None
        if self.many and not text:
            if not isinstance(value, list):
                raise ValueError(f"expected {self}, got {value!r}")
            return tuple(self._read_one(item, text=False) for item in value)
        return self._read_one(value, text=text)

    def _read_one(self, value: Any, *, text: bool) -> Any:
        try:
            if not text and type(value) not in _ACCEPTS[self.scalar]:
                raise TypeError
            result = self.scalar(value)
        except (TypeError, ValueError):
            raise ValueError(f"expected {self}, got {value!r}") from None
        if self.choices and result not in self.choices:
            raise ValueError(f"expected {self}, got {value!r}{_nearest(str(value), map(str, self.choices))}")
        return result


def parse_config[C](cls: type[C], argv: Sequence[str] | None = None, *, description: str | None = None) -> C:
    """The configuration that a command line asks for; a mistake ends the program with status 2 and one line on it.

    Args:
        cls: the configuration's dataclass; its first docstring line is the help's first line.
        argv: the arguments, by default those of the process.
        description: what the program does, instead of the docstring.
    """
    parser = _build_parser(cls, description or _summary(cls))
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"unknown argument {unknown[0]}{_nearest(unknown[0], known)}; --help lists them all")
    given = vars(flags)
    recipe = given.pop("config", None)
    try:
        values = _read_recipe(cls, recipe) if recipe else {}
        return _construct(cls, values, given)
    except ValueError as error:
        parser.error(str(error))


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Ends the program with status 1 and one line on what a user can mend: a ValueError or an OSError inside."""
    try:
        yield
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def load_config[C](cls: type[C], path: Path) -> C:
    """The configuration in a recipe; `ValueError` names the file, the key and the nearest known one."""
    return _construct(cls, _read_recipe(cls, path), {})


def as_dict(config: Any) -> dict[str, Any]:
    """The configuration in TOML's and JSON's types, groups as nested dictionaries, None as "none"."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def to_toml(config: Any) -> str:
    """A recipe with every field, which `load_config` reads back as an equal configuration."""
    values = as_dict(config)
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    blocks = [_assignments({key: value for key, value in values.items() if key not in tables})]
    blocks += [f"[{name}]\n" + _assignments(table) for name, table in tables.items()]
    return "\n".join(filter(None, blocks))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return as_dict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None:
        return _NONE
    return str(value) if isinstance(value, Path) else value


def _assignments(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in values.items())


def _toml_value(value: Any) -> str:
    """A value in TOML, whose strings, booleans and lists of these are JSON's; its floats may also be inf or nan."""
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _build_parser(cls: type, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        usage="%(prog)s [--config FILE.toml] [--flag value …]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    recipe = "a recipe: a TOML file with a table for each group below; flags win over it"
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help=recipe)
    _add_fields(parser.add_argument_group("general"), cls)
    for name, group in _groups(cls).items():
        _add_fields(parser.add_argument_group(name, _summary(group)), group)
    return parser


def _add_fields(parser: argparse._ArgumentGroup, cls: type) -> None:
    """A flag for each plain field; argparse refuses a name that two groups share."""
    helps = _field_docs(cls)
    for field, kind in _plain_fields(cls).values():
        flag = "--" + field.name.replace("_", "-")
        text = f"{helps.get(field.name, '')} {_default_note(field)}".strip().replace("%", "%%")
        if kind.scalar is bool and not kind.many:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            nargs: Any = {"nargs": "*", "action": "extend"} if kind.many else {}
            metavar = str(dataclasses.replace(kind, many=False)).replace(" | ", "|")
            parser.add_argument(flag, type=_flag_type(kind), metavar=metavar, help=text, **nargs)


def _flag_type(kind: _Kind) -> Any:
    """The `type=` of a flag: argparse shows the message of an `ArgumentTypeError` only."""

    def read(text: str) -> Any:
        try:
            return kind.read(text, text=True)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _default_note(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return "(required)"
    plain = _plain(value)
    return f"(default: {' '.join(map(str, plain)) if isinstance(plain, list) else plain})"


def _read_recipe(cls: type, path: Path) -> dict[str, Any]:
    """The recipe's values by field name, those of groups one level down."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{path}: cannot read this recipe: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    groups = _groups(cls)
    values = _read_table({key: value for key, value in tables.items() if key not in groups}, cls, f"{path}: ", groups)
    for name in groups.keys() & tables.keys():
        if not isinstance(tables[name], dict):
            raise ValueError(f"{path}: {name} = {tables[name]!r}: expected the table [{name}]")
        values[name] = _read_table(tables[name], groups[name], f"{path}: [{name}] ", ())
    return values


def _read_table(table: dict[str, Any], cls: type, where: str, groups: Iterable[str]) -> dict[str, Any]:
    fields = _plain_fields(cls)
    values = {}
    for key, value in table.items():
        if key not in fields:
            noun = f"table [{key}]" if isinstance(value, dict) else f"key {key!r}"
            raise ValueError(f"{where}unknown {noun}{_nearest(key, [*fields, *groups])}")
        try:
            values[key] = fields[key][1].read(value, text=False)
        except ValueError as error:
            raise ValueError(f"{where}{key}: {error}") from None
    return values


def _construct[C](cls: type[C], values: dict[str, Any], flags: dict[str, Any]) -> C:
    """An instance of `cls` from a recipe's nested values and the flags' flat ones."""
    fields = _plain_fields(cls)
    groups = _groups(cls)
    values = values | {name: flags[name] for name in fields.keys() & flags.keys()}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for field, _ in fields.values():
        if field.name not in values and _default_note(field) == "(required)":
            raise ValueError(f"--{field.name.replace('_', '-')} is missing: give the flag or its key in a recipe")
    return cls(**values | {name: _construct(group, values.get(name, {}), flags) for name, group in groups.items()})


def _groups(cls: type) -> dict[str, type]:
    hints = typing.get_type_hints(cls)
    names = (field.name for field in dataclasses.fields(cls) if field.init)
    return {name: hints[name] for name in names if dataclasses.is_dataclass(hints[name])}


def _plain_fields(cls: type) -> dict[str, tuple[dataclasses.Field, _Kind]]:
    hints, groups = typing.get_type_hints(cls), _groups(cls)
    fields = (field for field in dataclasses.fields(cls) if field.init and field.name not in groups)
    return {field.name: (field, _kind(hints[field.name])) for field in fields}


def _kind(hint: Any) -> _Kind:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (arg for arg in args if arg is not types.NoneType)
        return dataclasses.replace(_kind(inner), optional=True)
    if origin is tuple:
        assert args[1:] == (...,), f"only tuples of any length are supported, not {hint}"
        return dataclasses.replace(_kind(args[0]), many=True)
    if origin is typing.Literal:
        return _Kind(scalar=type(args[0]), choices=args)
    assert hint in _ACCEPTS, f"a configuration field cannot be {hint}"
    return _Kind(scalar=hint)


def _field_docs(cls: type) -> dict[str, str]:
    """The string literals that stand below the fields of a class and its bases, on one line each."""
    docs = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(field.target, ast.Name):
                docs[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return docs


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or cls.__name__).splitlines()[0]


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
