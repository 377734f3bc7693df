"""Episodes: conversations of the model with environments, each at its own turn, decoded together.

An environment resets, replies to a turn and judges in a thread, while the model writes turns of others.
"""

import base64
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Condition, Lock
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jaxglue.data.images import ImageRules
from jaxglue.generation.engine import Completion
from jaxglue.generation.turns import Turn
from jaxglue.rl.conversation import ConversationTemplate, Messages, conversation_text, named_results
from jaxglue.rl.episode_process import EpisodeDiedError
from jaxglue.rl.prompts import Content, Prompt, PromptImage, read_images
from jaxglue.rl.sampler import Episode, Sample, decoded_images, encoded_images
from jaxglue.vision.images import ImageSource
from jaxglue.vision.rows import Image, PromptImages

_SEEDS_APART = 1_000_003
"""Separates the seeds of turns."""
_log = logging.getLogger(__name__)
Fate = Literal["drop", "zero", "stop"]


class Reply(NamedTuple):
    """An environment's reply to a turn."""

    messages: Messages
    """Messages that the next turn follows; none ends the episode."""
    images: Sequence[ImageSource] = ()
    """Those of the messages, in order, whose parts of type `image` are their places."""
    ends: bool = False
    turn_reward: float = math.nan
    """Reward of the turn; NaN for none."""
    reward: float = math.nan
    """Reward of the episode, that its end brings; NaN for none."""
    calls: int = 0
    """Tools that were called."""
    failures: int = 0
    """Calls that failed."""


class Host(Protocol):
    """An environment in one episode; its methods raise EpisodeDiedError where it can't go on."""

    name: str
    """Of its own reward."""

    def reset(self, prompt: Prompt) -> Reply:
        """Begin; return a message whose content is added to the prompt, or none."""

    def reply(self, messages: Messages, *, last: bool) -> Reply:
        """Return the reply to a conversation; at the last turn nothing more can be said."""

    def rewards(self, sample: Sample, prompt: Prompt) -> Mapping[str, float]:
        """Return the episode's rewards by their names, NaN for none."""

    def state(self) -> Any:
        """Return what `restore` goes on from, as JSON; None for an environment that can't."""

    def restore(self, state: Any) -> None:
        """Go on from a state."""

    def leave(self) -> None:
        """End after the last request."""

    def close(self) -> None:
        """End, whatever it does."""


class Environment(NamedTuple):
    """What episodes are held with."""

    begin: Callable[[Prompt, str], Host]
    """Returns an environment for a row, with a text that seeds its random numbers."""
    template: ConversationTemplate
    any_tool: bool
    """Environments reply to calls of unknown tools."""
    turns: int
    """The most turns of the model."""
    longest: int
    """The most tokens of an episode after its prompt."""
    row: int
    """The most tokens with the prompt."""
    at_once: int | None
    """The most episodes under way; None for all."""
    fate: Fate
    """What becomes of episodes that die: they count as unjudged, or as of reward 0, or stop the run."""
    branches: bool
    """Each turn follows what the template makes of those before it, as a row of its own."""
    names: Sequence[str]
    """Of the rewards of episodes."""
    shows: bool = False
    """It may show images."""
    journal: "EpisodeJournal | None" = None


class EpisodeJournal(Protocol):
    """Keeps episodes under way."""

    def load(self, key: str) -> dict[str, Any] | None:
        """Return what was last saved of an episode."""

    def save(self, key: str, value: dict[str, Any]) -> None:
        """Save an episode in the place of what was saved before."""


