"""Rewards of answers: functions in processes of their own, with limits of time and memory, and reward models."""

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Self
from urllib.parse import unquote

import numpy as np
from jaxtyping import Float
from transformers import PreTrainedTokenizerBase

from jaxglue.data.images import ImageRules
from jaxglue.files.regular_file import file_digest
from jaxglue.generation.config import AssistantConfig
from jaxglue.generation.scoring import RewardScorer
from jaxglue.hf.folder_digest import folder_digest
from jaxglue.parts import Registry
from jaxglue.rl.checks import check_schema, expected_texts
from jaxglue.rl.config import RolloutConfig
from jaxglue.rl.conversation import Messages
from jaxglue.rl.episode_process import EnvironmentKind, EpisodeDiedError, EpisodeProcess
from jaxglue.rl.episodes import Host
from jaxglue.rl.given import GIVEN, ask_given, describe_given, digest_of, given_factories
from jaxglue.rl.hosts import ENVIRONMENT, FunctionHost, GivenConnection, ObjectHost, kind_of_row
from jaxglue.rl.process import Function, JudgingProcess
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.sampler import Sample
from jaxglue.rl.sources import source_files
from jaxglue.settings.spelling import nearest
from jaxglue.text.stream import CHANNEL, added_tokens, decode
from jaxglue.text.thinking import Thought, split_thinking, tags_of, thought_after
from jaxglue.vision.rows import Image

_CHECKS = Path(__file__).parent / "checks.py"
_OWN = Path(__file__).parents[1] / "environments"
_ENVIRONMENTS = {
    "sandbox": ("sandbox", "Sandbox"),
    "reasoning_gym": ("reasoning_tasks", "ReasoningGym"),
    "textarena": ("textarena_games", "TextArena"),
    "openenv": ("openenv_client", "OpenEnv"),
    "verifiers": ("verifiers_tasks", "Verifiers"),
}
"""Files and classes of shipped environments; no file has the name of a package, which it would hide."""
_TAIL = 16
"""Last tokens of a prompt, which tell whether it has begun to think."""
_MOST_KILLED = 3
"""Times in a row that a function's process may be killed."""
_log = logging.getLogger(__name__)


class ShippedReward(NamedTuple):
    """A function of `checks.py`, as its name alone is given."""

    after_thinking: bool = False
    """It judges what follows the thinking."""
    seconds: float = math.inf
    """The most time for an answer, which may be made to take long."""


SHIPPED = Registry[ShippedReward](
    "reward",
    {
        "exact": ShippedReward(after_thinking=True),
        "math": ShippedReward(after_thinking=True, seconds=10.0),
        "regex": ShippedReward(),
        "json_schema": ShippedReward(after_thinking=True),
        "length": ShippedReward(),
    },
)


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
        return [
            sample.episode.messages if sample.episode else [{"role": "assistant", "content": sample.text}]
            for sample in self.samples
        ]


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
    def call(self) -> Function:
        """Return the function with its settings."""
        return Function(self.file, self.function, self.options)

    @property
    def is_shipped(self) -> bool:
        """Return whether the function is one of jaxglue's."""
        return self.file == str(_CHECKS)

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
    if colon and not (file.strip() and function.strip()):
        raise ValueError(f"--reward {text}: expected a file and a function of it, as in rewards.py:exact_match")
    name = options.pop("as", "") or function  # no function has a parameter `as`, a keyword of Python
    if colon:
        return RewardSpec(name, file, options, weight, function)
    if place == "model":
        if not options.get("folder"):
            raise ValueError(f"--reward {text}: name the reward model's folder, as in model?folder=runs/reward/adapter")
        if unknown := sorted(options.keys() - {"folder"}):
            raise ValueError(f"--reward {text}: unknown {', '.join(unknown)}: a reward model has a folder and a weight")
        return RewardSpec(name, "", options, weight)
    if place not in SHIPPED:
        names = *SHIPPED, "model"
        raise ValueError(
            f"--reward {text}: expected a function of a file, as in rewards.py:{place}, or one of {', '.join(names)}"
            f"{nearest(place, names)}"
        )
    try:
        _check_shipped(options)
    except (ImportError, ValueError, re.error) as error:
        raise ValueError(f"--reward {text}: {error}") from None
    return RewardSpec(name, str(_CHECKS), options, weight, function)


