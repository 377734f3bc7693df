"""A training run from its configuration to the exported result."""

import os
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import IO, Any, cast

import jax

from jaxglue.data.config import NO_COLUMNS, Columns
from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.hf.hub import is_hub_id
from jaxglue.ops.backend import one_device_each
from jaxglue.parts import pinned
from jaxglue.planner.host_memory import HOST_LIMIT
from jaxglue.planner.memory import resident_bytes
from jaxglue.settings.recipe import as_dict
from jaxglue.terminal.console import Console
from jaxglue.terminal.interrupt import GuardedOutput, Interrupt
from jaxglue.training.callbacks import Callback, Callbacks, Metrics
from jaxglue.training.config import ModelConfig, TrainConfig, recorded_config
from jaxglue.training.context import RunContext
from jaxglue.training.explain import run_reasons
from jaxglue.training.fingerprint import fingerprint
from jaxglue.training.memory import configured_jax, restore_pool
from jaxglue.training.out_of_memory import (
    Overrun,
    describe,
    plan_again,
    smaller_pool,
)
from jaxglue.training.progress import StartupTimer
from jaxglue.training.report import RunSummary, plan_rows, print_panel, summary_rows
from jaxglue.training.run import Run
from jaxglue.training.run_folder import (
    RunFolder,
    check_inputs,
    check_output,
    shared_output_folder,
    warn_of_full_disk,
)
from jaxglue.training.setup import resolve


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
        console=console
        or Console(file=cast(IO[str], GuardedOutput(interrupt.output_closed)), quiet=not processes.is_main),
        timer=timer or StartupTimer(),
        processes=processes,
        interrupt=interrupt,
        callbacks=Callbacks(callbacks),
        compute_metrics=compute_metrics,
    )
    config = replace(config, model=pinned_model(config), parts=pinned(config.parts))
    processes.agree("configuration", {**as_dict(config.shared), "jax": jax.__version__})
    configured = configured_jax(config.run.compilation_cache, config.model.memory_limit, processes=processes.count)
    # Where one of two devices samples, each has programs of its own.
    with configured, one_device_each() if config.rollouts.staleness else nullcontext():
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
    from jaxglue.training.resuming import finished_run

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
        _print_plan(run, "plan", context)
        output = RunFolder(path, overwrite=settings.overwrite, processes=processes)
        with closing(run.batches):
            return _train_as_planned(run, identity, output, context)


def _train_as_planned(run: Run, identity: dict[str, Any], output: RunFolder, context: RunContext) -> RunSummary | None:
    """Train; where a run takes more memory than there is, plan with less and go on from its checkpoint or the start."""
    from jaxglue.training.loop import MOST_PLANS, run_loop  # with orbax, which a dry run does not need

    start: Any = run.batches.get_state()
    pinned, pool = os.environ.get(HOST_LIMIT), None
    result = run_loop(run, identity, output, context, plans_left=MOST_PLANS)
    if not isinstance(result, Overrun):
        return result
    with output.replacing():  # the run before comes back if nothing else fits
        for left in reversed(range(MOST_PLANS)):
            restore_pool(os.environ, pinned)
            pool = smaller_pool(run, result, pool)
            again = plan_again(run, result, pool)
            context.console.print(
                f"{describe(run, result)}: planned again and started again, with --remat {again.remat}"
            )
            again.batches.set_state(start)
            result, run = run_loop(again, identity, output, context, plans_left=left, again=True), again
            if not isinstance(result, Overrun):
                return result
    raise AssertionError("the last plan's overrun is an error")


def _dry_run(config: TrainConfig, context: RunContext) -> None:
    """Print the plan of a run; raise the errors that it would raise before it trains, and write nothing."""
    settings = config.run
    if context.processes.is_main:
        check_output(settings.output, resume=settings.resume, overwrite=settings.overwrite)
        if settings.overwrite:
            check_inputs(settings.output, config.inputs)
    run = resolve(config, context.processes)
    if settings.resume:
        from jaxglue.training.resuming import check_resumable  # with orbax

        check_resumable(run)
    _print_plan(run, "plan (dry run: nothing is trained)", context)


def _print_plan(run: Run, title: str, context: RunContext) -> None:
    """Print the plan, and the reasons for automatic choices where these are asked for; warn of a full disk."""
    print_panel(context.console, title, plan_rows(run))
    if not context.processes.is_main:
        return
    warn_of_full_disk(run.output.folder, resident_bytes(run.workload).state)
    if run.asked.explain:
        print_panel(context.console, "choices", run_reasons(run))


def pinned_model(config: TrainConfig) -> ModelConfig:
    """Return the run's model with its commit on the hub: the recorded one where a run resumes, else the newest."""
    model, record = config.model, config.run.output / "config.toml"
    if config.run.resume and model.revision is None and is_hub_id(model.model) and record.is_file():
        recorded = recorded_config(record).model
        if recorded.model == model.model:
            model = replace(model, revision=recorded.revision)
    return model.pinned
