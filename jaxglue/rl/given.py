"""Rewards and environments given as functions in Python, which run in the process of the run."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from types import CodeType
from typing import Any

from jaxglue.rl.episode_process import EnvironmentKind
from jaxglue.rl.episode_worker import describe, factories_of
from jaxglue.rl.worker import described, reply
from jaxglue.settings.dialects.rollouts import with_weights

GIVEN = "given"
"""Stands for the file of a function."""
_SETTINGS = ("reward", "reward_funcs", "reward_functions", "environment")
_functions: dict[str, Any] = {}
_lock = Lock()


@contextmanager
def named_functions(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield settings in which functions that judge or reply have names, known meanwhile, as those of files.

    Names of rewards have TRL's `reward_weights`.

    Raises:
        ValueError: functions of one name, or other weights than a number for each reward.
    """
    before, named = {**_functions}, {**settings}
    try:
        for key in _SETTINGS:
            if key in settings:
                value = settings[key]
                named[key] = [*map(_name, value)] if isinstance(value, list | tuple) else _name(value)
                if key != "environment" and "reward_weights" in named:
                    names = [named[key]] if isinstance(named[key], str) else named[key]
                    named[key] = with_weights(names, named.pop("reward_weights"))
        yield named
    finally:
        _functions.clear()
        _functions.update(before)


def ask_given(request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply of a function; one runs at a time, without limits."""
    with _lock:
        return reply(request, _find)


def describe_given(name: str, options: Mapping[str, str]) -> list[EnvironmentKind] | None:
    """Return the classes of environments that a name stands for; None for a function that replies.

    Raises:
        ValueError: an environment without a reset, or with undocumented tools.
    """
    if (factories := factories_of(_find("", name))) is None:
        return None
    try:
        return [EnvironmentKind(**kind) for kind in describe(factories, options)]
    except Exception as error:
        raise ValueError(described(error)) from error


def given_factories(name: str) -> Mapping[str | None, Callable[..., Any]]:
    """Return what makes environments, by their names."""
    factories = factories_of(_find("", name))
    assert factories is not None
    return factories


def digest_of(name: str) -> str:
    """Return the digest of a function's code, without that of functions which it calls; empty where there is none."""
    function = inspect.unwrap(_functions[name]) if name in _functions else None
    code = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
    return "" if code is None else hashlib.sha256("\n".join(_parts(code)).encode()).hexdigest()[:16]


def _parts(code: CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names}"
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _parts(value)
        else:  # the order of a set's texts differs from process to process
            yield repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _name(value: Any) -> Any:
    """Return the name of a function, after noting it, and other values as they are."""
    if not callable(value) and not isinstance(value, Mapping):
        return value
    name = getattr(value, "__name__", type(value).__name__)
    if _functions.setdefault(name, value) is not value:
        raise ValueError(f"reward: two functions are named {name}, and metrics tell them by name: rename one")
    return f"{GIVEN}:{name}"


def _find(_: str, name: str) -> Any:
    if name not in _functions:
        raise ValueError(f"{name} was given as a function: give it again, or name its file, as in rewards.py:{name}")
    return _functions[name]
