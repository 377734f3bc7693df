"""The training loop: from loaded weights over step after step to the exported result."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NotRequired, cast

import jax
import numpy as np

from jaxglue.data.batch import Batch
from jaxglue.data.iterator import Step
from jaxglue.engine.policy import AUTO
from jaxglue.files.json_file import write_json
from jaxglue.settings.recipe import as_dict, to_toml
from jaxglue.settings.secrets import masked
from jaxglue.sharding.mesh import mesh_of, place_batch
from jaxglue.training.callbacks import Callback, floats
from jaxglue.training.checkpoint import Checkpoints, NonFinite
from jaxglue.training.context import RunContext
from jaxglue.training.divergence import Spikes, SpikeState, explain_divergence, save_step
from jaxglue.training.evaluation import BestState, Evaluation, Samples, evaluation_lines
from jaxglue.training.fingerprint import changed_settings
from jaxglue.training.memory import planned_memory
from jaxglue.training.out_of_memory import (
    OutOfMemory,
    Overrun,
    describe,
    explained_out_of_memory,
    failed_allocation,
    is_out_of_memory,
    memory_beyond_limit,
    smaller_limit,
)
from jaxglue.training.progress import SAMPLING, WAITING, Compiling, TrainingProgress
from jaxglue.training.record import (
    Diverged,
    Recorder,
    StepProfiler,
    check_finite,
    memory_use,
    reward_change,
    save_loss_curve,
)
from jaxglue.training.reference_cache import add_reference
from jaxglue.training.report import RunSummary, plan_json, print_panel, summary_json, summary_rows
from jaxglue.training.result import abstract_state, write_result
from jaxglue.training.resuming import resume_notes
from jaxglue.training.rollout_policy import TrainedPolicy
from jaxglue.training.run import Run
from jaxglue.training.run_folder import RunFolder
from jaxglue.training.step import (
    StepParts,
    StepResult,
    StepsInFlight,
    StepState,
    TrainState,
    check_fp8,
    multiply_in_fp8,
    prepare_steps,
    train_step,
)
from jaxglue.training.trackers import Loggers, open_loggers
from jaxglue.ui.page import PAGE, write_page

_STEPS_IN_FLIGHT = 2
"""Steps that the host runs ahead of the device: enough to keep it busy, few enough to stop soon."""
MOST_PLANS = 3
"""How often a run that takes more memory than there is may be planned again."""


class RunState(BestState, StepState):
    """State of a run in a checkpoint, beside its arrays, as JSON."""

    batches: Any
    """State of the run's iterator, `BatchState` or another's."""
    first_loss: float | None
    last_loss: float | None
    spikes: NotRequired[SpikeState | None]


@dataclass(kw_only=True)
class Training:
    """A run while it trains: its state, and what reads, measures and records it."""

    run: Run
    context: RunContext
    parts: StepParts
    state: TrainState
    """The model, which each step replaces."""
    policy: TrainedPolicy | None
    """The model as reinforcement learning sees it."""
    evaluation: Evaluation
    samples: Samples
    recorder: Recorder
    spikes: Spikes | None
    checkpoints: Checkpoints
    output: RunFolder
    identity: dict[str, Any]
    """Fingerprint of the run."""
    again: bool
    """It was planned again, and began before."""
    plans: int
    """How often it may be planned again."""
    last_batch: Batch | None = None
    first_batch: Any = None
    """State of the batches before the first step."""
    drafts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Shares of accepted drafts; see `RunSummary`."""
    recent: dict[int, Step] = field(default_factory=dict)
    """The latest steps' rows, to be written if one of them fails."""

    @property
    def why_stopped(self) -> str | None:
        """Return the reason of an early end for good, in words."""
        return self.evaluation.why_stale if self.evaluation.is_stale else self.context.callbacks.why_stopped

    @property
    def has_ended(self) -> bool:
        """Tell whether no step is left."""
        return self.state.step == self.run.schedule.total_steps or self.why_stopped is not None

    @property
    def is_planned(self) -> bool:
        """Tell whether another plan may take less memory."""
        return self.run.asked.remat == AUTO and self.context.processes.count == 1

    @property
    def is_in_spikes(self) -> bool:
        """Tell whether the last step was a spike, after which the weights may be ruined."""
        return self.spikes is not None and self.spikes.in_a_row > 0

    @contextmanager
    def policy_in_use(self) -> Iterator[None]:
        """Let the policy, if there is one, write answers by the present state, whose moments it may move."""
        if self.policy is None:
            yield
            return
        self.policy.state = self.state
        try:
            yield
        finally:
            self.state = self.policy.state

    def answer_samples(self, when: str) -> None:
        """Answer the sample prompts with the present weights."""
        state = self.state
        self.samples.answer(when, state.step, state.trainable, state.frozen, self.parts.executor.fp8_layers)


