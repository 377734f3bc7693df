"""Packed batches of answers: a row holds a prompt once and its answers after it, and many such groups."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxglue.data.batch import Batch, Rollouts
from jaxglue.data.images import DocumentPart, ImageReader, ImageRules
from jaxglue.objectives.advantages import Values
from jaxglue.objectives.rollouts import RolloutObjective
from jaxglue.ops.segments import BatchKind, aligned, copy_beginnings, pack_forks, pack_segments, segment_bucket
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.sampler import Row, Sample
from jaxglue.vision.rows import Image, PlacedImage, feature_keys

_OPTIONAL = ("old", "reference", "credits", "teacher")
"""Values of answers' tokens, of all answers or none."""


@dataclass(frozen=True, kw_only=True)
class TrainedAnswer:
    """An answer as training reads it."""

    tokens: Int[np.ndarray, " L"]
    """Tokens, with the one that ended it."""
    log_probs: Float[np.ndarray, " L"]
    """Log-probabilities of its tokens as sampling computed them; NaN where it did not."""
    counted: Bool[np.ndarray, " L"]
    """False for tokens that the model did not write, such as results of tools, and those left out of the loss."""
    advantage: float = 0.0
    credits: Float[np.ndarray, " L"] | None = None
    """Advantages of its tokens, where they have some of their own; of all answers or none."""
    old: Float[np.ndarray, " L"] | None = None
    """Log-probabilities under the weights that wrote it, where these are not the present ones; of all answers or
    none."""
    reference: Float[np.ndarray, " L"] | None = None
    """Log-probabilities under the reference, where an objective has one; of all answers or none."""
    teacher: Float[np.ndarray, "L E"] | None = None
    """A teacher's hidden states that predict its tokens; of all answers or none."""
    images: Sequence[PlacedImage] = ()
    """Those among its tokens."""


class Packed(NamedTuple):
    """A micro-batch, and where its answers come from."""

    batch: Batch
    numbers: list[list[int]]
    """Numbers of each row's answers, in the order of their slots, among all answers of the groups in their order."""


class Group(NamedTuple):
    """A prompt and answers to it."""

    prompt: Sequence[int]
    answers: Sequence[TrainedAnswer]
    images: Sequence[Image] = ()
    """Those of the prompt, in order."""

    @property
    def length(self) -> int:
        """Return the tokens of a row: the prompt's last one begins every answer, whose own last predicts nothing."""
        return len(self.prompt) - 1 + sum(len(answer.tokens) for answer in self.answers)


def groups_of(
    objective: RolloutObjective,
    prompts: Sequence[Prompt],
    samples: Sequence[Sequence[Sample]],
    advantages: Values,
    credits: Sequence[Sequence[Float[np.ndarray, " L"]]] | None = None,
    rules: ImageRules | None = None,
) -> list[Group]:
    """Return answers as the objective trains on them, after their prompts.

    Episodes of a prompt may have longer ones of their own, and rows for each turn: a group's prompt is what all of its
    rows begin with, and the rest of a row's prompt precedes its tokens, without a loss.

    Args:
        objective: of the run.
        prompts: of the rows.
        samples: answers to each.
        advantages: of the answers.
        credits: advantages of their tokens, where these have some of their own.
        rules: for images; None where there are none.
    """
    groups = []
    for index, (prompt, group) in enumerate(zip(prompts, samples, strict=True)):
        shared, contexts = rows_after(prompt, group, rules)
        rows, images = iter(contexts), [Image.of(record) for record in prompt.records]
        answers = list[TrainedAnswer]()
        for number, sample in enumerate(group):
            of_tokens = None if credits is None else credits[index][number]
            shown = () if sample.episode is None else sample.episode.images
            for row in sample.rows(prompt.tokens):
                answer = _trained(objective, sample, row, next(rows), float(advantages[index][number]), of_tokens)
                pairs = zip(row.firsts, shown, strict=False)
                placed = [PlacedImage(first - len(shared), image) for first, image in pairs]
                answers.append(replace(answer, images=[each for each in placed if each.first >= 0]))
                if not answers[1:]:
                    images += [image for first, image in placed if first < 0]
        groups.append(Group(shared, answers, images))
    return groups


