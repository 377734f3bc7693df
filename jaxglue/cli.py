"""Command lines and recipes from configuration dataclasses: every field is a flag and a TOML key.

A configuration (`jaxglue.config.Config`) holds plain values and groups, which are further configurations.
`--seq-len 4096` and the recipe below mean the same; a flag wins over a recipe, a recipe over a default.

    [data]
    seq_len = 4096
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxglue.config import NONE, Kind, groups, nearest, plain_fields


def parse_config[C](cls: type[C], argv: Sequence[str] | None = None, *, command: str | None = None) -> C:
    """Parse a command line; a mistake ends the program with status 2 and one line that names it.

    Args:
        cls: class of the configuration; the first line of its docstring begins the help.
        argv: the arguments, by default those of the process.
        command: of `jaxglue`, as usage lines name it; by default the program's name.
    """
    parser = _build_parser(cls, command)
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"unknown argument {unknown[0]}{nearest(unknown[0], known)}; --help lists them all")
    given = vars(flags)
    recipe = given.pop("config", None)
    try:
        values = _read_recipe(cls, recipe) if recipe else {}
        return _construct(cls, values, given)
    except ValueError as error:
        parser.error(str(error))


def load_config[C](cls: type[C], path: Path) -> C:
    """Read a recipe; `ValueError` names the file, the key and the nearest known key."""
    return _construct(cls, _read_recipe(cls, path), {})


def as_dict(config: Any) -> dict[str, Any]:
    """Return a configuration in TOML's and JSON's types: groups as nested dictionaries, None as "none"."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def to_toml(config: Any) -> str:
    """Write a recipe with every field; `load_config` reads it back as an equal configuration."""
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
        return NONE
    return str(value) if isinstance(value, Path) else value


def _assignments(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in values.items())


def _toml_value(value: Any) -> str:
    """Format a TOML value; TOML's strings, numbers, booleans and lists are JSON's."""
    return json.dumps(value, ensure_ascii=False)


def _build_parser(cls: type, command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command and f"jaxglue {command}",
        description=_summary(cls),
        usage="%(prog)s [--config FILE.toml] [--flag value …]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    recipe = "a recipe: a TOML file with a table for each group below; flags win over it"
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help=recipe)
    _add_fields(parser.add_argument_group("general"), cls)
    for name, group in groups(cls).items():
        _add_fields(parser.add_argument_group(name, _summary(group)), group)
    return parser


def _add_fields(parser: argparse._ArgumentGroup, cls: type) -> None:
    """Add a flag for each plain field; argparse refuses a name that two groups share."""
    helps = _field_docs(cls)
    for field, kind in plain_fields(cls).values():
        flags = [_flag(name) for name in (field.name, *kind.aliases)]
        text = f"{helps.get(field.name, '')} {_notes(field, kind)}".strip().replace("%", "%%")
        if kind.scalar is bool and not kind.many:
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, help=text)
        else:
            nargs: Any = {"nargs": "*", "action": "extend"} if kind.many else {}
            parser.add_argument(*flags, type=_flag_type(kind), metavar=_metavar(kind), help=text, **nargs)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(kind: Kind) -> str:
    choices = kind.choices or (kind.scalar.__name__,)
    return "|".join(map(str, [*choices, NONE] if kind.optional else choices))


def _flag_type(kind: Kind) -> Any:
    """Return the `type=` of a flag: argparse shows the message of an `ArgumentTypeError` only."""

    def read(text: str) -> Any:
        try:
            return kind.read_text(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _notes(field: dataclasses.Field, kind: Kind) -> str:
    """Describe default and range, such as "(default: 1; >= 1)"."""
    notes = ["required" if _is_required(field) else f"default: {_default(field)}", str(kind.range)]
    return f"({'; '.join(filter(None, notes))})"


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field) -> str:
    factory = field.default_factory
    plain = _plain(field.default if factory is dataclasses.MISSING else factory())
    return " ".join(map(str, plain)) if isinstance(plain, list) else str(plain)


def _read_recipe(cls: type, path: Path) -> dict[str, Any]:
    """Return the recipe's values by field name, those of groups one level down."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{path}: cannot read this recipe: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    subgroups = groups(cls)
    plain = {key: value for key, value in tables.items() if key not in subgroups}
    values = _read_table(plain, cls, f"{path}: ", subgroups)
    for name in subgroups.keys() & tables.keys():
        if not isinstance(tables[name], dict):
            raise ValueError(f"{path}: {name} = {tables[name]!r}: expected the table [{name}]")
        values[name] = _read_table(tables[name], subgroups[name], f"{path}: [{name}] ", ())
    return values


def _read_table(table: dict[str, Any], cls: type, where: str, tables: Iterable[str]) -> dict[str, Any]:
    """Return the values of one table by field name; `tables` are the names that a misspelled key may have meant."""
    fields = plain_fields(cls)
    names = {key: name for name, (_, kind) in fields.items() for key in (name, *kind.aliases)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in names:
            noun = f"table [{key}]" if isinstance(value, dict) else f"key {key!r}"
            raise ValueError(f"{where}unknown {noun}{nearest(key, [*names, *tables])}")
        if names[key] in values:
            raise ValueError(f"{where}{key}: {names[key]} is given twice, by this name and another: leave one out")
        try:
            values[names[key]] = fields[names[key]][1].read(value)
        except ValueError as error:
            raise ValueError(f"{where}{key}: {error}") from None
    return values


def _construct[C](cls: type[C], values: dict[str, Any], flags: dict[str, Any]) -> C:
    """Build a configuration from a recipe's nested values and the flags' flat ones."""
    fields = plain_fields(cls)
    values = values | {name: flags[name] for name in fields.keys() & flags.keys()}
    for field, _ in fields.values():
        if field.name not in values and _is_required(field):
            raise ValueError(f"{_flag(field.name)} is missing: give the flag or its key in a recipe")
    nested: dict[str, Any] = {
        name: _construct(group, values.get(name, {}), flags) for name, group in groups(cls).items()
    }
    return cls(**values | nested)


def _field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class and its bases, each on one line."""
    docs = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(field.target, ast.Name):
                docs[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return docs


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or cls.__name__).splitlines()[0]
