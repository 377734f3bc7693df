"""Simulated schedules: copies hide under kernels until the link is full."""

import pytest

from jaxglue.planner.step import Work, simulate

AHEAD = {"depth": 1, "run_ahead": 2}


def test_only_the_first_arrival_is_not_hidden():
    assert simulate([Work(2.0)] * 5, **AHEAD) == 10
    assert simulate([Work(2.0, leaving=1.5)] * 5, **AHEAD) == 10
    assert simulate([Work(2.0, arriving=1.5)] * 5, **AHEAD) == 11.5


@pytest.mark.parametrize("copies", [{"arriving": 3.0}, {"leaving": 3.0}])
def test_full_link_determines_the_time(copies):
    assert simulate([Work(2.0, **copies)] * 40, **AHEAD) == pytest.approx(120, rel=0.1)


def test_one_buffer_hides_no_copy():
    assert simulate([Work(2.0, arriving=1.0)] * 5, depth=0, run_ahead=2) == 15


def test_link_catches_up_under_spread_layers_without_copies():
    moving, still = Work(2.0, leaving=2.4), Work(2.0)
    together, spread = [moving] * 32 + [still] * 8, [*[moving] * 4, still] * 8
    assert simulate(spread, **AHEAD) == pytest.approx(80, rel=0.01)
    assert simulate(together, **AHEAD) > 1.08 * simulate(spread, **AHEAD)
