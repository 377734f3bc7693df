"""Choice of the embeddings' place: on the GPU or in host memory."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxglue.engine.policy import AUTO
from jaxglue.engine.residency import is_streamed
from jaxglue.planner.planner import Planner
from jaxglue.planner.plans import DoesNotFit, Plan, by_time
from jaxglue.planner.workload import Workload


def embedding_places(workload: Workload, embeddings: str) -> list[Workload]:
    """Return the workload, and for `auto` also that with the embeddings in host memory where they can be there."""
    places = [workload]
    if embeddings == AUTO and workload.mesh.devices == 1:
        with contextlib.suppress(ValueError):  # a tied or trained table stays on the GPU
            places.append(replace(workload, host_embeddings=True))
    return places


def fastest_place[Place](
    places: Sequence[Place], resolve: Callable[[Place], tuple[Planner, Plan]]
) -> tuple[Planner, Plan]:
    """Return the fastest of the places' plans; the first place's where it streams no layer's weights.

    Raises:
        DoesNotFit: no plan fits; names the first place's remedy.
    """
    found, refused = [], []
    for placed in places:
        try:
            found.append(resolve(placed))
        except DoesNotFit as error:
            refused.append(error)
        if found and not is_streamed(found[0][1].weights):
            break
    if not found:
        raise refused[0]
    return min(found, key=lambda planned: by_time(planned[1]))
