"""Memory of a step on one GPU: resident arrays, and the peak."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import jax
import numpy as np

from jaxglue.engine.fixed_addresses import SMALL_ARRAYS
from jaxglue.engine.host_table import host_parts
from jaxglue.engine.residency import DEVICE, MAPPED
from jaxglue.engine.transfer import HEAD_AHEAD, requested_ahead, weights_prefetch_depth
from jaxglue.models.parameters import Params
from jaxglue.planner import calibration as fitted
from jaxglue.planner.cost import Cost
from jaxglue.planner.layer_costs import LayerCost, TracedModel
from jaxglue.planner.vision import tower_block, tower_in_steps
from jaxglue.planner.workload import Workload, abstract_parts, tree_bytes
from jaxglue.sharding.rules import Layout


@dataclass(frozen=True, kw_only=True)
class ResidentBytes:
    """Bytes on one GPU that no remat policy changes."""

    trainable_layers: tuple[int, ...]
    """Float32 parameters of each layer that train."""
    trainable_ends: tuple[int, ...]
    """Float32 parameters of the embedding, the last norm and the head that train."""
    trainable_table: int
    """Float32 parameters of the embedding that train."""
    frozen_layers: tuple[int, ...]
    """Frozen parameters of each layer."""
    frozen_ends: int
    """Other frozen parameters, without those in host memory."""
    host_table: int
    """Embedding tables in host memory."""
    host_tower: int
    """A frozen tower in host memory, which is copied to the GPU when it runs, between steps."""
    host_head: int
    """An output projection in host memory, which is copied to the GPU for the head."""
    moments: int
    """AdamW's two moments."""
    gradients: int
    """Float32 gradients held at once."""
    exchanged: float = 0.0
    """Bytes of gradients received to sum them over GPUs with the same parameters, by rings."""

    @property
    def trainable(self) -> int:
        """Return the bytes of all parameters that train."""
        return sum(self.trainable_layers) + sum(self.trainable_ends)

    @property
    def state(self) -> int:
        """Return the bytes of parameters that train and of their moments, as checkpoints hold them."""
        return self.trainable + self.moments

    @property
    def host_ends(self) -> int:
        """Return the bytes of embedding tables, tower and output projection in host memory."""
        return self.host_table + self.host_tower + self.host_head

    def streamed_layers(self, weights: Sequence[str]) -> list[int]:
        """Return the bytes of each layer's frozen parameters that are streamed, by their places."""
        return [0 if place == DEVICE else size for place, size in zip(weights, self.frozen_layers, strict=True)]

    def mapped_layers(self, weights: Sequence[str]) -> list[int]:
        """Return the bytes of each layer's frozen parameters that are streamed from files."""
        return [size if place == MAPPED else 0 for place, size in zip(weights, self.frozen_layers, strict=True)]

    def frozen(self, weights: Sequence[str] | None = None) -> int:
        """Return the bytes of frozen parameters on the GPU: all of them, or by the layers' places."""
        return self.frozen_ends + sum(self.frozen_layers) - (sum(self.streamed_layers(weights)) if weights else 0)

    def total(self, weights: Sequence[str] | None = None) -> int:
        """Return the bytes of parameters, gradients and optimizer state."""
        return self.trainable + self.frozen(weights) + self.moments + self.gradients


def resident_bytes(workload: Workload) -> ResidentBytes:
    """Count a workload's resident bytes from the shapes and dtypes of one GPU's parts."""
    return _resident_bytes(workload.any_rows)