def run_loop(
    run: Run, identity: dict[str, Any], output: RunFolder, context: RunContext, *, plans_left: int, again: bool = False
) -> RunSummary | Overrun | None:
    """Load the weights, resume, train to the end, and export; None after an interruption, which can be resumed.

    Return early where a step takes more memory than there is and the run can be planned again, to go on from the last
    checkpoint: nothing was written that another attempt would not write over.
    """
    processes, console, timer = context.processes, context.console, context.timer
    mesh = mesh_of(run.mesh)
    with explained_out_of_memory(run), planned_memory(run) as buffers:
        parts, state = prepare_steps(run, mesh, buffers)
        timer.stage("weights")
        if note := add_reference(run, parts, state, processes):
            console.print(note)
            timer.stage("reference")
        evaluation = Evaluation(run, parts, context.compute_metrics)
        samples = Samples(run, parts.graphdefs, output.path if processes.is_main else None, console)
        recorder, policy = Recorder(run, timer), None
        if run.rollouts:
            policy = TrainedPolicy(run, parts, state)
            run.rollouts.begin(policy, run.tokenizer)
        begun = time.monotonic()
        open_checkpoints = partial(
            Checkpoints,
            output.path / "checkpoints",
            fingerprint=identity,
            keep=run.output.checkpoints,
            processes=processes,
            before_write=output.before_checkpoint,
            saved=output.checkpoint_saved,
        )
        # Opened once those of the run before are aside: of steps that it finds there it would save none.
        with output.replacing(), open_checkpoints() as checkpoints:
            training = Training(
                run=run,
                context=context,
                parts=parts,
                state=state,
                policy=policy,
                evaluation=evaluation,
                samples=samples,
                recorder=recorder,
                spikes=Spikes(run.spikes.sigma) if run.spikes else None,
                checkpoints=checkpoints,
                output=output,
                identity=identity,
                again=again,
                plans=plans_left,
                first_batch=run.batches.get_state() if run.draft else None,
            )
            if run.output.resume or again:
                _resume(training)
            if not training.has_ended:
                if processes.is_main:
                    output.begin(masked(to_toml(run.recorded.shared), os.environ), plan_json(run))
                if training.state.step == 0 and not again:
                    training.answer_samples("before")
                if (overrun := _run_steps(training)) is not None:
                    if run.rollouts:
                        run.rollouts.release()
                    return overrun
            if training.has_ended:
                return _finish(training, begun)
        console.print(f"saved at step {training.state.step}: continue with --resume")
        return None


def _run_steps(training: Training) -> Overrun | None:
    """Train to the end or an interruption; explain a divergence; return where memory runs out, to plan again."""
    run, context, recorder = training.run, training.context, training.recorder
    begun, start = training.state.step, run.batches.get_state() if training.state.step == 0 else {}
    waits_for = SAMPLING if run.rollouts else WAITING
    progress = TrainingProgress(
        run.schedule.total_steps, first_step=begun, waits_for=waits_for, console=context.console
    )
    compiling = Compiling(progress, run.remat.compile_seconds, lambda: recorder.has_compiled)
    folders = [*run.output.trackers, *(["profile"] if run.output.profile else [])]
    try:
        with progress, compiling, recorder:
            with context.interrupt:
                if not training.again:
                    context.callbacks.call(Callback.on_start, begun, run.schedule.total_steps)
                first = _first_step(training, progress)
            if isinstance(first, Overrun):
                return first
            with training.output.writing(*folders), _open_loggers(training, begun) as loggers, context.interrupt:
                _loop(training, loggers, progress, first)
    except jax.errors.JaxRuntimeError as error:
        if not (training.is_planned and training.plans) or not is_out_of_memory(error):
            raise
        return failed_allocation(run, str(error))
    except Diverged as error:
        raise ValueError(_explained(training, error, start)) from error
    return None


