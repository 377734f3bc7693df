"""Command lines from configuration dataclasses: every field is a flag, and a key of a recipe.

A configuration (`jaxglue.settings.config.Config`) holds plain values and groups, which are further configurations.
A flag wins over a recipe (`jaxglue.settings.recipe`), a recipe over a default.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jaxglue.settings.config import (
    KEEP,
    NONE,
    HelpLayout,
    Kind,
    KindSettings,
    chosen_groups,
    groups,
    kind_names,
    plain_fields,
    refusal_of,
)
from jaxglue.settings.dialects import NOTES, REFUSED
from jaxglue.settings.dialects.left_out import MET
from jaxglue.settings.recipe import (
    code_fields,
    construct,
    find_recipe,
    is_required,
    read_recipe,
    read_tables,
    recipe_kinds,
    refuse_code,
    to_plain,
)
from jaxglue.settings.spelling import nearest

_log = logging.getLogger(__name__)


def parse_config[C](
    cls: type[C],
    argv: Sequence[str] | None = None,
    *,
    command: str | None = None,
    trusts: Callable[[str], bool] = lambda _: False,
) -> C:
    """Parse a command line; a mistake ends the program with status 2 and one line that names it.

    Args:
        cls: class of the configuration; the first line of its docstring begins the help.
        argv: the arguments, by default those of the process.
        command: of `jaxglue`, as usage lines name it; by default the program's name.
        trusts: tells whether a file of code that a recipe names may run, which the command line does not name.
    """
    words = [_hyphenated(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    named = given_flags(cls, words, *kind_names(cls), *code_fields(cls), command=command)
    kinds = {name: named[name] for name in kind_names(cls) if name in named}
    try:
        path = find_recipe(named["recipe"]) if "recipe" in named else None
        if path is not None:
            refuse_code(cls, path, read_tables(path), named, trusts)
            kinds = recipe_kinds(cls, path) | kinds
    except ValueError as error:
        _empty_parser(cls, command).error(str(error))
    parser = _build_parser(cls, command, kinds)
    flags, unknown = parser.parse_known_args(words)
    unknown = _without_met_wishes(unknown)
    if unknown:
        parser.error(_unknown(unknown[0].partition("=")[0], parser, cls, kinds))
    given = vars(flags)
    given.pop("recipe", None)
    strict = given.pop("strict", False)
    try:
        values = read_recipe(cls, path, given, strict=strict) if path else {}
        if path:
            refuse_code(cls, path, values, given, trusts)
        return construct(cls, values, given)
    except ValueError as error:
        parser.error(str(error))


def _without_met_wishes(unknown: Sequence[str]) -> list[str]:
    """Return unknown words without flags of other programs, and their values, that ask for what is done anyway."""
    rest: list[str] = []
    drops_value = False
    for word in unknown:
        name = word.partition("=")[0].strip("-").replace("-", "_")
        is_flag = word.startswith("--")
        if is_flag and NOTES.get(name) in MET:
            _log.warning("%s is left out: %s", word, NOTES[name])
            drops_value = "=" not in word
        elif is_flag or not drops_value:
            rest.append(word)
            drops_value = False
        else:
            drops_value = False
    return rest


def given_flags(cls: type, argv: Sequence[str], *names: str, command: str | None = None) -> dict[str, Any]:
    """Return the values that a command line has for some fields and `recipe`, whatever else it holds."""
    parser = _empty_parser(cls, command)
    parser.add_argument("--recipe", "--config")
    for group in (cls, *groups(cls).values()):
        fields = [name for name in names if name in plain_fields(group)]
        _add_fields(parser.add_argument_group(), group, fields, aliases=True)
    return vars(parser.parse_known_args([_hyphenated(word) for word in argv])[0])


def _hyphenated(argument: str) -> str:
    """Return a flag spelled with hyphens; anything else as it is."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") and " " not in name else argument


def _unknown(flag: str, parser: argparse.ArgumentParser, cls: type, kinds: Mapping[str, str]) -> str:
    """Describe an unknown flag with its kinds, with what replaces it here, or the flag it may be a misspelling of."""
    if refusal := refusal_of(chosen_groups(cls, kinds), flag.strip("-").replace("-", "_"), kinds):
        return refusal
    if note := (NOTES | REFUSED).get(flag.strip("-").replace("-", "_")):
        return f"{flag} has no counterpart: {note}"
    known = [name for action in parser._actions for name in action.option_strings]
    every = "--help-all" if "--help-all" in known else "--help"
    return f"unknown argument {flag}{nearest(flag, known)}; {every} lists them all"


