"""The training run from its configuration to the exported result."""

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxglue.cli import as_dict, to_toml
from jaxglue.data.batch import Batch
from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.engine.executor import Executor
from jaxglue.hf.files import write_json
from jaxglue.models.parameters import ParamKey, Params
from jaxglue.sharding.layout import Layout
from jaxglue.sharding.mesh import make_mesh, place_batch
from jaxglue.training.checkpoint import Checkpoints
from jaxglue.training.config import TrainConfig
from jaxglue.training.curve import save_loss_curve
from jaxglue.training.evaluation import Evaluation
from jaxglue.training.expert_load import ExpertLoadProbe
from jaxglue.training.fingerprint import fingerprint
from jaxglue.training.in_flight import StepResult, StepsInFlight
from jaxglue.training.interrupt import Interrupt
from jaxglue.training.loggers import Loggers, open_loggers
from jaxglue.training.metrics import check_finite
from jaxglue.training.optimizer import Optimizer
from jaxglue.training.output import shared_output_folder
from jaxglue.training.plan_view import plan_rows
from jaxglue.training.profile import StepProfiler
from jaxglue.training.progress import StepReport, TrainingProgress
from jaxglue.training.samples import Samples
from jaxglue.training.setup import Setup, prepare
from jaxglue.training.startup import StartupTimer
from jaxglue.training.summary import RunSummary, print_panel, summary_json, summary_rows
from jaxglue.training.throughput import Meter, memory_use
from jaxglue.training.weights import build_parameters, export_result

_log = logging.getLogger(__name__)
_STEPS_IN_FLIGHT = 2
"""Steps that the host may be ahead of the device: enough to keep it busy, few enough to stop soon."""


def train(
    config: TrainConfig,
    console: Console | None = None,
    timer: StartupTimer | None = None,
    processes: Processes = SINGLE_PROCESS,
) -> RunSummary | None:
    """Trains as configured, and writes adapter (or model), checkpoints, metrics and curve to the output folder.

    Args:
        config: the run.
        console: where to print; by default standard output.
        timer: of the start-up, if it began before this call.
        processes: those of the run, each of which calls this; process 0 alone prints and writes, but for checkpoints.

    Returns:
        what the closing panel shows; None after a dry run or an interruption.

    Raises:
        ValueError: bad input, before the accelerator is used.
        OSError: the disk is full, ….
    """
    console, timer = console or Console(quiet=not processes.is_main), timer or StartupTimer()
    processes.agree("configuration", {**as_dict(config.shared), "jax": jax.__version__})
    if config.run.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(config.run.compilation_cache.expanduser()))
    if config.run.dry_run:
        print_panel(console, "plan (dry run: nothing is trained)", plan_rows(prepare(config, processes)))
        return None
    run = config.run
    with shared_output_folder(run.output, processes, resume=run.resume, overwrite=run.overwrite) as folder:
        setup = prepare(config, processes)
        processes.agree("model and data", fingerprint(setup))
        timer.stage("data")
        print_panel(console, "plan", plan_rows(setup))
        if processes.is_main:
            (folder / "config.toml").write_text(to_toml(config.shared), encoding="utf-8")
        return Trainer(setup, folder, console, timer, processes).run()


