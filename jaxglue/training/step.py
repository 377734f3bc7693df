"""The optimizer step of a run: forward, backward and update, with the state that it advances."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Traced
from jaxtyping import Array, PyTree

from jaxglue.data.batch import Batch, Reads
from jaxglue.data.iterator import BatchIterator, Step
from jaxglue.engine.compiler import Lowering, Program, jit_exchanging, jit_step, on_devices, rounding_as_written
from jaxglue.engine.executor import Executor, LayerExecutor, Update
from jaxglue.engine.fixed_addresses import SmallResults
from jaxglue.engine.fp8_errors import FP8Errors, fp8_errors
from jaxglue.engine.host_buffers import Buffers
from jaxglue.models.lora import without_adapters
from jaxglue.models.parameters import ModelGraphDefs, ParamKey, Params
from jaxglue.objectives.objective import Objective
from jaxglue.objectives.rollouts import RolloutObjective
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.planner.device_memory import leave_small_blocks
from jaxglue.planner.workload import abstract_parts
from jaxglue.sharding.mesh import place_batch
from jaxglue.sharding.rules import Layout
from jaxglue.training.draft import DraftSteps
from jaxglue.training.features import ImageFeatures
from jaxglue.training.optimizer import Optimizer, make_optimizer
from jaxglue.training.run import Run, Setup
from jaxglue.training.weights import build_parameters, new_adapters

Accepts = Callable[[int, Mapping[str, float]], bool]
"""Tells of a step's loss and gradient norm whether its update may be applied."""
_OTHER_EXECUTORS = 4
"""Objectives beside the run's whose compiled programs are kept."""
_log = logging.getLogger(__name__)


class FP8Parts(TypedDict):
    """The layers, and perhaps the head, multiplied in FP8, as JSON, with the largest error allowed."""

    max_error: float
    layers: Sequence[bool]
    head: bool


class StepState(TypedDict):
    """State of the steps in a checkpoint, beside its arrays, as JSON."""

    fp8: NotRequired[FP8Parts | None]


class TrainState(NamedTuple):
    """A model in training, as values that a step advances: the arrays of the state before are donated."""

    trainable: Params
    frozen: Params
    optimizer: Params
    step: int = 0
    """Optimizer steps done."""
    spent: Params | None = None
    """Gradients of the last step, for the next step to overwrite."""
    draft: Params | None = None
    """The draft head in training and its optimizer's state; see `DraftSteps`."""

    @property
    def saved(self) -> dict[str, Params]:
        """Return the arrays that a checkpoint holds."""
        saved = {"trainable": self.trainable, "optimizer": self.optimizer}
        return saved if self.draft is None else saved | {"draft": self.draft}

    def restored(self, saved: Mapping[str, Params], step: int) -> "TrainState":
        """Return the state of a checkpoint's arrays after `step` optimizer steps."""
        arrays = {name: saved[name] for name in self.saved}
        return self._replace(**arrays, step=step, spent=None)

    def free(self) -> None:
        """Free the memory of the arrays that `restored` replaces, whoever holds them."""
        _delete((self.saved, self.spent))


class StepResult(NamedTuple):
    """A dispatched step, whose values may still be computing."""

    step: int
    values: dict[str, jax.Array | float]
    """loss, learning_rate and, unless parameters are updated in the backward pass, grad_norm."""
    tokens: int


@dataclass(kw_only=True)
class StepParts:
    """What steps are computed with: made before the first, compiled in it, and equal for all, but for FP8."""

    run: Setup
    mesh: Mesh | None
    host_buffers: Buffers | None
    layout: Layout
    optimizer: Optimizer
    graphdefs: ModelGraphDefs
    executor: Executor
    program: "StepProgram | None" = None
    """The whole step, where it can be one program."""
    lowering: Lowering | None = None
    """Programs that are lowered while weights load."""
    fp8: FP8Parts | None = None
    """Parts that stay in FP8; None before that is decided, or without it."""
    compiled: set[tuple[Any, ...]] = field(default_factory=set)
    """Kinds of micro-batches that are compiled: long documents, room for targets, one of several, sizes of images."""
    executors: dict[Objective, Executor] = field(default_factory=dict)
    """Of other objectives, the latest last."""
    norm: Program = field(default_factory=lambda: jit_step(optax.tree.norm))
    first_pass: Program | None = None
    """Gradients to the parts of a step, where its rows run twice."""
    small_blocks: Sequence[jax.Array] = ()
    """Keeps small blocks of memory for small arrays."""
    draft: DraftSteps | None = None
    """Trains the draft head, if the run does."""
    features: ImageFeatures | None = None
    """Features of images by a frozen tower; None without, or where it runs in each step."""

    def place(self, batch: Step) -> tuple[Batch, ...]:
        """Return a step's micro-batches on the devices, where they may be already."""
        placed = all(isinstance(each.tokens, jax.Array) for each in batch.micro_batches)
        return batch.micro_batches if placed else place_batch(batch.micro_batches, self.mesh)

    def noise_key(self, step: int) -> jax.Array | None:
        """Return a step's key of dropout and noise, by its number alone; None without either."""
        seed = self.run.execution.noise_seed
        return None if seed is None else jax.random.fold_in(jax.random.key(seed), step)

    def compilations(self) -> int:
        """Return how often the programs of a step were compiled."""
        return self.executor.compilations() + (self.program.compilations() if self.program else 0)


