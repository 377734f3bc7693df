"""The optimizer step of a run: forward, backward and update, with the state that it advances."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain
from typing import Any, NamedTuple, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Traced
from jaxtyping import Array

from jaxglue.data.batch import Batch
from jaxglue.data.iterator import BatchIterator, Step
from jaxglue.engine.compiler import Lowering, jit_exchanging, jit_step, on_devices, rounding_as_written
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
from jaxglue.training.optimizer import Optimizer, make_optimizer
from jaxglue.training.setup import Run, Setup
from jaxglue.training.weights import build_parameters, new_adapters

Accepts = Callable[[int, Mapping[str, float]], bool]
"""Tells of a step's loss and gradient norm whether its update may be applied."""
_log = logging.getLogger(__name__)


class FP8Parts(TypedDict):
    """The layers, and perhaps the head, multiplied in FP8, as JSON, with the largest error allowed."""

    max_error: float
    layers: Sequence[bool]
    head: bool


class StepState(TypedDict):
    """State of the step in a checkpoint, beside its arrays, as JSON."""

    fp8: NotRequired[FP8Parts | None]


_OTHER_EXECUTORS = 4
"""Objectives beside the run's whose compiled programs are kept."""


class TrainStep:
    """A model and its optimizer; `dispatch` advances them by one optimizer step.

    Args:
        run: the run, or a model alone, whose steps are given one by one.
        mesh: devices that share the work; None for one device.
        host_buffers: for offloaded values; None for JAX's pool.
        frozen: weights of another model to train new adapters on; None loads them.
    """

    def __init__(
        self, run: Setup, mesh: Mesh | None, host_buffers: Buffers | None = None, frozen: Params | None = None
    ):
        self._run, self._config, self._mesh = run, run.config, mesh
        self.layout = Layout(mesh, run.config.model.compute_dtype)
        self._objective, self._host_buffers = run.workload.objective, host_buffers
        self.step = 0
        """Optimizer steps done."""
        self._lowering: Lowering | None = None
        self._program: StepProgram | None = None
        self._optimizer = make_optimizer(run.config.optimizer, run.total_steps, self.layout)
        foreseen = self._lower_ahead()
        devices = jax.local_devices() if jax.default_backend() == "gpu" else []
        self._held = leave_small_blocks(devices if mesh else devices[:1])
        with self._lowering or nullcontext():
            self.graphdefs, self.trainable, self.frozen = (
                build_parameters(run, self.layout) if frozen is None else _on_frozen(run, frozen)
            )
        if foreseen != self.graphdefs:
            self._lowering = None
            reference = reference_layers(run, self.graphdefs, self.trainable, self.frozen)
            self.executor = self._make_executor(self.graphdefs, self._objective, reference)
            self._program = self._make_program()
        self._optimizer_state = self._optimizer.init(self.trainable)
        self._norm = jit_step(optax.tree.norm)
        self._spent: Params | None = None
        """Gradients of the last step, for the next step to overwrite."""
        self._compiled: set[tuple[bool, bool]] = set()
        self._executors: dict[Objective, Executor] = {self._objective: self.executor}
        self._fp8: FP8Parts | None = None

    def _make_executor(
        self, graphdefs: ModelGraphDefs, objective: Objective, reference: list[nnx.GraphDef] | None = None
    ) -> Executor:
        run = self._run
        with rounding_as_written(objective.needs_rollouts):
            return Executor(
                graphdefs,
                run.model,
                policy=run.remat.policies,
                dtype=run.config.model.compute_dtype,
                attention=run.remat.attention,
                tile=run.remat.tile,
                layers_per_program=run.remat.layers_per_program,
                stream_weights=run.remat.streams_weights,
                router_losses=run.config.model.router_losses,
                objective=objective,
                reference=reference,
                neftune_alpha=run.config.model.neftune_alpha,
                mesh=self._mesh,
                host_buffers=self._host_buffers,
            )

    def _make_program(self) -> "StepProgram | None":
        """Return the step's only program, where it can be one."""
        alone = self.executor.is_one_program and not self._run.workload.host_embeddings
        decided = self._config.run.on_spike == "nothing" and not self._config.optimizer.update_in_backward
        one_batch = self._config.run.documents_per_step is None
        fits = alone and decided and one_batch and self._optimizer.fits_programs
        with rounding_as_written(self._objective.needs_rollouts):
            return StepProgram(self.executor, self._optimizer) if fits else None

    def _lower_ahead(self) -> ModelGraphDefs | None:
        """Begin to trace and lower the step's programs, and return the modules foreseen; None where shapes say less."""
        run = self._run
        batches = run.batches if isinstance(run, Run) else None
        grouped = 1 < run.remat.layers_per_program < run.model.num_hidden_layers
        if grouped or not run.workload.compiled_ahead or not isinstance(batches, BatchIterator):
            return None
        graphdefs, trainable, frozen = abstract_parts(run.workload)
        self.executor, first = self._make_executor(graphdefs, self._objective), batches.first
        self._program, key = self._make_program(), self._micro_batch_key()
        if self._program and len(first.micro_batches) == 1:
            (rows,) = first.micro_batches if self._mesh is None else self.place(first)
            self._lowering = Lowering(self._program.trace(trainable, frozen, rows, key))
            return graphdefs
        step = self.executor.trace_step(trainable, frozen, self.place(first), key)
        in_backward = self._config.optimizer.update_in_backward
        shapes = on_devices(self.layout, trainable, self.layout.param_specs(trainable))
        update = () if in_backward else self._optimizer.trace_update(shapes)
        self._lowering = Lowering(chain(step, update))
        return graphdefs

    def dispatch(self, batch: Step, accepts: Accepts | None = None) -> "StepResult":
        """Run one optimizer step; its values may still be computing on return.

        Args:
            batch: of the step.
            accepts: asked with step, loss and gradient norm before the update; if it refuses, nothing is updated and
                the values have `skipped`. The host then waits for the gradients.
        """
        if self._lowering:
            self._lowering.compile()
            self._lowering = None
        compilations = self._compilations()
        if self._program and accepts is None and len(batch.micro_batches) == 1:
            loss, values = self._run_program(self._program, batch)
        elif self._config.optimizer.update_in_backward:
            loss, values = self._update_in_backward(batch)
        else:
            loss, values = self._update(batch, accepts)
        self.step += 1
        kinds = {(micro_batch.segments.long, len(batch.micro_batches) > 1) for micro_batch in batch.micro_batches}
        if kinds <= self._compiled and self._compilations() > compilations:
            _log.warning("step %d compiled programs again: its batch has other shapes", self.step)
        self._compiled |= kinds
        return StepResult(self.step, {"loss": loss, **values, **batch.metrics}, batch.tokens)

    def check_fp8(self, batch: Batch) -> str | None:
        """Take layers and a head out of FP8 where it is too inaccurate on a batch; return the errors in words.

        None where nothing is multiplied in FP8, or the choice was made.
        """
        if not FORMATS[self._run.model.quantize].fp8 or self._fp8:
            return None
        placed, largest = place_batch(batch, self._mesh), self._config.model.fp8_max_error
        choice = choose_fp8(fp8_errors(self.executor, self.trainable, self.frozen, placed), largest)
        self.set_state({"fp8": {"max_error": largest, "layers": choice.layers, "head": choice.head}})
        return choice.note

    def get_state(self) -> StepState:
        """Return the JSON values that a checkpoint holds beside the arrays."""
        return {"fp8": self._fp8}

    def set_state(self, state: StepState) -> None:
        """Multiply the parts in FP8 that `get_state` returned, unless another error is allowed now."""
        fp8 = state.get("fp8")
        if fp8 and fp8["max_error"] == self._config.model.fp8_max_error:
            self._fp8 = fp8
            for executor in self._executors.values():
                executor.multiply_in_fp8(fp8["layers"], fp8["head"])
            self._program = self._make_program()
            as_lowered = all(fp8["layers"]) and fp8["head"] == self._run.model.fp8_head
            if not as_lowered or self._run.remat.layers_per_program > 1:
                self._lowering = None

    def state(self) -> dict[str, Any]:
        """Return the arrays that a checkpoint holds."""
        return {"trainable": self.trainable, "optimizer": self._optimizer_state}

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Continue from the state of a checkpoint after `step` optimizer steps."""
        self.trainable, self._optimizer_state, self.step = state["trainable"], state["optimizer"], step

    def release(self) -> None:
        """Free the state, before `restore` or `restart`."""
        self.trainable, self._optimizer_state, self._spent = {}, {}, None

    def restart(self) -> None:
        """Return to the state before step 1."""
        self.release()
        self.frozen = {}
        _, self.trainable, self.frozen = build_parameters(self._run, self.layout)
        self._optimizer_state, self.step = self._optimizer.init(self.trainable), 0

    def place(self, batch: Step) -> tuple[Batch, ...]:
        """Return a step's micro-batches on the devices."""
        return place_batch(batch.micro_batches, self._mesh)

    def visit_gradients(self, batch: Step, visit: Update) -> jax.Array:
        """Pass each part's gradients of a step to `visit`, those of the head first; return the loss."""
        return self._divided(self.executor.loss_and_update(*self._arguments(batch), visit, self._step_key()))[0]

    def _run_program(self, program: "StepProgram", batch: Step) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Run a step as one program; return as `_update` does."""
        (rows,), weight, key = batch.micro_batches, float(batch.targets), self._micro_batch_key()
        rows = rows if self._mesh is None else place_batch(rows, self._mesh)
        state = self.trainable, self._optimizer_state
        self.trainable, self._optimizer_state, values = program(*state, self.frozen, rows, weight, key, self.step)
        loss, metrics = self._divided(values.pop("loss"))
        return loss, metrics | values

    def _update(self, batch: Step, accepts: Accepts | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Update all parameters after the backward pass; return the loss, and gradient norm and learning rate."""
        spent, self._spent = self._spent, None
        loss, metrics, gradients = self.loss_and_gradients(batch, into=spent)
        if self.executor.reuses_gradients:
            self._spent = gradients
        if accepts is not None:
            norm = self._norm(gradients)
            if not accepts(self.step + 1, {"loss": float(loss), "grad_norm": float(norm)}):
                skipped = {"grad_norm": norm, **self._optimizer.learning_rate(self.step), "skipped": jnp.int32(1)}
                return loss, metrics | skipped
        return loss, metrics | self._apply(gradients)

    def loss_and_gradients(
        self, batch: Step, objective: Objective | None = None, into: Params | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array], Params]:
        """Return loss, metrics and gradients of a step's batches, and change nothing.

        Args:
            batch: of the step; sums over it are divided by its targets.
            objective: in place of the run's; programs are compiled for each.
            into: gradients whose memory the new ones take where the executor reuses it; donated.
        """
        objective = objective or self._objective
        arguments = *self._arguments(batch), self._step_key(), into
        sums, gradients = self._executor_of(objective).loss_and_gradients(*arguments)
        return objective.loss(sums), objective.metrics(sums), gradients

    def begin_anew(self) -> None:
        """Forget the optimizer's state and the steps done; keep the weights."""
        self._optimizer_state, self.step = self._optimizer.init(self.trainable), 0

    def _executor_of(self, objective: Objective) -> Executor:
        """Return the executor of an objective; the run's and the latest others are kept, with their programs."""
        executor = self._executors.pop(objective, None)
        if executor is None:
            executor = self._make_executor(self.graphdefs, objective)
            if self._fp8:
                executor.multiply_in_fp8(self._fp8["layers"], self._fp8["head"])
            others = [each for each in self._executors if each != self._objective]
            if len(others) >= _OTHER_EXECUTORS:
                _log.warning(
                    "%d losses were compiled, and the programs of the oldest are dropped: define a loss outside of the "
                    "loop, since each function object is compiled by itself",
                    len(others) + 1,
                )
                del self._executors[others[0]]
        self._executors[objective] = executor
        return executor

    def take_step(self, gradients: Params) -> dict[str, jax.Array]:
        """Update the parameters; return the gradients' norm and the learning rate."""
        values = self._apply(gradients)
        self.step += 1
        return values

    def _apply(self, gradients: Params) -> dict[str, jax.Array]:
        self.trainable, self._optimizer_state, values = self._optimizer.update(
            self.trainable, self._optimizer_state, gradients, self.step
        )
        return values

    def _update_in_backward(self, batch: Step) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Update each part as soon as its gradients exist; return the loss, and the learning rate."""

        def update_part(key: ParamKey, gradient: Params) -> None:
            if jax.tree.leaves(gradient):
                self.trainable, self._optimizer_state = self._optimizer.update_part(
                    self.trainable, self._optimizer_state, key, gradient, self.step
                )

        values = self.executor.loss_and_update(*self._arguments(batch), update_part, self._step_key())
        loss, metrics = self._divided(values)
        return loss, metrics | self._optimizer.learning_rate(self.step)

    def _compilations(self) -> int:
        return self.executor.compilations() + (self._program.compilations() if self._program else 0)

    def _divided(self, loss: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (loss, metrics of the objective)."""
        return self._objective.loss(loss), self._objective.metrics(loss)

    def _arguments(self, batch: Step) -> tuple[Params, Params, tuple[Batch, ...], float]:
        return self.trainable, self.frozen, self.place(batch), float(batch.targets)

    def _micro_batch_key(self) -> jax.Array | None:
        """Return a key as a step's first micro-batch gets it."""
        return None if (key := self._step_key()) is None else jax.random.fold_in(key, 0)

    def _step_key(self) -> jax.Array | None:
        """Return the key of dropout and noise; None without either."""
        drops = self._config.model.method == "lora" and self._config.lora.dropout
        if not drops and not self._config.model.neftune_alpha:
            return None
        return jax.random.fold_in(jax.random.key(self._config.data.seed), self.step)


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


class StepResult(NamedTuple):
    """A dispatched step, whose values may still be computing."""

    step: int
    values: dict[str, jax.Array | float]
    """loss, learning_rate and, unless parameters are updated in the backward pass, grad_norm."""
    tokens: int


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
    from_base = run.config.rollouts.teacher == "base"
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
    new = run.config.model.method == "lora" and run.adapter is None and not jax.tree.leaves(others)
    return new and isinstance(run.workload.objective, RolloutObjective) and run.workload.objective.uses_reference
