"""Tasks of verifiers (https://github.com/PrimeIntellect-ai/verifiers): the model in training plays their agent.

The package's environment runs in the episode's process, with its own control flow, stops and rewards. Its agent asks an
endpoint of that process, of OpenAI's form, and what the model writes in the episode is the answer.

Rows have the number of a `task`, and what its agent is asked first:
`python -m jaxglue.environments.verifiers_tasks my-taskset > prompts.jsonl`.
"""

import asyncio
import json
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

with suppress(ImportError):  # ahead: an episode's process is a fork of one that has imported this file
    import verifiers.v1  # noqa: F401

_HARNESS = "jaxglue_turns"
"""Name of the harness, by which the package imports it."""


class Verifiers:
    """An episode of a task, whose reward is the sum of the task's own.

    Args:
        taskset: name of an installed taskset.
        env: name of the environment that plays it; by default the taskset's own.
    """

    def __init__(self, taskset: str = "", env: str = ""):
        if not taskset:
            raise ValueError("name a taskset, as in --environment 'verifiers?taskset=my-taskset'")
        self._play, self._loop = _Play(taskset, env), asyncio.new_event_loop()

    def __enter__(self) -> "Verifiers":
        return self

    def reset(self, task: int, prompt: Sequence[Mapping[str, Any]] | None = None, **row: Any) -> str | None:
        """Begin a task up to the agent's first request: the prompt of a row, or the text of one without."""
        asked = self._loop.run_until_complete(self._play.begin(task))
        if prompt is not None:
            if [*map(_told, prompt)] != asked:
                raise ValueError(f"task {task} begins with {asked!r:.300}, and the row's prompt is {prompt!r:.300}")
            return None
        if [message["role"] for message in asked] != ["user"]:
            raise ValueError(f"task {task} begins with several messages, which its row must have as `prompt`")
        return asked[0]["content"]

    def __call__(self, message: str, last: bool) -> list[dict[str, str]] | None:
        """Answer the agent's request; return what it is asked next, or None at the end."""
        return self._loop.run_until_complete(self._play.answer(message, last=last))

    def get_reward(self) -> float | None:
        """Return the sum of the task's weighted rewards; None where it gives none."""
        return self._loop.run_until_complete(self._play.reward())

    def __exit__(self, *error: object) -> None:
        self._loop.run_until_complete(self._play.stop())
        self._loop.close()


class _Question(NamedTuple):
    """A request of the agent, under way."""

    messages: list[dict[str, str]]
    answer: asyncio.Future