def train_step(
    parts: StepParts, state: TrainState, batch: Step, accepts: Accepts | None = None
) -> tuple[TrainState, StepResult]:
    """Advance a model by one optimizer step; its values may still be computing on return.

    Args:
        parts: programs and optimizer.
        state: whose arrays are donated.
        batch: of the step; sums over it are divided by its targets.
        accepts: asked with step, loss and gradient norm before the update; if it refuses, nothing is updated and the
            values have `skipped`. The host then waits for the gradients.
    """
    executor, optimizer, objective = parts.executor, parts.optimizer, parts.run.objective
    if parts.lowering:  # the calls below find the programs that this compiles
        parts.lowering.compile()
        parts.lowering = None
    if objective.two_passes:
        batch = with_gradients(parts, state, batch)
    compilations, targets, key = parts.compilations(), float(batch.targets), parts.noise_key(state.step)
    if parts.draft and state.draft is not None:
        parts.draft.begin(state.draft)

    if parts.program and accepts is None and len(batch.micro_batches) == 1:
        # The host would take longer to dispatch a small model's layers than the device to compute them.
        (rows,) = batch.micro_batches
        # On one device a program takes arrays on the host sooner than `device_put` copies them.
        (rows,) = (rows,) if parts.mesh is None else parts.place(batch)
        key = None if key is None else jax.random.fold_in(key, 0)
        trainable, moments, values = parts.program(
            state.trainable, state.optimizer, state.frozen, rows, targets, key, state.step
        )
        sums = values.pop("loss")
        state = state._replace(trainable=trainable, optimizer=moments)
    elif parts.run.workload.update_in_backward:
        # Gradients of one layer exist at a time: they update it before those of the layer below are computed.
        trainable, moments = state.trainable, state.optimizer

        def update_part(part: ParamKey, gradient: Params) -> None:
            nonlocal trainable, moments
            if jax.tree.leaves(gradient):
                trainable, moments = optimizer.update_part(trainable, moments, part, gradient, state.step)

        sums = executor.loss_and_update(state.trainable, state.frozen, parts.place(batch), targets, update_part, key)
        values = optimizer.learning_rate(state.step)
        state = state._replace(trainable=trainable, optimizer=moments)
    else:
        # One program takes the last gradients' memory, which it would else allocate beside them.
        sums, gradients = executor.loss_and_gradients(
            state.trainable, state.frozen, parts.place(batch), targets, key, state.spent
        )
        state = state._replace(spent=gradients if executor.reuses_gradients else None)
        values = {}
        if accepts is not None:
            norm, loss = parts.norm(gradients), objective.loss(sums)
            if not accepts(state.step + 1, {"loss": float(loss), "grad_norm": float(norm)}):
                values = {"grad_norm": norm, **optimizer.learning_rate(state.step), "skipped": jnp.int32(1)}
        if "skipped" not in values:
            state, values = update(parts, state, gradients)

    if parts.draft and state.draft is not None and "skipped" not in values:
        draft, own = parts.draft.finish(state.step)
        state, values = state._replace(draft=draft), {**values, **own}
    state = state._replace(step=state.step + 1)
    several = len(batch.micro_batches) > 1
    kinds = {(each.segments.long, each.room, several, _image_sizes(each)) for each in batch.micro_batches}
    if kinds <= parts.compiled and parts.compilations() > compilations:
        _log.warning("step %d compiled programs again: its batch has other shapes", state.step)
    parts.compiled |= kinds
    reported: dict[str, Any] = {"loss": objective.loss(sums), **objective.metrics(sums), **values, **batch.metrics}
    return state, StepResult(state.step, reported, batch.tokens)


