"""When a window is dispatched: shortly before the one under way ends, so that answers which come by then are in it."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxglue.generation import engine as engine_module
from jaxglue.generation.config import GREEDY
from jaxglue.generation.engine import Engine
from jaxglue.generation.inputs import ProgramKind
from jaxglue.generation.scheduler import Request
from jaxglue.models.parameters import split_model

SECONDS, HOST, PROMPTS = 1.0, 0.1, 5.0
"""Seconds that the device takes for a window, the host to dispatch it, and prompts in front of it."""


class Clock:
    """Time that passes by what a test says, and whether the window under way has ended."""

    def __init__(self):
        self.now, self.ended, self.host = 100.0, False, HOST

    def waited(self, batch):
        """Wait as long as a batch says; return the seconds."""
        begun = self.now
        while seconds := batch.spare():
            self.now += max(seconds, 1e-9)  # a sum may be rounded to less
        return self.now - begun


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    def passing(array):
        clock.now += PROMPTS
        return clock.now

    monkeypatch.setattr(engine_module, "monotonic", lambda: clock.now)
    monkeypatch.setattr(engine_module, "_is_there", lambda window: clock.ended)
    monkeypatch.setattr(engine_module, "_passing", passing)
    return clock


@pytest.fixture
def batch(tiny_model, clock):
    """A batch on a device of that clock, in which an answer decodes."""
    model = tiny_model("qwen3")
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    engine = Engine(graphdefs, model.config, dtype=jnp.float32)
    request = Request([1, 2, 3], replace(GREEDY, max_tokens=200))
    batch = engine.open(*trees, engine.plan([request, request], slots=2), ProgramKind.of([request], ()), whole=False)
    dispatch, receive = batch._dispatch, batch._receive

    def dispatched(work):
        clock.now += clock.host
        return dispatch(work)

    def received(window):
        # It began when the one before was received, or its prompts had passed.
        clock.now = max(clock.now, (batch._received or 0) + SECONDS)
        return receive(window)

    batch._dispatch, batch._receive = dispatched, received
    batch.begin = lambda: batch.add(engine.answers(request, 0), ())
    return batch


def test_a_window_is_dispatched_shortly_before_the_one_under_way_ends(batch, clock):
    assert batch.spare() == 0, "nothing is under way"
    batch.begin()
    for _ in range(3):
        assert clock.waited(batch) in (0, PROMPTS), "its time is not known"
        list(batch.advance())
    for _ in range(3):
        assert clock.waited(batch) == pytest.approx(0.9 * SECONDS - HOST)
        list(batch.advance())
    clock.host = 30.0
    clock.waited(batch)
    list(batch.advance())  # compiles
    clock.host = HOST
    assert clock.waited(batch) == pytest.approx(0.9 * SECONDS - HOST), "one that took longer does not count"
    list(batch.advance())
    clock.ended = True
    assert batch.spare() == 0, "it took less time than those before"


def test_prompts_in_front_of_a_window_pass_before_its_time_begins(batch, clock):
    batch.begin()
    for _ in range(6):
        clock.waited(batch)
        list(batch.advance())
    batch.begin()
    clock.waited(batch)
    list(batch.advance())
    assert clock.waited(batch) == pytest.approx(PROMPTS + 0.9 * SECONDS - HOST)
    (window,) = batch._under_way
    times = window.sizes.times.own(window.sizes, window.size)
    list(batch.advance())
    assert times == window.sizes.times.own(window.sizes, window.size) == pytest.approx(SECONDS)