@dataclass(eq=False)
class OpenEpisode:
    """An episode under way: the tokens after its prompt are those of the model's turns and of the replies to them."""

    prompt: Prompt
    number: int
    """Of the prompt in the run."""
    answer: int
    """Among the episodes of the prompt."""
    count: int
    """Episodes of the prompt."""
    images: list[Image] = field(default_factory=list)
    """Of its own prompt and of all messages after it, in order."""
    content: Messages = field(default_factory=list)
    """Messages of its own prompt."""
    prompts: list[Sequence[int]] = field(default_factory=list)
    """Tokens before its first turn and before the present one; where turns are rows of their own, before each."""
    firsts: list[list[int]] = field(default_factory=list)
    """First token of each image in each of these."""
    parts: list[Sample] = field(default_factory=list)
    """Turns, and tokens of the environment between them."""
    messages: Messages = field(default_factory=list)
    """After those of its prompt."""
    added: Content | None = None
    """What reset added to the prompt."""
    turn_rewards: list[float] = field(default_factory=list)
    reward: float = math.nan
    calls: int = 0
    failures: int = 0
    died: str | None = None
    name: str = ""
    """Of the environment's own reward."""
    host: Host | None = None
    turn: Turn | None = None
    """The turn that the model writes, or wrote last."""

    @property
    def turns(self) -> list[Sample]:
        """Return the model's turns so far."""
        return [part for part in self.parts if part.counted is None]

    @property
    def text(self) -> list[int]:
        """Return the tokens of its prompt and all after it."""
        return [*self.prompts[0], *(token for part in self.parts for token in part.tokens.tolist())]

    @property
    def key(self) -> str:
        """Return its name in the run."""
        return f"{self.number}.{self.answer}"

    @property
    def where(self) -> str:
        """Return its name in messages."""
        return f"environment of {self.prompt.origin}, episode {self.answer + 1}"

    @property
    def shown(self) -> list[Image]:
        """Return the images that its environment has shown."""
        return self.images[len(self.prompt.records) :]

    def turn_of(self, prompt: Sequence[int], images: PromptImages | None, seed: int, most: int, *, holds: bool) -> Turn:
        """Return its next turn, of at most so many tokens; random numbers depend on the run's seed and its place.

        Args:
            prompt: all tokens before it, as the model reads them.
            images: of these.
            seed: of the run.
            most: tokens.
            holds: another turn may go on from it.
        """
        turn, before = len(self.turns), self.turn
        index, answer = self.number, self.answer
        if turn:  # random keys take 32 bits, and held-out prompts have indices beyond all others
            index, answer = (self.number * self.count + self.answer) % (1 << 32), 0
        after = before if before is not None and before.holds else None
        seed += turn * _SEEDS_APART
        return Turn(prompt, index, answer, seed, most, after=after, images=images, holds=holds)

    def sample(self, rewards: Mapping[str, float], *, branches: bool, nothing: int) -> Sample:
        """Return the episode as an answer; tokens of the environment have no log-probability, and do not count.

        Args:
            rewards: of the episode.
            branches: its turns are rows of their own.
            nothing: token of an episode without any, which does not count.
        """
        parts = [part for part in self.parts if not branches or part.counted is None]
        if not parts:
            parts = [_unwritten([nothing])]
        ends = np.cumsum([len(part.tokens) for part in parts]).tolist()
        turn_ends = [end for part, end in zip(parts, ends, strict=True) if part.counted is None]
        observed = [] if self.added is None else [{"role": "user", "content": self.added}]
        prompts = self.prompts or [self.prompt.tokens]
        turns, own = self.turns, len(self.prompt.records)
        firsts = [each[own:] for each in (self.firsts if branches else self.firsts[-1:])]
        episode = Episode(
            messages=[*observed, *self.messages],
            prompts=[list(p) for p in (prompts[: len(ends)] if branches else prompts[:1])],
            row_ends=ends if branches else ends[-1:],
            turn_ends=turn_ends,
            turn_rewards=self.turn_rewards,
            rewards=rewards,
            calls=self.calls,
            failures=self.failures,
            died=self.died,
            name=self.name,
            images=self.shown,
            firsts=firsts[: len(ends)],
        )
        counted = [np.full(len(p.tokens), True) if p.counted is None else p.counted for p in parts]
        return Sample(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.log_probs for part in parts]),
            turns[-1].ended if turns else False,
            conversation_text(self.messages, [part.text for part in turns]),
            counted=np.concatenate(counted),
            episode=episode,
        )


def sample_json(sample: Sample) -> dict[str, Any]:
    """Return an answer as JSON, its numbers to the bit."""
    arrays = {
        name: _encoded(value)
        for name in ("tokens", "log_probs", "counted")
        if (value := getattr(sample, name)) is not None
    }
    episode = None if sample.episode is None else sample.episode.to_json()
    return {**arrays, "ended": sample.ended, "text": sample.text, "episode": episode}


def read_sample(value: Mapping[str, Any], rules: ImageRules | None = None) -> Sample:
    """Return an answer of `sample_json`; rules are those of images, None where none were shown."""
    arrays = {name: _decoded(value[name]) for name in ("tokens", "log_probs", "counted") if name in value}
    episode = None if value["episode"] is None else Episode.from_json(value["episode"], rules)
    return Sample(**arrays, ended=value["ended"], text=value["text"], episode=episode)


