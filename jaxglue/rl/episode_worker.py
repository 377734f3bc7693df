"""Processes that hold environments: one imports their file once, and each episode under way has a fork of it.

A fork begins with what the file's import made, and shares with others what neither writes to; an episode that ends
leaves it to another one, which has an environment of its own. It has a parent that
loads nothing and ends every program that the episode started, whatever its session, once the run closes the episode's
socket. Requests and replies are lines of JSON on that socket; no code travels. Messages on the first socket, a request
to begin each, bring the sockets.
"""

import asyncio
import base64
import contextlib
import gc
import importlib.util
import inspect
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESERVED = ("reset", "get_reward")
"""Public methods that are no tools, as in TRL."""
_OF_STATE = ("state", "restore")
"""Two more, where a class has both."""
LONGEST_RESULT = 1 << 20
"""Characters of a tool's result, or of another text of an environment."""
_MESSAGE = 1 << 16


def _sibling(name: str) -> Any:
    """Import a module beside this file, without its package, whose import takes time."""
    unique = f"jaxglue_rl_{name}"  # a user's file may import a module of the name
    if unique not in sys.modules:
        specification = importlib.util.spec_from_file_location(unique, Path(__file__).parent / f"{name}.py")
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[unique] = module
        specification.loader.exec_module(module)
    return sys.modules[unique]


worker = _sibling("worker")


class EpisodeError(Exception):
    """Reports an environment that fails outside of its tools."""


def factories_of(value: Any) -> dict[str | None, Callable[..., Any]] | None:
    """Return what makes environments, by their names where rows choose among several; None for a function that replies.

    A class with `reset` and a function without parameters make them.
    """
    if isinstance(value, Mapping):
        if not value:
            raise ValueError("it names no environment")
        return {str(name): factory for name, factory in value.items()}
    if inspect.isclass(value):
        return {None: value}
    takes_nothing = callable(value) and not _parameters(value)
    return {None: value} if takes_nothing else None


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def make(factory: Callable[..., Any], options: Mapping[str, str]) -> Any:
    """Return a new environment.

    Raises:
        ValueError: it has no `reset`.
    """
    environment = factory(**options)
    if not inspect.isroutine(getattr(type(environment), "reset", None)):
        raise ValueError(f"{type(environment).__name__} has no method reset, with which an episode begins")
    return environment


def saves_state(environment: Any) -> bool:
    """Return whether an environment can say its state, and go on from it."""
    return all(inspect.isfunction(getattr(type(environment), name, None)) for name in _OF_STATE)


def tools_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """Return the public methods of its class, which are tools, as in TRL."""
    functions = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    apart = (*RESERVED, *(_OF_STATE if saves_state(environment) else ()))
    return {name: getattr(environment, name) for name in functions if not name.startswith("_") and name not in apart}


def gives_reward(environment: Any) -> bool:
    """Return whether it may judge its episodes, or turns of them: methods may give it a reward of turns."""
    functions = [inspect.unwrap(each) for _, each in inspect.getmembers(type(environment), inspect.isfunction)]
    names = {name for each in functions if (code := getattr(each, "__code__", None)) for name in code.co_names}
    judges = inspect.isfunction(getattr(type(environment), "get_reward", None))
    return judges or hasattr(environment, "turn_reward") or "turn_reward" in names or callable(environment)


