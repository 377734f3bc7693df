"""Simulation of the executor's order of dispatch: kernels on the GPU, copies on the link."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxglue.engine.transfer import requested_ahead


class Work(NamedTuple):
    """Kernels and copies of one layer's forward or backward pass, seconds."""

    kernels: float
    arriving: float = 0.0
    """Copy from the host that must end before the kernels start."""
    leaving: float = 0.0
    """Copy to the host that starts when the kernels end."""
    weights: float = 0.0
    """Copy of streamed weights that must end before the kernels start."""

    def and_before(self, work: "Work") -> "Work":
        """Return this work with other kernels and copies before it."""
        return self._replace(kernels=self.kernels + work.kernels, arriving=self.arriving + work.arriving)


def simulate(layers: Sequence[Work], *, depth: int, run_ahead: int, weights_depth: int = 0) -> float:
    """Return the seconds from the first layer's start to the last one's end; copies of one direction are serial.

    Args:
        layers: in the order in which they run.
        depth: a layer's copy from the host is requested when the layer `depth` earlier starts.
        run_ahead: a layer is dispatched when the layer `run_ahead` + 1 earlier has been copied to the host.
        weights_depth: as `depth`, of streamed weights: counts only layers that have some.
    """
    now = left = arrived = 0.0
    arrivals: tuple[list[float], list[float]] = ([], [])
    departures: list[float] = []
    ahead = (
        requested_ahead([layer.weights > 0 for layer in layers], weights_depth),
        requested_ahead([True] * len(layers), depth),
    )
    for index, layer in enumerate(layers):
        asked = now if index else 0.0
        for kind, done in enumerate(arrivals):
            for following in layers[len(done) : ahead[kind][index]]:
                copy = following.arriving if kind else following.weights
                arrived = max(arrived, asked) + copy if copy else arrived
                done.append(arrived if copy else 0.0)
        held_back = departures[index - run_ahead - 1] if index > run_ahead else 0.0
        start = max(now, arrivals[0][index], arrivals[1][index], held_back)
        now = start + layer.kernels
        left = max(left, now) + layer.leaving
        departures.append(left)
    return now
