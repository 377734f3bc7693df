"""A training run from its configuration to the exported result."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import IO, Any, NotRequired, cast

import jax

from jaxglue.data.batch import Batch
from jaxglue.data.config import NO_COLUMNS, Columns
from jaxglue.data.iterator import Step
from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.engine.host_buffers import Buffers
from jaxglue.engine.policy import AUTO
from jaxglue.files.json_file import write_json
from jaxglue.hf.hub import is_hub_id
from jaxglue.parts import pinned
from jaxglue.planner.host_memory import HOST_LIMIT
from jaxglue.rl.page import write_page
from jaxglue.settings.recipe import as_dict, to_toml
from jaxglue.sharding.mesh import mesh_of
from jaxglue.terminal.console import Console
from jaxglue.training.callbacks import Callback, Callbacks, Metrics
from jaxglue.training.checkpoint import Checkpoints, NonFinite
from jaxglue.training.config import ModelConfig, TrainConfig, recorded_config
from jaxglue.training.divergence import Postmortem, Spikes, SpikeState, save_step
from jaxglue.training.evaluation import BestState, Evaluation, ExpertLoadProbe, Samples, evaluation_lines
from jaxglue.training.explain import run_reasons
from jaxglue.training.fingerprint import changed_settings, fingerprint
from jaxglue.training.interrupt import Interrupt, Output
from jaxglue.training.out_of_memory import (
    OutOfMemory,
    Overrun,
    describe,
    explained_out_of_memory,
    failed_allocation,
    is_out_of_memory,
    memory_beyond_limit,
    plan_again,
    smaller_limit,
    smaller_pool,
)
from jaxglue.training.progress import Compiling, StartupTimer, TrainingProgress
from jaxglue.training.record import (
    Diverged,
    Recorder,
    StepProfiler,
    check_finite,
    memory_use,
    read_metrics,
    save_loss_curve,
)
from jaxglue.training.reference_cache import add_reference
from jaxglue.training.remat import restore_pool
from jaxglue.training.report import RunSummary, plan_rows, print_panel, summary_json, summary_rows
from jaxglue.training.result import Result, ResultWriter, abstract_state
from jaxglue.training.resuming import check_resumable, finished_run, resume_notes
from jaxglue.training.rollout_policy import TrainedPolicy
from jaxglue.training.run_folder import RunFolder, check_inputs, check_output, shared_output_folder
from jaxglue.training.secrets import masked
from jaxglue.training.setup import Run, resolve
from jaxglue.training.start import configured_jax, planned_memory
from jaxglue.training.step import StepResult, StepsInFlight, StepState, TrainStep
from jaxglue.training.trackers import Loggers, open_loggers

_STEPS_IN_FLIGHT = 2
"""Steps that the host runs ahead of the device: enough to keep it busy, few enough to stop soon."""
_MOST_PLANS = 3
"""How often a run that takes more memory than there is may be planned again."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The surroundings of a run: the arguments of `train` beside its configuration."""

    console: Console
    timer: StartupTimer
    processes: Processes
    interrupt: Interrupt
    callbacks: Callbacks
    compute_metrics: Metrics | None


def train(
    config: TrainConfig,
    console: Console | None = None,
    timer: StartupTimer | None = None,
    processes: Processes = SINGLE_PROCESS,
    interrupt: Interrupt | None = None,
    callbacks: Sequence[Callback] = (),
    compute_metrics: Metrics | None = None,
    columns: Columns = NO_COLUMNS,
) -> RunSummary | None:
    """Train as configured and write adapter or model, checkpoints, metrics and curve to the output folder.

    Args:
        config: the run.
        console: where to print; by default standard output.
        timer: of a start-up that began before this call.
        processes: all call this; process 0 alone prints and writes, apart from checkpoints.
        interrupt: tells after an interruption which signal it was.
        callbacks: receive the run's events, in a run of one process.
        compute_metrics: of the predictions on held-out data.
        columns: of numbers in rows that it reads, each with the value of rows without it.

    Returns:
        the results of the run; None after a dry run or an interruption.

    Raises:
        ValueError: bad input, before the accelerator is used.
        OSError: a file cannot be written, as on a full disk.
    """
    if (callbacks or compute_metrics) and processes.count > 1:
        raise ValueError("callbacks: they run in one process alone, and this run has several: leave them out")
    _check_metrics(config, compute_metrics, columns)
    interrupt = interrupt or Interrupt()
    context = RunContext(
        console=console or Console(file=cast(IO[str], Output(interrupt.output_closed)), quiet=not processes.is_main),
        timer=timer or StartupTimer(),
        processes=processes,
        interrupt=interrupt,
        callbacks=Callbacks(callbacks),
        compute_metrics=compute_metrics,
    )
    config = replace(config, model=pinned_model(config), parts=pinned(config.parts))
    processes.agree("configuration", {**as_dict(config.shared), "jax": jax.__version__})
    with configured_jax(config, processes=processes.count):
        if not config.run.dry_run:
            return _train_in_folder(config, columns, context)
        _dry_run(config, context)
        return None


