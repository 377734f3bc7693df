"""The loop of reinforcement learning, as an iterator over optimizer steps: prompts, answers, rewards, packed batches.

A step is a function of the seed, the weights and the rewards. Answers stay on disk until a checkpoint holds their
steps: a run that was killed goes on with the same ones, and with rewards that might differ the next time.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, Float
from transformers import PreTrainedTokenizerBase

from jaxglue.data.batch import Batch
from jaxglue.data.iterator import Step, check_run
from jaxglue.objectives.policy_gradient import RolloutObjective, StepCounts
from jaxglue.rl.advantages import Advantages, group_advantages, left_one_out, reward_metrics
from jaxglue.rl.config import RolloutConfig
from jaxglue.rl.environment import Environment
from jaxglue.rl.packing import Group, Packed, TrainedAnswer, pack_groups, unpack, with_mean_weight
from jaxglue.rl.prompts import Prompt, PromptDataset, positions
from jaxglue.rl.record import Generation, RolloutFolder
from jaxglue.rl.rewards import Judge, Written
from jaxglue.rl.sampler import Sample

_log = logging.getLogger(__name__)
_HELD_OUT = 1 << 30
"""Number of the first held-out prompt, beyond those of all that are trained on."""
_MOST_ROUNDS = 10
"""Rounds of dynamic sampling, after which groups of equal rewards complete a step."""


class _Passes(NamedTuple):
    """Log-probabilities on their way, by the fields of samples, of packed answers."""

    packed: list[Packed]
    found: dict[str, list[Float[Array, "B T"]]]


class Policy(Protocol):
    """The model in training."""

    def sample(self, prompts: Sequence[Sequence[int]], indices: Sequence[int], count: int) -> list[list[Sample]]:
        """Return answers by the present weights, with their texts."""

    def turn(
        self, prompts: Sequence[Sequence[int]], indices: Sequence[int], turn: int, room: Sequence[int]
    ) -> list[Sample]:
        """Return an answer to each conversation in a later turn, of at most `room` tokens."""

    @property
    def teacher_matrix(self) -> Any:
        """Return the teacher's output projection."""

    def teacher_hidden(self, batch: Batch) -> Float[np.ndarray, "B T E"]:
        """Return the teacher's hidden states after its final norm."""

    def log_probs(self, batch: Batch, *, reference: bool = False) -> Float[Array, "B T"]:
        """Return log-probabilities of targets, perhaps on their way, under the present weights or the reference's."""