def _first_step(training: Training, progress: TrainingProgress) -> StepResult | Overrun:
    """Run this process's first step; return by how much it takes more memory than the limit, to plan again.

    Raises:
        OutOfMemory: it was planned as often as may be.
    """
    run, before = training.run, memory_use(jax.local_devices()).peak
    result = _dispatch(training, progress)
    jax.block_until_ready(result.values)
    if (overrun := memory_beyond_limit(run, before)) is None:
        return result
    if training.is_planned and training.plans:
        return overrun
    remedy = f"start again with {smaller_limit(run, overrun)}, or lower --batch-size or --seq-len"
    if training.is_planned:
        raise OutOfMemory(f"{describe(run, overrun)}, though planned {MOST_PLANS} times more: {remedy}")
    progress.say(f"{describe(run, overrun)}: where no more is free, {remedy}, or change --remat")
    return result


def _loop(training: Training, loggers: Loggers, progress: TrainingProgress, first: StepResult) -> None:
    """Dispatch step after step after the first one, evaluate and save between them, and record what they return.

    The host runs ahead of the device, and reads a step's loss while later ones run.
    """
    run, context, recorder, evaluation = training.run, training.context, training.recorder, training.evaluation
    total, interrupt, processes = run.schedule.total_steps, context.interrupt, context.processes
    profiler = StepProfiler(
        training.output.path / "profile",
        first=training.state.step + 3,
        count=run.output.profile if processes.is_main else 0,
    )
    # Answers are written by the weights of now: a step on them begins when the one before is done.
    ahead = 0 if run.rollouts else _STEPS_IN_FLIGHT
    stop, due, in_flight = False, False, StepsInFlight()
    dispatched: StepResult | None = first
    with profiler, _saved_before_failure(training, in_flight, loggers, progress):
        while dispatched or (training.state.step < total and not stop):
            profiler.before(training.state.step + 1)
            in_flight.add(dispatched or _dispatch(training, progress))
            dispatched, step = None, training.state.step

            # Several processes stop together, and ask each other at the steps they log.
            if processes.count == 1 or recorder.is_log_due(step):
                interrupt.number = max(processes.all_gather_object(interrupt.number))
                stop = bool(interrupt.number)
            stop = (stop or context.callbacks.why_stopped is not None) and not training.is_in_spikes
            look = step % run.cadence.evaluate == 0 or step == total
            due = due or step % run.cadence.save == 0 or step == total
            save = (stop or due) and not training.is_in_spikes

            drain = look or save or not recorder.has_compiled
            for result, done in in_flight.take(leave=0 if drain else ahead):
                values = recorder.record(result, done, loggers, progress)
                context.callbacks.call(Callback.on_step, result.step, floats(values))

            with recorder.meter.paused():
                eval_loss = _evaluate(training, loggers, progress) if look and evaluation.is_needed else None
                if look and step < total:
                    training.answer_samples(f"step {step} of")
                # The best weights are kept to be exported, as are those with which the run ends early.
                is_best = run.output.keep != "last" and evaluation.best is not None and evaluation.best[1] == step
                # Only after the finite checks, so a diverged step is never saved.
                if save or is_best or evaluation.is_stale:
                    _save(training, eval_loss)
                    due = False
            stop = stop or evaluation.is_stale


def _dispatch(training: Training, progress: TrainingProgress) -> StepResult:
    """Take a step on the next rows; of a spike, leave out the update, and perhaps return to the last checkpoint."""
    with training.recorder.meter.waiting(), training.policy_in_use():
        batch = next(training.run.batches)
    parts, state = training.parts, training.state
    training.last_batch = batch.micro_batches[-1]
    if note := check_fp8(parts, state, training.last_batch):
        training.context.console.print(note)
    training.recent[state.step + 1] = batch
    training.recent.pop(state.step - _STEPS_IN_FLIGHT, None)
    accepts = training.spikes.accepts if training.spikes else None
    training.state, result = train_step(parts, state, batch, accepts)
    if "skipped" in result.values:
        _skip(training, result, progress)
    return result


