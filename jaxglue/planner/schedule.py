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
    departures: list[float] = []
    weights, values = [layer.weights for layer in layers], [layer.arriving for layer in layers]
    ahead = requested_ahead(tuple(copy > 0 for copy in weights), weights_depth)
    queues = [(weights, ahead), (values, requested_ahead((True,) * len(layers), depth))]
    arriving = [(copies, ends, list[float]()) for copies, ends in queues if any(copies)]
    for index, layer in enumerate(layers):
        asked = start = now
        for copies, ends, done in arriving:
            for copy in copies[len(done) : ends[index]]:
                arrived = max(arrived, asked) + copy if copy else arrived
                done.append(arrived if copy else 0.0)
            start = max(start, done[index])
        if index > run_ahead:
            start = max(start, departures[index - run_ahead - 1])
        now = start + layer.kernels
        left = max(left, now) + layer.leaving
        departures.append(left)
    return now
