"""Packed batches of answers: a row holds a prompt once and its answers after it, and many such groups."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxglue.data.batch import Batch, Rollouts
from jaxglue.data.packing import plan_packing
from jaxglue.ops.segments import pack_forks, segment_bucket


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer as training reads it."""

    tokens: Int[np.ndarray, " L"]
    """With the token that ended it."""
    log_probs: Float[np.ndarray, " L"]
    """Of its tokens as sampling computed them; NaN where it did not."""
    counted: Bool[np.ndarray, " L"]
    """False for tokens that the model did not write, such as results of tools, and those left out of the loss."""
    advantage: float = 0.0


class Group(NamedTuple):
    """A prompt and answers to it."""

    prompt: Sequence[int]
    answers: Sequence[Answer]

    @property
    def length(self) -> int:
        """Return the tokens of a row: the prompt's last one begins every answer, whose own last predicts nothing."""
        return len(self.prompt) - 1 + sum(len(answer.tokens) for answer in self.answers)


def pack_groups(groups: Sequence[Group], *, seq_len: int, batch_size: int, slots: int) -> tuple[Batch, ...]:
    """Pack groups into micro-batches of one shape; a group longer than a row repeats its prompt in further ones.

    Args:
        groups: with at least one answer each.
        seq_len: T, tokens of a row.
        batch_size: B, rows of a micro-batch; empty rows complete the last.
        slots: the most answers of all groups; batches with equal slots share programs.

    Raises:
        ValueError: a prompt and one of its answers are longer than a row.
    """
    pieces = [piece for group in groups for piece in _pieces(group, seq_len)]
    plan = plan_packing(np.array([piece.length for piece in pieces], np.int64), seq_len=seq_len)
    rows = [[pieces[index] for index in plan.row(row)] for row in range(plan.rows)]
    rows += [[]] * (-len(rows) % batch_size)
    starts = range(0, len(rows), batch_size)
    return tuple(_batch(rows[start : start + batch_size], seq_len, segment_bucket(slots)) for start in starts)


def _pieces(group: Group, seq_len: int) -> Iterator[Group]:
    """Yield the group, or parts of it that fit a row."""
    taken: list[Answer] = []
    for answer in group.answers:
        if Group(group.prompt, [answer]).length > seq_len:
            raise ValueError(
                f"a prompt of {len(group.prompt):,} tokens and its answer of {len(answer.tokens):,} are longer than a "
                f"row of {seq_len:,}: raise --seq-len, or lower --max-completion-length"
            )
        if Group(group.prompt, [*taken, answer]).length > seq_len:
            yield Group(group.prompt, taken)
            taken = []
        taken.append(answer)
    yield Group(group.prompt, taken)


def _batch(rows: Sequence[Sequence[Group]], seq_len: int, slots: int) -> Batch:
    forks = [[(len(g.prompt) - 1, *(len(answer.tokens) for answer in g.answers)) for g in row] for row in rows]
    shape = len(rows), seq_len
    integers = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets")}
    counted, sampler = np.zeros(shape, np.float32), np.full(shape, np.nan, np.float32)
    owners, advantages = np.full(shape, slots, np.int32), np.zeros((len(rows), slots), np.float32)
    for b, row in enumerate(rows):
        begin = slot = 0
        for prompt, answers in row:
            shared = len(prompt) - 1
            integers["tokens"][b, begin : begin + shared] = prompt[:-1]
            begin += shared
            for answer in answers:
                own = slice(begin, begin + len(answer.tokens))
                integers["tokens"][b, own] = [prompt[-1], *answer.tokens[:-1]]
                integers["targets"][b, own] = answer.tokens
                counted[b, own], sampler[b, own] = answer.counted, answer.log_probs
                owners[b, own], advantages[b, slot] = slot, answer.advantage
                begin, slot = begin + len(answer.tokens), slot + 1
    rollouts: dict[str, Any] = {"owners": owners, "advantages": advantages, "sampler": sampler}
    fields: dict[str, Any] = {**integers, "loss_weights": counted, "rollouts": Rollouts(**rollouts)}
    return Batch(**fields, segments=pack_forks(forks, seq_len=seq_len, max_segments=slots))