def _skip(training: Training, result: StepResult, progress: TrainingProgress) -> None:
    """Say that a step was a spike and, to rewind, return to the weights and moments of the last checkpoint.

    After a second spike in a row that is one which an accepted step has followed, if there is one.
    """
    spikes, checkpoints, plan = training.spikes, training.checkpoints, training.run.spikes
    assert spikes is not None and plan is not None
    values = ", ".join(f"{name} {float(result.values[name]):.4g}" for name in ("loss", "grad_norm"))
    before = spikes.first_in_a_row(result.step) - 1
    if plan.rewinds and spikes.in_a_row > 1 and any(step < before for step in checkpoints.steps):
        checkpoints.reject(before)
    if plan.rewinds and checkpoints.steps:
        abstract = abstract_state(training.state.saved)
        training.state.free()
        restored = checkpoints.restore_latest(abstract)
        assert restored is not None
        training.state = training.state.restored(restored.state, result.step)
        progress.say(f"step {result.step}: spike ({values}); back to the weights of step {restored.step}")
    else:
        progress.say(f"step {result.step}: spike ({values}); its update is left out")


def _evaluate(training: Training, loggers: Loggers, progress: TrainingProgress) -> float | None:
    """Log an evaluation of the model; return its held-out loss, None without held-out data."""
    state = training.state
    with training.policy_in_use():
        values = training.evaluation.read(state.step, state.trainable, state.frozen, training.last_batch)
    loggers.log(state.step, values)
    eval_loss = values.get("eval_loss")
    if lines := list(evaluation_lines(values)):
        progress.say(f"step {state.step}: " + "\n".join(lines))
    if eval_loss is not None:
        check_finite(state.step, {"eval_loss": eval_loss})
    training.context.callbacks.call(Callback.on_evaluation, state.step, floats(values))
    return eval_loss


@contextmanager
def _saved_before_failure(
    training: Training, in_flight: StepsInFlight, loggers: Loggers, progress: TrainingProgress
) -> Iterator[None]:
    """Save a checkpoint of the steps done where a callback fails, unless a step diverged, before its error goes on."""
    try:
        yield
    except Exception:
        if training.context.callbacks.has_failed and not training.is_in_spikes:
            with suppress(Diverged):
                for result, done in in_flight.take(leave=0):
                    training.recorder.record(result, done, loggers, progress)
                if training.state.step not in training.checkpoints.steps:
                    _write_checkpoint(training, None)
        raise


def _save(training: Training, eval_loss: float | None) -> None:
    """Save a checkpoint, and tell callbacks; raise Diverged for weights that are not finite."""
    _write_checkpoint(training, eval_loss)
    training.context.callbacks.call(Callback.on_save, training.state.step, training.output.path / "checkpoints")


def _write_checkpoint(training: Training, eval_loss: float | None) -> None:
    state, run, recorder = training.state, training.run, training.recorder
    host: RunState = {
        "batches": run.batches.get_state(),
        **training.evaluation.get_state(),
        "fp8": training.parts.fp8,
        "first_loss": recorder.first_loss,
        "last_loss": recorder.last_loss,
        "spikes": training.spikes.get_state() if training.spikes else None,
    }
    try:
        training.checkpoints.save(state.step, state.saved, host, eval_loss=eval_loss)
        if run.rollouts:
            training.checkpoints.wait()
            run.rollouts.saved()
            write_page(training.output.path)
    except NonFinite as error:
        raise Diverged(state.step, f"after its update {error}") from error


def _resume(training: Training) -> None:
    """Continue from the last checkpoint, and say what changed since; begin anew where there is none."""
    run, context, state = training.run, training.context, training.state
    restored = training.checkpoints.restore_latest(abstract_state(state.saved))
    changed = changed_settings(training.output.path / "config.toml", run)
    if restored is None:
        notes = ["no checkpoint yet: starting from step 0"]
    else:
        host, notes = cast(RunState, restored.host), list(resume_notes(run, restored))
        state.free()
        training.state = state.restored(restored.state, restored.step)
        run.batches.set_state(host["batches"])
        training.evaluation.set_state(host)
        multiply_in_fp8(training.parts, host.get("fp8"))
        training.recorder.first_loss, training.recorder.last_loss = host["first_loss"], host["last_loss"]
        if training.spikes and (spikes := host.get("spikes")):
            training.spikes.set_state(spikes)
    if run.rollouts and changed and context.processes.is_main:
        run.rollouts.forget()  # answers were kept for later steps under other settings
    context.console.print("\n".join(notes))