def with_gradients(parts: StepParts, state: TrainState, batch: Step) -> Step:
    """Return a step whose parts have the loss's gradients, from a first pass over its rows."""
    objective, micro_batches = cast(Any, parts.run.objective), parts.place(batch)
    outputs = [parts.executor.read(state.trainable, state.frozen, each) for each in micro_batches]
    if parts.first_pass is None:
        layout = parts.layout
        rows = layout.sharding(layout.row_spec)
        blocks = layout.sharding(PartitionSpec(None, *layout.row_spec))

        def gradients(sizes: Any, outputs: list, reads: list) -> Any:
            spread = (lambda x: x) if blocks is None else lambda x: jax.lax.with_sharding_constraint(x, blocks)
            return objective.gradients(sizes, outputs, reads, spread)

        parts.first_pass = jit_step(gradients, static_argnames="sizes", out_shardings=rows)
    sizes = objective.step_sizes(parts.run.batches.dataset, int(batch.targets))  # type: ignore[attr-defined]
    reads = [cast(Reads, each.reads) for each in micro_batches]
    found = zip(micro_batches, reads, parts.first_pass(sizes, outputs, reads), strict=True)
    changed = (replace(each, reads=replace(own, values=own.values | values)) for each, own, values in found)
    return replace(batch, micro_batches=tuple(changed))


def _image_sizes(batch: Batch) -> tuple[Any, ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves(batch.images))


def update(parts: StepParts, state: TrainState, gradients: Params) -> tuple[TrainState, dict[str, jax.Array]]:
    """Update the parameters; return also the gradients' norm and the learning rate. The step's number stays."""
    trainable, moments, values = parts.optimizer.update(state.trainable, state.optimizer, gradients, state.step)
    return state._replace(trainable=trainable, optimizer=moments), values


def loss_and_gradients(
    parts: StepParts, state: TrainState, batch: Step, objective: Objective | None = None
) -> tuple[jax.Array, Params]:
    """Return loss and gradients of a step's batches by the run's objective or another, and change nothing.

    Programs are compiled for each objective.
    """
    objective, executor = objective or parts.run.objective, parts.executor
    if objective != parts.run.objective:
        executor = _executor_of(parts, objective)
    key = parts.noise_key(state.step)
    sums, gradients = executor.loss_and_gradients(
        state.trainable, state.frozen, parts.place(batch), float(batch.targets), key, None
    )
    return objective.loss(sums), gradients


def visit_gradients(parts: StepParts, state: TrainState, batch: Step, visit: Update) -> jax.Array:
    """Pass each part's gradients of a step to `visit`, those of the head first; return the loss."""
    key = parts.noise_key(state.step)
    sums = parts.executor.loss_and_update(
        state.trainable, state.frozen, parts.place(batch), float(batch.targets), visit, key
    )
    return parts.run.objective.loss(sums)


def prepare_steps(
    run: Setup, mesh: Mesh | None, host_buffers: Buffers | None = None, frozen: Params | None = None
) -> tuple[StepParts, TrainState]:
    """Load a model, and meanwhile trace and lower the programs of its steps.

    Args:
        run: the run, or a model alone, whose steps are given one by one.
        mesh: devices that share the work; None for one device.
        host_buffers: for offloaded values; None for JAX's pool.
        frozen: weights of another model to train new adapters on; None loads them.
    """
    layout = Layout(mesh, run.dtype)
    optimizer = make_optimizer(run.schedule.optimizer, run.schedule.total_steps, layout)
    parts = _lowered_ahead(run, mesh, host_buffers, layout, optimizer)
    devices = jax.local_devices() if jax.default_backend() == "gpu" else []
    small_blocks = leave_small_blocks(devices if mesh else devices[:1])
    with (parts and parts.lowering) or nullcontext():
        loaded = build_parameters(run, layout) if frozen is None else _on_frozen(run, frozen)
    graphdefs, trainable, frozen = loaded
    if parts is None or parts.graphdefs != graphdefs:
        reference = reference_layers(run, graphdefs, trainable, frozen)
        executor = _make_executor(run, graphdefs, run.objective, mesh, host_buffers, reference)
        parts = StepParts(
            run=run,
            mesh=mesh,
            host_buffers=host_buffers,
            layout=layout,
            optimizer=optimizer,
            graphdefs=graphdefs,
            executor=executor,
            program=_make_program(run, executor, optimizer),
        )
    parts.small_blocks = small_blocks
    see_images(parts, trainable, frozen)
    state = TrainState(trainable, _without_tower(parts, frozen), optimizer.init(trainable))
    if run.draft is None:
        return parts, state
    parts.draft = DraftSteps(run, graphdefs)
    if run.draft.when == "after":
        return parts, state
    parts.executor.watch = parts.draft.observe
    return parts, state._replace(draft=parts.draft.first())


