"""Environments in episodes: functions that reply to conversations, and objects of users' classes."""

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol

from jaxglue.data.messages import read_content
from jaxglue.data.tokenizer import require_unicode
from jaxglue.rl import episode_worker, worker
from jaxglue.rl.conversation import Messages
from jaxglue.rl.episode_process import EnvironmentKind, EpisodeDiedError, finite
from jaxglue.rl.episodes import Reply
from jaxglue.rl.process import Function
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.sampler import Sample
from jaxglue.vision.images import image_source

ENVIRONMENT = "environment"
"""Name of the reward that a function which replies gives, and the column by which rows choose among environments."""


class Connection(Protocol):
    """To an environment in an episode."""

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Return the reply to a request; raise EpisodeDiedError without one."""

    def close(self) -> None:
        """End the environment."""


class FunctionHost:
    """A function that replies to conversations, and keeps no state.

    Args:
        ask: returns the function's reply to messages; True for the last time.
    """

    name = ENVIRONMENT

    def __init__(self, ask: Callable[[Messages, bool], Any], where: str):
        self._ask, self._where = ask, where

    def reset(self, prompt: Prompt) -> Reply:
        """See `Host`."""
        return Reply([])

    def reply(self, messages: Messages, *, last: bool) -> Reply:
        """See `Host`.

        Raises:
            ValueError: the function replies with something else.
        """
        try:
            return read_reply(self._ask(messages, last))
        except EpisodeDiedError as error:
            raise ValueError(f"{self._where} {error}") from None

    def rewards(self, sample: Sample, prompt: Prompt) -> Mapping[str, float]:
        """See `Host`."""
        return {}

    def state(self) -> Any:
        """See `Host`."""
        return {}

    def restore(self, state: Any) -> None:
        """See `Host`."""

    def leave(self) -> None:
        """See `Host`."""

    def close(self) -> None:
        """See `Host`."""


class ObjectHost:
    """An object of a user's class, whose public methods are tools.

    Args:
        connection: to the object.
        kind: of its class.
        readers: functions that read the object when they judge, by their names.
        chosen: rows choose among several classes.
    """

    def __init__(self, connection: Connection, kind: EnvironmentKind, readers: Mapping[str, Function], *, chosen: bool):
        self.name = kind.class_name
        self._connection, self._kind, self._readers, self._chosen = connection, kind, readers, chosen

    def reset(self, prompt: Prompt) -> Reply:
        """See `Host`; all columns of the row are arguments of `reset`, with the prompt, if the row has one."""
        row = {"prompt": prompt.content, **prompt.columns} if prompt.asked else dict(prompt.columns)
        if self._chosen:
            row.pop(ENVIRONMENT, None)
        added = self._connection.ask("reset", row=row)["content"]
        return _reply([{"role": "user", "content": added}] if added else [])

    def reply(self, messages: Messages, *, last: bool) -> Reply:
        """See `Host`; the last turn's calls are not made."""
        said = messages[-1]
        if calls := said.get("tool_calls"):
            if last:
                return Reply([])
            reply = self._connection.ask("call", calls=[call["function"] for call in calls])
            results = _reply([{"role": "tool", "content": content} for content in reply["results"]])
            if reply["turn_reward"] is not None and not self._kind.judges:
                raise ValueError(
                    f"{self.name} gives turn_reward, which it did not have when it was made: give the class "
                    "turn_reward = None, so that metrics name its reward"
                )
            counts = {"calls": len(calls), "failures": reply["failures"]}
            return results._replace(ends=reply["over"], turn_reward=finite(reply["turn_reward"]), **counts)
        if not self._kind.replies:
            return Reply([])
        reply = self._connection.ask("reply", message=said["content"], messages=messages, last=last)
        read = read_reply(reply["reply"])
        return read._replace(ends=reply["over"], turn_reward=finite(reply["turn_reward"]))

    def rewards(self, sample: Sample, prompt: Prompt) -> Mapping[str, float]:
        """See `Host`: its own, and those of functions that read it."""
        rewards = {self.name: finite(self._connection.ask("reward")["reward"])} if self._kind.judges else {}
        assert sample.episode is not None
        judged: dict[str, Any] = {"columns": dict(prompt.columns), "prompt": prompt.content, "texts": [sample.text]}
        judged |= {"completions": [sample.episode.messages], "completion_ids": [sample.tokens.tolist()]}
        for name, function in self._readers.items():
            rewards[name] = finite(self._connection.ask("judge", **judged, **function.request)["reward"])
        return rewards

    def state(self) -> Any:
        """See `Host`."""
        return self._connection.ask("state")["state"] if self._kind.saves else None

    def restore(self, state: Any) -> None:
        """See `Host`."""
        self._connection.ask("restore", state=state)

    def leave(self) -> None:
        """See `Host`."""
        self._connection.ask("end")

    def close(self) -> None:
        """See `Host`."""
        self._connection.close()


