"""A generation: answers of the model to some prompts, judged, with the log-probabilities that training reads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, Float
from transformers import PreTrainedTokenizerBase

from jaxglue.data.batch import Batch
from jaxglue.data.images import ImageRules
from jaxglue.generation.turns import TurnSource
from jaxglue.rl.advantages import compare, rewards_of
from jaxglue.rl.conversation import ConversationTemplate
from jaxglue.rl.episodes import Environment, EpisodeJournal, Episodes
from jaxglue.rl.pack import Group, groups_of, images_before, of_samples, unpack
from jaxglue.rl.plan import RolloutPlan
from jaxglue.rl.prompts import Prompt, PromptDataset, PromptImage
from jaxglue.rl.record import Generation
from jaxglue.rl.rewards import Written
from jaxglue.rl.sampler import Sample
from jaxglue.rl.teachers import ServedTeachers
from jaxglue.vision.rows import Image, PlacedImage

_HELD_OUT = 1 << 30
"""Number of the first held-out prompt, beyond those of all that are trained on."""
_MOST_ROUNDS = 10
"""Rounds of dynamic sampling, after which groups of equal rewards complete a step."""


class Policy(Protocol):
    """The model in training."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        indices: Sequence[int],
        count: int,
        images: Sequence[Sequence[PromptImage]],
    ) -> list[list[Sample]]:
        """Return answers by the present weights, with their texts, to prompts with these images."""

    def features(self, images: Sequence[Image]) -> Mapping[tuple, Float[np.ndarray, "I D"]]:
        """Return the features of images by the present tower, by their `Image.cache_key`; several threads may ask."""

    def converse(self, sources: Callable[[int], Sequence[TurnSource]], count: int) -> None:
        """Write the turns of conversations, `count` to a prompt, which `sources` divides among devices."""

    def snapshot(self) -> "Policy":
        """Return the present weights as a policy of their own, which writes answers while training changes these."""

    def draft_acceptance(self) -> float | None:
        """Return the share of drafts that were accepted since the last call; None where there were none."""

    @property
    def teacher_matrix(self) -> Float[Array, "V E"]:
        """Return the teacher's output projection."""

    def teacher_hidden(self, batch: Batch) -> Float[np.ndarray, "B T E"]:
        """Return the teacher's hidden states after its final norm."""

    def log_probs(self, batch: Batch, *, reference: bool = False) -> Float[Array, "B T"]:
        """Return log-probabilities of targets, perhaps on their way, under the present weights or the reference's."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """What writes answers."""

    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    environment: Environment | None
    """Continues answers as conversations, if there is one."""


def make_writer(plan: RolloutPlan, policy: Policy, tokenizer: PreTrainedTokenizerBase) -> Writer:
    """Return the model as a writer of the plan's answers."""
    environment, config = None, plan.config
    if config.environment is not None:
        environment = Environment(
            begin=plan.judge.begin,
            template=ConversationTemplate(tokenizer, plan.rules),
            any_tool=plan.judge.kinds is not None,
            turns=config.max_turns,
            longest=config.max_completion_length,
            row=plan.seq_len,
            at_once=config.max_episodes,
            fate=config.dead_episodes,
            branches=config.history == "branch",
            names=plan.judge.episode_names,
            shows=config.environment_images,
        )
    return Writer(policy=policy, tokenizer=tokenizer, environment=environment)


def generate(
    plan: RolloutPlan,
    writer: Writer,
    position: int,
    journal: EpisodeJournal | None = None,
    *,
    ahead: bool = False,
) -> Generation:
    """Return answers to the prompts from a position in the run's order on.

    With dynamic sampling prompts whose rewards do not differ are replaced by further ones, for some rounds; then
    log-probabilities are computed for the chosen answers alone.

    Args:
        plan: of the run.
        writer: of the answers.
        position: of the first prompt.
        journal: keeps episodes under way.
        ahead: log-probabilities are those of later weights, by `with_log_probs`.
    """
    if writer.environment is not None:
        writer = replace(writer, environment=writer.environment._replace(journal=journal))
    if not plan.config.dynamic_sampling:
        return _answer(plan, writer, position, with_log_probs=not ahead)
    generation = _answer(plan, writer, position, with_log_probs=False)
    for _ in range(_MOST_ROUNDS):
        if compare(plan.objective, rewards_of(plan, generation)).teaches.sum() >= plan.prompts:
            break
        generation = generation.join(_answer(plan, writer, generation.following, with_log_probs=False))
    teaches = compare(plan.objective, rewards_of(plan, generation)).teaches
    first = np.argsort(~teaches, kind="stable")[: plan.prompts]
    chosen = generation.select(np.sort(first).tolist())
    return chosen if ahead else with_log_probs(plan, writer.policy, chosen)