def see_images(parts: StepParts, trainable: Params, frozen: Params) -> None:
    """Let a run's batches have features of images, made once, where its tower is frozen; else it runs in each step."""
    run, vision = parts.run, parts.run.model.vision
    if not isinstance(run, Run) or vision is None or run.execution.image_features == "off":
        return
    for reader in run.data.readers:
        reader.kept.clear()
    parts.features = ImageFeatures(
        parts.executor,
        trainable,
        frozen,
        parts.mesh,
        run.data.readers,
        more=run.data.stream is not None or run.shows_images,
        cache=run.cache,
        on_disk=run.execution.image_features == "disk",
    )
    for batches in (run.batches, run.eval_batches):
        if batches is not None:
            batches.see = parts.features
        if isinstance(batches, BatchIterator):
            batches.ahead, batches.begin = parts.features.ahead, parts.features.begin


def _without_tower(parts: StepParts, frozen: Params) -> Params:
    """Return the frozen parameters that steps take: a tower that runs between them is moved to the host."""
    if parts.features is None or not parts.run.workload.host_tower:
        return frozen
    return parts.features.move_tower(frozen)


def restart(parts: StepParts, state: TrainState) -> TrainState:
    """Return the state before step 1; free the present one."""
    _delete((state.saved, state.spent, state.frozen))
    _, trainable, frozen = build_parameters(parts.run, parts.layout)
    first = TrainState(trainable, _without_tower(parts, frozen), parts.optimizer.init(trainable))
    if parts.draft and state.draft is not None:
        return first._replace(draft=parts.draft.first())
    return first


def _delete(tree: PyTree) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):  # others are in files
            leaf.delete()


def check_fp8(parts: StepParts, state: TrainState, batch: Batch) -> str | None:
    """Take layers and a head out of FP8 where it is too inaccurate on a batch; return the errors in words.

    None where nothing is multiplied in FP8, or the choice was made.
    """
    if not FORMATS[parts.run.model.quantize].fp8 or parts.fp8:
        return None
    largest = parts.run.execution.fp8_max_error
    errors = fp8_errors(parts.executor, state.trainable, state.frozen, place_batch(batch, parts.mesh))
    choice = choose_fp8(errors, largest)
    multiply_in_fp8(parts, {"max_error": largest, "layers": choice.layers, "head": choice.head})
    return choice.note


def multiply_in_fp8(parts: StepParts, fp8: FP8Parts | None) -> None:
    """Multiply these parts alone in FP8, unless another error is allowed now."""
    run = parts.run
    if not fp8 or fp8["max_error"] != run.execution.fp8_max_error:
        return
    parts.fp8 = fp8
    for executor in (parts.executor, *parts.executors.values()):
        executor.multiply_in_fp8(fp8["layers"], fp8["head"])
    parts.program = _make_program(run, parts.executor, parts.optimizer)
    as_lowered = all(fp8["layers"]) and fp8["head"] == run.model.fp8_head
    if not as_lowered or run.remat.layers_per_program > 1:
        parts.lowering = None


def _make_executor(
    run: Setup,
    graphdefs: ModelGraphDefs,
    objective: Objective,
    mesh: Mesh | None,
    host_buffers: Buffers | None,
    reference: list[nnx.GraphDef] | None = None,
) -> Executor:
    with rounding_as_written(objective.needs_rollouts):
        return Executor(
            graphdefs,
            run.model,
            policy=run.remat.policies,
            dtype=run.dtype,
            attention=run.remat.attention,
            tile=run.remat.tile,
            exact=run.workload.exact,
            # The draft head reads the last layer's output between programs.
            layers_per_program=run.remat.layers_per_program if run.draft is None else 1,
            stream_weights=run.remat.streams_weights,
            router_losses=run.execution.router_losses,
            objective=objective,
            reference=reference,
            neftune_alpha=run.execution.neftune_alpha,
            mesh=mesh,
            host_buffers=host_buffers,
        )


