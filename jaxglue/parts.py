"""Registries of kinds, by name: objectives, optimizers, formats of weights, model families; and files that add kinds.

Such files are code, so a command imports one only if its own command line names it, or an installed package does.
"""

import importlib
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple, cast

from jaxglue.files.regular_file import file_digest, read_regular
from jaxglue.settings.config import Code, Config
from jaxglue.settings.spelling import nearest

_GROUP = "jaxglue.parts"
"""Entry points of installed packages that add kinds."""
_PIN = "#sha256="
_PACKAGE = "package:"
"""Begins the record of an installed package, `package:name==version`."""
_NAMED = Path("~/.cache/jaxglue/parts")
"""Folder with a file for each digest of code that a command line of this user has named."""
_loaded: dict[str, "Part"] = {}
"""Imported files by digest."""
_packages: dict[str, str] = {}
"""Versions of the installed packages whose parts are imported, by name."""
_log = logging.getLogger(__name__)


class Registry[T](Mapping[str, T]):
    """Things by name, in the order of registration; those given as `"module:name"` are imported when looked up.

    Args:
        noun: for a thing, in messages.
        built_in: things, or their modules and names.
    """

    def __init__(self, noun: str, built_in: Mapping[str, str | T] | None = None):
        self._noun = noun
        self._entries: dict[str, str | T] = dict(built_in or {})

    def register[K](self, name: str) -> Callable[[K], K]:
        """Return a decorator that adds a thing by this name; raises like `add`."""

        def add(thing: K) -> K:
            self.add(name, cast(T, thing))
            return thing

        return add

    def add(self, name: str, thing: str | T) -> None:
        """Add a thing, or its module and name as `"module:name"`.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._entries:
            article = "an" if self._noun[0] in "aeiou" else "a"
            raise ValueError(f"{article} {self._noun} named {name!r} is registered already: choose another name")
        self._entries[name] = thing

    def find(self, name: Any) -> T:
        """Return a thing by its name.

        Raises:
            ValueError: there is none of this name; lists the names, and the one that it may be a misspelling of.
        """
        if name not in self._entries:
            raise ValueError(
                f"{self._noun} {name!r:.100} is not known: expected {' | '.join(self)}{nearest(str(name), self)}"
            )
        return self[name]

    @contextmanager
    def scope(self, things: Mapping[str, T] | None = None) -> Iterator[None]:
        """Forget all that is added inside the context at its end.

        Args:
            things: to add, in place of those of the same names.
        """
        before = dict(self._entries)
        self._entries |= things or {}
        try:
            yield
        finally:
            self._entries = before

    def __getitem__(self, name: str) -> T:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self._entries[name] = cast(T, getattr(importlib.import_module(module), attribute))
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, kw_only=True)
class PartsConfig(Config):
    """Base of configurations of commands that take kinds from files."""

    parts: Annotated[tuple[str, ...], Code(lambda text: None if text.startswith(_PACKAGE) else text)] = ()
    """Python files that add objectives, optimizers, formats of weights or model families; a run records each with its
    digest, `my_parts.py#sha256=…`, and installed packages that add some, `package:name==version`."""


class Part(NamedTuple):
    """A Python file that adds kinds."""

    file: str
    digest: str | None
    """SHA-256 of its bytes; None for whichever it has."""

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Read `file.py` or `file.py#sha256=digest`."""
        file, _, digest = text.partition(_PIN)
        return cls(file, digest or None)

    def __str__(self) -> str:
        return self.file if self.digest is None else f"{self.file}{_PIN}{self.digest}"


def load_kinds(texts: str | Iterable[str] = ()) -> None:
    """Import the parts of installed packages, by their entry points of the group `jaxglue.parts`, and then files.

    Args:
        texts: the files, each with a digest or not.

    Raises:
        ValueError: one cannot be imported.
    """
    for point in entry_points(group=_GROUP):
        if point.value.partition(":")[0] not in sys.modules:
            with _explained(f"the entry point {point.name} of {_GROUP}", None):
                point.load()
        if point.dist is not None:
            _packages[point.dist.name] = point.dist.version
    load_parts((texts,) if isinstance(texts, str) else texts)