_KEPT = ("content", "prompts", "firsts", "messages", "added", "turn_rewards", "calls", "failures")
"""What an episode is beside its parts and its environment's state."""


def episode_json(episode: OpenEpisode, state: Any, *, branches: bool) -> dict[str, Any]:
    """Return an episode before its next turn as JSON, with the state of its environment."""
    values = {name: getattr(episode, name) for name in _KEPT}
    values["prompts"] = [*map(list, episode.prompts if branches else episode.prompts[:1])]
    values["images"] = encoded_images(episode.shown)
    return {**values, "parts": [*map(sample_json, episode.parts)], "state": state}


def restore_episode(
    episode: OpenEpisode, value: Mapping[str, Any], rules: ImageRules | None, *, branches: bool
) -> None:
    """Let an episode be as `episode_json` kept it."""
    for name in _KEPT:
        setattr(episode, name, value[name])
    episode.images += decoded_images(value["images"], rules)
    episode.parts = [*map(read_sample, value["parts"])]
    if not branches:
        episode.prompts[1:] = [episode.text]


def _encoded(array: np.ndarray) -> list[str]:
    return [array.dtype.str, base64.b64encode(array.tobytes()).decode()]


def _decoded(value: Sequence[str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(value[1]), np.dtype(value[0])).copy()


def _unwritten(tokens: Sequence[int]) -> Sample:
    """Return tokens that the model did not write."""
    unknown, apart = np.full(len(tokens), np.nan, np.float32), np.zeros(len(tokens), bool)
    return Sample(np.array(tokens, np.int32), unknown, True, counted=apart)


def _joined(said: Content, added: Content) -> Content:
    """Return a message's content with what is added to it: a text, if both are."""
    if isinstance(said, str) and isinstance(added, str):
        return said + added
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (said, added)]
    return [*parts[0], *parts[1]]


