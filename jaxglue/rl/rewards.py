"""Rewards of answers: functions in processes of their own, with limits of time and memory, and reward models."""

import json
import logging
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, Self
from urllib.parse import unquote

import numpy as np
from jaxtyping import Float
from transformers import PreTrainedTokenizerBase

from jaxglue.data.tokenizer import require_unicode
from jaxglue.files.regular_file import file_digest
from jaxglue.generation.config import AssistantConfig
from jaxglue.generation.scoring import RewardModel
from jaxglue.rl.config import RolloutConfig
from jaxglue.rl.environment import Episode, Reply
from jaxglue.rl.given import GIVEN, ask_given, digest_of
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.sampler import Sample

_CHECKS = Path(__file__).parent / "checks.py"
ENVIRONMENT = "environment"
"""Name of the reward that an environment gives."""
_SHIPPED = ("exact", "math", "regex", "json_schema", "length")
_START_SECONDS = 120.0
"""Time for a process to import a file."""
_log = logging.getLogger(__name__)


class Written(NamedTuple):
    """Answers to a prompt."""

    prompt: Prompt
    samples: Sequence[Sample]

    @property
    def ids(self) -> list[list[int]]:
        """Return the tokens of each answer, with the one that ended it."""
        return [sample.tokens.tolist() for sample in self.samples]

    @property
    def texts(self) -> list[str]:
        """Return the answers without special tokens."""
        return [sample.text for sample in self.samples]

    @property
    def completions(self) -> list[Any]:
        """Return the answers to a text as texts, those to a conversation as its further messages."""
        if isinstance(self.prompt.content, str):
            return self.texts
        return [sample.messages or [{"role": "assistant", "content": sample.text}] for sample in self.samples]


class RewardSpec(NamedTuple):
    """A reward as `--reward` names it."""

    name: str
    """Name in metrics."""
    file: str
    """A Python file; empty for a reward model."""
    options: Mapping[str, str]
    weight: float = 1.0
    function: str = ""
    """Function of the file."""

    @property
    def folder(self) -> Path | None:
        """Return the folder of a reward model; None for other rewards."""
        return Path(self.options["folder"]) if not self.file and "folder" in self.options else None


def parse_reward(text: str) -> RewardSpec:
    """Read `rewards.py:function?weight=0.5&as=name`, or the name of a shipped reward with its settings.

    Raises:
        ValueError: an unknown name, a weight that is no number, or a reward model without a folder or with settings
            besides.
    """
    place, _, query = text.partition("?")
    options = {key: unquote(value) for key, _, value in (item.partition("=") for item in query.split("&") if item)}
    try:
        weight = float(options.pop("weight", 1.0))
        if not math.isfinite(weight):
            raise ValueError
    except ValueError:
        raise ValueError(f"--reward {text}: weight: expected a number") from None
    file, colon, function = place.rpartition(":")
    name = options.pop("as", "") or function  # no function has a parameter `as`, a keyword of Python
    if colon:
        return RewardSpec(name, file, options, weight, function)
    if place == "model":
        if not options.get("folder"):
            raise ValueError(f"--reward {text}: name the reward model's folder, as in model?folder=runs/reward/adapter")
        if unknown := sorted(options.keys() - {"folder"}):
            raise ValueError(f"--reward {text}: unknown {', '.join(unknown)}: a reward model has a folder and a weight")
        return RewardSpec(name, "", options, weight)
    if place not in _SHIPPED:
        known = ", ".join((*_SHIPPED, "model"))
        raise ValueError(f"--reward {text}: expected a function of a file, as in rewards.py:{place}, or one of {known}")
    try:
        _check_shipped(options)
    except (ValueError, re.error) as error:
        raise ValueError(f"--reward {text}: {error}") from None
    return RewardSpec(name, str(_CHECKS), options, weight, function)


def _check_shipped(options: Mapping[str, str]) -> None:
    """Raise ValueError or re.error for settings of shipped rewards that no answer could be judged by."""
    re.compile(options.get("pattern", ""))
    for name in options.keys() & {"soft", "hard"}:
        float(options[name])
    if (schema := options.get("schema")) is not None and not Path(schema).is_file():
        raise ValueError(f"no such file: {schema}")


def parse_environment(text: str) -> RewardSpec:
    """Read `games.py:reply`, with settings and the weight of its reward behind a question mark.

    Raises:
        ValueError: no function of a file, or a weight that is no number.
    """
    if ":" not in text.partition("?")[0]:
        raise ValueError(f"--environment {text}: expected a function of a file, as in games.py:reply")
    return parse_reward(text)


class Scorer(Protocol):
    """A reward model."""

    def score(self, documents: Sequence[Sequence[int] | np.ndarray]) -> list[float]:
        """Return each document's score."""


