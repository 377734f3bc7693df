"""The planner's grid: settings that run side by side, and the error's distribution."""

from types import SimpleNamespace

import pytest

LARGE, SMALL = ({"predicted_gib": gib - 1, "gib": gib} for gib in (30, 4))


@pytest.mark.parametrize(
    ("held", "expected"), [([], LARGE), ([40], LARGE), ([40, 20], SMALL), ([40, 34], None), ([1] * 9, None)]
)
def test_first_setting_that_fits_beside_others_starts(held, expected):
    import grid_runs

    running = [SimpleNamespace(gib=gib) for gib in held]
    assert grid_runs._next([LARGE, SMALL], running, total=80) is expected


def test_draws_are_repeatable_and_cover_every_shape():
    import planner_grid

    drawn = planner_grid.settings(planner_grid.HELD_OUT)
    assert drawn == planner_grid.settings(planner_grid.HELD_OUT) != planner_grid.settings(planner_grid.FITTED)
    assert {row["shape"] for row in drawn[: planner_grid.COUNT]} == set(planner_grid.LAYERS)
    assert drawn[planner_grid.COUNT :] == planner_grid.STREAMED == planner_grid.settings(None)


def test_further_types_are_drawn_twice_each():
    import planner_grid

    drawn = planner_grid.settings(planner_grid.HELD_OUT, families=True)
    assert [row["shape"] for row in drawn] == 2 * list(planner_grid.FAMILIES)
    assert not planner_grid.FAMILIES.keys() & planner_grid.LAYERS.keys()


def test_summary_counts_failures_and_errors():
    import planner_grid

    measured = [
        {"predicted_ms": 100 + off, "ms": 100.0, "predicted_gib": 10.0, "peak_gib": 10.0 + off / 10} for off in (-2, 3)
    ]
    failed = [{"refused": "no plan"}, {"error": "RESOURCE_EXHAUSTED: out"}, {"error": "ValueError: x"}]
    found = planner_grid.summary([*measured, *failed])
    assert (found["settings"], found["measured"], found["refused"]) == (5, 2, 1)
    assert (found["out of memory"], found["other errors"]) == (1, 1)
    assert (found["time off, median"], found["memory too low, most"]) == ("2.5%", "2.9%")