class Episodes:
    """Episodes of some prompts, as sources of turns; a context that ends their environments.

    Args:
        environment: what they are held with.
        prompts: of the rows.
        numbers: of the prompts in the run.
        count: episodes of each.
        seed: of the run.
        images: of each prompt.
        features: of images, by their `Image.cache_key`.
    """

    def __init__(
        self,
        environment: Environment,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        count: int,
        seed: int,
        images: Sequence[Sequence[PromptImage]] = (),
        features: Callable[[Sequence[Image]], Mapping[tuple, np.ndarray]] | None = None,
    ):
        self.environment, self._seed = environment, seed
        images = images or [()] * len(prompts)
        self._all = [
            OpenEpisode(prompt, number, answer, count, [image for image, _ in seen])
            for prompt, number, seen in zip(prompts, numbers, images, strict=True)
            for answer in range(count)
        ]
        self._features_of, self._features = features, dict[tuple, np.ndarray]()
        self._seeing = Lock()
        self._see([image for seen in images for image, _ in seen])
        self._beginnings = {
            number: self._read(prompt.tokens, seen)
            for prompt, number, seen in zip(prompts, numbers, images, strict=True)
        }
        self._samples: dict[str, Sample] = {}
        most = len(self._all) if environment.at_once is None else min(environment.at_once, len(self._all))
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="episodes")
        self.failure: BaseException | None = None

    def sources(self, count: int) -> list["EpisodeSource"]:
        """Divide the episodes among devices, groups of a prompt together; return the sources of their turns."""
        size = self._all[0].count
        groups = [self._all[start : start + size] for start in range(0, len(self._all), size)]
        at_once = self.environment.at_once
        share = None if at_once is None else max(1, at_once // count)
        parts = [[episode for group in groups[device::count] for episode in group] for device in range(count)]
        return [EpisodeSource(self, part, share) for part in parts]

    def samples(self) -> list[list[Sample]]:
        """Return the episodes of each prompt as answers, when all are over.

        Raises:
            ValueError: all have died.
        """
        dead = [episode for episode in self._all if episode.died is not None]
        if len(dead) == len(self._all):
            raise ValueError(f"all {len(dead)} episodes died; {dead[0].where}, {dead[0].died}")
        if len(dead) > 1:
            _log.warning("%d of %d episodes died", len(dead), len(self._all))
        count = self._all[0].count
        ordered = [self._samples[episode.key] for episode in self._all]
        return [ordered[start : start + count] for start in range(0, len(ordered), count)]

    def _see(self, images: Sequence[Image]) -> None:
        """Let features of images be known; raise ValueError for a damaged one."""
        with self._seeing:
            if new := [image for image in images if image.cache_key not in self._features]:
                assert self._features_of is not None
                self._features |= self._features_of(new)

    def _read(self, tokens: Sequence[int], images: Sequence[PromptImage]) -> tuple[Sequence[int], PromptImages | None]:
        """Return tokens as the model reads them, with the features of their images."""
        rules = self.environment.template.rules
        return (tokens, None) if rules is None else read_images(tokens, images, self._features, rules.processor)

    def _begun(self, episode: OpenEpisode) -> tuple[Sequence[int], PromptImages | None]:
        """Return all tokens of an episode, as the model reads them, with the features of its images."""
        prompt, rules = episode.prompts[-1], self.environment.template.rules
        if prompt is episode.prompt.tokens:  # one for all episodes, which share its pages
            return self._beginnings[episode.number]
        tokens, images = np.array(prompt), list[PromptImage]()
        for first, image in zip(episode.firsts[-1], episode.images, strict=True):
            assert rules is not None
            images.append(PromptImage(image, rules.places(tokens, first, rules.processor.tokens(image.grid))))
        self._see(episode.images)  # some may be known by their bytes alone, from before a kill
        return self._read(prompt, images)

    def _shown(self, reply: Reply) -> list[Image]:
        """Return the images of a reply.

        Raises:
            EpisodeDiedError: one that is none, or a damaged one.
            ValueError: the run sees none.
        """
        if not reply.images:
            return []
        rules = self.environment.template.rules
        if rules is None or not self.environment.shows:
            raise ValueError("--environment showed an image: let it, with --environment-images true")
        try:
            images = [rules.shown(source.read()) for source in reply.images]
            self._see(images)
        except ValueError as error:
            raise EpisodeDiedError(f"failed: {error}") from error
        return images

    def submit(
        self, do: Callable[[OpenEpisode, "EpisodeSource"], None], episode: OpenEpisode, source: "EpisodeSource"
    ) -> None:
        """Let a thread do a part of an episode; an error ends all sources."""

        def run() -> None:
            try:
                if self.failure is None:
                    do(episode, source)
            except BaseException as error:
                self.failure = self.failure or error
                _log.debug("%s", traceback.format_exc())
            source.wake()

        self._threads.submit(run)

    def begin(self, episode: OpenEpisode, source: "EpisodeSource") -> None:
        """Begin an episode, or go on with one that was kept."""
        environment = self.environment
        saved = environment.journal.load(episode.key) if environment.journal else None
        if saved is not None and "sample" in saved:
            self._samples[episode.key] = sample = read_sample(saved["sample"], environment.template.rules)
            episode.died = sample.episode.died if sample.episode else None
            source.over(episode)
            return
        with self._dying(episode):
            episode.host = environment.begin(episode.prompt, f"{self._seed}.{episode.key}")
            episode.name = episode.host.name
            if saved is not None:
                restore_episode(episode, saved, environment.template.rules, branches=environment.branches)
                episode.host.restore(saved["state"])
            else:
                self._set_prompt(episode, episode.host.reset(episode.prompt))
            self._ask(episode, source)
            return
        self._end(episode, source)

    def _set_prompt(self, episode: OpenEpisode, reply: Reply) -> None:
        content = episode.prompt.content
        assert not isinstance(content, str)
        added = reply.messages[0]["content"] if reply.messages else None
        episode.added, episode.content, tokens = added, content, episode.prompt.tokens
        if added:
            last = content[-1]
            if not isinstance(said := last.get("content"), str | list):
                raise EpisodeDiedError("has a text for a last message whose content is no text")
            episode.content = [*content[:-1], {**last, "content": _joined(said, added)}]
            episode.images += self._shown(reply)
            tokens = self._tokens(episode, episode.content)
        if len(tokens) + 1 > self.environment.row:
            raise EpisodeDiedError(f"begins with a prompt of {len(tokens):,} tokens, which leaves none in --seq-len")
        self._append(episode, tokens)

    def _append(self, episode: OpenEpisode, tokens: Sequence[int]) -> None:
        """Add a prompt that the template has written."""
        rules, grids = self.environment.template.rules, [image.grid for image in episode.images]
        episode.prompts.append(tokens)
        episode.firsts.append([] if rules is None else rules.firsts(np.array(tokens), grids))

    def _tokens(self, episode: OpenEpisode, messages: Messages, new: Sequence[Image] = ()) -> list[int]:
        """Return the tokens of messages that begin with those of its prompt, of which the last have new images."""
        grids = [image.grid for image in (*episode.images, *new)]
        return self.environment.template.prompt(messages, episode.prompt.tools, grids)

    def _room(self, episode: OpenEpisode) -> int:
        """Return the tokens that the next turn may have."""
        environment, first, present = self.environment, episode.prompts[0], episode.prompts[-1]
        after = len(present) - len(first)
        return min(environment.longest, environment.row - len(first)) - after

    def _ask(self, episode: OpenEpisode, source: "EpisodeSource") -> None:
        """Let the model write the next turn."""
        environment = self.environment
        holds = not environment.branches and len(episode.turns) + 1 < environment.turns
        prompt, images = self._begun(episode)
        episode.turn = episode.turn_of(prompt, images, self._seed, self._room(episode), holds=holds)
        source.add(episode)

    def go_on(self, episode: OpenEpisode, source: "EpisodeSource") -> None:
        """Let the environment reply to the turn that the model has written."""
        environment, host = self.environment, episode.host
        assert host is not None
        with self._dying(episode):
            if self._reply(episode, host):
                if environment.journal is not None and (state := host.state()) is not None:
                    value = episode_json(episode, state, branches=environment.branches)
                    environment.journal.save(episode.key, value)
                self._ask(episode, source)
                return
        self._end(episode, source)

    def _reply(self, episode: OpenEpisode, host: Host) -> bool:
        """Add the environment's reply to a turn; return whether another one follows."""
        environment, turn, number = self.environment, episode.parts[-1], len(episode.turns) - 1
        said = environment.template.message(
            turn.tokens.tolist(), episode.prompt.tools, number, ended=turn.ended, any_tool=environment.any_tool
        )
        episode.messages.append(said)
        episode.turn_rewards.append(math.nan)
        last = number + 1 == environment.turns or not turn.ended or self._used(episode) + 1 >= self._most(episode)
        reply = host.reply([*episode.content, *episode.messages], last=last)
        episode.turn_rewards[-1], episode.reward = reply.turn_reward, reply.reward
        episode.calls += reply.calls
        episode.failures += reply.failures
        replies = named_results(reply.messages, said.get("tool_calls", []))
        goes_on = bool(replies) and not (last or reply.ends) and self._add(episode, replies, self._shown(reply))
        if goes_on or reply.ends:
            episode.messages += replies
        return goes_on

    def _used(self, episode: OpenEpisode) -> int:
        return len(episode.prompts[-1]) - len(episode.prompts[0]) + len(episode.parts[-1].tokens)

    def _most(self, episode: OpenEpisode) -> int:
        return min(self.environment.longest, self.environment.row - len(episode.prompts[0]))

    def _add(self, episode: OpenEpisode, replies: Messages, images: Sequence[Image]) -> bool:
        """Add the tokens of replies with these images; return False where they leave none for another turn."""
        environment, tools, last = self.environment, episode.prompt.tools, episode.parts[-1]
        if environment.branches:
            tokens = self._tokens(episode, [*episode.content, *episode.messages, *replies], images)
            if len(tokens) - len(episode.prompts[0]) >= self._most(episode):
                return False
            episode.images += images
            self._append(episode, tokens)
            return True
        grids, template = [image.grid for image in images], environment.template
        between = template.between(
            episode.content, episode.messages, replies, tools, int(last.tokens[-1]), episode.prompt.origin, grids
        )
        if between is None or self._used(episode) + len(between) >= self._most(episode):
            return False
        before = len(episode.text)
        new = [] if template.rules is None else template.rules.firsts(np.array(between), grids)
        episode.parts.append(_unwritten(between))
        episode.images += images
        episode.prompts[1:] = [episode.text]
        episode.firsts[1:] = [[*episode.firsts[-1], *(before + first for first in new)]]
        return True

    def _end(self, episode: OpenEpisode, source: "EpisodeSource") -> None:
        """End an episode: ask for its rewards, and let go of its environment."""
        environment, host, rewards = self.environment, episode.host, dict.fromkeys(self.environment.names, math.nan)
        make = partial(episode.sample, branches=environment.branches, nothing=episode.prompt.tokens[-1])
        if episode.died is None and host is not None:
            with self._dying(episode):
                rewards |= host.rewards(make(rewards), episode.prompt)
                parts = (*episode.turn_rewards, episode.reward, rewards.get(host.name, math.nan))
                if numbers := [part for part in parts if not math.isnan(part)]:
                    rewards[host.name] = math.fsum(numbers)
                host.leave()
        if episode.died is not None:
            rewards = dict.fromkeys(rewards, 0.0 if environment.fate == "zero" else math.nan)
        self._samples[episode.key] = sample = make(rewards)
        if environment.journal is not None:
            environment.journal.save(episode.key, {"sample": sample_json(sample)})
        if host is not None:
            host.close()
            episode.host = None
        source.over(episode)

    @contextmanager
    def _dying(self, episode: OpenEpisode) -> Iterator[None]:
        """Name an episode that dies in the body.

        Raises:
            ValueError: this stops the run.
        """
        try:
            yield
        except EpisodeDiedError as error:
            episode.died = str(error)
            if self.failure is not None:
                return
            message = f"{episode.where}, {error}"
            if self.environment.fate == "stop":
                raise ValueError(message) from error
            counts = "counts as of reward 0" if self.environment.fate == "zero" else "has no reward"
            _log.warning("%s; it %s", message, counts)

    def __enter__(self) -> "Episodes":
        return self

    def __exit__(self, *error: object) -> None:
        self.failure = self.failure or RuntimeError("the episodes have ended")
        for episode in self._all:
            if (host := episode.host) is not None:
                host.close()
        self._threads.shutdown(cancel_futures=True)
        for episode in self._all:  # of threads that were beginning one
            if (host := episode.host) is not None:
                host.close()


class EpisodeSource:
    """The turns of some episodes; see `TurnSource`.

    Args:
        episodes: all of them.
        part: those of this source.
        at_once: the most under way; None for all.
    """

    def __init__(self, episodes: Episodes, part: Sequence[OpenEpisode], at_once: int | None):
        self._episodes, self._left = episodes, len(part)
        self._ready, self._released = SimpleQueue[OpenEpisode](), SimpleQueue[Turn]()
        self._turns: dict[Turn, OpenEpisode] = {}
        self._news = Condition()
        self._waiting = list(reversed(part))
        for _ in range(len(part) if at_once is None else min(at_once, len(part))):
            self._begin_next()

    def _begin_next(self) -> None:
        if self._waiting:
            self._episodes.submit(self._episodes.begin, self._waiting.pop(), self)

    def add(self, episode: OpenEpisode) -> None:
        """Let an episode's turn be written."""
        self._ready.put(episode)
        self.wake()

    def over(self, episode: OpenEpisode) -> None:
        """Note that an episode is over; another one begins."""
        if episode.turn is not None:
            self._released.put(episode.turn)
        with self._news:
            self._left -= 1
            self._begin_next()
            self._news.notify()

    def wake(self) -> None:
        """Let `wait` look again."""
        with self._news:
            self._news.notify()

    def ready(self) -> list[Turn]:
        """See `TurnSource`."""
        self._raise()
        turns = []
        while not self._ready.empty():
            episode = self._ready.get()
            assert episode.turn is not None
            self._turns[episode.turn] = episode
            turns.append(episode.turn)
        return turns

    def released(self) -> list[Turn]:
        """See `TurnSource`."""
        turns = []
        while not self._released.empty():
            turns.append(self._released.get())
        return turns

    def take(self, turn: Turn, completion: Completion) -> None:
        """See `TurnSource`."""
        episode = self._turns.pop(turn)
        tokens = np.asarray(completion.tokens)
        text = self._episodes.environment.template.text(tokens.tolist())
        episode.parts.append(Sample(tokens, completion.log_probs, completion.finish == "stop", text))
        self._episodes.submit(self._episodes.go_on, episode, self)

    def wait(self, seconds: float = 60.0) -> None:
        """See `TurnSource`."""
        with self._news:
            self._news.wait_for(lambda: not self._ready.empty() or self._left == 0 or self._episodes.failure, seconds)

    @property
    def is_over(self) -> bool:
        """See `TurnSource`."""
        self._raise()
        return self._left == 0

    def _raise(self) -> None:
        if self._episodes.failure is not None:
            raise self._episodes.failure
