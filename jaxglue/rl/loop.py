"""The loop of reinforcement learning: prompts are answered and judged, answers compared, packed and trained on.

A step is a function of the seed, the weights and the rewards. Answers stay on disk until a checkpoint holds their
steps: a run that was killed goes on with the same ones, and with rewards that might differ the next time. With
`--staleness` K the answers of a step are written by the weights of K generations before, in a thread, so that this
holds there, too: a checkpoint waits for those of weights that it does not hold.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxglue.data.iterator import See, Step, check_run, seen
from jaxglue.objectives.rollouts import StepCounts
from jaxglue.rl.advantages import (
    Advantages,
    compare,
    generation_metrics,
    length_metrics,
    reward_metrics,
    rewards_of,
    turn_credits,
)
from jaxglue.rl.ahead import GenerationsAhead
from jaxglue.rl.generate import Policy, Writer, answer_held_out, check_exact, generate, make_writer, with_log_probs
from jaxglue.rl.pack import Group, groups_of, unpack, with_mean_weight, with_teacher_matrix
from jaxglue.rl.plan import RolloutPlan
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.record import Generation, RolloutFolder
from jaxglue.vision.rows import RowImages

_log = logging.getLogger(__name__)


class LoopState(NamedTuple):
    """Where a run is: between generations, or between steps on the same answers."""

    position: int = 0
    """The first prompt of the answers in use, or of the next ones, in the run's order."""
    step: int = 0
    """Optimizer steps before those on these answers."""
    taken: int = 0
    """Steps on them that were taken."""


