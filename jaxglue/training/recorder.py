"""Values of finished steps: checked, logged, shown and measured."""

import dataclasses
import gc
from typing import Any

import jax

from jaxglue.training.in_flight import StepResult
from jaxglue.training.loggers import Loggers
from jaxglue.training.metrics import Diverged, check_finite
from jaxglue.training.progress import StepReport, TrainingProgress
from jaxglue.training.setup import Setup
from jaxglue.training.startup import StartupTimer
from jaxglue.training.throughput import Meter, memory_use

_REPORTED = {"loss", "learning_rate", "grad_norm"}
"""Values of every step; others are an objective's metrics."""


class Recorder:
    """Context that records the steps of a run, in their order.

    After the first step Python's collector leaves out all objects that exist, until the end of the context: it would
    pause the run for 0.2 s each time.

    Args:
        setup: the run.
        timer: of the start-up, which the first step ends.
    """

    def __init__(self, setup: Setup, timer: StartupTimer):
        self._timer, self._log_every, self._total_steps = timer, setup.config.run.log_every, setup.total_steps
        self._steps_per_epoch = setup.batches.steps_per_epoch
        self.meter = Meter(model_flops_per_token=setup.flops_per_token, devices=jax.devices())
        self.has_compiled = False
        """Whether the first step of this process is done; its time is compilation, and does not count as training."""
        self.first_loss: float | None = None
        self.last_loss: float | None = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()

    def record(self, result: StepResult, done: float, loggers: Loggers, progress: TrainingProgress) -> None:
        """Wait for the values of a step, log them, and show them when a line is due.

        Args:
            result: of the step.
            done: when the devices finished it, `time.perf_counter`.
            loggers, progress: of the run.

        Raises:
            Diverged: a value is not finite; it is logged before.
        """
        values: dict[str, Any] = {name: float(value) for name, value in result.values.items()}
        if "skipped" in values:
            progress.advance(result.step)
            return loggers.log(result.step, values)
        try:
            check_finite(result.step, values)
        except Diverged:
            loggers.log(result.step, values)
            raise
        self.last_loss = values["loss"]
        progress.advance(result.step)
        if not self.has_compiled:
            self._begin(result.step, progress)
        else:
            self.meter.add(result.tokens, done)
            if self.is_log_due(result.step):
                report = self._report(result.step, values)
                progress.report(result.step, report)
                values = dataclasses.asdict(report)
                values |= values.pop("metrics")
        loggers.log(result.step, values)

    def is_log_due(self, step: int) -> bool:
        """Tell whether a step's speed and memory are logged."""
        return step % self._log_every == 0 or step == self._total_steps

    def _begin(self, step: int, progress: TrainingProgress) -> None:
        self.has_compiled = True
        self.first_loss = self.last_loss if self.first_loss is None else self.first_loss
        gc.collect()  # or garbage would stay until the end, too
        gc.freeze()
        self.meter.restart()
        self._timer.stage("first step")
        progress.say(f"step {step}: loss {self.last_loss:.4f}; start-up took {self._timer}")

    def _report(self, step: int, values: dict[str, Any]) -> StepReport:
        memory_gb, epoch = memory_use(jax.local_devices()).used / 1e9, step / self._steps_per_epoch
        known = {"grad_norm": None, **{name: values[name] for name in values.keys() & _REPORTED}}
        metrics = {name: value for name, value in values.items() if name not in _REPORTED}
        return StepReport(**known, **self.meter.read()._asdict(), memory_gb=memory_gb, epoch=epoch, metrics=metrics)