class GivenConnection:
    """To an object of a class that was given in Python, in the process of the run, without limits.

    Args:
        factory: makes the object.
        options: its arguments.
    """

    _lock = Lock()

    def __init__(self, factory: Callable[..., Any], options: Mapping[str, str]):
        self._loop = asyncio.new_event_loop()
        self._holder: episode_worker.Holder | None = None
        self._make = lambda: episode_worker.make(factory, options)

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """See `Connection`; one object replies at a time."""
        with self._lock:
            try:
                self._holder = self._holder or episode_worker.Holder(self._make(), self._loop)
                reply = json.loads(json.dumps(self._holder.answer({"do": do, **request}), default=worker.plain))
            except Exception as error:
                reply = {"error": worker.described(error)}
        if (reason := reply.get("error")) is not None:
            raise EpisodeDiedError(f"failed: {reason}")
        return reply

    def close(self) -> None:
        """See `Connection`."""
        self._loop.close()


def read_reply(reply: Any) -> Reply:
    """Return what an environment replies to a conversation: a text, a message, several, a reward, or None.

    Raises:
        EpisodeDiedError: something else, or half a character.
    """
    try:
        require_unicode(text := json.dumps(reply, ensure_ascii=False, default=worker.plain))
    except ValueError as error:
        raise EpisodeDiedError(f"failed: {error}") from None
    reply = json.loads(text)
    if isinstance(reply, str):
        return Reply([{"role": "user", "content": reply}])
    replies = [reply] if isinstance(reply, dict) else reply
    if isinstance(replies, list) and replies and all(map(_is_message, replies)):
        return _reply(replies)
    if reply is None:
        return Reply([])
    if isinstance(reply, int | float) and not isinstance(reply, bool) and math.isfinite(reply):
        return Reply([], reward=float(reply))
    raise EpisodeDiedError(
        "failed: expected a text, a message with content and a role other than assistant, a list of messages, a finite "
        f"number or None, got {reply!r:.200}"
    )


def _is_message(value: Any) -> bool:
    """Tell whether a value is a message of others than the model."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), str | list):
        return False
    return isinstance(role := value.get("role"), str) and role != "assistant"


def _reply(messages: Messages) -> Reply:
    """Return messages with the images of their parts.

    Raises:
        EpisodeDiedError: other parts, or an image that names a file or an address.
    """
    found = list[Any]()
    try:
        read = [{**each, "content": read_content(each["content"], each["role"], found)} for each in messages]
        return Reply(read, images=[image_source(value, None) for value in found])
    except ValueError as error:
        raise EpisodeDiedError(f"failed: {error}") from None


def kind_of_row(kinds: Sequence[EnvironmentKind], columns: Mapping[str, Any], where: str) -> EnvironmentKind:
    """Return the kind of environment that a row chooses.

    Raises:
        ValueError: it names none of them.
    """
    if len(kinds) == 1 and kinds[0].name is None:
        return kinds[0]
    name = columns.get(ENVIRONMENT)
    for kind in kinds:
        if kind.name == name:
            return kind
    names = ", ".join(str(kind.name) for kind in kinds)
    raise ValueError(f"{where}: the column environment must name one of {names}, got {name!r:.100}")
