"""Inputs of programs that write prompts: few shapes, whatever is asked at once."""

import numpy as np
import pytest

from jaxglue.generation.inputs import PromptInputs
from jaxglue.generation.pages import CachePlan
from jaxglue.generation.scheduler import Prefill, SchedulerOutput

PLAN = CachePlan(slots=100, pages=1000, table=64, bytes=0)


def prompts(lengths):
    return [Prefill(np.ones(length, np.int32), slot, [1 + slot] * 64) for slot, length in enumerate(lengths)]


@pytest.mark.parametrize("tokens", [128, 512, 1024])
def test_rows_of_so_many_tokens_have_one_program_whatever_prompts_they_hold(tokens):
    """But for long ones, whose attention has another."""
    inputs, shapes = PromptInputs(PLAN, (None,), 0), set()
    for count in (1, 3, min(tokens // 8, 64)):
        row = prompts([tokens // count] * count)
        ids, segments, places, _ = inputs.row(row)
        assert int(segments.cu_seqlens[0].max()) == sum(len(prompt.tokens) for prompt in row)
        assert places.slots[:count].tolist() == list(range(count))
        shapes.add((ids.shape, segments.cu_seqlens.shape, places.slots.shape))
    assert len(shapes) == 1


def test_many_short_prompts_are_several_rows_with_room_for_each():
    rows = [*SchedulerOutput(prompts=prompts([2] * 100)).rows]
    assert [len(row) for row in rows] == [64, 36]
    assert [PromptInputs(PLAN, (None,), 0).row(row)[0].shape for row in rows] == [(1, 512)] * 2


def test_copies_of_few_and_of_many_pages_have_two_programs():
    inputs, shapes = PromptInputs(PLAN, (None,), 0), set()
    for count in (1, 5, 8, 9, 60):
        pairs = [(index, index + 1) for index in range(count)]
        for pages in ([], pairs):
            copies = inputs.copies(SchedulerOutput(page_copies=pages, slot_copies=pairs))
            assert [*zip(*(each[:count].tolist() for each in copies.slots), strict=True)] == pairs
            shapes.add((copies.sources[0].shape, copies.slots[0].shape))
    assert shapes == {((8,), (8,)), ((64,), (64,))}