def with_log_probs(plan: RolloutPlan, policy: Policy, generation: Generation) -> Generation:
    """Return a generation with the log-probabilities that something reads, under the present weights."""
    passes = _begin_passes(plan, policy, generation.prompts, generation.samples)
    return _with_log_probs(generation, passes, plan.rules)


def _answer(plan: RolloutPlan, writer: Writer, position: int, *, with_log_probs: bool) -> Generation:
    """Return judged answers to as many prompts as a generation has.

    The device computes log-probabilities while the host judges.
    """
    rows, numbers = plan.rows(position), list(range(position, position + plan.prompts))
    prompts = [plan.dataset.prompts[row] for row in rows]
    if np.random.default_rng([plan.seed, position]).random() < plan.config.lmbda:
        samples = sample(plan, writer, plan.dataset, prompts, numbers)
    else:
        samples = [[_row_answer(prompt, writer.tokenizer)] for prompt in prompts]
    passes = _begin_passes(plan, writer.policy, prompts, samples) if with_log_probs else None
    generation = Generation(
        rows=rows,
        numbers=numbers,
        following=position + plan.prompts,
        prompts=prompts,
        samples=samples,
        rewards=judge(plan, prompts, samples),
        sampled=len(prompts),
    )
    return _with_log_probs(generation, passes, plan.rules)


def answer_held_out(plan: RolloutPlan, writer: Writer) -> Generation:
    """Return judged answers to the held-out prompts, always by the same random numbers."""
    assert plan.held_out is not None
    prompts = list(plan.held_out.prompts)
    rows, numbers = list(range(len(prompts))), list(range(_HELD_OUT, _HELD_OUT + len(prompts)))
    samples = sample(plan, writer, plan.held_out, prompts, numbers)
    rewards = judge(plan, prompts, samples)
    return Generation(
        rows=rows, numbers=numbers, following=0, prompts=prompts, samples=samples, rewards=rewards, sampled=len(prompts)
    )


def sample(
    plan: RolloutPlan, writer: Writer, dataset: PromptDataset, prompts: Sequence[Prompt], numbers: Sequence[int]
) -> list[list[Sample]]:
    """Return the model's answers to prompts of a data set, continued by the environment.

    Numbers are the prompts' in the run. The log-probabilities of exact sampling are those of training under the same
    weights.
    """
    tokens, images = [prompt.tokens for prompt in prompts], [dataset.images_of(prompt) for prompt in prompts]
    if writer.environment is None:
        groups = writer.policy.sample(tokens, numbers, plan.answers, images)
        if plan.tile is None or not plan.objective.needs_old(plan.window):
            return groups
        return [[answer._replace(old=answer.log_probs) for answer in group] for group in groups]
    features = writer.policy.features
    with Episodes(writer.environment, prompts, numbers, plan.answers, plan.seed, images, features) as episodes:
        writer.policy.converse(episodes.sources, plan.answers)
        return episodes.samples()


def judge(
    plan: RolloutPlan, prompts: Sequence[Prompt], samples: Sequence[Sequence[Sample]]
) -> Float[np.ndarray, "prompts answers functions"]:
    """Return the rewards of answers; NaN where a function leaves one out, or an episode has died and counts as none."""
    rewards = plan.judge.score([Written(prompt, [*group]) for prompt, group in zip(prompts, samples, strict=True)])
    dead = np.array([[s.episode is not None and s.episode.died is not None for s in group] for group in samples])
    rewards[dead] = 0.0 if plan.config.dead_episodes == "zero" else np.nan
    return rewards


