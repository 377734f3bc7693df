"""Recipes: files that hold the fields of a configuration, in TOML or YAML.

A table for each group holds its fields; `{recipe}` in a text stands for the recipe's folder.

    [data]
    seq_len = 4096

A YAML file without such tables is taken for a recipe of another program (`jaxglue.settings.dialects`).
"""

import dataclasses
import json
import logging
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxglue.files.json_file import MAX_DEPTH, is_deeper
from jaxglue.files.regular_file import read_regular_text
from jaxglue.settings.config import (
    KEEP,
    NONE,
    Kind,
    KindSettings,
    chosen_groups,
    groups,
    is_default,
    kind_names,
    names_in,
    plain_fields,
    refusal_of,
)
from jaxglue.settings.dialects import NO_FLAGS, NOTES, REFUSED, foreign_kinds, translate
from jaxglue.settings.dialects.defaults import TORCHTUNE, program_of
from jaxglue.settings.dialects.left_out import PYTHON
from jaxglue.settings.spelling import nearest

_log = logging.getLogger(__name__)
SHIPPED = Path(__file__).parents[1] / "recipes"
"""Recipes that come with the library."""
_FOLDER = "{recipe}"
_REMEDIES = NOTES | REFUSED
_YAML = (".yaml", ".yml")
_MAX_BYTES, _MAX_DOTS = 2**18, 1000
"""Largest recipe, and most dots in one of its lines."""


def find_recipe(name: str | Path) -> Path:
    """Return the recipe's file: an existing one, or a shipped one by its bare name.

    Raises:
        ValueError: neither; lists the shipped recipes.
    """
    path = Path(name)
    try:
        is_file, exists = path.is_file(), path.exists()
    except OSError as error:
        raise ValueError(f"{name}: cannot read this recipe: {error.strerror}") from error
    if not is_file and str(name) in shipped_recipes():
        return SHIPPED / f"{name}.toml"
    if not exists and path.suffix not in (".toml", *_YAML):
        raise ValueError(f"no recipe named {name}: give a file, or one of {', '.join(shipped_recipes())}")
    return path


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that come with the library."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_config[C](cls: type[C], path: Path) -> C:
    """Read a recipe; `ValueError` names the file, the key and its remedy."""
    return construct(cls, read_recipe(cls, path), {})


def read_recipe(cls: type, path: Path, flags: Mapping[str, Any] = NO_FLAGS, *, strict: bool = False) -> dict[str, Any]:
    """Return the recipe's values by field name, those of groups one level down.

    Args:
        cls: the configuration.
        path: the file.
        flags: given beside it, by field: kinds among them win over the recipe's.
        strict: refuse all unknown settings of another program's recipe; see `translate`.

    Raises:
        ValueError: an unreadable file, or a key or value that the configuration does not have.
    """
    tables = _with_folder(read_tables(path), str(path.resolve().parent))
    if _is_foreign(tables, cls, path):
        return translate(tables, cls, f"{path}: ", flags, strict=strict, lines=_yaml_lines(path))
    named = recipe_kinds(cls, path) | named_kinds(cls, flags)
    subgroups = chosen_groups(cls, named)
    plain = {key: value for key, value in tables.items() if key not in subgroups}
    values = _read_table(plain, cls, f"{path}: ", cls, "", named)
    for name in subgroups.keys() & tables.keys():
        if not isinstance(tables[name], dict):
            raise ValueError(f"{path}: {name} = {tables[name]!r:.100}: expected the table [{name}]")
        values[name] = _read_table(tables[name], subgroups[name], f"{path}: [{name}] ", cls, name, named)
    return values


