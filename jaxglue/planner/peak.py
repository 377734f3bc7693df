"""Peak device memory of a training step."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxglue.engine.transfer import requested_ahead, weights_prefetch_depth
from jaxglue.planner.gpus import GIB
from jaxglue.planner.resident import ResidentBytes
from jaxglue.planner.traced import LayerCost, TracedModel
from jaxglue.planner.workload import Workload

_EXPERTS_TEMPORARIES = 1.1
"""XLA's temporary memory of a layer with experts as a multiple of the least that its order needs; others take that."""
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
    """Dropped inputs on the device in each layer's backward pass."""

    def total(self) -> int:
        """Return the peak with everything resident, bytes."""
        resident, streamed = self.resident, sum(self.streamed)
        always = resident.moments + resident.trainable + resident.frozen() - streamed
        always += self.model.gathered + max(self.streamed)  # a streamed layer's buffer is freed late
        return int(_WORKSPACE + always + max(self._forward(), self._backward()))

    @property
    def _accumulates(self) -> bool:
        return self.workload.gradient_accumulation_steps > 1

    def _forward(self) -> float:
        """Return the peak of the forward pass, with later layers' weights and copies on their way to the host."""
        stored, peak = 0, 0.0
        inputs = 4 if self.workload.reference else 2
        buffers = _windows(self.streamed, self._requested(self.streamed, weights_prefetch_depth(self.depth)))
        for index, cost in enumerate(self.costs):
            leaving = sum(earlier.offloaded for earlier in self.costs[max(index - self.run_ahead, 0) : index + 1])
            stored += cost.saved
            held = stored + leaving + buffers[index] + inputs * self.model.input_bytes
            peak = max(peak, held + cost.forward.temporary)
        return peak + (self.resident.trainable if self._accumulates else 0)

    def _backward(self) -> float:
        """Return the peak of the head and the layers' backward passes."""
        model, trained = self.model, self.resident.trainable
        stored, leaving = sum(cost.saved for cost in self.costs), self._leaving()
        buffers = self._buffers()
        head = max(model.head.results + model.head.temporary, model.head.matmul)
        head += self.resident.host_head
        peak: float = buffers[-1] + leaving + stored + (trained if self._accumulates else 0) + head
        head_gradients = model.head.results - model.input_bytes
        updates = self.workload.update_in_backward
        gradients = trained if self._accumulates else 0 if updates else head_gradients
        temporaries = 1.0 if self.workload.config.moe is None else _EXPERTS_TEMPORARIES
        for index in reversed(range(len(self.costs))):
            here = gradients if self._accumulates else gradients + self.resident.trainable_layers[index]
            held = stored + buffers[index] + leaving + here + model.scattered
            held += (2 + self.restored[index]) * model.input_bytes
            cost = self.costs[index].backward
            peak = max(peak, held + max(temporaries * cost.temporary, cost.matmul))
            gradients = gradients if updates else here
            stored, leaving = stored - self.costs[index].saved, 0
        if not self._accumulates:  # the embedding's gradients come last
            embedding = max(sum(self.resident.trainable_ends) - head_gradients, 0)
            peak = max(peak, gradients + embedding + model.input_bytes)
        return peak

    def _buffers(self) -> list[int]:
        """Return for each layer's backward pass the bytes fetched, or still on the device, for it and those after."""
        offloaded = [cost.offloaded for cost in reversed(self.costs)]
        streamed = list(reversed(self.streamed))
        values = _windows(offloaded, [min(index + self.depth + 1, len(offloaded)) for index in range(len(offloaded))])
        weights = _windows(streamed, self._requested(streamed, self.depth))
        return [value + weight for value, weight in zip(values, weights, strict=True)][::-1]

    def _requested(self, streamed: Sequence[int], depth: int) -> list[int]:
        return requested_ahead([size > 0 for size in streamed], depth)

    def _leaving(self) -> int:
        """Return the bytes still on their way to the host when the backward pass begins."""
        sent = self.costs[: -1 - self.depth]
        return max(self.run_ahead - 1, 0) * max((cost.offloaded for cost in sent), default=0)


def _windows(sizes: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return for each index the sum of the sizes from there to its end."""
    return [sum(sizes[index:end]) for index, end in enumerate(ends)]