class Trainer:
    """One run: the model, its optimizer and where they stand."""

    def __init__(
        self, setup: Setup, folder: Path, console: Console, timer: StartupTimer, processes: Processes = SINGLE_PROCESS
    ):
        self._setup, self._config, self._run = setup, setup.config, setup.config.run
        self._processes = processes
        self._folder, self._console, self._timer = folder, console, timer
        self._mesh = make_mesh(setup.mesh) if setup.mesh.devices > 1 else None
        layout = Layout(self._mesh, setup.config.model.compute_dtype)
        self._graphdefs, self._trainable, self._frozen = build_parameters(setup, layout)
        timer.stage("weights")
        model = self._config.model
        shared: dict[str, Any] = {"dtype": model.compute_dtype, "attention": model.attention}
        self._executor = Executor(
            self._graphdefs,
            setup.model,
            policy=setup.remat.policies,
            **shared,
            stream_weights=setup.remat.stream_weights,
            router_losses=model.router_losses,
            mesh=self._mesh,
        )
        probe = ExpertLoadProbe(self._graphdefs, setup.model, **shared, layout=layout)
        self._evaluation = Evaluation(setup, self._executor, probe, self._mesh)
        self._optimizer = Optimizer(self._config.optimizer, setup.total_steps, layout)
        self._optimizer_state = self._optimizer.init(self._trainable)
        self._samples = Samples(setup, self._graphdefs, folder if processes.is_main else None, console)
        self._step = 0
        self._last_batch: Batch | None = None
        self._warm = False
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._meter = Meter(model_flops_per_token=setup.flops_per_token, devices=jax.devices())

    def run(self) -> RunSummary | None:
        """Trains to the end, or until an interruption, after which the run can be resumed."""
        begun = time.monotonic()
        checkpoints = Checkpoints(
            self._folder / "checkpoints",
            fingerprint=fingerprint(self._setup),
            keep=self._run.keep_checkpoints,
            processes=self._processes,
        )
        with checkpoints:
            self._resume(checkpoints)
            with self._loggers() as metrics, Interrupt() as interrupt:
                if self._step == 0:
                    self._samples.answer("before", 0, self._trainable, self._frozen)
                self._train(checkpoints, metrics, interrupt)
        if self._step < self._setup.total_steps:
            self._console.print(f"saved at step {self._step}: continue with --resume", highlight=False)
            return None
        self._samples.answer("after", self._step, self._trainable, self._frozen)
        result = export_result(self._setup, self._trainable, self._folder, write=self._processes.is_main)
        metrics_path = self._folder / "metrics.jsonl"
        summary = self._summarize(result, metrics_path, time.monotonic() - begun)
        if self._processes.is_main:
            save_loss_curve(metrics_path, self._folder / "loss.png")
            write_json(self._folder / "summary.json", summary_json(summary))
        print_panel(self._console, "done", summary_rows(summary))
        return summary

    def _train(self, checkpoints: Checkpoints, metrics: Loggers, interrupt: Interrupt) -> None:
        """Dispatches step after step, reading a step's loss while later ones run."""
        total, stop, in_flight = self._setup.total_steps, False, StepsInFlight()
        save_every = self._run.save_every or self._eval_every
        profiled = self._run.profile if self._processes.is_main else 0
        profiler = StepProfiler(self._folder / "profile", first=self._step + 4, count=profiled)
        with TrainingProgress(total, first_step=self._step, console=self._console) as progress, profiler:
            while self._step < total and not stop:
                profiler.before(self._step + 1)
                in_flight.add(self._dispatch_step())
                stop = self._must_stop(interrupt)
                evaluate = self._evaluation.is_needed and self._is_due(self._eval_every)
                save = stop or self._is_due(save_every)
                drain = evaluate or save or not self._warm
                for result, done in in_flight.take(leave=0 if drain else _STEPS_IN_FLIGHT):
                    self._record(result, done, metrics, progress)
                with self._meter.paused():
                    eval_loss = self._evaluate(metrics, progress) if evaluate else None
                    if save:
                        self._save(checkpoints, eval_loss)

    def _loggers(self) -> Loggers:
        return open_loggers(self._folder, resume_step=self._step) if self._processes.is_main else Loggers()

    def _must_stop(self, interrupt: Interrupt) -> bool:
        """Whether any process was asked to; several processes compare at the steps that are logged."""
        if self._processes.count > 1 and not self._is_log_due(self._step):
            return False
        return any(self._processes.all_gather_object(interrupt.requested))

    def _dispatch_step(self) -> StepResult:
        with self._meter.waiting():
            step = next(self._setup.batches)
        key = self._dropout_key()
        compiled = self._executor.compilations()
        arguments = (self._trainable, self._frozen, place_batch(step.micro_batches, self._mesh), float(step.targets))
        if self._config.optimizer.update_in_backward:
            loss = self._executor.loss_and_update(*arguments, self._update_part, key)
            values = self._optimizer.learning_rate(self._step)
        else:
            loss, gradients = self._executor.loss_and_gradients(*arguments, key)
            self._trainable, self._optimizer_state, values = self._optimizer.update(
                self._trainable, self._optimizer_state, gradients, self._step
            )
        if self._warm and self._executor.compilations() > compiled:
            _log.warning("step %d compiled programs again: its batch has other shapes", self._step + 1)
        self._step, self._last_batch = self._step + 1, step.micro_batches[-1]
        return StepResult(self._step, {"loss": loss, **values}, step.tokens)

    def _update_part(self, place: ParamKey, gradient: Params) -> None:
        if jax.tree.leaves(gradient):
            self._trainable, self._optimizer_state = self._optimizer.update_part(
                self._trainable, self._optimizer_state, place, gradient, self._step
            )

    def _dropout_key(self) -> jax.Array | None:
        if self._config.model.method == "full" or not self._config.lora.dropout:
            return None
        return jax.random.fold_in(jax.random.key(self._config.data.seed), self._step)

    def _record(self, result: StepResult, done: float, metrics: Loggers, progress: TrainingProgress) -> None:
        """Waits for a step's values, writes them down, and shows them when a line is due.

        A checkpoint is written after its step's values are here: none holds what a refused step has left.
        """
        values: dict[str, Any] = {name: float(value) for name, value in result.values.items()}
        check_finite(result.step, values)
        self._last_loss = values["loss"]
        progress.advance(result.step)
        first = not self._warm
        if first:
            self._start_measuring(result.step, progress)
        else:
            self._meter.add(result.tokens, done)
        if self._is_log_due(result.step) and not first:
            memory_gb = memory_use(jax.local_devices()).used / 1e9
            report = StepReport(**{"grad_norm": None, **values}, **self._meter.read()._asdict(), memory_gb=memory_gb)
            progress.report(result.step, report)
            values = dataclasses.asdict(report)
        metrics.log(result.step, values)

    def _start_measuring(self, step: int, progress: TrainingProgress) -> None:
        """The first step is done: what it took was compilation, and does not count."""
        self._warm = True
        self._first_loss = self._last_loss if self._first_loss is None else self._first_loss
        self._meter.restart()
        self._timer.stage("first step")
        progress.say(f"step {step}: loss {self._last_loss:.4f}; start-up took {self._timer}")

    @property
    def _eval_every(self) -> int:
        return self._run.eval_every or self._setup.batches.steps_per_epoch

    def _is_due(self, every: int) -> bool:
        return self._step % every == 0 or self._step == self._setup.total_steps

    def _is_log_due(self, step: int) -> bool:
        return step % self._run.log_every == 0 or step == self._setup.total_steps

    def _evaluate(self, metrics: Loggers, progress: TrainingProgress) -> float | None:
        """Writes the figures of the model as it stands; its loss on held-out data, None without such data."""
        values = self._evaluation.read(self._step, self._trainable, self._frozen, self._last_batch)
        metrics.log(self._step, values)
        eval_loss = values.get("eval_loss")
        if eval_loss is not None:
            progress.say(f"step {self._step}: eval loss {eval_loss:.4f}")
        return eval_loss

    def _save(self, checkpoints: Checkpoints, eval_loss: float | None) -> None:
        host = {
            "batches": self._setup.batches.get_state(),
            "best_eval": self._evaluation.best,
            "first_loss": self._first_loss,
            "last_loss": self._last_loss,
        }
        checkpoints.save(self._step, self._state(), host, eval_loss=eval_loss)

    def _resume(self, checkpoints: Checkpoints) -> None:
        if not self._run.resume:
            return
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._state())
        restored = checkpoints.restore_latest(abstract)
        if restored is None:
            self._console.print("no checkpoint yet: starting from step 0", highlight=False)
            return
        self._trainable, self._optimizer_state = restored.state["trainable"], restored.state["optimizer"]
        self._step = restored.step
        self._setup.batches.set_state(restored.host["batches"])
        self._evaluation.best = restored.host["best_eval"] and tuple(restored.host["best_eval"])
        self._first_loss, self._last_loss = restored.host["first_loss"], restored.host["last_loss"]
        self._console.print(f"resumed from step {self._step}", highlight=False)

    def _state(self) -> dict[str, Any]:
        return {"trainable": self._trainable, "optimizer": self._optimizer_state}

    def _summarize(self, result: Path, metrics: Path, seconds: float) -> RunSummary:
        speed = self._meter.total()
        best = self._evaluation.best or (None, None)
        assert self._first_loss is not None and self._last_loss is not None
        return RunSummary(
            steps=self._step,
            first_loss=self._first_loss,
            last_loss=self._last_loss,
            best_eval_loss=best[0],
            best_eval_step=best[1],
            tokens_per_second=speed.tokens_per_second,
            mfu=speed.mfu,
            peak_memory_gb=memory_use(jax.local_devices()).peak / 1e9,
            seconds=seconds,
            startup_seconds=self._timer.stages,
            adapter=result,
            checkpoints=self._folder / "checkpoints",
            metrics=metrics,
            curve=self._folder / "loss.png",
        )