def refuse_code(
    cls: type, path: Path, values: Mapping[str, Any], flags: Mapping[str, Any], trusts: Callable[[str], bool]
) -> None:
    """Refuse files of code that a recipe names, unless it is shipped.

    Args:
        cls: class of the configuration.
        path: the recipe.
        values: of the recipe, nested.
        flags: which win over these.
        trusts: tells whether a file, with the digest that its text may have, may run nevertheless.

    Raises:
        ValueError: names the flag to add.
    """
    tables = {group: (base, values.get(group, {})) for group, base in groups(cls).items()} | {"": (cls, values)}
    for base, table in tables.values():
        for name, (_, kind) in plain_fields(base).items():
            if kind.code is None or name in flags or path.parent == SHIPPED:
                continue
            texts = (table.get(name) if isinstance(table, dict) else None) or ()
            for text in (texts,) if isinstance(texts, str) else texts:
                if isinstance(text, str) and (file := kind.code.file(text)) and not trusts(file):
                    flag = f"--{name.replace('_', '-')} {text}"
                    raise ValueError(f"{path} names {text}, which is code: add {flag} to the command to run it")


def code_fields(cls: type) -> list[str]:
    """Return the names of a configuration's fields that name files of code."""
    members = (cls, *groups(cls).values())
    return [name for group in members for name, (_, kind) in plain_fields(group).items() if kind.code is not None]


def code_files(config: Any) -> Iterator[str]:
    """Yield the files of code that a configuration names."""
    for group in (config, *(getattr(config, name) for name in groups(type(config)))):
        for name, (_, kind) in plain_fields(type(group)).items():
            texts = getattr(group, name) if kind.code is not None else ()
            for text in (texts,) if isinstance(texts, str) else texts or ():
                if kind.code is not None and (file := kind.code.file(text)):
                    yield file


def recipe_kinds(cls: type, path: Path) -> dict[str, Any]:
    """Return the names of kinds in a recipe, by field; raises like `read_recipe`."""
    tables = read_tables(path)
    if _is_foreign(tables, cls, path):
        return foreign_kinds(tables, cls, f"{path}: ", _yaml_lines(path))
    named: dict[str, Any] = {}
    for name in groups(cls):
        if isinstance(table := tables.get(name), dict):
            named |= named_kinds(cls, table, f"{path}: [{name}] ")
    return named


def peek(cls: type, path: Path, name: str) -> Any:
    """Return the value that a recipe has for a field of one value, whatever else it holds; None for none."""
    (kind,) = (plain_fields(group)[name][1] for group in (cls, *groups(cls).values()) if name in plain_fields(group))
    tables = _with_folder(read_tables(path), str(path.resolve().parent))
    rows = (tables, *(table for table in tables.values() if isinstance(table, dict)))
    return next((row[key] for row in rows for key in (name, *kind.aliases) if key in row), None)


def _is_foreign(tables: Mapping[str, Any], cls: type, path: Path) -> bool:
    """Tell whether a recipe is one of another program, without tables for our groups."""
    has_ours = any(isinstance(tables.get(name), dict) for name in groups(cls)) and program_of(tables) is not TORCHTUNE
    return path.suffix in _YAML and bool(groups(cls)) and not has_ours


def named_kinds(cls: type, settings: Mapping[str, Any], where: str = "") -> dict[str, str]:
    """Return the names of kinds among settings, which have fields' names or their aliases, by field.

    Raises:
        ValueError: a kind that is not known; begins with `where` and the key.
    """
    found = {}
    for name, kind in kind_names(cls).items():
        for key in (name, *kind.aliases):
            if key in settings and (read := _read_value(kind, key, settings[key], where)) is not KEEP:
                found[name] = read
    return found


def construct[C](cls: type[C], values: Mapping[str, Any], flags: Mapping[str, Any]) -> C:
    """Build a configuration from a recipe's nested values and the flags' flat ones, which win.

    Raises:
        ValueError: a required field is missing, or the configuration refuses a value.
    """
    fields = plain_fields(cls)
    given = {name: flags[name] for name in fields.keys() & flags.keys()}
    overruled = {other for name, value in given.items() if value is True for other in fields[name][1].overrules}
    values = {**values, **dict.fromkeys(overruled, False), **given}
    for field, _ in fields.values():
        if field.name not in values and is_required(field):
            flag = field.name.replace("_", "-")
            raise ValueError(f"--{flag} is missing: give the flag or its key in a recipe")
    chosen = chosen_groups(cls, {**names_in(cls, values), **flags})
    nested: dict[str, Any] = {name: construct(group, values.get(name, {}), flags) for name, group in chosen.items()}
    return cls(**values | nested)


