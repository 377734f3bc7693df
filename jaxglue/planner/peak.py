"""Peak device memory of a training step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxglue.engine.layer_groups import SMALL_ARRAYS
from jaxglue.engine.transfer import HEAD_AHEAD, requested_ahead, weights_prefetch_depth
from jaxglue.planner.gpus import GIB
from jaxglue.planner.resident import ResidentBytes
from jaxglue.planner.traced import LayerCost, TracedModel
from jaxglue.planner.workload import Workload

_TEMPORARIES = 1.03
"""XLA's temporary memory of a layer's backward pass by that of `peak_bytes`; a twentieth of layers take more."""
_SCATTERED, _MOST_SCATTERED, _SPARE = 0.35, 3 * GIB // 2, 0.05
"""Share of the largest temporary memory, one block, that a pool loses between other values, the most bytes of that, and
the share of the whole peak that plans leave free anyway."""
_LARGER = 0.1
"""Share by which a layer's temporary memory may exceed the prediction, counted where gaps take the spare."""
_WORKSPACE = int(0.3 * GIB)
"""Bytes of loaded programs and matmul workspaces, for any model."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Predicts the most bytes that a step has in use on one GPU."""

    workload: Workload
    model: TracedModel
    resident: ResidentBytes
    costs: Sequence[LayerCost]
    """Cost of each layer under its policy."""
    streamed: Sequence[int]
    """Bytes of each layer's frozen weights in host memory."""
    depth: int
    """Layers by which copies from the host are ahead."""
    run_ahead: int
    """Dispatched layers that the host does not wait for."""
    restored: Sequence[int]
    """Bytes of dropped inputs and values on the device in each layer's backward pass."""
    whole: bool
    """A micro-batch is one program."""
    scattered: bool
    """A micro-batch is one program that recomputes layers' values, and these do not fill the gap of the head's."""

    def total(self) -> int:
        """Return the peak with everything resident, bytes."""
        resident, streamed = self.resident, sum(self.streamed)
        always = resident.moments + resident.trainable + resident.frozen() - streamed
        always += self.model.gathered + max(self.streamed)  # a streamed layer's buffer is freed late
        always += SMALL_ARRAYS if self.whole else 0
        peak = _WORKSPACE + always + max(self._forward(), self._backward())
        peak += self.model.head.temporary if self.scattered else 0
        largest = max(max(cost.forward.temporary, cost.backward.temporary) for cost in self.costs)
        peak += max(min(_SCATTERED * largest, _MOST_SCATTERED) - _SPARE * peak, 0)
        return int(max(peak, (1 - _SPARE) * (_WORKSPACE + always + self._with_gaps())))

    @property
    def _accumulates(self) -> bool:
        return self.workload.gradient_accumulation_steps > 1

    @property
    def _tied(self) -> bool:
        """Return whether embedding and head train one table."""
        return self.workload.config.tie_word_embeddings

    @cached_property
    def _stored(self) -> np.ndarray:
        """Return for each layer the bytes saved by it and those before."""
        return np.cumsum([cost.saved for cost in self.costs])

    @cached_property
    def _offloaded(self) -> np.ndarray:
        return np.array([cost.offloaded for cost in self.costs])

    def _forward(self) -> float:
        """Return the peak of the forward pass, with later layers' weights and copies on their way to the host."""
        inputs = 4 if self.workload.reference else 2
        layers = np.arange(len(self.costs))
        leaving = _windows(self._offloaded, np.maximum(layers - self.run_ahead, 0), layers + 1)
        requested = requested_ahead(_moving(self.streamed), weights_prefetch_depth(self.depth))
        buffers = _windows(self.streamed, layers, requested)
        held = self._stored + leaving + buffers + inputs * self.model.input_bytes
        temporary = np.array([cost.forward.temporary for cost in self.costs])
        held[-HEAD_AHEAD:] += self.resident.host_head
        return (held + temporary).max() + (self.resident.trainable if self._accumulates else 0)

    def _backward(self) -> float:
        """Return the peak of the head and the layers' backward passes."""
        model, trained = self.model, self.resident.trainable
        head = max(model.head.results + model.head.temporary, model.head.matmul)
        head += self.resident.host_head
        peak = self._buffers()[-1] + self._leaving() + self._stored[-1] + (trained if self._accumulates else 0) + head
        peak = max(peak, self._layers_backward.max())
        return max(peak, self._embedding_backward())

    def _embedding_backward(self) -> int:
        """Return the bytes of gradients, complete by then, and of a table's that a program of its own adds to a sum."""
        ends = self.resident.trainable_ends
        added = max(ends, default=0) if (self._accumulates or self._tied) and not self.whole else 0
        if self._accumulates:
            return self.resident.trainable + added + self.model.input_bytes
        embedding = max(sum(ends) - self._head_gradients, 0)
        first = self._kept_gradients if self.workload.update_in_backward else self._gradients()[0]
        return first + embedding + added + self.model.input_bytes

    @cached_property
    def _layers_backward(self) -> np.ndarray:
        """Return for each layer's backward pass the bytes in use."""
        held = self._stored + self._buffers() + self._gradients() + self.model.scattered
        held[-1] += self._leaving()
        return held + 2 * self.model.input_bytes + np.array(self.restored) + self._temporaries()

    def _with_gaps(self) -> int:
        """Return the most bytes up to the end of a layer's temporary memory, which is one block.

        Below it is the gap of the next layer's values, freed before, under the gradient that arrives.
        """
        if self.whole:
            return 0
        freed, temporary = np.append(np.diff(self._stored), 0), self._temporaries()
        return (self._layers_backward + np.where(temporary > freed, freed + _LARGER * temporary, 0)).max()

    @property
    def _head_gradients(self) -> int:
        return self.model.head.results - self.model.input_bytes

    @property
    def _kept_gradients(self) -> int:
        """Return the bytes of the head's gradients that wait for the embedding's where each is used at once."""
        return self._head_gradients if self._tied else 0

    def _gradients(self) -> np.ndarray:
        """Return for each layer's backward pass the bytes of gradients."""
        if self._accumulates:
            return np.full(len(self.costs), self.resident.trainable)
        layers = np.array(self.resident.trainable_layers)
        if self.workload.update_in_backward:
            return layers + self._kept_gradients
        return self._head_gradients + layers[::-1].cumsum()[::-1]

    def _temporaries(self) -> np.ndarray:
        """Return for each layer's backward pass the bytes of XLA's temporary memory, or of the matmuls it compares."""
        return np.array([max(_TEMPORARIES * cost.backward.temporary, cost.backward.matmul) for cost in self.costs])

    def _buffers(self) -> np.ndarray:
        """Return for each layer's backward pass the bytes fetched, or still on the device, for it and those after."""
        layers = np.arange(len(self.costs))
        values = _windows(self._offloaded[::-1], layers, np.minimum(layers + self.depth + 1, len(layers)))
        streamed = self.streamed[::-1]
        weights = _windows(streamed, layers, requested_ahead(_moving(streamed), self.depth))
        return (values + weights)[::-1]

    def _leaving(self) -> int:
        """Return the bytes still on their way to the host when the backward pass begins."""
        return max(self.run_ahead - 1, 0) * max(self._offloaded[: -1 - self.depth], default=0)


def _moving(sizes: Sequence[int]) -> tuple[bool, ...]:
    return tuple(size > 0 for size in sizes)


def _windows(sizes: Sequence[int] | np.ndarray, starts: np.ndarray, ends: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the sums of the sizes from starts to ends."""
    sums = np.concatenate([[0], np.cumsum(sizes)])
    return sums[np.asarray(ends)] - sums[starts]
