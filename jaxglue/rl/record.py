"""Answers on disk: those that no checkpoint holds yet, whole, and a line for each in `rollouts.jsonl`."""

import hashlib
import io
import json
import logging
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxglue.data.images import ImageRules
from jaxglue.files.atomic import atomic_file
from jaxglue.files.json_file import parse_object
from jaxglue.files.json_lines import move_aside
from jaxglue.rl.journal import EPISODES, EpisodeFile
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.sampler import Episode, Sample

KEPT, LINES = "rollouts", "rollouts.jsonl"
_DAMAGED = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, SyntaxError, TypeError),
    *(ValueError, struct.error, zipfile.BadZipFile, zlib.error),
)
"""What a file with changed bytes raises somewhere in zipfile, numpy or json."""
_HEX = 2 * hashlib.sha256().digest_size
_log = logging.getLogger(__name__)
_ARRAYS = ("tokens", "log_probs", "old", "reference", "counted")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Answers to some prompts, and their rewards."""

    rows: list[int]
    """Of the prompts in their data."""
    numbers: list[int]
    """Positions of the prompts in the run's order."""
    following: int
    """Position of the next prompt."""
    prompts: list[Prompt]
    samples: list[list[Sample]]
    rewards: Float[np.ndarray, "prompts answers functions"]
    sampled: int
    """Prompts that were answered, with those that dynamic sampling left out."""
    weights: int = 0
    """Optimizer steps of the weights that wrote them, where these are not the present ones."""

    @property
    def all_samples(self) -> list[Sample]:
        """Return all answers in their order."""
        return [sample for group in self.samples for sample in group]

    def select(self, chosen: Sequence[int]) -> "Generation":
        """Return those of some prompts."""
        return replace(
            self,
            rows=[self.rows[i] for i in chosen],
            numbers=[self.numbers[i] for i in chosen],
            prompts=[self.prompts[i] for i in chosen],
            samples=[self.samples[i] for i in chosen],
            rewards=self.rewards[list(chosen)],
        )

    def join(self, later: "Generation") -> "Generation":
        """Return both."""
        return Generation(
            rows=self.rows + later.rows,
            numbers=self.numbers + later.numbers,
            following=later.following,
            prompts=self.prompts + later.prompts,
            samples=self.samples + later.samples,
            rewards=np.concatenate([self.rewards, later.rewards]),
            sampled=self.sampled + later.sampled,
        )