def from_settings[C](cls: type[C], settings: Mapping[str, Any], recipe: str | Path | None = None) -> C:
    """Build a configuration from settings by the names of its fields or their aliases, without groups.

    Args:
        cls: class of the configuration.
        settings: Python values; they win over the recipe's. `strict=True` beside a recipe is as `--strict`.
        recipe: file or shipped name.

    Raises:
        ValueError: an unknown name, a bad value, or a missing field.
    """
    path = find_recipe(recipe) if recipe else None
    strict = False
    if path:
        strict = Kind(scalar=bool).read(settings.get("strict", False))
        settings = {key: value for key, value in settings.items() if key != "strict"}
        refuse_code(cls, path, read_tables(path), settings, lambda _: False)
    kinds = (recipe_kinds(cls, path) if path else {}) | named_kinds(cls, settings)
    chosen = chosen_groups(cls, kinds)
    fields = {name: kind for group in (cls, *chosen.values()) for name, (_, kind) in plain_fields(group).items()}
    names = {key: name for name, kind in fields.items() for key in (name, *kind.aliases)}
    flags: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in names:
            if refusal := refusal_of(chosen, key, kinds):
                raise ValueError(refusal)
            remedy = f" has no counterpart: {_REMEDIES[key]}" if key in _REMEDIES else ""
            remedy = f" is TRL's: {PYTHON[key]}" if key in PYTHON else remedy
            raise ValueError(f"unknown setting {key!r:.100}{remedy or nearest(key, names)}")
        read = _read_value(fields[names[key]], key, value, "")
        if read is KEEP:
            continue
        if flags.setdefault(names[key], read) != read:
            raise ValueError(f"{key}: {names[key]} is given twice, by this name and another: leave one out")
    values = read_recipe(cls, path, flags, strict=strict) if path else {}
    if path:
        refuse_code(cls, path, values, flags, lambda _: False)
    return construct(cls, values, flags)


def is_required(field: dataclasses.Field) -> bool:
    """Tell whether a field has no default."""
    return field.default is field.default_factory is dataclasses.MISSING


