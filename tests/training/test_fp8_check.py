"""Layers that FP8 does not suit."""

import pytest
from selection import repeats_parts_of

from jaxglue.engine.executor import Executor
from jaxglue.engine.fp8_errors import FP8Errors
from jaxglue.training import step
from jaxglue.training.config import ModelConfig
from jaxglue.training.step import choose_fp8
from jaxglue.training.train import train


def test_only_inaccurate_layers_leave_fp8():
    choice = choose_fp8(FP8Errors([0.05, 0.3, float("nan"), 0.1], 0.04), 0.2)
    assert choice[:2] == ([True, False, False, True], True)
    assert "of the head's gradient 4.0%; layers above 20% multiply in the activations' dtype: 1, 2" in choice.note


def test_an_inaccurate_head_leaves_fp8():
    choice = choose_fp8(FP8Errors([0.05], 0.3), 0.2)
    assert choice[:2] == ([True], False) and choice.note.endswith("dtype: head")


def test_nothing_changes_below_the_threshold():
    choice = choose_fp8(FP8Errors([0.05, 0.07], None), 0.2)
    assert choice == ([True, True], False, "fp8: largest relative error of a layer 7.0%, in layer 1")


@repeats_parts_of("test_layers_that_fp8_does_not_suit_leave_it")
def test_a_resumed_run_keeps_the_choice_unless_the_limit_changed(make_config, monkeypatch, xla_cache):
    options = {"matmul": "fp8", "compilation_cache": xla_cache}
    errors, chosen = [FP8Errors([0.1, 0.3], None), FP8Errors([0.3, 0.1], None)], []
    monkeypatch.setattr(step, "fp8_errors", lambda *_: errors.pop(0))
    monkeypatch.setattr(Executor, "multiply_in_fp8", lambda _, layers, head: chosen.append(layers))
    train(make_config(**options, steps=2))

    def stop(_, layers, head):
        chosen.append(layers)
        raise KeyError("chosen")

    monkeypatch.setattr(Executor, "multiply_in_fp8", stop)
    for changes in ({"steps": 3}, {"steps": 4, "fp8_max_error": 0.25}):
        with pytest.raises(KeyError, match="chosen"):
            train(make_config(**options, **changes, resume=True))
    assert chosen == [[True, False], [True, False], [False, True]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "nf4"}, "--matmul fp8 stores weights in FP8, not nf4: leave out --quantize"),
        ({"method": "full", "fp8_head": True}, "--fp8-head is not for --method full"),
        (
            {"matmul": "bf16", "fp8_experts": True},
            "--matmul bf16 is not for --fp8-experts: it is a part of --matmul fp8",
        ),
    ],
)
def test_flags_that_contradict_fp8_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"model": "model", "matmul": "fp8"} | options)