@lru_cache(maxsize=8)
def _resident_bytes(workload: Workload) -> ResidentBytes:
    layout = Layout(workload.mesh.abstract, workload.dtype)
    trainable, frozen = (layout.local_shapes(tree, layout.param_specs(tree)) for tree in abstract_parts(workload)[1:])
    layers = tuple(tree_bytes(layer) for layer in trainable["layers"])
    ends = tuple(tree_bytes(part) for name, part in trainable.items() if name != "layers")
    trained = sum(layers) + sum(ends)
    one_at_a_time = workload.update_in_backward and workload.gradient_accumulation_steps == 1
    on_host = host_parts(frozen) if workload.host_embeddings else {}
    host = {name: tree_bytes(part) for name, part in on_host.items()}
    frozen_ends = sum(tree_bytes(part) for name, part in frozen.items() if name != "layers")
    tower = tree_bytes(frozen["embed_tokens"].get("vision", {})) if workload.host_tower else 0
    return ResidentBytes(
        trainable_layers=layers,
        trainable_ends=ends,
        trainable_table=tree_bytes(trainable.get("embed_tokens", {})),
        frozen_layers=tuple(tree_bytes(layer) for layer in frozen["layers"]),
        frozen_ends=frozen_ends - sum(host.values()) - tower,
        host_table=host.get("embed_tokens", 0),
        host_tower=tower,
        host_head=host.get("lm_head", 0),
        moments=round(workload.moment_bytes / 4 * trained),
        gradients=max(*layers, *ends) if one_at_a_time else trained,
        exchanged=_exchanged(layout, abstract_parts(workload)[1]),
    )


def _exchanged(layout: Layout, trainable: Params) -> float:
    specs = layout.param_specs(trainable)
    rows = zip(jax.tree.leaves(layout.local_shapes(trainable, specs)), jax.tree.leaves(specs), strict=True)
    shares = ((leaf.size, layout.copies(spec)) for leaf, spec in rows)
    return sum(2 * 4 * size * (copies - 1) / copies for size, copies in shares)