class RolloutSteps(Iterator[Step]):
    """Iterator over optimizer steps on answers that the model writes in between; see `BatchIterator`.

    Args:
        plan: prompts, sizes, objective and judge.
        folder: of the run.
    """

    def __init__(self, plan: RolloutPlan, folder: Path):
        self.plan = plan
        self.state = LoopState()
        self.steps_per_epoch = max(1, len(plan.dataset) * plan.window // plan.prompts)
        """Optimizer steps in which as many prompts are answered as there are."""
        self.total: int | None = None
        """Optimizer steps of the run, beyond which nothing is written ahead."""
        self._ahead = GenerationsAhead()
        self.max_segments = plan.most_rows
        """Segment slots of every batch."""
        self.see: See = RowImages.with_patches
        """See `BatchIterator.see`."""
        self._folder = RolloutFolder(folder, plan.fingerprint, plan.judge.digests, plan.rules)
        self._writer: Writer | None = None
        self._window: deque[Step] = deque()
        self._following = 0
        self._warned: set[str] = set()
        self._is_exact = plan.tile is None
        """Whether exact sampling has been compared with training, if it is asked for."""

    def begin(self, policy: Policy, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the model that writes the answers, and load those that judge them."""
        self._writer = make_writer(self.plan, policy, tokenizer)
        self.plan.judge.load_models(tokenizer, self.plan.rules)

    def release(self) -> None:
        """Let go of the model, whose arrays would stay, until another one comes."""
        self._ahead.drop()
        self._writer = None

    def __next__(self) -> Step:
        if not self._window:
            self._fill(self._next_generation())
        step, taken = self._window.popleft(), self.state.taken + 1
        last = LoopState(self._following, self.state.step + taken)
        self.state = self.state._replace(taken=taken) if self._window else last
        return seen(step, self.see)

    def _next_generation(self) -> Generation:
        """Return the next answers, which with `--staleness` were begun some generations ago; begin later ones."""
        assert self._writer is not None
        plan, (position, step, _), writer = self.plan, self.state, None
        if not plan.config.staleness:
            return self._write(self._writer, step, step, position)
        last = step + plan.config.staleness * plan.window
        for later in range(step, last + 1, plan.window):
            if later not in self._ahead and (later == step or self.total is None or later < self.total):
                writer = writer or replace(self._writer, policy=self._writer.policy.snapshot())
                self._ahead.begin(later, position, partial(self._write, writer, step))
        return self._ahead.take(step)

    def _write(self, writer: Writer, weights: int, step: int, position: int) -> Generation:
        """Return the answers for the steps after `step`: those that were kept for them, or new ones.

        Args:
            writer: of new ones.
            weights: optimizer steps of its weights.
            step: optimizer steps before those on the answers.
            position: of the first prompt in the run's order.
        """
        plan = self.plan
        if (kept := self._folder.load(step, plan.dataset.prompts)) is not None:
            return kept
        with self._folder.journal(step) as journal:
            generation = generate(plan, writer, position, journal, ahead=plan.config.staleness > 0)
        if not self._is_exact:
            check_exact(plan, writer.policy, generation)
            self._is_exact = True
        generation = replace(generation, weights=weights)
        self._folder.save(step, generation)
        return generation

    def _with_log_probs(self, generation: Generation) -> Generation:
        """Return answers that were written ahead with log-probabilities under the weights before their first step."""
        first = generation.samples[0][0]
        if not self.plan.config.staleness or first.old is not None or first.reference is not None:
            return generation
        assert self._writer is not None
        computed = with_log_probs(self.plan, self._writer.policy, generation)
        if computed is not generation:
            self._folder.save(self.state.step, computed)
        return computed

    def _fill(self, generation: Generation) -> None:
        """Make the steps on the next answers, or on those that were kept for them."""
        assert self._writer is not None
        plan, step, generation = self.plan, self.state.step, self._with_log_probs(generation)
        advantages = compare(plan.objective, rewards_of(plan, generation))
        self._folder.record(step + 1, generation, plan.judge.names, advantages.values)
        for kind, text in _vain(plan, generation, advantages):
            if kind not in self._warned:
                self._warned.add(kind)
                _log.warning("step %d: %s", step + 1, text)
        first, *others = make_steps(plan, self._writer.policy, generation, advantages)
        if (share := self._writer.policy.draft_acceptance()) is not None:
            first = replace(first, metrics={**first.metrics, "drafts/accepted": share})
        if plan.config.staleness:
            first = replace(first, metrics={**first.metrics, "staleness": step - generation.weights})
        self._window.extend([first, *others])
        self._following = generation.following

    def evaluate(self) -> dict[str, float]:
        """Answer the held-out prompts, always by the same random numbers; return the metrics of rewards and lengths."""
        assert self._writer is not None
        self._ahead.wait()
        generation = answer_held_out(self.plan, self._writer)
        advantages = compare(self.plan.objective, rewards_of(self.plan, generation))
        metrics = length_metrics(generation.all_samples)
        metrics |= reward_metrics(generation.rewards, self.plan.judge.names, advantages)
        return {f"eval_{name}": value for name, value in metrics.items()}

    def get_state(self) -> dict[str, Any]:
        """Return a JSON-able state: the beginning of the answers in use, and the number of their steps taken.

        Answers under way are waited for, since their weights are in no checkpoint.
        """
        self._ahead.wait()
        return {**self.state._asdict(), "run": self.plan.fingerprint, "judges": self.plan.judge.digests}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of `get_state`; between steps on the same answers, from those on disk.

        Raises:
            ValueError: data, seed or sizes differ from the state's, by name; or the answers are not there.
        """
        check_run(state["run"], self.plan.fingerprint)
        before = state.get("judges", {})
        for file, digest in self.plan.judge.digests.items():
            if before.get(file, digest) != digest:
                _log.warning("%s has changed since step %d: further answers are judged by it", file, state["step"])
        self._window.clear()
        self._ahead.drop()
        self.state = LoopState(state["position"], state["step"])
        self._folder.rewind()
        if not state["taken"]:
            return
        generation = self._folder.load(self.state.step, self.plan.dataset.prompts, in_use=True)
        if generation is None:
            raise ValueError(
                f"the answers that steps from {self.state.step + 1} on train on are gone from the output folder's "
                f"rollouts, or damaged: delete its checkpoints after step {self.state.step:,}, and --resume goes on "
                "from there"
            )
        self._fill(generation)
        for _ in range(state["taken"]):
            next(self)

    def forget(self) -> None:
        """Delete the answers kept for later steps, of which other settings would make others."""
        self._folder.drop_all(but=self.state.step if self.state.taken else None)

    def saved(self) -> None:
        """Delete answers that no step after the last checkpoint needs."""
        self._folder.drop_before(self.state.step)

    def close(self) -> None:
        """End what is written ahead, the processes of rewards, and what is asked of teachers."""
        self._ahead.drop()
        self.plan.judge.close()
        if self.plan.teachers is not None:
            self.plan.teachers.close()


def make_steps(plan: RolloutPlan, policy: Policy, generation: Generation, advantages: Advantages) -> list[Step]:
    """Return the optimizer steps on a generation: its prompts divided among some, all of them as often as asked."""
    credits = turn_credits(plan, generation) if plan.config.credit == "turn" else None
    groups = groups_of(plan.objective, generation.prompts, generation.samples, advantages.values, credits, plan.rules)
    if plan.objective.needs_teacher:
        groups = _with_teacher(plan, policy, groups, generation.prompts)
    size = len(groups) // plan.config.steps_per_generation
    parts = [groups[start : start + size] for start in range(0, len(groups), size)]
    steps = [_make_step(plan, policy, part) for part in parts] * plan.config.num_iterations
    return [replace(steps[0], metrics=generation_metrics(plan, generation, advantages)), *steps[1:]]


def _with_teacher(plan: RolloutPlan, policy: Policy, groups: Sequence[Group], prompts: Sequence[Prompt]) -> list[Group]:
    """Return groups with the teacher's hidden states of their answers, after its own prompts where it has some."""
    asked = [group._replace(prompt=p.teacher or group.prompt) for p, group in zip(prompts, groups, strict=True)]
    packed = plan.pack(asked)
    hidden = iter(unpack(packed, [policy.teacher_hidden(batch) for batch, _ in packed]))
    return [g._replace(answers=[replace(answer, teacher=next(hidden)) for answer in g.answers]) for g in groups]


def _make_step(plan: RolloutPlan, policy: Policy, groups: Sequence[Group]) -> Step:
    """Return the optimizer step on some groups."""
    objective, batches = plan.objective, [batch for batch, _ in plan.pack(groups)]
    answers = [answer for group in groups for answer in group.answers]
    counted = float(sum(answer.counted.sum() for answer in answers))
    counts = StepCounts(len(answers), counted, len(batches), plan.config.max_completion_length)
    normalizer = objective.normalizer(counts)
    if objective.needs_teacher:
        batches = [with_teacher_matrix(batch, policy.teacher_matrix) for batch in batches]
    if objective.needs_mean_weight:
        batches = [with_mean_weight(batch, normalizer / max(counted, 1)) for batch in batches]
    return Step(micro_batches=tuple(batches), tokens=sum(group.length for group in groups), targets=normalizer)


def _vain(plan: RolloutPlan, generation: Generation, advantages: Advantages) -> Iterator[tuple[str, str]]:
    """Yield reasons why nothing is learned from a generation, each as its kind and a text for the user."""
    is_equal, rewards = advantages.is_equal.all(), advantages.rewards
    if plan.objective.compares and (is_equal or not advantages.teaches.any()):
        judged = (
            f"{np.isfinite(rewards).sum()} of {rewards.size} answers have a reward, and no two of a prompt differ in it"
        )
        reason = "all answers to each prompt have the same reward" if is_equal else judged
        yield (
            "rewards",
            f"{reason}, so nothing is learned from them; where this goes on, choose easier or harder prompts, or a "
            "finer reward",
        )
    if plan.objective.masks_truncated and not any(sample.ended for sample in generation.all_samples):
        yield (
            "lengths",
            "all answers reached --max-completion-length and leave the loss (--mask-truncated-completions), so nothing "
            "is learned from them: raise it, where this goes on",
        )