def rows_after(
    prompt: Prompt, samples: Sequence[Sample], rules: ImageRules | None = None
) -> tuple[Sequence[int], list[Sequence[int]]]:
    """Return the tokens that all rows of a prompt's answers begin with, and those after them up to each row's own."""
    rows = [row for sample in samples for row in sample.rows(prompt.tokens)]
    first = rows[0].prompt
    if all(row.prompt is first for row in rows):
        return first, [()] * len(rows)
    prompts = list[list[int]]()
    for sample in samples:
        shown = () if sample.episode is None else sample.episode.images
        prompts += [_keyed(row, shown, rules) for row in sample.rows(prompt.tokens)]
    least, most = min(prompts), max(prompts)
    # What the first and last in order have in common, all have.
    common = next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), len(least))
    return first[:common], [row.prompt[common:] for row in rows]


def _keyed(row: Row, shown: Sequence[Image], rules: ImageRules | None) -> list[int]:
    """Return the tokens before a row's own, of which those of images that its environment showed tell these apart."""
    tokens = np.array(row.prompt)
    for first, image in zip(row.firsts, shown, strict=False):
        if first < len(tokens):
            assert rules is not None
            keys = feature_keys([image], rules.processor)
            tokens[rules.places(tokens, first, len(keys))] = keys
    return tokens.tolist()


def _trained(
    objective: RolloutObjective,
    sample: Sample,
    row: Row,
    context: Sequence[int],
    advantage: float,
    credits: Float[np.ndarray, " L"] | None,
) -> TrainedAnswer:
    """Return a row of an answer as training reads it, behind tokens that have no loss."""
    before, span = len(context), slice(row.start, row.end)
    trained = np.full(row.end - row.start, sample.ended or not objective.masks_truncated)
    if sample.counted is not None:
        trained &= sample.counted[span]

    def behind(values: np.ndarray | None, nothing: float = 0.0) -> np.ndarray | None:
        if values is None or not before:
            return None if values is None else values[span]
        return np.concatenate([np.full(before, nothing, values.dtype), values[span]])

    return TrainedAnswer(
        tokens=np.concatenate([np.array(context, np.int32), sample.tokens[span]]) if before else sample.tokens[span],
        log_probs=behind(sample.log_probs, np.nan),  # type: ignore[arg-type]
        counted=np.concatenate([np.zeros(before, bool), trained]) if before else trained,
        advantage=advantage,
        credits=behind(credits),
        old=behind(sample.old),
        reference=behind(sample.reference),
    )


def of_samples(
    prompts: Sequence[Prompt],
    samples: Sequence[Sequence[Sample]],
    values: Sequence[Float[np.ndarray, "L *E"]],
    rules: ImageRules | None = None,
) -> list[Float[np.ndarray, "L *E"]]:
    """Return the values of each answer's own tokens from those of its rows, in the order of `groups_of`."""
    rows, joined = iter(values), []
    for prompt, group in zip(prompts, samples, strict=True):
        contexts = iter(rows_after(prompt, group, rules)[1])
        for sample in group:
            parts = [next(rows)[len(next(contexts)) :] for _ in sample.rows(prompt.tokens)]
            joined.append(np.concatenate(parts) if len(parts) > 1 else parts[0])
    return joined


