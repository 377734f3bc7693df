"""Embeddings go to host memory where that is faster."""

from types import SimpleNamespace

import pytest

from jaxglue.planner.plan import DoesNotFit
from jaxglue.planner.planner import fastest_place


def plan(seconds, *weights):
    return SimpleNamespace(seconds=seconds, device_bytes=0, weights=weights)


@pytest.mark.parametrize(
    ("here", "there", "chosen"),
    [
        (plan(2, "device"), plan(1, "device"), "here"),
        (plan(2, "host"), plan(1, "device"), "there"),
        (plan(1, "host"), plan(2, "host"), "here"),
        (None, plan(2, "host"), "there"),
    ],
)
def test_embeddings_leave_the_gpu_only_for_a_faster_plan(here, there, chosen):
    plans = {"here": here, "there": there}

    def resolve(place):
        if plans[place] is None:
            raise DoesNotFit(place)
        return place, plans[place]

    assert fastest_place(list(plans), resolve)[0] == chosen


def test_first_place_is_named_where_nothing_fits():
    def resolve(place):
        raise DoesNotFit(place)

    with pytest.raises(DoesNotFit, match="here"):
        fastest_place(["here", "there"], resolve)