def _explained(training: Training, error: Diverged, start: Any) -> str:
    """Return the error of a divergence with its cause, and write the failed step's rows for a replay."""
    run, context, spikes, rows = training.run, training.context, training.spikes, ""
    if error.step in training.recent and context.processes.is_main:
        path = training.output.path / f"failed-step-{error.step}.npz"
        save_step(path, training.recent[error.step])
        rows = f" Its rows are in {path}."
    context.console.print(f"step {error.step} diverged: looking for the cause")
    with context.interrupt:
        cause = explain_divergence(
            run,
            training.parts,
            training.state,
            training.checkpoints,
            error,
            start=start,
            first=spikes.first_in_a_row(error.step) if spikes else error.step,
            replay=context.processes.count == 1 and spikes is None and "eval_loss" not in error.found,
        )
    return f"{error}.{rows} {cause}."


def _finish(training: Training, begun: float) -> RunSummary:
    """Export the result, answer samples and write curve and summary; `begun` is the start, `time.monotonic`."""
    run, context, recorder, folder = training.run, training.context, training.recorder, training.output.path
    best_loss, best_step = training.evaluation.best or (None, None)
    if training.why_stopped:
        context.console.print(training.why_stopped)
    if training.parts.features:
        training.state = training.state._replace(frozen=training.parts.features.with_tower(training.state.frozen))
    training.state, result = write_result(
        run,
        training.parts,
        training.state,
        training.checkpoints,
        training.output,
        best_step=best_step,
        batch=training.last_batch,
        processes=context.processes,
        console=context.console,
        draft=partial(_draft_tensors, training) if run.draft else None,
    )
    training.answer_samples("after")
    speed = recorder.meter.total()
    assert recorder.first_loss is not None and recorder.last_loss is not None
    first_reward, last_reward = reward_change(folder / "metrics.jsonl") if run.rollouts else (None, None)
    summary = RunSummary(
        steps=training.state.step,
        first_loss=recorder.first_loss,
        last_loss=recorder.last_loss,
        best_eval_loss=best_loss,
        best_eval_step=best_step,
        tokens_per_second=speed.tokens_per_second,
        mfu=speed.mfu,
        peak_memory_gb=memory_use(jax.local_devices()).peak / 1e9,
        seconds=time.monotonic() - begun,
        startup_seconds=context.timer.stages,
        adapter=result.path,
        adapter_step=result.step,
        last_adapter=result.last,
        stopped_early=training.why_stopped,
        checkpoints=folder / "checkpoints",
        metrics=folder / "metrics.jsonl",
        curve=folder / "loss.png",
        skipped_steps=training.spikes.steps if training.spikes else [],
        drafts=training.drafts,
        first_reward=first_reward,
        last_reward=last_reward,
        page=folder / PAGE,
    )
    if context.processes.is_main:
        save_loss_curve(summary.metrics, summary.curve)
        asked = {"keep": run.output.keep, "early_stopping": run.output.early_stopping}
        write_json(folder / "summary.json", summary_json(summary) | asked | {"fingerprint": training.identity})
        write_page(folder)
    print_panel(context.console, "done", summary_rows(summary))
    context.callbacks.call(Callback.on_end, summary)
    return summary


def _draft_tensors(training: Training, state: TrainState) -> dict[str, np.ndarray]:
    """Return the draft head for a state's model, and note how many drafts are accepted; train it, if not yet."""
    run, parts, console = training.run, training.parts, training.context.console
    model = parts.executor, state.trainable, state.frozen
    assert run.draft is not None and parts.draft is not None
    rows = list(run.eval_batches) if run.eval_batches else [training.last_batch] if training.last_batch else []
    held_out, head = [place_batch(batch, parts.mesh) for batch in rows], state.draft
    if run.draft.when == "after":
        count, losses = run.schedule.total_steps, []
        run.batches.set_state(training.first_batch)
        steps = (parts.place(batch) for batch in islice(run.batches, count))
        for head, loss in parts.draft.train(*model, steps):  # noqa: B007 - the last one is used
            losses.append(float(loss))
            if len(losses) % run.cadence.log == 0 or len(losses) == count:
                console.print(f"draft head, step {len(losses)} of {count}: draft_loss {losses[-1]:.4f}")
    assert head is not None
    for name, each in (("folder's", parts.draft.first()), ("trained", head)):
        training.drafts[name] = parts.draft.acceptance(*model, held_out, each)._asdict()
    return parts.draft.tensors(head)


def _open_loggers(training: Training, step: int) -> Loggers:
    """Open the receivers of metrics, which go on after a step."""
    if not training.context.processes.is_main:
        return Loggers()
    settings = masked(as_dict(training.run.recorded.shared), os.environ)
    trackers = training.run.output.trackers
    return open_loggers(training.output.path, resume_step=step, trackers=trackers, settings=settings)