class Holder:
    """An environment in an episode.

    Args:
        environment: of a user.
        loop: runs its async methods.
    """

    def __init__(self, environment: Any, loop: asyncio.AbstractEventLoop):
        self._loop, self._tools = loop, tools_of(environment)
        self._columns: dict[str, Any] = {}
        self._manager = environment if hasattr(type(environment), "__exit__") else None
        self._environment = environment.__enter__() or environment if self._manager is not None else environment

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request; an `error` for an environment that fails."""
        try:
            return getattr(self, f"_do_{request['do']}")(request)
        except MemoryError:
            return {"error": "it reached its limit of memory"}
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return {"error": worker.described(error)}

    def _do_reset(self, request: dict[str, Any]) -> dict[str, Any]:
        self._columns = request["row"]
        content = self._awaited(self._environment.reset(**self._columns))
        content = _content(content) if isinstance(content, list) or worker.is_picture(content) else content
        if not isinstance(content, str | list | None):
            raise TypeError(f"reset: expected a text, parts of a message or None, got {content!r:.100}")
        _require_short(content or "", "the text of reset")
        return {"content": content}

    def _do_call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call tools, async ones of a turn together; results are in the order of the calls."""
        self._clear()
        results: list[Any] = [self._call(call) for call in request["calls"]]
        waiting = [index for index, value in enumerate(results) if inspect.isawaitable(value)]
        if waiting:
            values = self._loop.run_until_complete(_gathered([results[index] for index in waiting]))
            for index, value in zip(waiting, values, strict=True):
                results[index] = _Failure(str(value)) if isinstance(value, BaseException) else value
        contents = [_result(value) for value in results]
        failures = sum(isinstance(content, _Failure) for content in contents)
        return {"results": [*map(_told, contents)], "failures": failures, **self._turn()}

    def _call(self, call: dict[str, Any]) -> Any:
        name, arguments = call["name"], call["arguments"]
        try:
            if name not in self._tools:
                raise ValueError(f"Tool {name} not found.")
            if not isinstance(arguments, dict):
                raise TypeError(f"expected an object of arguments, got {arguments!r:.100}")
            return self._tools[name](**arguments)
        except MemoryError:
            return _Failure("it reached its limit of memory")
        except Exception as error:
            return _Failure(str(error))

    def _do_reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """Reply to a turn that calls no tool, where the environment can be called."""
        self._clear()
        values = {"message": request["message"], "messages": request["messages"], "last": request["last"]}
        names = _parameters(self._environment)
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
        chosen = {name: value for name, value in {**self._columns, **values}.items() if takes_all or name in names}
        reply = self._awaited(self._environment(**chosen))
        messages = [reply] if isinstance(reply, dict) else reply
        for message in messages if isinstance(messages, list) else [reply]:
            content = message.get("content") if isinstance(message, dict) else message
            _require_short(content if isinstance(content, str | list) else str(content), "a reply")
        return {"reply": reply, **self._turn()}

    def _do_reward(self, request: dict[str, Any]) -> dict[str, Any]:
        if not inspect.isfunction(getattr(type(self._environment), "get_reward", None)):
            return {"reward": None}
        return {"reward": worker.as_number(self._awaited(self._environment.get_reward()), "get_reward")}

    def _do_judge(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the rewards of a function that reads the environment, as TRL's `environments`."""
        function = worker.load(request["file"], request["function"])
        columns = {**request["columns"], "environments": self._environment}
        (reward,) = worker.judge(function, {**request, "columns": columns})
        return {"reward": worker.as_number(reward, request["function"])}

    def _do_state(self, request: dict[str, Any]) -> dict[str, Any]:
        if not saves_state(self._environment):
            return {"state": None}
        state = self._awaited(self._environment.state())
        _require_texts_as_keys(state)
        return {"state": {"own": state, "random": _random_state(), "columns": self._columns}}

    def _do_restore(self, request: dict[str, Any]) -> dict[str, Any]:
        self._columns = request["state"]["columns"]
        self._awaited(self._environment.restore(request["state"]["own"]))
        _set_random_state(request["state"]["random"])
        return {}

    def _do_end(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._manager is not None:
            self._manager.__exit__(None, None, None)
        self._environment, self._tools, self._manager = None, {}, None
        gc.collect()
        return {}

    def _awaited(self, value: Any) -> Any:
        return self._loop.run_until_complete(_one(value)) if inspect.isawaitable(value) else value

    def _clear(self) -> None:
        if hasattr(self._environment, "turn_reward"):
            self._environment.turn_reward = None

    def _turn(self) -> dict[str, Any]:
        """Return what a turn brought beside its results: a reward, and the episode's end."""
        reward = worker.as_number(getattr(self._environment, "turn_reward", None), "turn_reward")
        return {"turn_reward": reward, "over": getattr(self._environment, "end_episode", False) is True}


class _Failure(str):
    """The message of a call that failed."""


async def _one(value: Any) -> Any:
    return await value


async def _gathered(values: list[Any]) -> list[Any]:
    return list(await asyncio.gather(*values, return_exceptions=True))


def _result(value: Any) -> str | list[Any]:
    """Return a tool's result as a message's content; a failure for one that is too long, or that has no text."""
    try:
        content = _content(value)
    except Exception as error:
        return _Failure(str(error))
    if (length := _length(content)) > LONGEST_RESULT:
        return _Failure(f"the result has {length} characters, and at most {LONGEST_RESULT} are read")
    return value if isinstance(value, _Failure) else content


def _told(result: str | list[Any]) -> str | list[Any]:
    """Return a result as the model is told it, without halves of characters."""
    if isinstance(result, list):
        return [part | {"text": _told(part["text"])} if "text" in part else part for part in result]
    text = str({"error": str(result)}) if isinstance(result, _Failure) else result
    return text.encode(errors="replace").decode()


_IMAGES = ("image", "image_url", "input_image")


def _content(value: Any) -> str | list[Any]:
    """Return a value as a message's content: parts where there are images, else a text, of which parts are joined."""
    if worker.is_picture(value):
        value = [{"type": "image", "image": value}]
    kinds = {part.get("type") if isinstance(part, dict) else None for part in value} if isinstance(value, list) else ()
    if kinds == {"text"}:
        return "".join(str(part.get("text")) for part in value)
    if kinds and kinds <= {"text", *_IMAGES}:
        parts: list[Any] = json.loads(json.dumps(value, default=worker.plain))
        return [part | {"text": str(part.get("text"))} if part["type"] == "text" else part for part in parts]
    return value if isinstance(value, str) else str(value)


def _length(content: str | list[Any]) -> int:
    """Return the characters of a content's texts."""
    if isinstance(content, str):
        return len(content)
    texts = [part.get("text", "") if isinstance(part, dict) else part for part in content]
    return sum(len(text) for text in texts if isinstance(text, str))


def _require_short(content: str | list[Any], name: str) -> None:
    if (length := _length(content)) > LONGEST_RESULT:
        raise EpisodeError(f"{name} has {length} characters, and at most {LONGEST_RESULT} are read")
    if isinstance(content, str):
        content.encode()  # half a character of UTF-16 is none


def _require_texts_as_keys(state: Any) -> None:
    """Raise TypeError for a key that JSON would make a text of, which `restore` would not find."""
    for part in state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ():
        _require_texts_as_keys(part)
    if isinstance(state, dict) and (others := [key for key in state if not isinstance(key, str)]):
        raise TypeError(f"state: JSON makes a text of the key {others[0]!r:.80}: use texts, or a list of pairs")


def seed(text: str) -> None:
    """Seed the generators of Python and, where it is imported, numpy that environments share, for one episode."""
    random.seed(text)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(zlib.crc32(text.encode()))


def _random_state() -> str:
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, numbers, gauss]}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()