def check_exact(plan: RolloutPlan, policy: Policy, generation: Generation) -> None:
    """Compare log-probabilities of sampling with training's, on a micro-batch of answers under the same weights.

    Raises:
        ValueError: some differ, so that sampling is not exact on this device.
    """
    prompts, samples = generation.prompts, generation.samples
    groups = groups_of(plan.objective, prompts, samples, np.zeros((len(prompts), len(samples[0]))), rules=plan.rules)
    batch = plan.pack(groups)[0].batch
    assert batch.rollouts is not None
    counted = np.asarray(batch.loss_weights) > 0
    trained, sampled = (np.asarray(values)[counted] for values in (policy.log_probs(batch), batch.rollouts.sampler))
    if unequal := int((trained != sampled).sum()):
        raise ValueError(
            f"--exact-sampling on does not hold here: of {len(trained):,} tokens {unequal:,} have other "
            f"log-probabilities in training, by up to {np.abs(trained - sampled).max():.2g} nats, so that some sum has "
            "another order on this device: leave it out"
        )


def _row_answer(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Return the answer of a prompt's row."""
    assert prompt.given
    tokens = np.array(prompt.given, np.int32)
    text = str(tokenizer.decode(prompt.given, skip_special_tokens=True))
    return Sample(tokens, np.full(len(tokens), np.nan, np.float32), True, text)


_RowValues = Callable[[], list[Float[np.ndarray, " L"]]]
"""Waits for values of each row of answers."""


class _LogProbPasses(NamedTuple):
    """Log-probabilities of answers, on their way."""

    old: _RowValues | None
    reference: _RowValues | None


def _begin_passes(
    plan: RolloutPlan, policy: Policy, prompts: Sequence[Prompt], samples: Sequence[Sequence[Sample]]
) -> _LogProbPasses | None:
    """Begin to compute the log-probabilities that something reads: later steps, the reference's divergence, rewards."""
    needs_old = plan.objective.needs_old(plan.window) and plan.tile is None
    needs_reference = plan.objective.uses_reference
    if not (needs_old or needs_reference or plan.teachers is not None):
        return None
    groups = groups_of(plan.objective, prompts, samples, np.zeros((len(prompts), len(samples[0]))), rules=plan.rules)
    reference = None if plan.teachers is None else _begin_scores(plan.teachers, prompts, groups, plan.rules)
    if not (needs_old or needs_reference):
        return _LogProbPasses(None, reference)
    packed = plan.pack(groups)

    def begin(**options: bool) -> _RowValues:
        return partial(unpack, packed, [policy.log_probs(batch, **options) for batch, _ in packed])

    old = begin() if needs_old else None
    return _LogProbPasses(old, begin(reference=True) if needs_reference else reference)


def _begin_scores(
    teachers: ServedTeachers, prompts: Sequence[Prompt], groups: Sequence[Group], rules: ImageRules | None
) -> _RowValues:
    """Begin to ask teachers for the log-probabilities of answers, after their own prompts where they have some."""
    scores = []
    for prompt, group in zip(prompts, groups, strict=True):
        before = prompt.teacher or group.prompt
        images = [] if rules is None else images_before(before, group.images, rules)
        for answer in group.answers:
            own = [PlacedImage(len(before) + first, image) for first, image in answer.images]
            scores.append(teachers.begin(prompt, [*before, *answer.tokens.tolist()], [*images, *own]))
    lengths = [len(answer.tokens) for group in groups for answer in group.answers]
    return lambda: [score.result()[-length:] for score, length in zip(scores, lengths, strict=True)]


def _with_log_probs(generation: Generation, passes: _LogProbPasses | None, rules: ImageRules | None) -> Generation:
    """Return the generation with the log-probabilities of these passes."""
    if passes is None:
        return generation
    samples = generation.all_samples
    if passes.old is not None:
        values = of_samples(generation.prompts, generation.samples, passes.old(), rules)
        samples = [answer._replace(old=own) for answer, own in zip(samples, values, strict=True)]
    if passes.reference is not None:
        values = of_samples(generation.prompts, generation.samples, passes.reference(), rules)
        samples = [answer._replace(reference=own) for answer, own in zip(samples, values, strict=True)]
    answers = iter(samples)
    return replace(generation, samples=[[next(answers) for _ in group] for group in generation.samples])
