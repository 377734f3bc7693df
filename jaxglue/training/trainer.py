"""The training run from its configuration to the exported result."""

import os
from dataclasses import replace
from typing import IO, cast

import jax
from rich.console import Console

from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.engine.program_cache import keep_programs
from jaxglue.hf.hub import is_hub_id
from jaxglue.recipe import as_dict, load_config
from jaxglue.training.config import TrainConfig
from jaxglue.training.console import Output
from jaxglue.training.fingerprint import fingerprint
from jaxglue.training.finished import finished_run
from jaxglue.training.interrupt import Interrupt
from jaxglue.training.model_config import ModelConfig
from jaxglue.training.out_of_memory import explained_out_of_memory
from jaxglue.training.output import check_inputs, shared_output_folder
from jaxglue.training.pinned import open_buffers, size_pool
from jaxglue.training.plan_view import plan_rows
from jaxglue.training.run import Trainer
from jaxglue.training.setup import prepare
from jaxglue.training.startup import StartupTimer
from jaxglue.training.summary import RunSummary, print_panel, summary_rows


def train(
    config: TrainConfig,
    console: Console | None = None,
    timer: StartupTimer | None = None,
    processes: Processes = SINGLE_PROCESS,
    interrupt: Interrupt | None = None,
) -> RunSummary | None:
    """Train as configured and write adapter or model, checkpoints, metrics and curve to the output folder.

    Args:
        config: the run.
        console: where to print; by default standard output.
        timer: of a start-up that began before this call.
        processes: all call this; process 0 alone prints and writes, apart from checkpoints.
        interrupt: tells after an interruption which signal it was.

    Returns:
        the results of the run; None after a dry run or an interruption.

    Raises:
        ValueError: bad input, before the accelerator is used.
        OSError: a file cannot be written, as on a full disk.
    """
    interrupt = interrupt or Interrupt()
    console = console or Console(file=cast(IO[str], Output(interrupt.output_closed)), quiet=not processes.is_main)
    timer = timer or StartupTimer()
    config = replace(config, model=pinned_model(config))
    processes.agree("configuration", {**as_dict(config.shared), "jax": jax.__version__})
    if config.run.compilation_cache:
        keep_programs(config.run.compilation_cache, take_turns=processes.count == 1)
    run = config.run
    setup = prepare(config, processes) if run.dry_run or run.resume else None
    if setup and run.dry_run:
        print_panel(console, "plan (dry run: nothing is trained)", plan_rows(setup))
        return None
    if setup and (summary := finished_run(setup, processes)):
        print_panel(console, "done before: no step is left to train", summary_rows(summary))
        return summary
    with shared_output_folder(run.output, processes, resume=run.resume, overwrite=run.overwrite) as folder:
        if run.overwrite and processes.is_main:
            check_inputs(folder, config.inputs)
        setup = setup or prepare(config, processes)
        identity = fingerprint(setup)
        processes.agree("model and data", identity)
        timer.stage("data")
        print_panel(console, "plan", plan_rows(setup))
        size_pool(setup.workload, setup.remat, os.environ)
        with explained_out_of_memory(setup), open_buffers(setup.workload, setup.remat) as buffers:
            return Trainer(setup, identity, console, timer, processes, interrupt, buffers).run()


def pinned_model(config: TrainConfig) -> ModelConfig:
    """Return the run's model with its commit on the hub: the recorded one where a run resumes, else the newest."""
    model, record = config.model, config.run.output / "config.toml"
    if config.run.resume and model.revision is None and is_hub_id(model.model) and record.is_file():
        recorded = load_config(TrainConfig, record).model
        if recorded.model == model.model:
            model = replace(model, revision=recorded.revision)
    return model.pinned