def _make_program(run: Setup, executor: Executor, optimizer: Optimizer) -> "StepProgram | None":
    """Return the whole step as a program, where it can be one."""
    alone = executor.is_one_program and not run.workload.host_embeddings
    decided = run.spikes is None and not run.workload.update_in_backward
    fits = alone and decided and run.rows.documents is None and optimizer.fits_programs
    with rounding_as_written(run.objective.needs_rollouts):
        return StepProgram(executor, optimizer) if fits else None


def _lowered_ahead(
    run: Setup, mesh: Mesh | None, host_buffers: Buffers | None, layout: Layout, optimizer: Optimizer
) -> StepParts | None:
    """Begin to trace and lower the step's programs of the modules foreseen; None where shapes say less."""
    batches = run.batches if isinstance(run, Run) else None
    grouped = 1 < run.remat.layers_per_program < run.model.num_hidden_layers
    if grouped or run.objective.two_passes or not run.workload.compiled_ahead or not isinstance(batches, BatchIterator):
        return None
    graphdefs, trainable, frozen = abstract_parts(run.workload)
    executor = _make_executor(run, graphdefs, run.objective, mesh, host_buffers)
    parts = StepParts(
        run=run,
        mesh=mesh,
        host_buffers=host_buffers,
        layout=layout,
        optimizer=optimizer,
        graphdefs=graphdefs,
        executor=executor,
        program=_make_program(run, executor, optimizer),
    )
    first, key = batches.first, parts.noise_key(0)
    key = None if key is None else jax.random.fold_in(key, 0)  # of the first micro-batch
    if parts.program and len(first.micro_batches) == 1:
        (rows,) = first.micro_batches if mesh is None else parts.place(first)
        parts.lowering = Lowering(parts.program.trace(trainable, frozen, rows, key))
        return parts
    step = executor.trace_step(trainable, frozen, parts.place(first), key)
    shapes = on_devices(layout, trainable, layout.param_specs(trainable))
    updates = () if run.workload.update_in_backward else optimizer.trace_update(shapes)
    parts.lowering = Lowering(chain(step, updates))
    return parts


def _executor_of(parts: StepParts, objective: Objective) -> Executor:
    """Return the executor of another objective; the latest are kept, with their programs."""
    executor = parts.executors.pop(objective, None)
    if executor is None:
        executor = _make_executor(parts.run, parts.graphdefs, objective, parts.mesh, parts.host_buffers)
        if parts.fp8:
            executor.multiply_in_fp8(parts.fp8["layers"], parts.fp8["head"])
        if len(parts.executors) >= _OTHER_EXECUTORS:
            _log.warning(
                "%d losses were compiled, and the programs of the oldest are dropped: define a loss outside of the "
                "loop, since each function object is compiled by itself",
                len(parts.executors) + 1,
            )
            del parts.executors[next(iter(parts.executors))]
    parts.executors[objective] = executor
    return executor


def _on_frozen(run: Setup, frozen: Params) -> tuple[ModelGraphDefs, Params, Params]:
    """Return the modules, new adapters and the weights of another model, which must be those of the run."""
    graphdefs, trainable, wanted = new_adapters(run)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), frozen)
    if shapes != wanted:
        raise ValueError("base: another model, storage or dtype, or an output projection that is tied there alone")
    return graphdefs, trainable, frozen


