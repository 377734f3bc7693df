"""The schedule that plans go by: copies hide under kernels until the link is full."""

import pytest

from jaxglue.planner.schedule import Work, simulate

AHEAD = {"depth": 1, "run_ahead": 2}


def test_hidden_copies_cost_nothing_but_the_first_to_arrive():
    assert simulate([Work(2.0)] * 5, **AHEAD) == 10
    assert simulate([Work(2.0, leaving=1.5)] * 5, **AHEAD) == 10
    assert simulate([Work(2.0, arriving=1.5)] * 5, **AHEAD) == 11.5


@pytest.mark.parametrize("copies", [{"arriving": 3.0}, {"leaving": 3.0}])
def test_a_full_link_decides(copies):
    assert simulate([Work(2.0, **copies)] * 40, **AHEAD) == pytest.approx(120, rel=0.1)


def test_without_a_second_buffer_every_copy_is_waited_for():
    assert simulate([Work(2.0, arriving=1.0)] * 5, depth=0, run_ahead=2) == 15


def test_the_link_catches_up_under_layers_that_move_nothing_where_they_are_spread():
    moving, still = Work(2.0, leaving=2.4), Work(2.0)
    together, spread = [moving] * 32 + [still] * 8, [*[moving] * 4, still] * 8
    assert simulate(spread, **AHEAD) == pytest.approx(80, rel=0.01)
    assert simulate(together, **AHEAD) > 1.08 * simulate(spread, **AHEAD)