class Judge:
    """All rewards of a run; a context that ends its processes.

    Args:
        config: names of the rewards, and limits.

    Raises:
        ValueError: malformed names, or two rewards of one name.
    """

    def __init__(self, config: RolloutConfig):
        self.specs = [parse_reward(text) for text in config.reward]
        self._environment = None if config.environment is None else parse_environment(config.environment)
        if self._environment is not None:
            self.specs.append(RewardSpec(ENVIRONMENT, "", {}, self._environment.weight))
        names = [spec.name for spec in self.specs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"--reward: two are named {twice}, and metrics tell them by name: let &as= name one")
        self.weights = np.array([spec.weight for spec in self.specs])
        self._models: dict[str, Scorer] = {}
        self._timeout = config.reward_timeout
        self._free: SimpleQueue[_Process] = SimpleQueue()
        self._processes = [_Process(config.reward_memory) for _ in range(config.reward_workers)]
        for process in self._processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(config.reward_workers, thread_name_prefix="rewards")

    @property
    def names(self) -> list[str]:
        """Return the names of the rewards in metrics."""
        return [spec.name for spec in self.specs]

    @property
    def digests(self) -> dict[str, str]:
        """Return the digests of the functions' files, without those shipped, and of functions given in Python."""
        specs = self.specs if self._environment is None else [*self.specs, self._environment]
        given = {spec.function: digest_of(spec.function) for spec in specs if spec.file == GIVEN}
        files = sorted({spec.file for spec in specs} - {"", GIVEN, str(_CHECKS)})
        return {file: file_digest(Path(file))[:16] for file in filter(os.path.isfile, files)} | given

    def check(self, columns: Collection[str]) -> None:
        """Import every function once.

        Args:
            columns: names of the columns of rows.

        Raises:
            ValueError: a function that cannot be imported, lacks a named setting, or has parameters that no column has.
        """
        rewards = [("--reward", spec) for spec in self.specs if spec.file]
        for flag, spec in rewards if self._environment is None else [*rewards, ("--environment", self._environment)]:
            if (spec.name, spec.file) == ("math", str(_CHECKS)) and not {"answer", "solution"} & {*columns}:
                raise ValueError(
                    f"--reward math needs a column answer or solution; rows have {', '.join(sorted(columns))}"
                )
            known = {"columns": sorted(columns), "replies": spec is self._environment}
            request = _named(spec) | {"check": True} | known
            reply = ask_given(request) if spec.file == GIVEN else self._processes[0].check(spec, known)
            name = spec.function if spec.file in (str(_CHECKS), GIVEN) else f"{spec.file}:{spec.function}"
            if limit := reply.get("limit"):
                raise ValueError(f"{flag} {name}: its import reached {limit}")
            if error := reply.get("error"):
                raise ValueError(f"{flag} {name}: {error}")

    def load_models(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load the reward models, which read the tokens of answers.

        Raises:
            ValueError: no reward model, or one with another vocabulary than the tokenizer.
        """
        for spec in self.specs:
            if (folder := spec.folder) is None:
                continue
            is_adapter = (folder / "adapter_config.json").is_file()
            model = RewardModel(AssistantConfig(adapter=folder) if is_adapter else AssistantConfig(model=folder))
            if model.tokenizer.get_vocab() != tokenizer.get_vocab():
                raise ValueError(
                    f"--reward model: {folder} has another vocabulary than the model in training: train one on its base"
                )
            self._models[spec.name] = model

    def score(self, written: Sequence[Written]) -> Float[np.ndarray, "prompts answers functions"]:
        """Return the rewards of groups of equal size; NaN where a function leaves an answer out.

        Raises:
            ValueError: a function fails, or returns a wrong number of rewards or one that is not finite, by its row.
        """
        found = np.full((len(written), len(written[0].samples), len(self.specs)), np.nan)
        tasks = {
            (row, column): self._threads.submit(self._ask, spec, group)
            for row, group in enumerate(written)
            for column, spec in enumerate(self.specs)
            if spec.file
        }
        for column, spec in enumerate(self.specs):
            if spec.file:
                continue
            if spec.folder is None:
                found[:, :, column] = [[sample.reward for sample in group.samples] for group in written]
            else:
                documents = [[*group.prompt.tokens, *ids] for group in written for ids in group.ids]
                found[:, :, column] = np.reshape(self._models[spec.name].score(documents), found.shape[:2])
        for (row, column), task in tasks.items():
            if (rewards := task.result()) is not None:
                found[row, :, column] = rewards
        return found

    def reply(self, episodes: Sequence[Episode]) -> list[Reply]:
        """Return the environment's replies to conversations; beyond a limit they end without a reward.

        Raises:
            ValueError: the environment fails, or replies with something else than a text, a message or a finite number.
        """
        return list(self._threads.map(self._reply, episodes))

    def _reply(self, episode: Episode) -> Reply:
        assert self._environment is not None and not isinstance(episode.prompt.content, str)
        request = {"messages": [*episode.prompt.content, *episode.messages], "columns": dict(episode.prompt.columns)}
        answer: dict[str, Any] = {"completions": [None], "completion_ids": [None], "texts": [None], "prompt": None}
        answer["last"] = episode.is_last
        where = f"environment of {episode.prompt.origin}"
        found = self._call(self._environment, request | answer, where)
        if found is None:
            return None
        reply = found["reply"]
        try:
            require_unicode(json.dumps(reply, ensure_ascii=False))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if isinstance(reply, str):
            return [{"role": "user", "content": reply}]
        replies = [reply] if isinstance(reply, dict) else reply
        if isinstance(replies, list) and replies and all(map(_is_message, replies)):
            return replies
        if reply is None or (isinstance(reply, float) and math.isfinite(reply)):
            return reply
        raise ValueError(
            f"{where}: expected a text, a message with content and a role other than "
            f"assistant, a list of messages, a finite number or None, got {reply!r:.200}"
        )

    def _ask(self, spec: RewardSpec, group: Written) -> list[float] | None:
        """Return a function's rewards of the answers to a prompt; None beyond a limit."""
        where = f"reward {spec.name} of {group.prompt.origin}"
        request: dict[str, Any] = {"prompt": group.prompt.content, "columns": dict(group.prompt.columns)}
        request |= {"texts": group.texts, "completions": group.completions, "completion_ids": group.ids}
        reply = self._call(spec, request, where)
        return None if reply is None else _checked(reply["rewards"], len(group.samples), where)

    def _call(self, spec: RewardSpec, request: dict[str, Any], where: str) -> dict[str, Any] | None:
        """Return the reply of a process; None beyond a limit, with a line; raise ValueError if the function fails."""
        process = self._free.get()
        try:
            if spec.file == GIVEN:
                reply = ask_given(_named(spec) | request)
            else:
                reply = process.ask(spec, request, self._timeout)
        finally:
            self._free.put(process)
        if limit := reply.get("limit"):
            if not process.is_stopped:
                _log.warning("%s reached %s; it gives none", where, limit)
            return None
        if error := reply.get("error"):
            raise ValueError(f"{where}: {error}")
        return reply

    def close(self) -> None:
        """End the processes, also those that judge answers now."""
        for process in self._processes:
            process.stop()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _named(spec: RewardSpec) -> dict[str, Any]:
    """Return the function of a request."""
    return {"file": spec.file, "function": spec.function, "options": dict(spec.options)}


def _is_message(value: Any) -> bool:
    """Tell whether a value is a message of others than the model."""
    texts = isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
    return texts and value["role"] != "assistant"


def _checked(rewards: Sequence[float | None], count: int, where: str) -> list[float]:
    if len(rewards) != count:
        raise ValueError(f"{where}: expected a reward for each of {count} answers, got {len(rewards)}")
    if wrong := next((value for value in rewards if value is not None and not math.isfinite(value)), None):
        raise ValueError(f"{where}: expected finite numbers or None, got {wrong}")
    return [math.nan if value is None else value for value in rewards]


class _Process:
    """A process that judges answers, started when it is asked and again after it was ended."""

    def __init__(self, memory: float):
        self._memory, self._process, self._read = memory, None, b""  # type: tuple[float, subprocess.Popen | None, bytes]
        self._loaded: list[RewardSpec] = []
        self.is_stopped = False
        """Whether the process is stopped for good, and judges no further answers."""

    def ask(self, spec: RewardSpec, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return a function's reply; beyond the time, or where the process has died, end it and return the `limit`.

        Args:
            spec: the function.
            request: what it judges.
            seconds: the time to judge it; an import has its own.
        """
        if self.is_stopped:
            return {"limit": "the end of the run"}
        if spec not in self._loaded and (reply := self.check(spec, {})):
            return reply
        return self._exchange(_named(spec) | request, seconds)

    def check(self, spec: RewardSpec, known: dict[str, Any]) -> dict[str, Any]:
        """Import a function and check its parameters; return an error or limit, if there is one."""
        if not (reply := self._exchange(_named(spec) | {"check": True} | known, _START_SECONDS)):
            self._loaded.append(spec)
        return reply

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            process.stdin.flush()
            line = self._line(process, seconds)
        except (BrokenPipeError, EOFError):
            self.end()
            return {"limit": "its limit of memory, or ended its process"}
        if line is None:
            self.end()
            return {"limit": f"its limit of {seconds:g} s"}
        return json.loads(line)

    def _start(self) -> subprocess.Popen:
        # The file is run by its path, as importing the package takes time; -P keeps its neighbors out of the imports.
        command = [sys.executable, "-P", str(Path(__file__).parent / "worker.py"), str(self._memory)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, **pipes, env=environment, start_new_session=True)

    def _line(self, process: subprocess.Popen, seconds: float) -> bytes | None:
        """Return a line of the process; None where it takes too long."""
        assert process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._read:
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            if not (part := os.read(process.stdout.fileno(), 65536)):
                raise EOFError
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line

    def stop(self) -> None:
        """Kill the process from another thread than the one that asks it, and start none again."""
        self.is_stopped = True
        if (process := self._process) is not None:
            _kill(process)

    def end(self) -> None:
        """Kill the process, if there is one."""
        if self._process is None:
            return
        _kill(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # of unwritten requests
                pipe and pipe.close()
        self._process.wait()
        self._process, self._read = None, b""
        self._loaded.clear()


def _kill(process: subprocess.Popen) -> None:
    """Kill a process and those that the functions started in it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