class StepProgram:
    """Runs a step of one micro-batch as one compiled program.

    Args:
        executor: with one program for all layers.
        optimizer: whose update can be a part of a program.
    """

    def __init__(self, executor: LayerExecutor, optimizer: Optimizer):
        self._executor, self._optimizer = executor, optimizer
        shapes: dict[str, tuple[int, ...]] = {"loss": executor.loss_shape, "grad_norm": (), "learning_rate": ()}
        self._results = SmallResults(shapes, executor.layout)
        donated = "trainable", "state", "places"
        self._program = (jit_exchanging if executor.layout.gathers else jit_step)(
            self._run, donate_argnames=donated, keep_unused=True
        )

    def __call__(
        self, trainable: Params, state: Params, frozen: Params, batch, total_weight: float, key, step: int
    ) -> tuple[Params, Params, dict[str, Array]]:
        """Return new trainable, new state, and the loss beside the values of `Optimizer.update`.

        Args:
            trainable, state: of the step; donated. Both are committed to the devices, as is `frozen`.
            frozen, total_weight, key: as in `LayerExecutor.loss_and_gradients`.
            batch: of one micro-batch, placed on a mesh; on one device a program takes arrays on the host sooner than
                `jax.device_put` copies them.
            step: optimizer steps done before.
        """
        arguments = frozen, batch, np.float32(1 / total_weight), key, np.int32(step), self._results.take()
        trainable, state, results = self._program(trainable, state, *arguments)
        return trainable, state, self._results.keep(results)

    def trace(self, trainable: Params, frozen: Params, batch, key) -> Iterator[Traced]:
        """Trace the program for shapes of parameters."""
        layout = self._executor.layout
        trainable, frozen = (on_devices(layout, tree, layout.param_specs(tree)) for tree in (trainable, frozen))
        state, places = self._optimizer.state_shapes(trainable), self._results.abstract()
        yield self._program.trace(trainable, state, frozen, batch, np.float32(1), key, np.int32(0), places)

    def compilations(self) -> int:
        """Return how often the program was compiled."""
        return self._program.compilations()

    def _run(self, trainable: Params, state: Params, frozen: Params, batch, scale, key, step, places):
        """Return trainable, state and results of the step, which XLA writes to the donated arrays."""
        loss, gradients = self._executor.traced_step(trainable, frozen, batch, scale, key)
        trainable, state, reported = self._optimizer.update(trainable, state, gradients, step)
        return trainable, state, {"loss": loss, **reported}


class StepsInFlight:
    """Queue of results in the order of their steps; a thread notes when each is done, as the host looks later."""

    def __init__(self) -> None:
        self._waiter = ThreadPoolExecutor(1)
        self._results: deque[tuple[StepResult, Future[float]]] = deque()

    def add(self, result: StepResult) -> None:
        """Append the result of a step just dispatched."""
        self._results.append((result, self._waiter.submit(_when_done, result)))

    def take(self, *, leave: int) -> Iterator[tuple[StepResult, float]]:
        """Yield all results but the last `leave`, each with the time it was done, `time.perf_counter`."""
        while len(self._results) > leave:
            result, done = self._results.popleft()
            yield result, done.result()


def _when_done(result: StepResult) -> float:
    jax.block_until_ready(result.values)
    return time.perf_counter()


class FP8Choice(NamedTuple):
    """Parts that are multiplied in FP8, and a line that names them."""

    layers: list[bool]
    head: bool
    note: str


def choose_fp8(errors: FP8Errors, largest: float) -> FP8Choice:
    """Return the choice by errors and the largest error that stays in FP8; not-a-number is above any."""
    layers, head = [error <= largest for error in errors.layers], errors.head is not None and errors.head <= largest
    worst = max(range(len(layers)), key=lambda index: errors.layers[index])
    note = f"fp8: largest relative error of a layer {errors.layers[worst]:.1%}, in layer {worst}"
    if errors.head is not None:
        note += f"; of the head's gradient {errors.head:.1%}"
    wide = [str(index) for index, stays in enumerate(layers) if not stays]
    if errors.head is not None and not head:
        wide.append("head")
    if wide:
        note += f"; layers above {100 * largest:.3g}% multiply in the activations' dtype: {', '.join(wide)}"
    return FP8Choice(layers, head, note)


def reference_layers(
    run: Setup, graphdefs: ModelGraphDefs, trainable: Params, frozen: Params
) -> list[nnx.GraphDef] | None:
    """Return the frozen layers without adapters, to run beside the model's; None where no loss needs them."""
    from_base = run.teacher is not None and run.teacher.folder is None
    if not (run.workload.reference or from_base or _compares_rollouts_with_frozen(run, trainable)):
        return None
    kinds: dict[nnx.GraphDef, nnx.GraphDef] = {}
    for graphdef, *trees in zip(graphdefs.layers, trainable["layers"], frozen["layers"], strict=True):
        if graphdef not in kinds:
            kinds[graphdef] = without_adapters(graphdef, *trees)
    return [kinds[graphdef] for graphdef in graphdefs.layers]


def _compares_rollouts_with_frozen(run: Setup, trainable: Params) -> bool:
    """Return whether rollouts have a reference, and all that trains are new adapters, without which it is."""
    others = {name: part for name, part in trainable.items() if name != "layers"}
    new = run.lora is not None and run.base.adapter is None and not jax.tree.leaves(others)
    return new and isinstance(run.objective, RolloutObjective) and run.objective.uses_reference
