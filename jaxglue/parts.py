"""Registries of kinds, by name: objectives, optimizers, formats of weights, model families."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from jaxglue.settings.spelling import nearest


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
