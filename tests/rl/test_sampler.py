"""Random numbers of answers depend on the prompt's place in the run, and the plan of memory on no step."""

from contextlib import contextmanager
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxglue.generation.config import SamplingConfig
from jaxglue.rl import sampler as module
from jaxglue.rl.sampler import Sampler


class Engine:
    """Records requests and answers them in reverse."""

    def __init__(self):
        self.requests, self.plans = [], []

    def plan(self, requests, *, limit, memory=None, begun=0):
        assert limit == "--max-completion-length"
        self.plans.append(requests)
        self.memory = memory
        return "plan"

    def generate(self, trainable, frozen, requests, stops, *, plan, whole):
        assert plan == "plan"
        self.requests.append(requests)
        for number, request in reversed(list(enumerate(requests))):
            for answer in reversed(range(request.n)):
                tokens = np.array([number, answer, request.index])
                finish = "stop" if answer else "length"
                yield SimpleNamespace(number=number, answer=answer, tokens=tokens, log_probs=tokens, finish=finish)


def test_answers_are_told_apart_by_prompt_and_place():
    engine = Engine()
    sampler = Sampler(engine, [0], SamplingConfig(max_tokens=9, seed=5), rounds=3, typical=[[1] * 7])
    found = [sampler({}, {}, [[1, 2], [3]], [None, None], indices, 2) for indices in ([0, 1], [2, 3])]
    for step, groups in enumerate(found):
        for number, group in enumerate(groups):
            assert [sample.tokens.tolist() for sample in group] == [[number, a, 2 * step + number] for a in range(2)]
            assert [sample.ended for sample in group] == [False, True]
    assert len(engine.plans) == 1  # or every step could compile again


def test_devices_with_the_same_weights_have_pages_for_the_fullest(monkeypatch):
    engine, free = Engine(), iter([5.0, 3.0])
    monkeypatch.setattr(module, "copies_of", lambda trees: [trees] * 2)
    monkeypatch.setattr(module, "free_bytes", lambda *, device: next(free))
    sampler = Sampler(engine, [0], SamplingConfig(max_tokens=9), rounds=3, typical=[[1], [2], [3]])
    assert [len(group) for group in sampler({}, {}, [[1], [2], [3]], [None] * 3, [0, 1, 2], 2)] == [2, 2, 2]
    assert engine.memory == 3.0 and [request.prompt for request in engine.plans[0]] == [[1], [3]]


def exhausted(engine, monkeypatch, times: int, message="RESOURCE_EXHAUSTED: Out of memory allocating 55.89GiB."):
    """Let the first answers of an engine fail so many times, after some that did not."""
    answer = engine.generate

    def generate(*arguments, **options):
        nonlocal times
        for index, done in enumerate(answer(*arguments, **options)):
            if index and times:
                times -= 1
                raise jax.errors.JaxRuntimeError(f"{message}\nmore")
            yield done

    monkeypatch.setattr(engine, "generate", generate)


def test_a_cache_beside_which_programs_have_too_little_is_planned_again(monkeypatch, caplog):
    engine = Engine()
    memory = iter([100.0])
    monkeypatch.setattr(module, "free_bytes", lambda *, device: next(memory))  # what failed is not measured again
    exhausted(engine, monkeypatch, 2)
    sampler = Sampler(engine, [0], SamplingConfig(max_tokens=9), rounds=3, typical=[[1] * 7])
    groups = sampler({}, {}, [[1, 2], [3]], [None, None], [0, 1], 2)
    assert [[sample.tokens.tolist() for sample in group] for group in groups] == [
        [[number, answer, number] for answer in range(2)] for number in range(2)
    ]
    assert len(engine.plans) == 3 and engine.memory == pytest.approx(49.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "planned again with 70% of it" in caplog.text and "55.89GiB" in caplog.text and "more" not in caplog.text
    exhausted(engine, monkeypatch, 1)
    with pytest.raises(jax.errors.JaxRuntimeError):  # the plan served before, so something else takes the memory
        sampler({}, {}, [[1]], [None], [2], 2)


@pytest.mark.parametrize("message", ["RESOURCE_EXHAUSTED: too much", "INTERNAL: another fault"])
def test_plans_end_where_they_are_small_or_the_error_is_another(message, monkeypatch):
    engine = Engine()
    exhausted(engine, monkeypatch, 99, message)
    sampler = Sampler(engine, [0], SamplingConfig(max_tokens=9), rounds=3, typical=[[1] * 7])
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        sampler({}, {}, [[1]], [None], [0], 2)
    assert len(engine.plans) == (4 if "EXHAUSTED" in message else 1)


class Idle:
    """Arrays of 40 bytes, which pay from so many further slots; notes when they leave and come back."""

    bytes = 40.0

    def __init__(self, least, notes):
        self.least, self.notes = least, notes

    def __str__(self):
        return "moments"

    def pays_moving(self, slots, more):
        return more - slots >= self.least

    @contextmanager
    def moved(self):
        self.notes.append("out")
        yield
        self.notes.append("back")


class RoomyEngine(Engine):
    """Holds as many answers at a time as ten bytes each allow."""

    def __init__(self, notes, most=99):
        super().__init__()
        self.notes, self.most = notes, most

    def plan(self, requests, *, limit, memory=None, begun=0):
        super().plan(requests, limit=limit, memory=memory)
        if memory < 10:
            raise ValueError("too little")
        return SimpleNamespace(slots=min(int(memory / 10), self.most))

    def generate(self, trainable, frozen, requests, stops, *, plan, whole):
        self.notes.append(plan.slots)
        yield from super().generate(trainable, frozen, requests, stops, plan="plan", whole=whole)


@pytest.mark.parametrize(
    ("free", "least", "most", "notes"),
    [
        (60.0, 4, 99, ["out", 10, "back"]),
        (60.0, 5, 99, [6]),  # which would take longer
        (60.0, 0, 6, [6]),  # nothing is gained
        (0.0, 9, 99, ["out", 4, "back"]),  # or not one fits
    ],
)
def test_idle_arrays_leave_the_device_where_answers_gain_by_it(monkeypatch, caplog, free, least, most, notes):
    found = []
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "free_bytes", lambda *, device: free)
    engine, idle = RoomyEngine(found, most), Idle(least, found)
    sampler = Sampler(engine, [0], SamplingConfig(max_tokens=9), rounds=3, typical=[[1] * 7], idle=idle)
    for step in range(2):
        sampler({}, {}, [[1]], [None], [step], 2)
    assert found == notes * 2
    assert len(caplog.records) == 1 and ("; moments on the host meanwhile" in caplog.text) == ("out" in notes)


def test_idle_arrays_come_back_before_another_plan_and_stay_away_after_an_error(monkeypatch):
    """Memory is full where programs failed: what they hold is let go before."""
    found = []
    monkeypatch.setattr(module, "free_bytes", lambda *, device: 60.0)
    engine, idle = RoomyEngine(found), Idle(1, found)
    exhausted(engine, monkeypatch, 1)
    sampler = Sampler(engine, [0], SamplingConfig(max_tokens=9), rounds=3, typical=[[1] * 7], idle=idle)
    sampler({}, {}, [[1]], [None], [0], 2)
    assert found == ["out", 10, "back", "out", 7, "back"]
    exhausted(engine, monkeypatch, 1)
    with pytest.raises(jax.errors.JaxRuntimeError):
        sampler({}, {}, [[1]], [None], [1], 2)
    assert found[6:] == ["out", 7]