def _check_metrics(config: TrainConfig, compute_metrics: Metrics | None, columns: Columns) -> None:
    """Refuse metrics without predictions, and columns that nothing reads."""
    if columns and (compute_metrics is None or config.data.streaming):
        raise ValueError("columns: compute_metrics reads them, of data that are no stream: leave them out")
    if compute_metrics is None:
        return
    if not config.objective.kind.supervised:
        name = config.objective.objective
        raise ValueError(f"compute_metrics: it reads predictions of tokens, which --objective {name} has none of")
    if not (config.data.eval_data or config.data.eval_fraction):
        raise ValueError("compute_metrics: it reads held-out data: give eval_data, or eval_fraction")


def _train_in_folder(config: TrainConfig, columns: Columns, context: RunContext) -> RunSummary | None:
    """Settle the run, hold its folder and train."""
    settings, console, processes = config.run, context.console, context.processes
    run = resolve(config, processes, columns) if settings.resume else None
    if run and (summary := finished_run(run, processes)):
        print_panel(console, "done before: no step is left to train", summary_rows(summary))
        return summary
    folder = shared_output_folder(settings.output, processes, resume=settings.resume, overwrite=settings.overwrite)
    with folder as path:
        if settings.overwrite and processes.is_main:
            check_inputs(path, config.inputs)
        run = run or resolve(config, processes, columns)
        identity = fingerprint(run)
        processes.agree("model and data", identity)
        context.timer.stage("data")
        print_panel(console, "plan", plan_rows(run))
        _explain(run, context)
        output = RunFolder(path, overwrite=settings.overwrite, processes=processes)
        with closing(run.batches):
            return _train_as_planned(run, identity, output, context)


def _train_as_planned(run: Run, identity: dict[str, Any], output: RunFolder, context: RunContext) -> RunSummary | None:
    """Train; where a run takes more memory than there is, plan with less and go on from its checkpoint or the start."""
    start: Any = run.batches.get_state()
    pinned, pool = os.environ.get(HOST_LIMIT), None
    result = _attempt(run, identity, output, context, plans_left=_MOST_PLANS)
    if not isinstance(result, Overrun):
        return result
    with output.replacing():  # the run before comes back if nothing else fits
        for left in reversed(range(_MOST_PLANS)):
            restore_pool(os.environ, pinned)
            pool = smaller_pool(run, result, pool)
            again = plan_again(run, result, pool)
            context.console.print(
                f"{describe(run, result)}: planned again and started again, with --remat {again.remat}"
            )
            again.batches.set_state(start)
            result, run = _attempt(again, identity, output, context, plans_left=left, again=True), again
            if not isinstance(result, Overrun):
                return result
    raise AssertionError("the last plan's overrun is an error")


def _attempt(
    run: Run, identity: dict[str, Any], output: RunFolder, context: RunContext, *, plans_left: int, again: bool = False
) -> RunSummary | Overrun | None:
    """Train as a run is planned, with the memory of the host that this needs."""
    with explained_out_of_memory(run), planned_memory(run) as buffers:
        return Trainer(run, identity, output, context, buffers, plans_left=plans_left, again=again).run()


def _dry_run(config: TrainConfig, context: RunContext) -> None:
    """Print the plan of a run; raise the errors that it would raise before it trains, and write nothing."""
    settings = config.run
    if context.processes.is_main:
        check_output(settings.output, resume=settings.resume, overwrite=settings.overwrite)
        if settings.overwrite:
            check_inputs(settings.output, config.inputs)
    run = resolve(config, context.processes)
    if settings.resume:
        check_resumable(run)
    print_panel(context.console, "plan (dry run: nothing is trained)", plan_rows(run))
    _explain(run, context)