def _empty_parser(cls: type, command: str | None, *, usual: bool = False) -> argparse.ArgumentParser:
    return _Parser(
        prog=command and f"jaxglue {command}",
        description=_summary(cls),
        usage="%(prog)s [--recipe FILE] [--flag value …]",
        epilog="--help-all shows all flags, and other programs' names for them." if usual else None,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
        add_help=False,
    )


def _build_parser(
    cls: type, command: str | None, kinds: Mapping[str, str], *, usual: bool = False
) -> argparse.ArgumentParser:
    """Return the parser of a configuration; for its help, perhaps that of the usual flags by one name each.

    Args:
        cls: class of the configuration.
        command: of `jaxglue`.
        kinds: names of kinds, by the field that names them.
        usual: show the usual flags, and those of the kinds named.
    """
    layout: HelpLayout | None = getattr(cls, "help_layout", None)
    parser = _empty_parser(cls, command, usual=usual)
    short = layout and (lambda: _build_parser(cls, command, kinds, usual=True).format_help())
    everything = lambda: parser.format_help() + _help_of_kinds(cls, kinds)  # noqa: E731 - as the one above
    parser.add_argument("-h", "--help", action=_Help, text=short or parser.format_help, help="show this help")
    if layout is not None:
        text = "show all flags, those of all kinds, and other programs' names for them"
        parser.add_argument("--help-all", action=_Help, text=everything, help=text)
    recipe = (
        "a recipe: a TOML or YAML file with a table for each group below, a shipped one by its name, or a YAML file of "
        "axolotl, LLaMA-Factory, TRL or torchtune; flags win over it"
    )
    parser.add_argument("--recipe", "--config", metavar="NAME|FILE", help=recipe)
    if groups(cls) and not usual:
        unknown = "refuse settings of another program's recipe that are not known, those of trackers and launchers too"
        parser.add_argument("--strict", action=_Switch, help=unknown)
    general = [name for name, (_, kind) in plain_fields(cls).items() if not (usual and kind.code)]
    _add_fields(parser.add_argument_group("general"), cls, general, aliases=not usual)
    chosen = chosen_groups(cls, kinds)
    of_kinds = {name for group in chosen.values() for name in _fields_of_kind(group, kinds)}
    shown = {*layout.common, *of_kinds} if layout and usual else None
    for title, text, owners in _help_groups(chosen, layout):
        fields = [(group, [name for name in names if shown is None or name in shown]) for group, names in owners]
        if any(names for _, names in fields):
            target = parser.add_argument_group(title, text)
            for group, names in fields:
                _add_fields(target, group, names, aliases=not usual)
    return parser


def _fields_of_kind(group: type, kinds: Mapping[str, str]) -> set[str]:
    """Return the fields that a group has for the kind named, if one is."""
    if not issubclass(group, KindSettings) or group.named_by not in kinds:
        return set()
    return plain_fields(group).keys() - plain_fields(group.base()).keys()


def _help_of_kinds(cls: type, kinds: Mapping[str, str]) -> str:
    """Return help on the settings of kinds that are not named, a section for each class that declares some."""
    sections = []
    for title, chosen in chosen_groups(cls, kinds).items():
        if not issubclass(chosen, KindSettings):
            continue
        settings = {kind: chosen.base().of(kind) for kind in chosen.names()}
        declaring = dict.fromkeys(each for kind in settings.values() for each in reversed(kind.__mro__))
        for declared in (each for each in declaring if each not in chosen.__mro__ and dataclasses.is_dataclass(each)):
            names = [kind for kind, cls in settings.items() if issubclass(cls, declared)]
            fields = [field for field in plain_fields(declared) if field in inspect.get_annotations(declared)]
            if fields:
                parser = _Parser(usage=argparse.SUPPRESS, add_help=False, formatter_class=_HelpFormatter)
                _add_fields(parser.add_argument_group(f"{title} {', '.join(names)}"), declared, fields, aliases=True)
                sections.append("\n" + parser.format_help())
    return "".join(sections)