def as_dict(config: Any) -> dict[str, Any]:
    """Return a configuration in TOML's and JSON's types: groups as nested dictionaries, None as "none"."""
    return {field.name: to_plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def defaults_of(config: Any) -> dict[str, Any]:
    """Return the defaults of a configuration's optional fields, as `as_dict` does their values."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found[field.name] = defaults_of(value)
        elif field.default is not dataclasses.MISSING:
            found[field.name] = to_plain(field.default)
    return found


def to_toml(config: Any) -> str:
    """Write a recipe with every field; `load_config` reads it back as an equal configuration."""
    values = as_dict(config)
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    blocks = [_assignments({key: value for key, value in values.items() if key not in tables})]
    blocks += [f"[{name}]\n" + _assignments(table) for name, table in tables.items()]
    return "\n".join(filter(None, blocks))


def to_plain(value: Any) -> Any:
    """Return a value of a configuration in TOML's and JSON's types."""
    if dataclasses.is_dataclass(value):
        return as_dict(value)
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if value is None:
        return NONE
    return str(value) if isinstance(value, Path) else value


def _assignments(values: dict[str, Any]) -> str:
    # TOML's strings, numbers, booleans and lists are JSON's, but for a character that it wants escaped.
    lines = (f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
    return "".join(lines).replace("\x7f", r"\u007f")


def read_tables(path: Path) -> dict[str, Any]:
    """Parse a TOML or YAML file, bounded in size and depth; raise ValueError of one line for any defect."""
    too_deep = f"{path}: nested more than {MAX_DEPTH} levels deep"
    try:
        text = read_regular_text(path, "utf-8", _MAX_BYTES)
        values = _parse_yaml(text) if path.suffix in _YAML else _parse_toml(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot read this recipe: {error.strerror}") from error
    except RecursionError:
        raise ValueError(too_deep) from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid {'YAML' if path.suffix in _YAML else 'TOML'}: {error}") from error
    if is_deeper(values, MAX_DEPTH):
        raise ValueError(too_deep)
    _check_keys(values, path)
    return values


def _check_keys(value: Any, path: Path) -> None:
    """Raise ValueError for a key that is no text of one line, at any depth."""
    if isinstance(value, dict):
        for key in value:
            if not (isinstance(key, str) and key.isprintable()):
                raise ValueError(f"{path}: the key {key!r:.100} is no text of one line")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_keys(item, path)


def _parse_toml(text: str) -> dict[str, Any]:
    # tomllib takes time that grows with the square of a dotted key's length.
    if any(line.count(".") > _MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"a line of more than {_MAX_DOTS:,} dots")
    return tomllib.loads(text)


def _parse_yaml(text: str) -> dict[str, Any]:
    from jaxglue.files.yaml_file import parse_yaml  # only such recipes need the library

    return parse_yaml(text)


def _yaml_lines(path: Path) -> dict[str, int]:
    """Return the lines of a recipe's keys."""
    from jaxglue.files.yaml_file import lines_of_keys

    return lines_of_keys(read_regular_text(path, "utf-8", _MAX_BYTES))


def _with_folder(value: Any, folder: str) -> Any:
    """Return parsed values with the recipe's folder put in."""
    match value:
        case str():
            return value.replace(_FOLDER, folder)
        case list():
            return [_with_folder(item, folder) for item in value]
        case dict():
            return {key: _with_folder(item, folder) for key, item in value.items()}
    return value


def _read_table(
    table: dict[str, Any], cls: type, where: str, root: type, own: str, kinds: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of one table by field name; a key that belongs to another of `root`'s tables is told so.

    Settings of kinds other than those named are left out where they have their defaults, else refused.
    """
    fields = plain_fields(cls)
    names = {key: name for name, (_, kind) in fields.items() for key in (name, *kind.aliases)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if (
            key not in names
            and issubclass(cls, KindSettings)
            and (refusal := cls.refusal(key, kinds.get(cls.named_by)))
        ):
            if is_default(cls, key, value):
                continue
            if _is_of_replaced_kind(cls, key, table, kinds):
                _log.warning("%s%s is left out: %s", where, key, refusal)
                continue
            raise ValueError(f"{where}{refusal}")
        if key not in names:
            raise ValueError(f"{where}{_unknown(key, value, names, root, own)}")
        if isinstance(value, dict):
            raise ValueError(f"{where}[{key}] is a table, and this command has one value there: give flags instead")
        _, kind = fields[names[key]]
        if issubclass(cls, KindSettings) and value == NONE and not kind.optional:
            continue  # earlier runs record it where a kind's default holds
        read = _read_value(kind, key, value, where)
        if names[key] in values and read is not KEEP:
            raise ValueError(f"{where}{key}: {names[key]} is given twice, by this name and another: leave one out")
        if read is not KEEP:
            values[names[key]] = read
    return values


def _is_of_replaced_kind(cls: type[KindSettings], key: str, table: Mapping[str, Any], kinds: Mapping[str, Any]) -> bool:
    """Tell whether a setting is of the kind that the recipe names itself, and a flag has put another in its place."""
    default = plain_fields(cls.base())[cls.named_by][0].default
    recipes_own = table.get(cls.named_by, default)
    return recipes_own != kinds.get(cls.named_by, default) and recipes_own in cls.readers(key)


def _read_value(kind: Kind, key: str, value: Any, where: str) -> Any:
    try:
        value = kind.from_alias(key, value)
        return value if value is KEEP else kind.read(value)
    except ValueError as error:
        raise ValueError(f"{where}{key}: {error}") from None


def _unknown(key: str, value: Any, names: Collection[str], root: type, own: str) -> str:
    """Describe an unknown key with the table it belongs to, or the key it may be a misspelling of."""
    if isinstance(value, dict):
        return f"unknown table [{key}]{nearest(key, groups(root))}"
    for name, cls in {**groups(root), "": root}.items():
        if name != own and any(key in (field, *kind.aliases) for field, (_, kind) in plain_fields(cls).items()):
            place = f"in the table [{name}]" if name else "above the first table"
            return f"{key!r:.100} belongs {place}"
    return f"unknown key {key!r:.100}{nearest(key, names)}"