def _explain(run: Run, context: RunContext) -> None:
    """Print the reasons for automatic choices, where these are asked for."""
    if run.config.run.explain and context.processes.is_main:
        print_panel(context.console, "choices", run_reasons(run))


def pinned_model(config: TrainConfig) -> ModelConfig:
    """Return the run's model with its commit on the hub: the recorded one where a run resumes, else the newest."""
    model, record = config.model, config.run.output / "config.toml"
    if config.run.resume and model.revision is None and is_hub_id(model.model) and record.is_file():
        recorded = recorded_config(record).model
        if recorded.model == model.model:
            model = replace(model, revision=recorded.revision)
    return model.pinned


class RunState(BestState, StepState):
    """State of a run in a checkpoint, beside its arrays, as JSON."""

    batches: Any
    """State of the run's iterator, `BatchState` or another's."""
    first_loss: float | None
    last_loss: float | None
    spikes: NotRequired[SpikeState | None]


class Trainer:
    """One run, from its loaded weights to the exported result.

    Args:
        run: the run.
        identity: its fingerprint.
        output: its folder.
        context: its surroundings.
        host_buffers: for offloaded values; None for JAX's pool.
        plans_left: how often the run may be planned again.
        again: it was, and began before.
    """

    def __init__(
        self,
        run: Run,
        identity: dict[str, Any],
        output: RunFolder,
        context: RunContext,
        host_buffers: Buffers | None,
        *,
        plans_left: int,
        again: bool,
    ):
        self._run, self._settings, self._identity, self._again = run, run.config.run, identity, again
        self._output, self._folder = output, output.path
        self._console, self._timer, self._processes = context.console, context.timer, context.processes
        self._interrupt, self._callbacks = context.interrupt, context.callbacks
        self._is_planned = run.config.model.remat == AUTO and self._processes.count == 1
        self._may_plan = self._is_planned and plans_left > 0
        mesh = mesh_of(run.mesh)
        self._model = TrainStep(run, mesh, host_buffers)
        self._timer.stage("weights")
        if note := add_reference(run, self._model, mesh, self._processes):
            self._console.print(note)
            self._timer.stage("reference")
        shared: dict[str, Any] = {"dtype": run.config.model.compute_dtype, "attention": run.config.model.attention}
        probe = ExpertLoadProbe(self._model.graphdefs, run.model, **shared, layout=self._model.layout)
        self._evaluation = Evaluation(run, self._model.executor, probe, mesh, context.compute_metrics)
        folder = self._folder if self._processes.is_main else None
        self._samples = Samples(run, self._model.graphdefs, folder, self._console)
        self._recorder = Recorder(run, self._timer)
        self._result = ResultWriter(run, self._model, output, self._processes, self._console)
        if run.rollouts:
            run.rollouts.begin(TrainedPolicy(run, self._model, mesh), run.tokenizer)
        self._ahead = 0 if run.rollouts else _STEPS_IN_FLIGHT
        self._last_batch: Batch | None = None
        self._recent: dict[int, Step] = {}
        self._spikes = None if self._settings.on_spike == "nothing" else Spikes(self._settings.spike_sigma)

    def run(self) -> RunSummary | Overrun | None:
        """Train to the end, or until an interruption, after which the run can be resumed.

        Return early where it takes more memory than there is and can be planned again, to go on from the last
        checkpoint: nothing was written that another attempt would not write over.
        """
        begun = time.monotonic()
        with self._output.replacing(), self._open_checkpoints() as checkpoints:
            if self._settings.resume or self._again:
                self._resume(checkpoints)
            if self._has_ended:
                return self._finish(begun, checkpoints)
            if self._processes.is_main:
                self._output.begin(masked(to_toml(self._run.config.shared), os.environ))
            if self._model.step == 0 and not self._again:
                self._answer_samples("before")
            if (overrun := self._train(checkpoints)) is not None:
                if self._run.rollouts:
                    self._run.rollouts.release()
                return overrun
            if self._has_ended:
                return self._finish(begun, checkpoints)
        self._console.print(f"saved at step {self._model.step}: continue with --resume")
        return None

    @property
    def _has_ended(self) -> bool:
        return self._model.step == self._run.total_steps or self._why_stopped is not None

    @property
    def _why_stopped(self) -> str | None:
        """Return the reason of an early end for good, in words."""
        return self._evaluation.why_stale if self._evaluation.is_stale else self._callbacks.why_stopped

    def _open_checkpoints(self) -> Checkpoints:
        return Checkpoints(
            self._folder / "checkpoints",
            fingerprint=self._identity,
            keep=self._settings.keep_checkpoints,
            processes=self._processes,
            before_write=self._output.before_checkpoint,
            saved=self._output.checkpoint_saved,
        )

    def _train(self, checkpoints: Checkpoints) -> Overrun | None:
        """Train to the end or an interruption; explain a divergence; return where memory runs out, to plan again."""
        begun, start = self._model.step, self._run.batches.get_state() if self._model.step == 0 else {}
        progress = TrainingProgress(self._run.total_steps, first_step=begun, console=self._console)
        compiling = Compiling(progress, self._run.remat.compile_seconds, lambda: self._recorder.has_compiled)
        try:
            with progress, compiling, self._recorder:
                with self._interrupt:
                    if not self._again:
                        self._callbacks.call(Callback.on_start, begun, self._run.total_steps)
                    first = self._first_step(checkpoints, progress)
                if isinstance(first, Overrun):
                    return first
                with (
                    self._output.writing(*self._settings.trackers, *(["profile"] if self._settings.profile else [])),
                    self._open_loggers(begun) as loggers,
                    self._interrupt,
                ):
                    self._run_steps(checkpoints, loggers, progress, first)
        except jax.errors.JaxRuntimeError as error:
            if not self._may_plan or not is_out_of_memory(error):
                raise
            return failed_allocation(self._run, str(error))
        except Diverged as error:
            rows = self._save_rows(error.step)
            self._console.print(f"step {error.step} diverged: looking for the cause")
            postmortem = Postmortem(self._run, self._model, checkpoints, start)
            alone = self._processes.count == 1 and self._spikes is None and "eval_loss" not in error.found
            failed = self._spikes.first_in_a_row(error.step) if self._spikes else error.step
            with self._interrupt:
                cause = postmortem.explain(error, first=failed, replay=alone)
            raise ValueError(f"{error}.{rows} {cause}.") from error
        return None

    def _first_step(self, checkpoints: Checkpoints, progress: TrainingProgress) -> StepResult | Overrun:
        """Run this process's first step; return by how much it takes more memory than the limit, to plan again.

        Raises:
            OutOfMemory: it was planned as often as may be.
        """
        before = memory_use(jax.local_devices()).peak
        result = self._dispatch_step(checkpoints, progress)
        jax.block_until_ready(result.values)
        if (overrun := memory_beyond_limit(self._run, before)) is None:
            return result
        if self._may_plan:
            return overrun
        remedy = f"start again with {smaller_limit(self._run, overrun)}, or lower --batch-size or --seq-len"
        if self._is_planned:
            raise OutOfMemory(f"{describe(self._run, overrun)}, though planned {_MOST_PLANS} times more: {remedy}")
        progress.say(f"{describe(self._run, overrun)}: where no more is free, {remedy}, or change --remat")
        return result

    def _save_rows(self, step: int) -> str:
        """Write the rows of a recent step for a replay; return a sentence that names the file."""
        path = self._folder / f"failed-step-{step}.npz"
        if step not in self._recent or not self._processes.is_main:
            return ""
        save_step(path, self._recent[step])
        return f" Its rows are in {path}."

    def _run_steps(
        self, checkpoints: Checkpoints, loggers: Loggers, progress: TrainingProgress, first: StepResult
    ) -> None:
        """Dispatch step after step after the first one, reading a step's loss while later ones run."""
        eval_every = self._settings.eval_every or self._run.batches.steps_per_epoch
        save_every = self._settings.save_every or eval_every
        profiled = self._settings.profile if self._processes.is_main else 0
        profiler = StepProfiler(self._folder / "profile", first=self._model.step + 3, count=profiled)
        total, stop, due, in_flight = self._run.total_steps, False, False, StepsInFlight()
        dispatched: StepResult | None = first
        with profiler:
            while dispatched or (self._model.step < total and not stop):
                profiler.before(self._model.step + 1)
                in_flight.add(dispatched or self._dispatch_step(checkpoints, progress))
                dispatched = None
                stop = (self._must_stop() or self._callbacks.why_stopped is not None) and not self._is_in_spikes
                look = self._is_due(eval_every)
                evaluate = self._evaluation.is_needed and look
                due = due or self._is_due(save_every)
                save = (stop or due) and not self._is_in_spikes
                drain = look or save or not self._recorder.has_compiled
                for result, done in in_flight.take(leave=0 if drain else self._ahead):
                    values = self._recorder.record(result, done, loggers, progress)
                    self._callbacks.call(Callback.on_step, result.step, values)
                with self._recorder.meter.paused():
                    eval_loss = self._evaluate(loggers, progress) if evaluate else None
                    if look and self._model.step < total:
                        self._answer_samples(f"step {self._model.step} of")
                    # Only after the finite checks, so a diverged step is never saved.
                    if save or self._must_keep:
                        self._save(checkpoints, eval_loss)
                        due = False
                stop = stop or self._evaluation.is_stale

    def _open_loggers(self, step: int) -> Loggers:
        """Open the receivers of metrics, which go on after a step."""
        if not self._processes.is_main:
            return Loggers()
        settings = masked(as_dict(self._run.config.shared), os.environ)
        trackers = self._settings.trackers
        return open_loggers(self._folder, resume_step=step, trackers=trackers, settings=settings)

    def _dispatch_step(self, checkpoints: Checkpoints, progress: TrainingProgress) -> StepResult:
        with self._recorder.meter.waiting():
            batch = next(self._run.batches)
        self._last_batch = batch.micro_batches[-1]
        if note := self._model.check_fp8(self._last_batch):
            self._console.print(note)
        self._recent = {**dict(list(self._recent.items())[-_STEPS_IN_FLIGHT:]), self._model.step + 1: batch}
        if self._spikes is None:
            return self._model.dispatch(batch)
        result = self._model.dispatch(batch, self._spikes.accepts)
        if "skipped" in result.values:
            self._skip(result, checkpoints, progress)
        return result

    def _skip(self, result: StepResult, checkpoints: Checkpoints, progress: TrainingProgress) -> None:
        """Say that a step was a spike and, to rewind, return to the weights and moments of the last checkpoint.

        After a second spike in a row that is one which an accepted step has followed, if there is one.
        """
        assert self._spikes is not None
        values = ", ".join(f"{name} {float(result.values[name]):.4g}" for name in ("loss", "grad_norm"))
        rewinds, before = self._settings.on_spike == "rewind", self._spikes.first_in_a_row(result.step) - 1
        if rewinds and self._spikes.in_a_row > 1 and any(step < before for step in checkpoints.steps):
            checkpoints.reject(before)
        if rewinds and checkpoints.steps:
            abstract = abstract_state(self._model.state())
            self._model.release()
            restored = checkpoints.restore_latest(abstract)
            assert restored is not None
            self._model.restore(restored.state, result.step)
            progress.say(f"step {result.step}: spike ({values}); back to the weights of step {restored.step}")
        else:
            progress.say(f"step {result.step}: spike ({values}); its update is left out")

    @property
    def _is_in_spikes(self) -> bool:
        return self._spikes is not None and self._spikes.in_a_row > 0

    def _must_stop(self) -> bool:
        """Tell whether any process was asked to stop; several processes ask each other at the steps they log."""
        if self._processes.count > 1 and not self._recorder.is_log_due(self._model.step):
            return False
        self._interrupt.number = max(self._processes.all_gather_object(self._interrupt.number))
        return bool(self._interrupt.number)

    @property
    def _must_keep(self) -> bool:
        """Return whether this step has the best weights, to be exported, or ends the run early."""
        best = self._evaluation.best
        is_best = self._settings.keep != "last" and best is not None and best[1] == self._model.step
        return is_best or self._evaluation.is_stale

    def _is_due(self, every: int) -> bool:
        return self._model.step % every == 0 or self._model.step == self._run.total_steps

    def _evaluate(self, loggers: Loggers, progress: TrainingProgress) -> float | None:
        """Log an evaluation of the model; return its held-out loss, None without held-out data."""
        step = self._model.step
        values = self._evaluation.read(step, self._model.trainable, self._model.frozen, self._last_batch)
        loggers.log(step, values)
        eval_loss = values.get("eval_loss")
        if lines := list(evaluation_lines(values)):
            progress.say(f"step {step}: " + "\n".join(lines))
        if eval_loss is not None:
            check_finite(step, {"eval_loss": eval_loss})
        self._callbacks.call(Callback.on_evaluation, step, values)
        return eval_loss

    def _answer_samples(self, when: str) -> None:
        model = self._model
        self._samples.answer(when, model.step, model.trainable, model.frozen, model.executor.fp8_layers)

    def _save(self, checkpoints: Checkpoints, eval_loss: float | None) -> None:
        host: RunState = {
            "batches": self._run.batches.get_state(),
            **self._evaluation.get_state(),
            **self._model.get_state(),
            "first_loss": self._recorder.first_loss,
            "last_loss": self._recorder.last_loss,
            "spikes": self._spikes.get_state() if self._spikes else None,
        }
        try:
            checkpoints.save(self._model.step, self._model.state(), host, eval_loss=eval_loss)
            if self._run.rollouts:
                checkpoints.wait()
                self._run.rollouts.saved()
                self._write_page()
        except NonFinite as error:
            raise Diverged(self._model.step, f"after its update {error}") from error
        self._callbacks.call(Callback.on_save, self._model.step, self._folder / "checkpoints")

    def _resume(self, checkpoints: Checkpoints) -> None:
        restored = checkpoints.restore_latest(abstract_state(self._model.state()))
        changed = changed_settings(self._folder / "config.toml", self._run.config)
        if restored is None:
            self._console.print("no checkpoint yet: starting from step 0")
            self._forget_answers(changed)
            return
        host, notes = cast(RunState, restored.host), list(resume_notes(self._run, restored))
        self._model.restore(restored.state, restored.step)
        self._run.batches.set_state(host["batches"])
        self._evaluation.set_state(host)
        self._model.set_state(host)
        self._recorder.first_loss, self._recorder.last_loss = host["first_loss"], host["last_loss"]
        if self._spikes and (spikes := host.get("spikes")):
            self._spikes.set_state(spikes)
        self._forget_answers(changed)
        self._console.print("\n".join(notes))

    def _forget_answers(self, changed: Mapping[str, str]) -> None:
        """Forget answers that were kept for later steps under other settings."""
        if self._run.rollouts and changed and self._processes.is_main:
            self._run.rollouts.forget()

    def _finish(self, begun: float, checkpoints: Checkpoints) -> RunSummary:
        """Export the result, answer samples and write curve and summary; `begun` is the start, `time.monotonic`."""
        _, best_step = self._evaluation.best or (None, None)
        if self._why_stopped:
            self._console.print(self._why_stopped)
        result = self._result.write(checkpoints, best_step, self._last_batch)
        self._answer_samples("after")
        summary = self._summarize(result, time.monotonic() - begun)
        if self._processes.is_main:
            save_loss_curve(summary.metrics, summary.curve)
            self._write_page()
            asked = {"keep": self._settings.keep, "early_stopping": self._settings.early_stopping}
            write_json(self._folder / "summary.json", summary_json(summary) | asked | {"fingerprint": self._identity})
        print_panel(self._console, "done", summary_rows(summary))
        self._callbacks.call(Callback.on_end, summary)
        return summary

    def _write_page(self) -> None:
        """Write the page about rollouts, where there are some."""
        if self._run.rollouts:
            write_page(self._folder, read_metrics(self._folder / "metrics.jsonl"))

    def _summarize(self, result: Result, seconds: float) -> RunSummary:
        recorder, speed = self._recorder, self._recorder.meter.total()
        best_loss, best_step = self._evaluation.best or (None, None)
        assert recorder.first_loss is not None and recorder.last_loss is not None
        return RunSummary(
            steps=self._model.step,
            first_loss=recorder.first_loss,
            last_loss=recorder.last_loss,
            best_eval_loss=best_loss,
            best_eval_step=best_step,
            tokens_per_second=speed.tokens_per_second,
            mfu=speed.mfu,
            peak_memory_gb=memory_use(jax.local_devices()).peak / 1e9,
            seconds=seconds,
            startup_seconds=self._timer.stages,
            adapter=result.path,
            adapter_step=result.step,
            last_adapter=result.last,
            stopped_early=self._why_stopped,
            checkpoints=self._folder / "checkpoints",
            metrics=self._folder / "metrics.jsonl",
            curve=self._folder / "loss.png",
            skipped_steps=self._spikes.steps if self._spikes else [],
        )