def _help_groups(
    chosen: Mapping[str, type], layout: HelpLayout | None
) -> Iterator[tuple[str, str, list[tuple[type, list[str]]]]]:
    """Yield title, description and the classes' fields of each group of the help; sections follow the first group."""
    sections = layout.sections if layout else {}
    elsewhere = {name for _, names in sections.values() for name in names}
    for index, (title, group) in enumerate(chosen.items()):
        yield title, _summary(group), [(group, [name for name in plain_fields(group) if name not in elsewhere])]
        if index == 0:
            for section, (text, names) in sections.items():
                owners = [(owner, [name for name in names if name in plain_fields(owner)]) for owner in chosen.values()]
                yield section, text, owners


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        from jaxglue.terminal.lines import fold

        self.exit(2, fold(f"{self.prog}: error: {message}") + "\n")


class _HelpFormatter(argparse.HelpFormatter):
    """Shows all names of a flag before its value, and a switch with its negation once."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names: list[str] = list(action.option_strings)
        if isinstance(action, _Switch):
            names = [f"--[no-]{name[2:]}" for name in names if not name.startswith("--no-")]
        value = "" if action.nargs == 0 or isinstance(action, _Switch) else self._format_args(action, "")
        return self._folded(f"{', '.join(names)} {value}".rstrip())

    def _folded(self, names: str) -> str:
        """Break a flag's names and choices into lines, between words."""
        width = self._width - self._current_indent - 4
        lines = textwrap.wrap(names.replace("|", "| "), width, break_long_words=False, break_on_hyphens=False)
        return f"\n{' ' * (self._current_indent + 4)}".join(line.replace("| ", "|") for line in lines)


def _add_fields(parser: argparse._ArgumentGroup, cls: type, names: Sequence[str], *, aliases: bool) -> None:
    """Add a flag for each named field, with its aliases or not; argparse refuses a name given twice."""
    helps, declared = _field_docs(cls), plain_fields(cls)
    for field, kind in map(declared.__getitem__, names):
        others = kind.aliases if aliases else {}
        flags = [_flag(name) for name in (field.name, *(name for name, values in others.items() if not values))]
        text = f"{helps.get(field.name, '')} {_notes(field, kind)}".strip().replace("%", "%%")
        if kind.scalar is bool and not kind.many:
            parser.add_argument(*flags, action=_Switch, help=text)
        else:
            nargs: Any = {"nargs": "*", "action": "extend"} if kind.many else {}
            parser.add_argument(*flags, type=_flag_type(kind), metavar=_metavar(kind), help=text, **nargs)
        for name, values in others.items():
            if values:
                _add_alias(parser, field.name, name, kind)


def _add_alias(parser: argparse._ArgumentGroup, field: str, name: str, kind: Kind) -> None:
    """Add a flag of another program whose values stand for values of ours."""
    values = kind.aliases[name] or {}
    ours = values.get(True, "")
    more: dict[str, Any] = {"metavar": "|".join(map(str, values))}
    if True in values:
        more = {"nargs": "?", "const": True, "metavar": "true|false"}
    text = f"means {_flag(field)} {' '.join(ours) if isinstance(ours, tuple) else ours}".rstrip().replace("%", "%%")
    parser.add_argument(_flag(name), action=_Translate, dest=field, kind=kind, alias=name, help=text, **more)


class _Help(argparse.Action):
    """Prints a help and ends the program."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, text: Callable[[], str], **options: Any):
        super().__init__(option_strings, dest, nargs=0, **options)
        self._text = text

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        sys.stdout.write(self._text())
        parser.exit()


class _Switch(argparse.BooleanOptionalAction):
    """Takes --flag and --no-flag, and true or false after them, as other programs do."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.nargs = "?"

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        on = True if value is None else {"true": True, "false": False}.get(value.lower())
        if on is None:
            raise argparse.ArgumentError(self, f"expected true | false, got {value!r:.100}")
        setattr(namespace, self.dest, on != str(option_string).startswith("--no-"))


class _Translate(argparse.Action):
    """Stores our value for that of another program."""

    def __init__(self, *args: Any, kind: Kind, alias: str, **options: Any):
        super().__init__(*args, **options)
        self._kind, self._alias = kind, alias

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        try:
            read = self._kind.from_alias(self._alias, {"true": True, "false": False}.get(str(value).lower(), value))
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        if read is not KEEP:
            setattr(namespace, self.dest, list(read) if isinstance(read, tuple) else read)  # our flag may extend it


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
    notes = ["required" if is_required(field) else f"default: {_default(field)}", str(kind.range)]
    return f"({'; '.join(filter(None, notes))})"


def _default(field: dataclasses.Field) -> str:
    factory = field.default_factory
    plain = to_plain(field.default if factory is dataclasses.MISSING else factory())
    return " ".join(map(str, plain)) if isinstance(plain, list) else str(plain)


@functools.cache
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