class _Play:
    """A task that is played; its environment goes on while a method waits.

    Args:
        taskset, env: names of `Verifiers`.
    """

    def __init__(self, taskset: str, env: str):
        self._names, self._environment = (taskset, env), _make_environment(taskset, env)
        self._questions: asyncio.Queue[_Question]
        self._question: _Question | None = None
        self._played: asyncio.Task | None = None
        self.is_last = False
        """The model can say nothing more."""

    async def begin(self, number: int) -> list[dict[str, str]]:
        """Begin a task; return the messages of its agent's first request."""
        task, self._questions = _task(*self._names, number), asyncio.Queue()
        self._played = asyncio.create_task(self._run(task))
        self._question = await self._next()
        if self._question is None:
            raise ValueError(f"task {number} ended before its agent was asked: {_failure(self._played.result())}")
        return self._question.messages

    async def answer(self, text: str, *, last: bool) -> list[dict[str, str]] | None:
        """Answer the request; return the messages that follow the answer in the next one, or None at the end."""
        asked, self.is_last = self._question, last
        assert asked is not None
        asked.answer.set_result(text)
        self._question = await self._next()
        if self._question is None:
            return None
        messages, before = self._question.messages, len(asked.messages)
        if [each["role"] for each in messages[before : before + 1]] != ["assistant"]:
            raise ValueError("the agent's request does not go on from the one before it: its messages were rewritten")
        return messages[before + 1 :]

    async def reward(self) -> float | None:
        """Return the sum of the rewards at the end."""
        assert self._played is not None
        episode = await self._played
        if not episode.ok:
            raise RuntimeError(_failure(episode))
        played = [trace for trace in episode.traces if trace.agent.config.harness.id == _HARNESS]
        found = [reward.value for trace in played for reward in trace.rewards.values() if reward is not None]
        return sum(found) if found else None

    async def stop(self) -> None:
        """End the task, wherever it is."""
        if self._question is not None:
            self._question.answer.cancel()
        if self._played is not None:
            self._played.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._played

    async def _next(self) -> _Question | None:
        """Return the agent's next request; None at the end of the task."""
        assert self._played is not None
        asked = asyncio.create_task(self._questions.get())
        await asyncio.wait([asked, self._played], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        return None

    async def _run(self, task: Any) -> Any:
        """Play a task to its end; return its `Episode`."""
        from aiohttp import web
        from verifiers.v1 import EvalClientConfig, ModelContext

        path, application = f"/{secrets.token_hex(16)}", web.Application()
        application.router.add_post(f"{path}/v1/chat/completions", self._complete)
        runner = web.AppRunner(application, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}/v1"
            client, _harness_module().played[url] = EvalClientConfig(base_url=url, api_key_var=_HARNESS), self
            async with self._environment.serving():
                return await self._environment.run_episode(task, ModelContext(model="policy", client=client))
        finally:
            await runner.cleanup()

    async def _complete(self, http: Any) -> Any:
        """Answer a request of the agent by the model's next turn."""
        from aiohttp import web

        body = await http.json()
        question = _Question([*map(_told, body["messages"])], asyncio.get_running_loop().create_future())
        await self._questions.put(question)
        choice = {"index": 0, "message": {"role": "assistant", "content": await question.answer}}
        completion = {"id": "turn", "object": "chat.completion", "created": 0, "model": body["model"]}
        return web.json_response(completion | {"choices": [choice | {"finish_reason": "stop"}]})


def _failure(episode: Any) -> str:
    """Return why an episode failed."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[0].type}: {errors[0].message}" if errors else "it failed without an error"


def _told(message: Mapping[str, Any]) -> dict[str, str]:
    """Return a message with its role and text alone; raise ValueError for one that has no text."""
    content = message["content"]
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"expected a message with a text, got {message!r:.200}")
    return {"role": message["role"], "content": content}


def _make_environment(taskset: str, env: str) -> Any:
    """Return an environment of verifiers whose agent asks from this process.

    Raises:
        ValueError: no such taskset, several agents, or tools.
    """
    from verifiers import v1
    from verifiers.v1.configs.agent import agent_config_fields

    _harness_module()
    settings: dict[str, Any] = {"id": env, "taskset": {"id": taskset}}
    agents = agent_config_fields(v1.resolve_env_config(settings))
    played = [name for name, agent in agents.items() if agent.client is None]
    if len(played) != 1:
        raise ValueError(
            f"{taskset}: expected one agent without a model of its own, found {', '.join(played) or 'none'}"
        )
    local = {"type": "subprocess"}
    settings |= {name: {"runtime": local} for name in agents}
    settings[played[0]] |= {"harness": {"id": _HARNESS}}
    environment = v1.load_environment(v1.resolve_env_config(settings))
    tasks = type(environment.taskset)
    if tasks.toolsets(environment.taskset.config) or tasks.task_type().toolsets(environment.taskset.config.task):
        raise ValueError(f"{taskset}: its tasks have tool servers, which are not offered to the model")
    return environment


@cache
def _tasks(taskset: str, env: str) -> tuple[list[Any], Iterator[Any]]:
    """Return the tasks that were read, and the further ones."""
    return [], iter(_make_environment(taskset, env).taskset)


def _task(taskset: str, env: str, number: int) -> Any:
    read, further = _tasks(taskset, env)
    read += islice(further, max(number + 1 - len(read), 0))
    if not 0 <= number < len(read):
        raise ValueError(f"{taskset} has {len(read)} tasks, and none of number {number}")
    return read[number]


def _harness_module() -> Any:
    """Return the module of the harness, with the episodes that are `played` by the addresses of their endpoints."""
    if _HARNESS not in sys.modules:
        module: Any = ModuleType(_HARNESS)
        module.TurnHarness, module.__all__ = _harness_class(), ["TurnHarness"]
        module.played = WeakValueDictionary[str, _Play]()
        sys.modules[_HARNESS] = module
    return sys.modules[_HARNESS]


def _harness_class() -> type:
    """Return the program of an agent that has no tools: one request for each turn."""
    import httpx
    from verifiers.v1 import Harness, HarnessConfig, ProgramResult
    from verifiers.v1.dialects.chat import message_to_wire

    class TurnHarness(Harness[HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
            if _harness_module().played[ctx.client.base_url].is_last:
                trace.stop("max_turns")
                return ProgramResult(0, "", "")
            system, prompt = self.resolve_prompt(data)
            said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
            messages = [*([{"role": "system", "content": system}] if system else []), *said]
            headers = {"Authorization": f"Bearer {secret}"}
            async with httpx.AsyncClient(timeout=None) as client:
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
            return ProgramResult(int(answer.is_error), "", answer.text if answer.is_error else "")

    return TurnHarness


async def _first_messages(taskset: str, env: str, number: int) -> list[dict[str, str]]:
    play = _Play(taskset, env)
    try:
        return await play.begin(number)
    finally:
        await play.stop()


def main(taskset: str, *settings: str) -> None:
    """Print a row for each task, with settings such as `env=name` or `tasks=100`."""
    options = dict(text.split("=", 1) for text in settings)
    env, most = options.get("env", ""), options.get("tasks")
    tasks = _make_environment(taskset, env).taskset
    if not tasks.bounded and most is None:
        raise SystemExit(f"{taskset} never ends: say how many, as tasks=1000")
    for number, _ in enumerate(islice(iter(tasks), None if most is None else int(most))):
        asked = asyncio.run(_first_messages(taskset, env, number))
        sys.stdout.write(json.dumps({"task": number, "prompt": asked}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
