"""Turns of conversations, decoded together: as separate prompts, also from pages that were on the host meanwhile."""

from collections import deque

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import DecodeBatch, Engine
from jaxglue.generation.pages import plan_cache
from jaxglue.generation.scheduler import Request, Scheduler
from jaxglue.generation.turns import Turn, decode_turns
from jaxglue.models.parameters import split_model

TURNS, MOST = 3, 6


class Source:
    """Conversations whose next turn comes after that of others, with some further tokens."""

    def __init__(self, prompts, *, delay):
        self._ready = deque(Turn(prompt, i, 0, 5, MOST, holds=True) for i, prompt in enumerate(prompts))
        self._delay, self.late, self.left, self.texts = delay, deque(), len(prompts), {}
        self._over, self.waited = [], []

    def ready(self):
        turns = [*self._ready]
        self._ready.clear()
        return turns

    def released(self):
        turns, self._over = self._over, []
        return turns

    def take(self, turn, completion):
        text = [*turn.prompt, *completion.tokens.tolist()]
        self.texts.setdefault(turn.index, []).append((turn, completion))
        if len(self.texts[turn.index]) == TURNS:
            self.left -= 1
            self._over.append(turn)
            self.late.append(None)
        else:
            further = [(turn.index * 7 + i) % 90 for i in range(3 + turn.index)]
            holds = len(self.texts[turn.index]) + 1 < TURNS
            self.late.append(Turn(text + further, turn.index, 0, turn.seed + 1, MOST, after=turn, holds=holds))
        if len(self.late) > self._delay or self.left <= self._delay:
            self._next()

    def _next(self):
        turn = self.late.popleft() if self.late else None
        if turn is not None:
            self._ready.append(turn)

    def wait(self, seconds=60.0):
        self.waited.append(seconds)
        self._next()

    @property
    def is_over(self):
        return self.left == 0


@pytest.fixture(scope="module")
def engine(tiny_model):
    graphdefs, *trees = split_model(tiny_model("qwen3"), nnx.LoRAParam)
    model = tiny_model("qwen3")
    return Engine(graphdefs, model.config, dtype=jnp.float32), tuple(trees)


@pytest.mark.parametrize("begun", [5, 0])
def test_turns_are_as_answers_to_whole_prompts(engine, monkeypatch, begun):
    """Where pages are planned for those that decode at once alone, those of others move to the host."""
    engine, trees = engine
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 97, length).tolist() for length in (70, 90, 100, 64, 129)]
    seen = {"saved": 0, "loaded": 0, "computed": 0}
    dispatch = DecodeBatch._dispatch

    def noted(self, work):
        seen["saved"] += len(work.saves)
        seen["loaded"] += len(work.loads)
        seen["computed"] += sum(len(each.tokens) - each.begin for each in [*work.prompts, *work.suffixes])
        return dispatch(self, work)

    monkeypatch.setattr(DecodeBatch, "_dispatch", noted)
    source = Source(prompts, delay=4)
    sampling = SamplingConfig(max_tokens=MOST, temperature=1.0, top_p=1.0)
    ends = [len(prompt) + TURNS * MOST + (TURNS - 1) * (3 + index) for index, prompt in enumerate(prompts)]
    lengths = [*zip(map(len, prompts), ends, strict=True)]
    plan = plan_cache(lengths, engine.config, jnp.float32, batch_size=2, free=1e8, begun=begun)
    decode_turns(engine, trees, source, plan, sampling, (), whole=False)
    assert all(len(source.texts[index]) == TURNS for index in range(len(prompts)))
    assert bool(seen["saved"]) == bool(seen["loaded"]) == (not begun)
    # Nothing is computed twice: a prompt once, and then the last token of each turn with those that follow it.
    follow = sum((TURNS - 1) * (3 + index) for index in range(len(prompts)))
    assert seen["computed"] == sum(len(prompt) - 1 for prompt in prompts) + follow
    monkeypatch.undo()
    for turns in source.texts.values():
        for turn, completion in turns:
            own = SamplingConfig(max_tokens=MOST, temperature=1.0, top_p=1.0, seed=turn.seed)
            (alone,) = engine.generate(*trees, [Request(turn.prompt, own, turn.index)])
            assert completion.tokens.tolist() == alone.tokens.tolist()
            np.testing.assert_allclose(completion.log_probs, alone.log_probs, atol=2e-5)


def test_turns_that_become_ready_during_a_window_are_waited_for(engine, monkeypatch):
    engine, trees = engine
    source = Source([[1, 2, 3], [4, 5], [6]], delay=2)
    windows, next_window = [], Scheduler.next

    def noted(self, *resting):
        if work := next_window(self, *resting):
            windows.append(len(work.answers))
        return work

    monkeypatch.setattr(Scheduler, "next", noted)
    monkeypatch.setattr(DecodeBatch, "spare", lambda batch: 7.0 if batch._under_way and any(source.late) else 0.0)
    plan = plan_cache([(3, 60)] * 3, engine.config, jnp.float32, batch_size=3, free=1e8)
    decode_turns(engine, trees, source, plan, SamplingConfig(max_tokens=MOST), (), whole=False)
    assert source.left == 0 and 7.0 in source.waited
    assert windows[:3] == [3, 1, 2], windows
