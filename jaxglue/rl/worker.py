"""A process that judges answers: it imports functions by their file's path and talks JSON lines.

It reads requests from its first standard input and writes replies to its first standard output; the functions, and
programs that they start, find an empty input, and print to standard error. No code travels through the pipe.
"""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_SINGULAR = {"prompt": "prompts", "completion": "texts", "completion_ids": "completion_ids"}
"""Parameters of functions that judge one answer, by those of functions that judge all answers to a prompt."""
_ALL = ("prompts", "completions", "completion_ids", "texts")
"""Parameters of the latter."""


@cache
def load(file: str, name: str) -> Callable[..., Any]:
    """Return a function of a file.

    Raises:
        ValueError: no such file, or no such function in it.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"no such file: {file}")
    specification = importlib.util.spec_from_file_location(f"rewards_{path.stem}", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent.resolve()))  # its neighbors can be imported
    specification.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ValueError(f"{file} has no function {name!r}; it has {', '.join(known) or 'none'}")
    return found


def check_options(function: Callable[..., Any], options: Mapping[str, str]) -> None:
    """Raise ValueError for a setting that the function has no parameter for."""
    parameters = inspect.signature(function).parameters.values()
    known = [parameter.name for parameter in parameters]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_all and (unknown := [name for name in options if name not in known]):
        raise ValueError(f"no parameter {', '.join(unknown)}; it has {', '.join(known) or 'none'}")


def check_values(function: Callable[..., Any], known: Collection[str]) -> None:
    """Raise ValueError for a parameter without a default that has no value."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if missing := [p.name for p in named if p.default is p.empty and p.name not in known]:
        raise ValueError(f"nothing is given for its parameter {', '.join(missing)}; there are {', '.join(known)}")


def values_of(function: Callable[..., Any], *, replies: bool) -> tuple[str, ...]:
    """Return what an environment, or a function that judges, is given beside options and columns."""
    if replies:
        return ("messages", "last")
    return _ALL if judges_all(function) else (*_SINGULAR,)


def judges_all(function: Callable[..., Any]) -> bool:
    """Return whether a function gets all answers to a prompt at once, as in TRL.

    It has a parameter `completions`, or `**columns` and neither `completion` nor `prompt`.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "completions" in parameters or (takes_all and not parameters.keys() & {"completion", "prompt"})


def judge(function: Callable[..., Any], request: dict[str, Any]) -> list[Any]:
    """Return the function's rewards of the answers to a prompt.

    A function that judges all answers at once gets lists and returns one; another gets one `completion`, a text, at a
    time. Both may be async.
    """
    given = {**request["columns"], **request["options"]}
    names = inspect.signature(function).parameters
    check_values(function, (*values_of(function, replies="messages" in request), *given))
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    count = len(request["completions"])

    def chosen(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if takes_all or name in names}

    if "messages" in request:
        found = function(**chosen(given | {name: request[name] for name in ("messages", "last")}))
        return [asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found]
    if judges_all(function):
        lists = {"prompts": [request["prompt"]] * count, "completions": request["completions"]}
        lists |= {"completion_ids": request["completion_ids"], "texts": request["texts"]}
        columns = {name: [value] * count for name, value in request["columns"].items()}
        found = function(**chosen(columns | request["options"] | lists))
        return list(asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found)
    plural = {"prompts": [request["prompt"]] * count, **request}
    calls = [
        function(**chosen(given | {name: plural[many][index] for name, many in _SINGULAR.items()}))
        for index in range(count)
    ]
    if calls and inspect.isawaitable(calls[0]):
        return asyncio.run(_gathered(calls))
    return calls


async def _awaited(value: Any) -> Any:
    return await value


async def _gathered(calls: list[Any]) -> list[Any]:
    return list(await asyncio.gather(*calls))


def reply(request: dict[str, Any], find: Callable[[str, str], Callable[..., Any]] = load) -> dict[str, Any]:
    """Return the reply to a request: its rewards, or the error; `find` returns the function of a file."""
    try:
        function = find(request["file"], request["function"])
        if request.get("check"):
            check_options(function, request["options"])
            if (columns := request.get("columns")) is not None:
                check_values(
                    function, (*values_of(function, replies=request["replies"]), *request["options"], *columns)
                )
            return {}
        rewards = judge(function, request)
        if "messages" in request:
            return {"reply": rewards[0] if isinstance(rewards[0], str | dict | list | None) else float(rewards[0])}
        return {"rewards": [value if value is None else float(value) for value in rewards]}
    except MemoryError:
        return {"limit": "its limit of memory"}
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({Path(last.filename).name}:{last.lineno})" if last.filename != __file__ else ""
        return {"error": f"{type(error).__name__}: {error}{where}"}


def _end_with_parent(parent: int) -> None:
    """End this process, and those that the functions started, once the parent has ended, even if it was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Answer requests until standard input ends."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    bytes_ = int(float(sys.argv[1]) * 2**30)
    with contextlib.suppress(ValueError, OSError):  # a lower limit is in force
        resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_))
    with contextlib.suppress(KeyboardInterrupt):
        for line in requests:
            replies.write(json.dumps(reply(json.loads(line))) + "\n")
            replies.flush()


if __name__ == "__main__":
    main()