def _set_random_state(text: str) -> None:
    state = json.loads(zlib.decompress(base64.b64decode(text)))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, numpy.uint32), *rest))


def load(request: dict[str, Any]) -> dict[str | None, Callable[..., Any]] | None:
    """Return what makes the environments of a file; None for a function that replies."""
    return factories_of(worker.load(request["file"], request["function"], kinds=(Mapping,)))


def _serve(connection: socket.socket, make_environment: Callable[[], Any]) -> None:
    """Hold an environment, and answer requests until the connection ends."""
    loop, process, begun = asyncio.new_event_loop(), os.getpid(), _left()
    lines = connection.makefile("rb")
    holder: Holder | None = None
    for line in lines:
        request = json.loads(line)
        if "seed" in request:  # another episode begins
            seed(request["seed"])
            holder = None
        try:
            holder = holder or Holder(make_environment(), loop)
            reply = holder.answer(request)
            if request["do"] == "end":
                reply["again"] = _left() == begun
            body = json.dumps(reply, default=worker.plain, allow_nan=True)
        except Exception as error:
            body = json.dumps({"error": worker.described(error)})
        if os.getpid() != process:  # a tool forked, and its copy returned
            os._exit(0)
        connection.sendall(body.encode() + b"\n")


def _left() -> tuple[Any, ...]:
    """Return what an episode may leave behind in its process: programs that it started, and another folder."""
    programs = list[str]()
    for process in (os.getpid(), os.getppid()):
        with contextlib.suppress(OSError):
            programs += Path(f"/proc/{process}/task/{process}/children").read_text().split()
    with contextlib.suppress(OSError):
        return programs, os.getcwd()
    return (object(),)  # its folder is gone


