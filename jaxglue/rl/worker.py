"""A process that judges answers: it imports functions by their file's path and talks JSON lines.

It reads requests from its first standard input and writes replies to its first standard output; the functions, and
programs that they start, find an empty input, and print to standard error. No code travels through the pipe. The
process has a parent that loads nothing, and ends every program that the functions started, whatever its session.
"""

import asyncio
import base64
import contextlib
import ctypes
import importlib.util
import inspect
import io
import json
import os
import resource
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any

_SINGULAR = {"prompt": "prompts", "completion": "texts", "completion_ids": "completion_ids"}
"""Parameters of functions that judge one answer, by those of functions that judge all answers to a prompt."""
_ALL = ("prompts", "completions", "completion_ids", "texts")
"""Parameters of the latter."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@cache
def load(file: str, name: str, kinds: tuple[type, ...] = ()) -> Any:
    """Return a function of a file, or a value of these kinds.

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
    if not (callable(found) or isinstance(found, kinds)):
        parts = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        known = [key for key, value in parts.items() if inspect.isfunction(value) or inspect.isclass(value)]
        raise ValueError(f"{file} has no function or class {name!r}; it has {', '.join(known) or 'none'}")
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

    It has a parameter `completions` or `environments`, or `**columns` and neither `completion` nor `prompt`.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return bool(parameters.keys() & {"completions", "environments"}) or (
        takes_all and not parameters.keys() & {"completion", "prompt"}
    )


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
        found = asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found
        if isinstance(found, str | bytes | Mapping | Set):
            raise TypeError(f"expected a list of numbers or None, got {found!r:.80}")
        return list(found)
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
            known = ("environments",) if request.get("episodes") else ()
            if (columns := request.get("columns")) is not None:
                values = values_of(function, replies=request["replies"])
                check_values(function, (*values, *known, *request["options"], *columns))
            named = inspect.signature(function).parameters
            return {
                "judges_each": not (judges_all(function) or inspect.iscoroutinefunction(function)),
                "reads_environments": "environments" in named and bool(known),
            }
        rewards = judge(function, request)
        if "messages" in request:
            return {"reply": rewards[0] if isinstance(rewards[0], str | dict | list | None) else float(rewards[0])}
        return {"rewards": [as_number(value, request["function"]) for value in rewards]}
    except MemoryError:
        return {"limit": "its limit of memory"}
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return {"error": described(error)}


_OTHERS = ("<", str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Beginnings of the names of files that no user writes: frozen ones of the interpreter, and packages."""


def described(error: BaseException) -> str:
    """Return an error with the last line of a user's file that it comes through."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OTHERS)]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def plain(value: Any) -> Any:
    """Return a value that JSON has not: images of Pillow, and bytes, as data: URLs, numpy's numbers as Python's."""
    if is_picture(value):
        value.save(stored := io.BytesIO(), "PNG")
        value = stored.getvalue()
    if isinstance(value, bytes):
        return f"data:image/png;base64,{base64.b64encode(value).decode()}"
    if axes := getattr(value, "ndim", None):
        raise TypeError(f"an array of {axes} axes is no JSON: call its tolist()")
    return float(value) if axes is None else value.item()


def is_picture(value: Any) -> bool:
    """Return whether a value is an image of Pillow, which is imported where there is one."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def as_number(value: Any, name: str) -> float | None:
    """Return the reward of a function or attribute of this name; texts of numbers are none."""
    try:
        if not isinstance(value, str | bytes):
            return None if value is None else float(value)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name}: expected a number or None, got {value!r:.80}")


def _serve(memory: int) -> None:
    """Answer requests until standard input ends."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with contextlib.suppress(ValueError, OSError):  # a lower limit is in force
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    process = os.getpid()
    with contextlib.suppress(KeyboardInterrupt):
        for line in requests:
            request = json.loads(line)
            answer = json.dumps({"number": request["number"], **reply(request)}, default=plain)
            if os.getpid() != process:  # a function forked, and its copy returned
                os._exit(0)
            replies.write(answer + "\n")
            replies.flush()


def set_option(option: int, value: int) -> None:
    """Set an option of this process; without Linux's there are none."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _watch(child: int, parent: int) -> int:
    """Return the exit status of the child, which ends at SIGTERM or with the parent; negative for a signal."""
    while True:
        received = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, 1.0)
        ended = dict(_reaped())
        if child in ended:
            return os.waitstatus_to_exitcode(ended[child])
        if os.getppid() != parent or (received is not None and received.si_signo == signal.SIGTERM):
            return 0


def _reaped() -> Iterator[tuple[int, int]]:
    """Yield processes that have ended, and their statuses."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def end_descendants() -> None:
    """Kill the processes under this one; those whose parents end become its children."""
    while found := _descendants():
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        dict(_reaped())
        time.sleep(0.005)


def _descendants() -> set[int]:
    parents = dict[int, int]()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = entry.read_text(errors="replace").rpartition(")")[2].split()
            if state not in "ZX":
                parents[int(entry.parent.name)] = int(parent)
    found = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def main() -> None:
    """Answer requests in a child until standard input ends; then end all that it has started."""
    parent, both = os.getppid(), {signal.SIGCHLD, signal.SIGTERM}
    set_option(PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    if not (child := os.fork()):
        set_option(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        _serve(int(float(sys.argv[1]) * 2**30))
        return
    empty = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(empty, descriptor)  # or the pipes would stay open without the child
    status = _watch(child, parent)
    end_descendants()
    if status < 0:
        with contextlib.suppress(OSError, ValueError):  # of SIGKILL, which has one disposition
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