def _check_shipped(options: Mapping[str, str]) -> None:
    """Raise ValueError or re.error for settings of shipped rewards that no answer could be judged by."""
    re.compile(options.get("pattern", ""))
    bounds = {name: float(options[name]) for name in ("soft", "hard") if name in options}
    if not all(map(math.isfinite, bounds.values())) or bounds.get("soft", 0) > bounds.get("hard", math.inf):
        raise ValueError(f"expected numbers of tokens with soft ≤ hard, got {bounds}")
    if (schema := options.get("schema")) is not None:
        if not Path(schema).is_file():
            raise ValueError(f"no such file: {schema}")
        check_schema(schema)


def parse_environment(text: str) -> RewardSpec:
    """Read `games.py:Game`, with settings and the weight of its reward behind a question mark.

    Raises:
        ValueError: no class or function of a file, or a weight that is no number.
    """
    name, mark, settings = text.partition("?")
    if ":" in name:
        return parse_reward(text)
    if name not in _ENVIRONMENTS:
        raise ValueError(
            f"--environment {text}: expected a class or function of a file, as in games.py:Game, or one of "
            f"{', '.join(_ENVIRONMENTS)}"
        )
    file, kind = _ENVIRONMENTS[name]
    return parse_reward(f"{_OWN / file}.py:{kind}{mark}{settings}")


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
        self._episodes: EpisodeProcess | None = None
        self.kinds: list[EnvironmentKind] | None = None
        """Classes of environments; None for a function that replies, or without any."""
        if (environment := self._environment) is not None:
            self._episodes = EpisodeProcess(
                environment.call, memory=config.reward_memory, seconds=config.reward_timeout
            )
            self.kinds = self._describe(environment)
            judging = [ENVIRONMENT] if self.kinds is None else [k.class_name for k in self.kinds if k.judges]
            self.specs += [RewardSpec(name, "", {}, environment.weight) for name in dict.fromkeys(judging)]
            if not (self.specs or config.teacher):
                raise ValueError(
                    f"--environment {config.environment}: no class has get_reward: give one, or a --reward beside it"
                )
        self._of_episodes = {spec.name for spec in self.specs if not spec.file and spec.folder is None}
        """Rewards that episodes bring."""
        names = [spec.name for spec in self.specs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"--reward: two are named {twice}, and metrics tell them by name: let &as= name one")
        self.weights = np.array([spec.weight for spec in self.specs])
        self._models: dict[str, RewardScorer] = {}
        self._timeout = config.reward_timeout
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._judges_each = set[str]()
        self._killed = Counter[str]()
        self._unread = set[str]()
        self._free: SimpleQueue[JudgingProcess] = SimpleQueue()
        self._processes = [JudgingProcess(config.reward_memory) for _ in range(config.reward_workers)]
        for process in self._processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(config.reward_workers, thread_name_prefix="rewards")

    @property
    def names(self) -> list[str]:
        """Return the names of the rewards in metrics."""
        return [spec.name for spec in self.specs]

    @cached_property
    def digests(self) -> dict[str, str]:
        """Return the digests of what judges: files with those that they import, schemas, reward models' folders, and
        functions given in Python; nothing of those shipped."""
        specs = self.specs if self._environment is None else [*self.specs, self._environment]
        given = {spec.function: digest_of(spec.function) for spec in specs if spec.file == GIVEN}
        own = {spec.file for spec in specs if spec.file != GIVEN and not spec.is_shipped} - {""}
        files = {str(path) for file in own for path in source_files(Path(file))}
        files |= {spec.options["schema"] for spec in specs if spec.is_shipped and "schema" in spec.options}
        folders = {str(spec.folder): folder_digest(spec.folder) for spec in specs if spec.folder is not None}
        return {file: file_digest(Path(file))[:16] for file in sorted(files) if os.path.isfile(file)} | folders | given

    def _describe(self, environment: RewardSpec) -> list[EnvironmentKind] | None:
        """Return the classes of environments that a name stands for; None for a function that replies."""
        assert self._episodes is not None
        try:
            if environment.file == GIVEN:
                return describe_given(environment.function, environment.options)
            return self._episodes.describe()
        except ValueError as error:
            raise ValueError(f"--environment {environment.file}:{environment.function}: {error}") from None

    @property
    def episode_names(self) -> list[str]:
        """Return the names of the rewards that episodes bring."""
        return [spec.name for spec in self.specs if spec.name in self._of_episodes]

    def tools_of(self, columns: Mapping[str, Any]) -> list[Any]:
        """Return the tools of the environment of a row; errors as of `kind_of`."""
        kind = self.kind_of(columns, "--environment")
        return [] if kind is None else kind.tools

    def kind_of(self, columns: Mapping[str, Any], where: str) -> EnvironmentKind | None:
        """Return the class of environments of a row; raise ValueError where it names none of several."""
        return None if self.kinds is None else kind_of_row(self.kinds, columns, where)

    def begin(self, prompt: Prompt, seed: str) -> Host:
        """Begin the environment of an episode.

        Args:
            prompt: of the row.
            seed: of random numbers.
        """
        environment = self._environment
        assert environment is not None and self._episodes is not None
        where = f"environment of {prompt.origin}"
        if (kind := self.kind_of(prompt.columns, prompt.origin)) is None:
            return FunctionHost(partial(self._reply, environment, prompt, where), where)
        readers = {spec.name: spec.call for spec in self.specs if spec.file and spec.name in self._of_episodes}
        if environment.file == GIVEN:
            factory = given_factories(environment.function)[kind.name]
            connection: Any = GivenConnection(factory, environment.options)
        else:
            connection = self._episodes.begin(kind.name, seed)
        return ObjectHost(connection, kind, readers, chosen=kind.name is not None)

    def check(self, columns: Collection[str]) -> None:
        """Import every function once.

        Args:
            columns: names of the columns of rows.

        Raises:
            ValueError: a function that cannot be imported, lacks a named setting, or has parameters that no column has.
        """
        for where, spec in self._functions:
            if spec.is_shipped and spec.function == "math" and not {"answer", "solution"} & {*columns}:
                raise ValueError(
                    f"--reward math needs a column answer or solution; rows have {', '.join(sorted(columns))}"
                )
            self._check(where, spec, columns)

    def check_rows(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a row without a column that a function needs, or with a value that no answer can have.

        Args:
            prompts: all that are to be answered, after `check`.
        """
        by_columns = {frozenset(prompt.columns): prompt for prompt in reversed(prompts)}
        for where, spec in self._functions:
            if spec.is_shipped:
                _check_values(spec.function, prompts)
            for columns, prompt in by_columns.items() if len(by_columns) > 1 else ():
                self._check(f"{where}, {prompt.origin}", spec, columns)

    @property
    def _functions(self) -> list[tuple[str, RewardSpec]]:
        """Return the functions that judge and reply, each after its flag and name."""
        flags = [("--reward", spec) for spec in self.specs if spec.file]
        if self._environment is not None and self.kinds is None:
            flags.append(("--environment", self._environment))
        return [
            (f"{flag} {s.function if s.is_shipped or s.file == GIVEN else f'{s.file}:{s.function}'}", s)
            for flag, s in flags
        ]

    def _check(self, where: str, spec: RewardSpec, columns: Collection[str]) -> None:
        """Import a function, and check that columns of these names have its parameters."""
        known = {"columns": sorted(columns), "replies": spec is self._environment, "episodes": self.kinds is not None}
        if spec.file == GIVEN:
            reply = ask_given(spec.call.request | {"check": True} | known)
        else:
            reply = self._processes[0].check(spec.call, known)
            if reply.get("judges_each"):
                self._judges_each.add(spec.name)
            if reply.get("reads_environments"):
                self._of_episodes.add(spec.name)
        if limit := reply.get("limit"):
            raise ValueError(f"{where}: its import reached {limit}")
        if error := reply.get("error"):
            raise ValueError(f"{where}: {error}")

    def load_models(self, tokenizer: PreTrainedTokenizerBase, rules: ImageRules | None = None) -> None:
        """Load the reward models, which read the tokens of answers.

        Args:
            tokenizer: of the model in training.
            rules: for images of prompts and environments; None where there are none.

        Raises:
            ValueError: no reward model, or one with another vocabulary than the tokenizer, or that makes other tokens
                of images.
        """
        self._tokenizer = tokenizer
        for spec in self.specs:
            if (folder := spec.folder) is None:
                continue
            is_adapter = (folder / "adapter_config.json").is_file()
            config = AssistantConfig(adapter=folder) if is_adapter else AssistantConfig(model=folder)
            model = RewardScorer(config, **({} if rules is None else rules.processor.limits))
            if rules is not None and (model.rules is None or model.rules.processor != rules.processor):
                raise ValueError(
                    f"--reward model?folder={folder} makes other tokens of images than the model in training, or sees "
                    "none: train one on its base, or leave out rows with images"
                )
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
            if spec.file and spec.name not in self._of_episodes
        }
        for column, spec in enumerate(self.specs):
            if spec.name in self._of_episodes:
                found[:, :, column] = [
                    [
                        sample.episode.rewards.get(spec.name, math.nan) if sample.episode else math.nan
                        for sample in group.samples
                    ]
                    for group in written
                ]
            elif spec.folder is not None:
                read = [_document(group.prompt, sample) for group in written for sample in group.samples]
                documents, images = [tokens for tokens, _ in read], [shown for _, shown in read]
                found[:, :, column] = np.reshape(self._models[spec.name].score(documents, images), found.shape[:2])
        for (row, column), task in tasks.items():
            found[row, :, column] = task.result()
        return found

    def _reply(self, environment: RewardSpec, prompt: Prompt, where: str, messages: Messages, last: bool) -> Any:
        """Return the reply of a function to a conversation.

        Raises:
            EpisodeDiedError: it reaches a limit.
            ValueError: it fails.
        """
        request: dict[str, Any] = {"messages": messages, "columns": dict(prompt.columns), "last": last}
        nothing = {"completions": [None], "completion_ids": [None], "texts": [None], "prompt": None}
        reply = self._call(environment, request | nothing, where)
        if limit := reply.get("limit"):
            raise EpisodeDiedError(f"reached {limit}")
        return reply["reply"]

    def _ask(self, spec: RewardSpec, group: Written) -> list[float]:
        """Return a function's rewards of the answers to a prompt; NaN beyond a limit.

        A function that judges one answer at a time has its time for each: none takes that of the others.
        """
        where = f"reward {spec.name} of {group.prompt.origin}"
        after_thinking = spec.is_shipped and SHIPPED[spec.function].after_thinking
        texts = self._visible(group) if after_thinking else group.texts
        size = 1 if spec.name in self._judges_each else len(group.samples)
        rewards, limits = list[float](), list[str]()
        for start in range(0, len(group.samples), size):
            part = slice(start, start + size)
            request = {
                "prompt": group.prompt.content,
                "columns": dict(group.prompt.columns),
                "texts": texts[part],
                "completions": group.completions[part],
                "completion_ids": group.ids[part],
            }
            reply = self._call(spec, request, where)
            if limit := reply.get("limit"):
                limits.append(limit)
                rewards += [math.nan] * size
            else:
                rewards += _checked(reply["rewards"], size, where)
        if spec.is_shipped and not limits and np.isnan(rewards).all() and group.prompt.origin not in self._unread:
            self._unread.add(group.prompt.origin)
            _log.warning("%s: math-verify reads no mathematics in its answer, so the row teaches nothing", where)
        self._warn(where, limits, len(rewards) // size)
        return rewards

    def _warn(self, where: str, limits: Sequence[str], count: int) -> None:
        if limits and not self._processes[0].is_stopped:
            share = "" if len(limits) == count else f" with {len(limits)} of {count} answers"
            _log.warning("%s reached %s%s; it gives none", where, limits[0], share)

    def _call(self, spec: RewardSpec, request: dict[str, Any], where: str) -> dict[str, Any]:
        """Return the reply of a process, or the `limit` that it reached; raise ValueError if the function fails."""
        process, seconds = self._free.get(), self._timeout
        if spec.is_shipped:
            seconds = min(seconds, SHIPPED[spec.function].seconds)
        try:
            if spec.file == GIVEN:
                reply = ask_given(spec.call.request | request)
            else:
                reply = process.ask(spec.call, request, seconds)
        finally:
            self._free.put(process)
        self._killed[spec.name] = self._killed[spec.name] + 1 if reply.get("killed") else 0
        if self._killed[spec.name] == _MOST_KILLED and not process.is_stopped:
            raise ValueError(f"{where}: its process was killed {_MOST_KILLED} times in a row, and judges nothing")
        if error := reply.get("error"):
            raise ValueError(f"{where}: {error}")
        return reply

    def _visible(self, group: Written) -> list[str]:
        """Return the answers without the model's thinking; of conversations, what the model says last."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return group.texts
        tags, channels = tags_of(tokenizer), CHANNEL in added_tokens(tokenizer).all
        opened = thought_after(str(tokenizer.decode(group.prompt.tokens[-_TAIL:]))) is Thought.BEGUN

        def visible(sample: Sample) -> str:
            if sample.episode:
                written = [message for message in sample.episode.messages if message["role"] == "assistant"]
                if not written:
                    return ""
                text = str(written[-1]["content"])
            elif tags or channels:
                text = decode(tokenizer, sample.tokens.tolist())
            else:
                return sample.text
            return split_thinking(text, tags=tags, opened=opened, channels=channels)[1]

        return [visible(sample) for sample in group.samples]

    def close(self) -> None:
        """End the processes, also those that judge answers now."""
        for process in self._processes:
            process.stop()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.end()
        if self._episodes is not None:
            self._episodes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_values(name: str, prompts: Sequence[Prompt]) -> None:
    """Raise ValueError for a row whose value no answer could have, by a shipped reward's name."""
    for prompt in prompts if name in ("exact", "math") else ():
        columns = prompt.columns
        column = "solution" if name == "math" and columns.get("answer") is None else "answer"
        try:
            expected_texts(columns.get(column), column)
        except ValueError as error:
            raise ValueError(f"--reward {name}, {prompt.origin}: {error}") from None


def _document(prompt: Prompt, sample: Sample) -> tuple[list[int], list[Image]]:
    """Return an answer's tokens after its prompt, and their images; of a conversation in several rows, the last's."""
    *_, row = sample.rows(prompt.tokens)
    shown = () if sample.episode is None else sample.episode.images
    tokens = [*row.prompt, *sample.tokens[row.start : row.end].tolist()]
    return tokens, [*map(Image.of, prompt.records), *shown[: len(row.firsts)]]


def _checked(rewards: Sequence[float | None], count: int, where: str) -> list[float]:
    if len(rewards) != count:
        raise ValueError(f"{where}: expected a reward for each of {count} answers, got {len(rewards)}")
    if wrong := next((value for value in rewards if value is not None and not math.isfinite(value)), None):
        raise ValueError(f"{where}: expected finite numbers or None, got {wrong}")
    return [math.nan if value is None else value for value in rewards]