class RolloutFolder:
    """The rollouts of a run in its folder.

    Args:
        path: of the run.
        run: settings that answers depend on; those of others are not loaded.
        judges: digests of the functions that judge them, likewise.
        rules: for images that environments show; None where they show none.
    """

    def __init__(self, path: Path, run: dict[str, Any], judges: dict[str, str], rules: ImageRules | None = None):
        self._path, self._run, self._judges, self._rules = path, run, judges, rules
        self._is_cut = False

    def load(self, step: int, dataset: Sequence[Prompt], *, in_use: bool = False) -> Generation | None:
        """Return the rollouts after `step` optimizer steps; None where they are not kept.

        Args:
            step: optimizer steps.
            dataset: the prompts.
            in_use: some steps were made on them, so their rewards stay, whatever would judge them now.
        """
        file = self._file(step)
        if not file.is_file():
            return None
        try:
            values = _read_arrays(file.read_bytes())
            meta = json.loads(values["meta"].tobytes())
            if meta["run"] != self._run or not (in_use or meta.get("judges", {}) == self._judges):
                return None
            return _generation(values, meta, dataset, self._rules)
        except _DAMAGED as error:
            _log.warning("%s is damaged (%s): its answers are not used", file, error)
            return None

    def save(self, step: int, rollouts: Generation) -> None:
        """Keep rollouts for the steps after `step` optimizer steps."""
        samples = rollouts.all_samples
        meta = {
            "run": self._run,
            "judges": self._judges,
            "numbers": rollouts.numbers,
            "following": rollouts.following,
            "rows": rollouts.rows,
            "ended": [sample.ended for sample in samples],
            "texts": [sample.text for sample in samples],
            "episodes": [sample.episode and sample.episode.to_json() for sample in samples],
            "sampled": rollouts.sampled,
            "weights": rollouts.weights,
        }
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(sample, name) for sample in samples])
            for name in _ARRAYS
            if getattr(samples[0], name) is not None
        }
        arrays |= {"lengths": np.array([len(sample.tokens) for sample in samples]), "rewards": rollouts.rewards}
        arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        (self._path / KEPT).mkdir(exist_ok=True)
        with atomic_file(self._file(step)) as temporary:
            temporary.write_bytes(_signed(buffer.getvalue()))

    @contextmanager
    def journal(self, step: int) -> Iterator[EpisodeFile]:
        """Keep episodes of the generation after `step` optimizer steps while they are under way."""
        path = self._path / KEPT / f"step-{step}{EPISODES}"
        with EpisodeFile(path, {"run": self._run, "judges": self._judges}) as journal:
            yield journal
        path.unlink(missing_ok=True)

    def record(
        self, step: int, rollouts: Generation, names: Sequence[str], advantages: Float[np.ndarray, "prompts answers"]
    ) -> None:
        """Append a line for each answer that optimizer step `step` is the first to train on."""
        if not self._is_cut:
            self._cut(step)
        lines = []
        for index, (prompt, group) in enumerate(zip(rollouts.prompts, rollouts.samples, strict=True)):
            for sample, rewards, advantage in zip(group, rollouts.rewards[index], advantages[index], strict=True):
                judged = [*map(_number, rewards)]
                line = {"step": step, "origin": prompt.origin, "prompt": prompt.content, "answer": sample.text}
                line |= {"rewards": dict(zip(names, judged, strict=True)), "advantage": round(float(advantage), 4)}
                line |= {"tokens": sample.length, "ended": sample.ended}
                if (episode := sample.episode) is not None:
                    line |= {"turns": episode.messages, "turn_rewards": [*map(_number, episode.turn_rewards)]}
                    line |= {} if episode.died is None else {"died": episode.died}
                line["log_probs"] = [None if np.isnan(x) else round(float(x), 4) for x in sample.log_probs]
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        with (self._path / LINES).open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def rewind(self) -> None:
        """Let the lines of the next step and later ones be written again."""
        self._is_cut = False

    def _cut(self, step: int) -> None:
        """Cut lines from `step` on, and a last line that a crash cut short; move damaged ones to a file beside it."""
        self._is_cut, path = True, self._path / LINES
        if not path.is_file():
            return
        end, damaged = 0, list[tuple[int, int]]()
        with path.open("r+b") as file:
            for line in file:
                number = _step(line)
                if not line.endswith(b"\n") or (number is not None and number >= step):
                    break
                if number is None:
                    damaged.append((end, end + len(line)))
                end += len(line)
            file.truncate(end)
        if damaged:
            move_aside(path, damaged)

    def drop_all(self, *, but: int | None) -> None:
        """Delete the rollouts kept for all steps but one."""
        for file in (self._path / KEPT).glob("step-*"):
            if _step_of(file) != but or file.name.endswith(EPISODES):
                file.unlink()

    def drop_before(self, step: int) -> None:
        """Delete the rollouts kept for steps before the one after `step`."""
        for file in (self._path / KEPT).glob("step-*"):
            if _step_of(file) < step:
                file.unlink()

    def _file(self, step: int) -> Path:
        return self._path / KEPT / f"step-{step}.npz"


def _step_of(file: Path) -> int:
    return int(file.name.partition("-")[2].partition(".")[0])


def _signed(content: bytes) -> bytes:
    """Return a zip file with the digest of its bytes as its comment: checksums of zip files leave out much."""
    buffer = io.BytesIO(content)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = bytes(_HEX)
    content = buffer.getvalue()[:-_HEX]
    return content + hashlib.sha256(content).hexdigest().encode()


def _read_arrays(content: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a signed file; those of earlier versions have no digest."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if archive.comment and hashlib.sha256(content[:-_HEX]).hexdigest().encode() != content[-_HEX:]:
            raise ValueError("its digest differs")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _generation(
    values: dict[str, Any], meta: dict[str, Any], dataset: Sequence[Prompt], rules: ImageRules | None
) -> Generation:
    bounds = np.cumsum(values["lengths"])[:-1]
    parts: dict[str, Any] = {name: np.split(values[name], bounds) for name in _ARRAYS if name in values}
    kept = meta.get("episodes", [None] * len(meta["ended"]))
    episodes = [episode and Episode.from_json(episode, rules) for episode in kept]
    samples = [
        Sample(**{name: part[index] for name, part in parts.items()}, ended=ended, text=text, episode=episode)
        for index, (ended, text, episode) in enumerate(zip(meta["ended"], meta["texts"], episodes, strict=True))
    ]
    count = len(samples) // len(meta["numbers"])
    return Generation(
        rows=meta["rows"],
        numbers=meta["numbers"],
        following=meta["following"],
        prompts=[dataset[row] for row in meta["rows"]],
        samples=[samples[start : start + count] for start in range(0, len(samples), count)],
        rewards=values["rewards"],
        sampled=meta["sampled"],
        weights=meta.get("weights", 0),
    )


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _step(line: bytes) -> int | None:
    """Return the step of a line; None for one that is damaged."""
    try:
        step = parse_object(line, LINES).get("step")
    except ValueError:
        return None
    return step if type(step) is int else None