def pack_groups(
    groups: Sequence[Group],
    *,
    seq_len: int,
    batch_size: int,
    slots: int,
    shared: bool = True,
    copies: bool = False,
    reader: ImageReader | None = None,
    tile: int = 1,
) -> list[Packed]:
    """Pack groups into micro-batches of one shape; a group longer than a row repeats its prompt in further ones.

    Args:
        groups: with at least one answer each.
        seq_len: T, tokens of a row.
        batch_size: B, rows of a micro-batch; empty rows complete the last.
        slots: the most answers of all groups; batches with equal slots share programs.
        shared: a row holds a prompt once; else each answer has a copy.
        copies: rows with shared prompts say where operations that follow one continuation find copies.
        reader: of images; None where there are none.
        tile: tokens at whose multiples shared prompts and answers begin.

    Raises:
        ValueError: a prompt and one of its answers are longer than a row.
    """
    rows = _rows(groups, seq_len, shared, tile)
    rows += [[] for _ in range(-len(rows) % batch_size)]
    packed = [_pack(part, seq_len, segment_bucket(slots), shared, reader, tile) for part in batched(rows, batch_size)]
    if not copies:
        return packed
    return [Packed(replace(b, segments=copy_beginnings(b.segments)), numbers) for b, numbers in packed]


def with_mean_weight(batch: Batch, weight: float) -> Batch:
    """Return a micro-batch whose tokens have this weight in a mean over those of the step."""
    assert batch.rollouts is not None
    weights: Any = np.full((len(batch.tokens), 1), weight, np.float32)
    return replace(batch, rollouts=replace(batch.rollouts, mean_weight=weights))


def with_teacher_matrix(batch: Batch, matrix: Float[Array, "V E"]) -> Batch:
    """Return a micro-batch with a teacher's output projection."""
    assert batch.rollouts is not None
    return replace(batch, rollouts=replace(batch.rollouts, teacher_matrix=matrix))


def unpack(packed: Sequence[Packed], values: Sequence[Float[Any, "B T *E"]]) -> list[Float[np.ndarray, "L *E"]]:
    """Return the values of each answer's tokens from those of the micro-batches, in the order of the answers."""
    by_number: dict[int, np.ndarray] = {}
    for (batch, numbers), rows in zip(packed, values, strict=True):
        assert batch.rollouts is not None
        for owners, row, answers in zip(np.asarray(batch.rollouts.owners), np.asarray(rows), numbers, strict=True):
            by_number |= {number: row[owners == slot] for slot, number in enumerate(answers)}
    return [by_number[number] for number in range(len(by_number))]


def _rows(groups: Sequence[Group], seq_len: int, shared: bool, tile: int) -> list[list[tuple[Group, range]]]:
    """Return rows of groups, or parts of them, with the numbers of their answers.

    A group goes to the fullest row with room for it. Where there is none, as many of its answers as fit complete the
    emptiest row, unless they are shorter than the copy of the prompt that they need there.
    """
    rows: list[list[tuple[Group, range]]] = []
    rooms: list[int] = []
    number = 0
    for group in groups:
        prompt, answers = group.prompt, group.answers
        end = number + len(answers)
        while number < end:
            waiting = answers[len(answers) - (end - number) :]
            lengths = np.cumsum([aligned(len(answer.tokens), tile) for answer in waiting])
            sizes = (lengths + aligned(len(prompt) - 1, tile))[: None if shared else 1]
            if sizes[0] > seq_len:
                raise ValueError(
                    f"a prompt of {len(prompt):,} tokens and its answer of {len(waiting[0].tokens):,}{_rounded(tile)} "
                    f"are longer than a row of {seq_len:,}: raise --seq-len, or lower --max-completion-length"
                )
            row = min((row for row, room in enumerate(rooms) if room >= sizes[-1]), key=rooms.__getitem__, default=None)
            if row is None and rooms:
                emptiest = max(range(len(rooms)), key=rooms.__getitem__)
                count = int(np.searchsorted(sizes, rooms[emptiest], side="right"))
                row = emptiest if count and lengths[count - 1] >= len(prompt) else None
            if row is None:
                row = len(rows)
                rows.append([])
                rooms.append(seq_len)
            count = int(np.searchsorted(sizes, rooms[row], side="right"))
            rows[row].append((group._replace(answers=waiting[:count]), range(number, number + count)))
            rooms[row] -= int(sizes[count - 1])
            number += count
    return rows


