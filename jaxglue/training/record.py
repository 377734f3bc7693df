"""The record of a run: values of finished steps, speed and memory, the loss curve, and a profiler trace."""

import contextlib
import dataclasses
import gc
import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import psutil

from jaxglue.engine.garbage_collection import leave_out_what_lives_on
from jaxglue.files.atomic import atomic_file
from jaxglue.files.json_lines import read_steps
from jaxglue.planner.gpus import peak_flops
from jaxglue.training.progress import StartupTimer, StepReport, TrainingProgress
from jaxglue.training.run import Run
from jaxglue.training.step import StepResult
from jaxglue.training.trackers import Loggers

_REPORTED = {"loss", "learning_rate", "grad_norm"}
"""Values of every step; others are an objective's metrics."""
_REWARDS = (
    *("reward", "reward_std"),
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl"),
    *("mean_reward", "margin", "accuracy"),
)


class Recorder:
    """Context that records the steps of a run, in their order.

    After the first step Python's collector leaves out all objects that exist, until the end of the context: it would
    pause the run for 0.2 s each time.

    Args:
        run: the run.
        timer: of the start-up, which the first step ends.
    """

    def __init__(self, run: Run, timer: StartupTimer):
        self._timer, self._log_every, self._total_steps = timer, run.cadence.log, run.schedule.total_steps
        self._steps_per_epoch = run.batches.steps_per_epoch
        self.meter = Meter(model_flops_per_token=run.flops_per_token, devices=jax.devices())
        self.has_compiled = False
        """Whether the first step of this process is done; its time is compilation, and does not count as training."""
        self.first_loss: float | None = None
        self.last_loss: float | None = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()

    def record(self, result: StepResult, done: float, loggers: Loggers, progress: TrainingProgress) -> dict[str, Any]:
        """Wait for the values of a step, log them, show them when a line is due, and return them.

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
            loggers.log(result.step, values)
            return values
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
        return values

    def is_log_due(self, step: int) -> bool:
        """Tell whether a step's speed and memory are logged."""
        return step % self._log_every == 0 or step == self._total_steps

    def _begin(self, step: int, progress: TrainingProgress) -> None:
        self.has_compiled = True
        self.first_loss = self.last_loss if self.first_loss is None else self.first_loss
        leave_out_what_lives_on()
        self.meter.restart()
        self._timer.stage("first step")
        progress.say(f"step {step}: loss {self.last_loss:.4f}; start-up took {self._timer}")

    def _report(self, step: int, values: Mapping[str, float]) -> StepReport:
        speed = self.meter.read()
        return StepReport(
            loss=values["loss"],
            learning_rate=values["learning_rate"],
            grad_norm=values.get("grad_norm"),
            tokens_per_second=speed.tokens_per_second,
            mfu=speed.mfu,
            data_wait=speed.data_wait,
            memory_gb=memory_use(jax.local_devices()).used / 1e9,
            epoch=step / self._steps_per_epoch,
            metrics={name: value for name, value in values.items() if name not in _REPORTED},
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the intact lines of a `metrics.jsonl`."""
    return read_steps(path).intact


class Diverged(ValueError):  # noqa: N818
    """Reports that values of a step, or the arrays after it, are not finite; no later step recovers from that.

    Args:
        step: optimizer steps done with it.
        found: the values, and whether they are infinite or NaN.
    """

    def __init__(self, step: int, found: str):
        super().__init__(f"step {step}: {found}. Training has diverged and stops")
        self.step, self.found = step, found


def check_finite(step: int, values: Mapping[str, float]) -> None:
    """Raise Diverged if a value is not finite."""
    if wrong := ", ".join(f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)):
        raise Diverged(step, wrong)


class Reading(NamedTuple):
    """Speed over a window of training."""

    tokens_per_second: float
    mfu: float | None
    """Model FLOPs utilization (Chowdhery et al. 2022, appendix B), 0–1; None if unknown: excludes recomputation."""
    data_wait: float
    """Share of time spent waiting for a batch, 0–1."""


class Meter:
    """Counts tokens and seconds since the last reading and since the start, without pauses such as evaluation."""

    def __init__(
        self,
        *,
        model_flops_per_token: float,
        devices: Sequence[jax.Device],
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Start counting.

        Args:
            model_flops_per_token: forward and backward, without recomputation.
            devices: all that train, of one kind.
            clock: seconds.
        """
        peak = peak_flops(devices[0].device_kind)
        self._tokens_per_second_at_peak = peak and peak * len(devices) / model_flops_per_token
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forget everything counted."""
        self._window = self._total = _Count()
        self._mark = self._last = self._clock()

    def add(self, tokens: int, done: float) -> None:
        """Count the tokens of a step, without padding, and the time when it was done."""
        self._window, self._last = self._window.plus(tokens=tokens), done

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count time inside the context as waiting for data."""
        begun = self._clock()
        yield
        self._window = self._window.plus(waited=self._clock() - begun)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude time inside the context."""
        begun = self._clock()
        yield
        pause = self._clock() - begun
        self._mark, self._last = self._mark + pause, self._last + pause

    def read(self) -> Reading:
        """Return the speed since the last reading, up to the end of the last step counted."""
        window = self._window.plus(seconds=self._last - self._mark)
        self._total = self._total.plus(*window)
        self._window, self._mark = _Count(), self._last
        return self._reading(window)

    def total(self) -> Reading:
        """Return the speed from the start to the last reading."""
        return self._reading(self._total)

    def _reading(self, count: "_Count") -> Reading:
        seconds = max(count.seconds, 1e-9)
        rate = count.tokens / seconds
        peak = self._tokens_per_second_at_peak
        return Reading(rate, rate / peak if peak else None, min(count.waited / seconds, 1.0))


class _Count(NamedTuple):
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def plus(self, tokens: int = 0, seconds: float = 0.0, waited: float = 0.0) -> "_Count":
        return _Count(self.tokens + tokens, self.seconds + seconds, self.waited + waited)


class MemoryUse(NamedTuple):
    """Memory of the fullest device, in bytes."""

    used: int
    peak: int
    kind: str
    """"device", or "host" for devices that do not count their memory, as CPUs."""


def memory_use(devices: Sequence[Any]) -> MemoryUse:
    """Return memory in use now and at its peak: XLA's count on GPUs, the process's resident memory on CPUs."""
    stats = [device.memory_stats() for device in devices]
    if all(stats):
        used, peak = (max(stat[key] for stat in stats) for key in ("bytes_in_use", "peak_bytes_in_use"))
        return MemoryUse(used, peak, "device")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return MemoryUse(psutil.Process().memory_info().rss, peak, "host")


def reward_change(metrics: Path) -> tuple[float, float] | tuple[None, None]:
    """Return the mean rewards of the first and the last answers in a `metrics.jsonl`; None without any."""
    values = _series(read_metrics(metrics), "reward")[1]
    return (values[0], values[-1]) if values else (None, None)


def save_loss_curve(metrics: Path, output: Path) -> None:
    """Draw `loss` and `eval_loss` of a `metrics.jsonl` over the steps as a PNG.

    Rewards come below; above, where the model writes the answers that have them: their loss says nothing of progress.
    """
    # Imported late: matplotlib would delay every start by a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = list(read_metrics(metrics))
    rewards = {name: _series(lines, name) for name in _REWARDS if _series(lines, name)[0]}
    rows = 2 if rewards else 1
    loss_row = rows if "reward" in rewards else 1
    figure = Figure(figsize=(8, 4.5 * rows), layout="constrained")
    if rewards:
        _draw_rewards(figure.add_subplot(rows, 1, 3 - loss_row, xlabel="step", ylabel="reward, accuracy"), rewards)
    label = "loss" if rewards else "loss (nats per token)"
    axes = figure.add_subplot(rows, 1, loss_row, xlabel="step", ylabel=label)
    steps, losses = _series(lines, "loss")
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="train")
    axes.plot(steps, smooth(losses), color="tab:blue", label="train, smoothed")
    eval_steps, eval_losses = _series(lines, "eval_loss")
    if eval_steps:
        axes.plot(eval_steps, eval_losses, "o-", color="tab:orange", label="eval")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_file(output) as temporary:
        FigureCanvasAgg(figure).print_figure(temporary, dpi=120, format="png")


def _draw_rewards(axes: Any, rewards: Mapping[str, tuple[list[int], list[float]]]) -> None:
    for name, (steps, values) in rewards.items():
        axes.plot(steps, smooth(values), label=name)
    axes.grid(alpha=0.3)
    axes.legend()


def smooth(values: Sequence[float], *, decay: float = 0.9) -> list[float]:
    """Return the exponential moving average, bias-corrected as in Adam (Kingma & Ba 2015, section 3)."""
    average, smoothed = 0.0, []
    for count, value in enumerate(values, start=1):
        average = decay * average + (1 - decay) * value
        smoothed.append(average / (1 - decay**count))
    return smoothed


def _series(lines: list[dict], name: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
    return [step for step, _ in points], [value for _, value in points]


class StepProfiler:
    """Traces `count` steps from step `first` on, into a folder for TensorBoard and xprof."""

    def __init__(self, folder: Path, *, first: int, count: int):
        self._folder, self._first, self._end = folder, first, first + count
        self._tracing = False

    def before(self, step: int) -> None:
        """Start or stop the trace; call it before dispatching each step."""
        if step == self._first and self._end > self._first:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        if step == self._end:
            self._stop()

    def _stop(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()
