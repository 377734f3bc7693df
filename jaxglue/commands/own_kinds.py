"""Kinds of the user's own, imported before a command's flags are read: they add names and settings."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxglue.parts import PartsConfig, is_own, load_kinds
from jaxglue.settings.flags import given_flags
from jaxglue.settings.recipe import find_recipe, peek, read_tables


class OwnKinds(NamedTuple):
    """The user's code that a command runs."""

    flags: tuple[str, ...] = ()
    """To add to the command line."""
    trusts: Callable[[str], bool] = lambda _: False
    """Tells whether a file of code that only a recipe names may run."""


def own_kinds(cls: type, argv: Sequence[str]) -> OwnKinds:
    """Import the parts of installed packages, those that a command line names, and a resumed run's own.

    Args:
        cls: class of the command's configuration.
        argv: its flags.

    Raises:
        ValueError: parts that cannot be imported, or parts of a resumed run that this user has never named.
    """
    if not issubclass(cls, PartsConfig):
        return OwnKinds()
    given = given_flags(cls, argv, "parts", "resume", "output")
    if "parts" in given or not given.get("resume"):
        load_kinds(given.get("parts", ()))
        return OwnKinds(trusts=is_own if given.get("resume") else lambda _: False)
    recorded = _recorded(cls, given)
    if foreign := [text for text in recorded if not is_own(text)]:
        raise ValueError(
            f"--resume: the run records parts from {foreign[0]}, which no command of yours has named with these "
            "contents: add --parts with the file"
        )
    load_kinds(recorded)
    return OwnKinds(("--parts", *recorded) if recorded else (), is_own)


def _recorded(cls: type, given: dict[str, Any]) -> list[str]:
    """Return the parts that the run in the output folder records."""
    output = given.get("output") or (peek(cls, find_recipe(given["recipe"]), "output") if "recipe" in given else None)
    record = Path(output or "runs/latest") / "config.toml"
    return list(read_tables(record).get("parts", ())) if record.is_file() else []