def _rounded(tile: int) -> str:
    return "" if tile == 1 else f", each rounded up to a multiple of {tile} for --exact-sampling,"


def _pack(
    rows: Sequence[Sequence[tuple[Group, range]]],
    seq_len: int,
    slots: int,
    shared: bool,
    reader: ImageReader | None,
    tile: int,
) -> Packed:
    forks = [[(len(g.prompt) - 1, *(len(answer.tokens) for answer in g.answers)) for g, _ in row] for row in rows]
    examples = {
        name: value
        for name in _OPTIONAL
        for value in [getattr(a, name) for row in rows for g, _ in row for a in g.answers][:1]
        if value is not None
    }
    shape = len(rows), seq_len
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    counted, sampler = np.zeros(shape, np.float32), np.full(shape, np.nan, np.float32)
    others = {name: np.zeros((*shape, *value.shape[1:]), value.dtype) for name, value in examples.items()}
    owners, advantages = np.full(shape, slots, np.int32), np.zeros((len(rows), slots), np.float32)
    for b, row in enumerate(rows):
        begin = slot = 0
        for group, _ in row:
            prompt, answers = group.prompt, group.answers
            before = len(prompt) - 1
            tokens[b, begin : begin + before] = prompt[:-1]
            begin += aligned(before, tile)
            for answer in answers:
                span = slice(begin, begin + len(answer.tokens))
                tokens[b, span] = [prompt[-1], *answer.tokens[:-1]]
                targets[b, span] = answer.tokens
                counted[b, span], sampler[b, span] = answer.counted, answer.log_probs
                for name, values in others.items():
                    values[b, span] = getattr(answer, name)
                owners[b, span], advantages[b, slot] = slot, answer.advantage
                begin, slot = begin + aligned(len(answer.tokens), tile), slot + 1
    rollouts = Rollouts(owners=owners, advantages=advantages, sampler=sampler, **others)  # type: ignore[arg-type]
    if shared:
        segments = pack_forks(forks, seq_len=seq_len, max_segments=slots, tile=tile)
    else:
        kind = BatchKind(long=False, slots=slots)
        segments = pack_segments([list(map(sum, row)) for row in forks], seq_len=seq_len, kind=kind)
    images = None
    if reader is not None:
        parts = [[part for group, _ in row for part in _parts(group, shared, reader.rules)] for row in rows]
        images = reader.rows(tokens, parts)
    batch = Batch(
        tokens=tokens,  # type: ignore[arg-type]
        targets=targets,  # type: ignore[arg-type]
        loss_weights=counted,  # type: ignore[arg-type]
        rollouts=rollouts,
        segments=segments,
        images=images,
    )
    return Packed(batch, [[number for _, numbers in row for number in numbers] for row in rows])


def images_before(prompt: Sequence[int], images: Sequence[Image], rules: ImageRules) -> list[PlacedImage]:
    """Return the images of a prompt in their places."""
    firsts = rules.firsts(np.array(prompt), [image.grid for image in images])
    return [PlacedImage(*pair) for pair in zip(firsts, images, strict=False)]


def _parts(group: Group, shared: bool, rules: ImageRules) -> Iterator[DocumentPart]:
    """Yield the parts of a group in a row, with the images of each whole."""
    prompt, images = len(group.prompt), images_before(group.prompt, group.images, rules)
    if shared:
        yield DocumentPart(0, prompt - 1, images)
    for answer in group.answers:
        own = [PlacedImage(prompt + first, image) for first, image in answer.images]
        yield DocumentPart(prompt - 1 if shared else 0, prompt - 1 + len(answer.tokens), [*images, *own])