_SPARE = 0.05
"""Share of the whole peak that plans leave free anyway."""


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
    replayed: Sequence[int]
    """Bytes that running other layers again takes before each layer's backward pass."""
    one_program: bool
    """A micro-batch is one program."""
    scattered: bool
    """A micro-batch is one program that recomputes layers' values, and these do not fill the gap of the head's."""
    compiled_ahead: bool = False
    """Programs are compiled, and their matmuls compared, before one runs."""

    def total(self) -> int:
        """Return the peak with everything resident, bytes."""
        resident, streamed = self.resident, sum(self.streamed)
        always = resident.moments + resident.trainable + resident.frozen() - streamed
        compiled = (fitted.PROGRAMS_MEMORY + always + self._compared()) if self.compiled_ahead else 0
        always += self.model.gathered + max(self.streamed)  # a streamed layer's buffer is freed late
        always += SMALL_ARRAYS if self.one_program else 0
        always += self._layer_inputs + self.workload.other_models
        peak = fitted.PROGRAMS_MEMORY + always + max(self._forward(), self._backward())
        peak += self.model.head.temporary if self.scattered else 0
        largest = max(max(cost.forward.temporary, cost.backward.temporary) for cost in self.costs)
        lost = min(fitted.SCATTERED * largest, fitted.MOST_SCATTERED)
        if self._trains_output:  # whose gradient and temporary memory are two large blocks at once
            lost = max(lost, fitted.SCATTERED * 2 * min(self.model.head.temporary, self.model.head.results))
        if any(self.streamed):
            lost = max(lost, fitted.UNFILLED * peak)
        peak += max(lost - _SPARE * peak, 0)
        between = fitted.PROGRAMS_MEMORY + always + resident.gradients + self._tower_at_work
        return int(max(peak, compiled, between, (1 - _SPARE) * (fitted.PROGRAMS_MEMORY + always + self._with_gaps())))

    def _compared(self) -> int:
        """Return the most bytes of copies with which algorithms of a step's matmuls are compared."""
        return max(self.model.head.matmul, *(max(cost.forward.matmul, cost.backward.matmul) for cost in self.costs))

    def _comparing(self, cost: Cost) -> int:
        """Return the bytes of such copies beside a program's arguments."""
        return 0 if self.compiled_ahead else cost.matmul

    @property
    def _tower_at_work(self) -> int:
        """Return the bytes of a tower's values where the text's are not there; between steps it comes by itself."""
        work = self.workload
        if work.host_tower:
            return self.resident.host_tower + tower_block(work.config, work.dtype)
        return tower_in_steps(work)

    @property
    def _layer_inputs(self) -> int:
        """Return the bytes of the embeddings that each layer has of its own, which stay for the backward pass.

        Where a tower trains, their gradients stay for its own.
        """
        own, work, vision = self.workload.config.per_layer, self.workload, self.workload.config.vision
        copies = 2 if vision is not None and vision.trains != "none" else 1
        return 0 if own is None else copies * work.tokens * own.layers * own.size * np.dtype(work.dtype).itemsize

    @property
    def _trains_output(self) -> bool:
        """Return whether the output projection trains, and not the last norm and adapters alone."""
        return self._head_gradients > self.model.input_bytes

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
        stays = max(len(layers) - 1 - self.depth, 0)  # the last layers' weights stay for the backward pass
        buffers = _windows(self.streamed, np.minimum(layers, stays), requested)
        held = self._stored + leaving + buffers + inputs * self.model.input_bytes
        # A program is compiled, and its matmuls compared, when the first layer of its type is due.
        compiles = [self.costs.index(cost) == index for index, cost in enumerate(self.costs)]
        passes = [cost.forward for cost in self.costs]
        temporary = np.array(
            [max(each.temporary, self._comparing(each) * new) for each, new in zip(passes, compiles, strict=True)]
        )
        held[-HEAD_AHEAD:] += self.resident.host_head
        return (held + temporary).max() + (self.resident.trainable if self._accumulates else 0)

    def _backward(self) -> float:
        """Return the peak of the head and the layers' backward passes."""
        model, trained = self.model, self.resident.trainable
        head = max(model.head.results + model.head.temporary, self._comparing(model.head))
        head += self.resident.host_head
        peak = self._buffers()[-1] + self._leaving() + self._stored[-1] + (trained if self._accumulates else 0) + head
        peak = max(peak, self._layers_backward.max())
        return max(peak, self._embedding_backward())

    def _embedding_backward(self) -> int:
        """Return the bytes of gradients, complete by then, and of a table's that a program of its own adds to a sum."""
        ends = self.resident.trainable_ends
        added = max(ends, default=0) if (self._accumulates or self._tied) and not self.one_program else 0
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
        if self.one_program:
            return 0
        freed, temporary = np.append(np.diff(self._stored), 0), self._temporaries()
        gaps = np.where(temporary > freed, freed + fitted.LARGER_TEMPORARY * temporary, 0)
        return (self._layers_backward + gaps).max()

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
        """Return for each layer's backward pass the bytes of XLA's temporary memory, or of the matmuls it compares.

        Or of the layers that run again before it, if these are more.
        """
        passes = zip((cost.backward for cost in self.costs), self.replayed, strict=True)
        return np.array(
            [max(fitted.TEMPORARIES * each.temporary, self._comparing(each), again) for each, again in passes]
        )

    def _buffers(self) -> np.ndarray:
        """Return for each layer's backward pass the bytes fetched, or still on the device, for it and those after."""
        layers = np.arange(len(self.costs))
        values = _windows(self._offloaded[::-1], layers, np.minimum(layers + self.depth + 1, len(layers)))
        streamed = self.streamed[::-1]
        weights = _windows(streamed, layers, requested_ahead(_moving(streamed), self.depth))
        return (values + weights)[::-1]

    def _leaving(self) -> int:
        """Return the bytes on their way to the host when the backward pass begins: the host waited for those before.

        With the default depths there are none, as the last layers' values stay.
        """
        layers = len(self.costs)
        return self._offloaded[max(layers - self.run_ahead, 0) : max(layers - 1 - self.depth, 0)].sum()


def _moving(sizes: Sequence[int]) -> tuple[bool, ...]:
    return tuple(size > 0 for size in sizes)


def _windows(sizes: Sequence[int] | np.ndarray, starts: np.ndarray, ends: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the sums of the sizes from starts to ends."""
    sums = np.concatenate([[0], np.cumsum(sizes)])
    return sums[np.asarray(ends)] - sums[starts]