def _hold(connection: socket.socket, begin: dict[str, Any], factories: Mapping[str | None, Any], memory: int) -> None:
    """Run an episode in a child; end all that it started when it ends, or the run closes the connection."""
    os.setsid()
    worker.set_option(worker.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    zygote = os.getppid()
    if not (child := os.fork()):
        worker.set_option(worker.PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(ValueError, OSError):  # a lower limit is in force
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        seed(begin["seed"])
        factory = factories[begin["environment"]]
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError, ConnectionResetError):
            _serve(connection, lambda: make(factory, begin["options"]))
        os._exit(0)
    poll, ended = select.poll(), os.pidfd_open(child)
    poll.register(connection, select.POLLRDHUP)
    poll.register(ended, select.POLLIN)
    while not (events := dict(poll.poll(1000))):
        if os.getppid() != zygote:
            break
    hung_up = ended not in events
    status = None if hung_up else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if hung_up:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    if _has_children():
        worker.end_descendants()
    if not hung_up:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps({"ended": status}).encode() + b"\n")


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def describe(factories: Mapping[str | None, Any], options: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the kinds of environments that these make, as fields of `EnvironmentKind`."""
    kinds = list[dict[str, Any]]()
    for name, factory in factories.items():
        environment = make(factory, options)
        tools = tools_of(environment).values()
        kind: dict[str, Any] = {"name": name, "class_name": type(environment).__name__, "tools": [*map(_schema, tools)]}
        kind |= {"judges": gives_reward(environment), "saves": saves_state(environment)}
        kinds.append(kind | {"replies": callable(environment)})
    return kinds


def _schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a tool from its signature and docstring.

    Raises:
        ValueError: an undocumented tool, or parameters whose types have no schema.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:
        help = "describe it and its parameters, or begin its name with _"
        raise ValueError(f"{tool.__qualname__} is a tool: {help}: {error}") from None


def _main() -> None:
    """Begin episodes until the first socket ends."""
    control, memory = socket.socket(fileno=int(sys.argv[1])), int(float(sys.argv[2]) * 2**30)
    empty = os.open(os.devnull, os.O_RDWR)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the run's terminal: the run ends its episodes
    factories: dict[str | None, Any] = {}
    while True:
        body, sockets, _, _ = socket.recv_fds(control, _MESSAGE, 1)
        if not body:
            return
        request = json.loads(body)
        if request["do"] in ("describe", "load"):
            try:
                factories, reply = load(request) or {}, dict[str, Any]()
                if request["do"] == "describe":
                    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # transformers would import it
                    reply["environments"] = describe(factories, request["options"]) if factories else None
            except BaseException as error:
                reply = {"error": worker.described(error)}
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave nothing
            with socket.socket(fileno=sockets[0]) as connection:
                connection.sendall(json.dumps(reply).encode() + b"\n")
            continue
        connection = socket.socket(fileno=sockets[0])
        if not os.fork():
            control.close()
            try:
                _hold(connection, request, factories, memory)
            finally:
                os._exit(0)
        connection.close()


if __name__ == "__main__":
    _main()