def load_parts(texts: Iterable[str]) -> None:
    """Import files that add kinds, each once in a process.

    Raises:
        ValueError: a file is missing or has other contents than its digest says, or its import fails; names its line.
    """
    for text in texts:
        if text.startswith(_PACKAGE):
            _require_package(text, "--parts")
            continue
        part = Part.parse(text)
        path = Path(part.file).expanduser()
        try:
            source = read_regular(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"--parts {part.file}: cannot read this file: {error}") from error
        digest = sha256(source).hexdigest()
        if part.digest not in (None, digest):
            raise ValueError(f"--parts {part.file}: it has changed since its digest was recorded: {digest} now")
        if digest in _loaded:
            continue
        if any(Path(other.file).expanduser().resolve() == path.resolve() for other in _loaded.values()):
            raise ValueError(f"--parts {part.file}: it has changed since this process imported it: start another one")
        module = ModuleType(f"jaxglue_part_{digest[:16]}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module
        with _explained(f"--parts {part.file}", path):
            exec(compile(source, str(path), "exec"), module.__dict__)
        _loaded[digest] = Part(part.file, digest)


@contextmanager
def _explained(what: str, path: Path | None) -> Iterator[None]:
    """Raise ValueError for any error of code that is imported, with its line in the file."""
    try:
        yield
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"{what}{line}: {type(error).__name__}: {error}") from error


def _require_package(text: str, where: str) -> None:
    """Raise ValueError for a recorded package whose parts are not imported; tell of another version."""
    name, _, version = text.removeprefix(_PACKAGE).partition("==")
    if name not in _packages:
        raise ValueError(f"{where}: the package {name} {version} added parts, and is not installed: install it")
    if version and version != _packages[name]:
        _log.warning("%s: parts of %s %s are recorded, and %s is installed", where, name, version, _packages[name])


def pinned(texts: Iterable[str]) -> tuple[str, ...]:
    """Return parts that this process has imported, as a run records them.

    Files have their digests and absolute paths; installed packages that add parts follow with their versions.
    """
    files = [text for text in texts if not text.startswith(_PACKAGE)]
    parts = [(Path(Part.parse(text).file).expanduser().resolve(), text) for text in files]
    digests = {Path(part.file).expanduser().resolve(): part.digest for part in _loaded.values()}
    return (
        *(str(Part(str(path), digests[path])) if path in digests else text for path, text in parts),
        *(f"{_PACKAGE}{name}=={version}" for name, version in sorted(_packages.items())),
    )


def require_parts(texts: Iterable[str], where: str) -> None:
    """Raise ValueError for parts that a file records, and this process has not imported, by contents or name.

    Args:
        texts: of the parts.
        where: the file that records them.
    """
    names = {Path(part.file).name for part in _loaded.values()}
    for text in texts:
        if text.startswith(_PACKAGE):
            _require_package(text, where)
            continue
        part = Part.parse(text)
        if part.digest not in _loaded and Path(part.file).name not in names:
            raise ValueError(
                f"{where} records parts from {part.file}, which is code: add --parts {part.file} to run it"
            )


def note_named(files: Iterable[str]) -> None:
    """Remember the contents of files of code that a command line of this user names, which `is_own` then knows."""
    for file in files:
        with suppress(OSError, ValueError):  # without a cache they are named again; a missing file has its own error
            folder = _NAMED.expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file_digest(Path(file).expanduser())).touch()


def is_own(text: str) -> bool:
    """Tell whether a command line of this user has named the contents of a file of code before; packages pass."""
    if text.startswith(_PACKAGE):
        return True  # its user installed it
    part = Part.parse(text)
    with suppress(OSError, ValueError):
        digest = file_digest(Path(part.file).expanduser())
        return part.digest in (None, digest) and (_NAMED.expanduser() / digest).is_file()
    return False