class RolloutSteps(Iterator[Step]):
    """Iterator over optimizer steps on answers that the model writes in between; see `BatchIterator`.

    Args:
        dataset: the prompts.
        objective: what its losses need.
        config: sizes.
        judge: the rewards.
        seq_len, batch_size: of packed rows, over all devices.
        seed: of the order of prompts.
        folder: of the run.
        shared: a row holds a prompt once; else each answer has a copy.
        copies: rows with shared prompts say where operations that follow one continuation find copies.
        held_out: prompts that `evaluate` answers, if there are any.

    Raises:
        ValueError: a prompt that settings leave without a use, or sizes that contradict each other.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        objective: RolloutObjective,
        config: RolloutConfig,
        judge: Judge,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        folder: Path,
        shared: bool = True,
        copies: bool = False,
        held_out: PromptDataset | None = None,
    ):
        _check_prompts(dataset.prompts, config.environment, answered=config.lmbda < 1)
        _check_prompts(held_out.prompts if held_out else (), config.environment, answered=False)
        self._held_out = held_out
        self._dataset, self._objective, self._config, self._judge = dataset, objective, config, judge
        self._shape: dict[str, Any] = {"seq_len": seq_len, "batch_size": batch_size, "copies": copies}
        self._shared, self._seed = shared, seed
        self._answers = config.answers_to_each(objective.generations, compared=objective.compares)
        self._count = config.generation_batch_size // self._answers
        self._policy: Policy | None = None
        self._environment: Environment | None = None
        self._window: deque[Step] = deque()
        self._warned = self._cut = False
        self._position = self._step = 0
        self._began = {"position": 0, "step": 0}
        self.window = config.steps_per_generation * config.num_iterations
        """Optimizer steps on the same answers."""
        self.steps_per_epoch = max(1, len(dataset) * self.window // self._count)
        """Optimizer steps in which as many prompts are answered as there are."""
        self.max_segments = config.generation_batch_size
        """Segment slots of every batch."""
        self._folder = RolloutFolder(folder, self._run(), judge.digests)

    @property
    def description(self) -> str:
        """Return a line about the answers of a step, for the plan."""
        specs, longest = self._judge.specs, self._config.max_completion_length
        names = " + ".join(spec.name if spec.weight == 1 else f"{spec.weight:g} × {spec.name}" for spec in specs)
        sizes = f"{self._count:,} prompts × {self._answers:,} answers of at most {longest:,} tokens"
        steps = f", {self.window} steps on each" if self.window > 1 else ""
        copied = "" if self._shared else "; each answer has a copy of its prompt"
        judged = f"; reward: {names}" if names else ""
        return f"{sizes}{steps}{judged}{copied}"

    @property
    def typical_prompts(self) -> list[list[int]]:
        """Return as many prompts as a step answers, spread over all by length, the longest of all and held-out ones."""
        order = np.argsort(self._dataset.lengths, kind="stable")
        chosen = order[np.linspace(0, len(order) - 1, self._count).round().astype(int)[::-1]]
        found = [self._dataset.prompts[row].tokens for row in chosen]
        longest = max((prompt.tokens for prompt in self._held_out.prompts), key=len) if self._held_out else found[0]
        return [max(found[0], longest, key=len), *found[1:]]

    def begin(self, policy: Policy, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the model that writes the answers, and load those that judge them."""
        self._policy, self._tokenizer = policy, tokenizer
        if self._config.environment is not None:
            sizes = {"turns": self._config.max_turns, "longest": self._config.max_completion_length}
            self._environment = Environment(self._judge.reply, tokenizer, **sizes)
        self._judge.load_models(tokenizer)

    def release(self) -> None:
        """Let go of the model, whose arrays would stay, until another one comes."""
        self._policy = None

    def __next__(self) -> Step:
        if not self._window:
            self._began = {"position": self._position, "step": self._step}
            self._window.extend(self._steps())
        self._step += 1
        return self._window.popleft()

    def _steps(self, kept: Generation | None = None) -> list[Step]:
        """Return the steps on the next answers, or on those that are kept for them."""
        kept = kept or self._folder.load(self._step, self._dataset.prompts)
        rollouts = self._keep(self._write()) if kept is None else kept
        advantages = self._advantages(rollouts)
        self._folder.record(self._step + 1, rollouts, self._judge.names, advantages.values)
        self._warn_of_equal(advantages)
        self._warn_of_truncated(rollouts)
        groups = self._groups(rollouts.prompts, rollouts.samples, advantages.values)
        parts = self._divide(self._with_teacher(groups, rollouts.prompts))
        steps = [self._as_step(part) for part in parts] * self._config.num_iterations
        self._position = rollouts.following
        return [replace(steps[0], metrics=self._measures(rollouts, advantages)), *steps[1:]]

    def _warn_of_equal(self, advantages: Advantages) -> None:
        """Say once that a step's rewards teach nothing."""
        is_equal = advantages.is_equal.all()
        if self._warned or not self._objective.compares or (advantages.teaches.any() and not is_equal):
            return
        self._warned, rewards = True, advantages.rewards
        judged = (
            f"{np.isfinite(rewards).sum()} of {rewards.size} answers have a reward, and no two of a prompt differ in it"
        )
        _log.warning(
            "step %d: %s, so nothing is learned from them; where this goes on, choose easier or harder prompts, or a "
            "finer reward",
            self._step + 1,
            "all answers to each prompt have the same reward" if is_equal else judged,
        )

    def _warn_of_truncated(self, rollouts: Generation) -> None:
        """Say once that a step trains on no answer."""
        cut = self._objective.masks_truncated and not any(sample.ended for sample in rollouts.all_samples)
        if cut and not self._cut:
            self._cut = True
            _log.warning(
                "step %d: all answers reached --max-completion-length and leave the loss "
                "(--mask-truncated-completions), so nothing is learned from them: raise it, where this goes on",
                self._step + 1,
            )

    def _write(self) -> Generation:
        """Return answers to the next prompts, their rewards and log-probabilities; perhaps where rewards differ."""
        if not self._config.dynamic_sampling:
            return self._answered(self._position, with_log_probs=True)
        rollouts = self._answered(self._position)
        for _ in range(_MOST_ROUNDS):
            differ = np.flatnonzero(self._advantages(rollouts).teaches)
            if len(differ) >= self._count:
                break
            rollouts = rollouts.join(self._answered(rollouts.following))
        differ = self._advantages(rollouts).teaches
        first = np.argsort(~differ, kind="stable")[: self._count]
        chosen = rollouts.select(np.sort(first).tolist())
        return self._with_log_probs(chosen, self._begin_passes(chosen.prompts, chosen.samples))

    def _answered(self, position: int, *, with_log_probs: bool = False) -> Generation:
        """Return answers to as many prompts as a generation has, and their rewards.

        Rewards are judged on the host while the device computes log-probabilities.
        """
        numbers = list(range(position, position + self._count))
        rows = islice(positions(len(self._dataset), self._seed, position), self._count)
        prompts = [self._dataset.prompts[row] for row in rows]
        if np.random.default_rng([self._seed, position]).random() < self._config.lmbda:
            samples = self._answer(prompts, numbers)
        else:
            samples = [[self._given(prompt)] for prompt in prompts]
        passes = self._begin_passes(prompts, samples) if with_log_probs else _Passes([], {})
        return self._with_log_probs(self._judged(prompts, numbers, position + self._count, samples), passes)

    def _answer(self, prompts: list[Prompt], numbers: list[int]) -> list[list[Sample]]:
        """Return the model's answers to prompts with these numbers."""
        assert self._policy is not None
        samples = self._policy.sample([prompt.tokens for prompt in prompts], numbers, self._answers)
        if self._environment is not None:
            samples = self._environment.run(prompts, samples, numbers, self._policy.turn)
        return samples

    def _judged(
        self, prompts: list[Prompt], numbers: list[int], following: int, samples: list[list[Sample]]
    ) -> Generation:
        written = [Written(prompt, group) for prompt, group in zip(prompts, samples, strict=True)]
        fields: dict[str, Any] = {"numbers": numbers, "following": following, "sampled": len(prompts)}
        return Generation(**fields, prompts=prompts, samples=samples, rewards=self._judge.score(written))

    @property
    def has_held_out(self) -> bool:
        """Return whether there are held-out prompts."""
        return self._held_out is not None

    def evaluate(self) -> dict[str, float]:
        """Answer the held-out prompts, always by the same random numbers; return the metrics of rewards and lengths."""
        assert self._held_out is not None
        prompts = list(self._held_out.prompts)
        numbers = list(range(_HELD_OUT, _HELD_OUT + len(prompts)))
        found = self._judged(prompts, numbers, 0, self._answer(prompts, numbers))
        metrics = length_metrics(found.all_samples)
        metrics |= reward_metrics(found.rewards, self._judge.names, self._advantages(found))
        return {f"eval_{name}": value for name, value in metrics.items()}

    def _given(self, prompt: Prompt) -> Sample:
        """Return the answer of a prompt's row."""
        assert prompt.given
        tokens = np.array(prompt.given, np.int32)
        text = str(self._tokenizer.decode(prompt.given, skip_special_tokens=True))
        return Sample(tokens, np.full(len(tokens), np.nan, np.float32), True, text)

    def _begin_passes(self, prompts: Sequence[Prompt], samples: list[list[Sample]]) -> _Passes:
        """Begin to compute the log-probabilities that later steps, the reference or rewards need."""
        assert self._policy is not None
        needs_old = self._objective.compares and (self.window > 1 or self._objective.leaves_one_out)
        if not (needs_old or self._objective.uses_reference):
            return _Passes([], {})
        packed = self._pack(self._groups(prompts, samples, np.zeros((len(prompts), len(samples[0])))))
        found: dict[str, list[Array]] = {}
        if needs_old:
            found["old"] = [self._policy.log_probs(batch) for batch, _ in packed]
        if self._objective.uses_reference:
            found["reference"] = [self._policy.log_probs(batch, reference=True) for batch, _ in packed]
        return _Passes(packed, found)

    def _with_log_probs(self, rollouts: Generation, passes: _Passes) -> Generation:
        """Return the rollouts with the log-probabilities of these passes."""
        if not passes.found:
            return rollouts
        fields = {name: unpack(passes.packed, arrays) for name, arrays in passes.found.items()}
        known = [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
        samples = [sample._replace(**own) for sample, own in zip(rollouts.all_samples, known, strict=True)]
        return replace(rollouts, samples=[list(group) for group in zip(*[iter(samples)] * self._answers, strict=True)])

    def _keep(self, rollouts: Generation) -> Generation:
        rows = [next(positions(len(self._dataset), self._seed, number)) for number in rollouts.numbers]
        return self._folder.save(self._step, rollouts, rows)

    def _advantages(self, rollouts: Generation) -> Advantages:
        if not self._objective.leaves_one_out:
            return group_advantages(rollouts.rewards, self._judge.weights, self._objective.config)
        divergence = [[_divergence(sample) for sample in group] for group in rollouts.samples]
        return left_one_out(rollouts.rewards, self._judge.weights, np.array(divergence), self._objective.config)

    def _groups(
        self,
        prompts: Sequence[Prompt],
        samples: Sequence[Sequence[Sample]],
        advantages: Float[np.ndarray, "prompts answers"],
    ) -> list[Group]:
        def answer(sample: Sample, advantage: float) -> TrainedAnswer:
            counts = sample.ended or not self._objective.masks_truncated
            known: dict[str, Any] = {"log_probs": sample.log_probs, "old": sample.old, "reference": sample.reference}
            counted = np.full(len(sample.tokens), counts) & (True if sample.counted is None else sample.counted)
            return TrainedAnswer(tokens=sample.tokens, **known, counted=counted, advantage=float(advantage))

        return [
            Group(prompt.tokens, [answer(*pair) for pair in zip(group, values, strict=True)])
            for prompt, group, values in zip(prompts, samples, advantages, strict=True)
        ]

    def _with_teacher(self, groups: list[Group], prompts: Sequence[Prompt]) -> list[Group]:
        """Return groups with the teacher's hidden states of their answers, after its own prompts where it has some."""
        if not self._objective.needs_teacher:
            return groups
        assert self._policy is not None
        asked = [Group(p.teacher or p.tokens, group.answers) for p, group in zip(prompts, groups, strict=True)]
        packed = self._pack(asked)
        hidden = iter(unpack(packed, [self._policy.teacher_hidden(batch) for batch, _ in packed]))
        return [Group(g.prompt, [replace(answer, teacher=next(hidden)) for answer in g.answers]) for g in groups]

    def _divide(self, groups: list[Group]) -> list[list[Group]]:
        """Divide groups among the steps of a generation."""
        size = len(groups) // self._config.steps_per_generation
        return [groups[start : start + size] for start in range(0, len(groups), size)]

    def _as_step(self, groups: list[Group]) -> Step:
        packed = self._pack(groups)
        answers = [answer for group in groups for answer in group.answers]
        counted = float(sum(answer.counted.sum() for answer in answers))
        counts = StepCounts(len(answers), counted, len(packed), self._config.max_completion_length)
        tokens, normalizer = sum(group.length for group in groups), self._objective.normalizer(counts)
        micro_batches = tuple(self._with_matrix(batch) for batch, _ in packed)
        if self._objective.needs_mean_weight:
            micro_batches = tuple(with_mean_weight(batch, normalizer / max(counted, 1)) for batch in micro_batches)
        return Step(micro_batches=micro_batches, tokens=tokens, targets=normalizer)

    def _with_matrix(self, batch: Batch) -> Batch:
        """Return the batch with the teacher's output projection, if there is a teacher."""
        if not self._objective.needs_teacher:
            return batch
        assert self._policy is not None and batch.rollouts is not None
        return replace(batch, rollouts=replace(batch.rollouts, teacher_matrix=self._policy.teacher_matrix))

    def _pack(self, groups: list[Group]) -> list[Packed]:
        slots = self._config.generation_batch_size
        return pack_groups(groups, **self._shape, slots=slots, shared=self._shared)

    def _measures(self, rollouts: Generation, advantages: Advantages) -> dict[str, float]:
        """Return the metrics of answers and rewards, by TRL's names."""
        samples = rollouts.all_samples
        metrics = length_metrics(samples)
        if self._judge.names:
            metrics |= reward_metrics(rollouts.rewards, self._judge.names, advantages)
        if self._objective.leaves_one_out and self._objective.beta:
            tokens = sum(sample.length for sample in samples)
            metrics["kl"] = sum(_divergence(sample) for sample in samples) / tokens
        if self._config.dynamic_sampling:
            metrics["sampled_prompts"] = rollouts.sampled
        return metrics

    def get_state(self) -> dict[str, Any]:
        """Return a JSON-able state: the beginning of the answers in use, and the number of their steps taken."""
        began = self._began if self._window else {"position": self._position, "step": self._step}
        return {**began, "taken": self._step - began["step"], "run": self._run(), "judges": self._judge.digests}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of `get_state`; between steps on the same answers, from those on disk.

        Raises:
            ValueError: data, seed or sizes differ from the state's, by name; or the answers are not there.
        """
        check_run(state["run"], self._run())
        before = state.get("judges", {})
        for file, digest in self._judge.digests.items():
            if before.get(file, digest) != digest:
                _log.warning("%s has changed since step %d: further answers are judged by it", file, state["step"])
        self._window.clear()
        self._position, self._step = state["position"], state["step"]
        self._folder.rewind()
        if not state["taken"]:
            return
        if (kept := self._folder.load(self._step, self._dataset.prompts, in_use=True)) is None:
            raise ValueError(
                f"the answers that steps from {self._step + 1} on train on are gone from the output folder's rollouts, "
                f"or damaged: delete its checkpoints after step {self._step:,}, and --resume goes on from there"
            )
        self._began = {"position": self._position, "step": self._step}
        self._window.extend(self._steps(kept))
        for _ in range(state["taken"]):
            next(self)

    def forget(self) -> None:
        """Delete the answers kept for later steps, of which other settings would make others."""
        self._folder.drop_all(but=self._began["step"] if self._window else None)

    def saved(self) -> None:
        """Delete answers that no step after the last checkpoint needs."""
        self._folder.drop_before(self._began["step"] if self._window else self._step)

    def close(self) -> None:
        """End the processes of rewards."""
        self._judge.close()

    def _run(self) -> dict[str, Any]:
        sizes = {"answers": self._answers, "prompts": self._count, "window": self.window}
        return {"data": self._dataset.fingerprint, "seed": self._seed, **self._shape, **sizes}


def _check_prompts(prompts: Sequence[Prompt], environment: str | None, *, answered: bool) -> None:
    """Raise ValueError for a text with an environment, or a row without an answer where all are to have one."""
    for prompt in prompts:
        if environment is not None and isinstance(prompt.content, str):
            raise ValueError(
                f"{prompt.origin}: --environment needs prompts of messages or questions, and this one is a text"
            )
        if answered and not prompt.given:
            raise ValueError(f"{prompt.origin}: --lmbda below 1 needs rows with answers, and this one has none")


def _divergence(sample: Sample) -> float:
    """Return Σ log π − log π_ref of an answer's tokens; 0 without a reference."""
    if sample.old is None or sample.reference is None:
        return 0.0
    return float(np.sum(sample.old - sample.reference, dtype=np.float64))


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of lengths by TRL's names; those of ended answers are 0 where there is none."""
    lengths = np.array([sample.length for sample in samples])
    ended = np.array([sample.ended for sample in samples])
    metrics = {"completions/clipped_ratio": float(1 - ended.mean())}
    for name, values in (("length", lengths), ("terminated_length", lengths[ended] if ended.any() else np.zeros(1))):
        parts = {"mean": values.mean(), "min": values.min(), "max": values.max()}
        metrics |= {f"completions/{part}_{name}": float(value) for part, value in parts.items()}
    return metrics
