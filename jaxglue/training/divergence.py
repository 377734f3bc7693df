"""Divergence of a run: spikes left out, and the cause of values that are not finite."""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax.numpy as jnp
import numpy as np

from jaxglue.data.batch import Answers, Batch, Rollouts
from jaxglue.data.iterator import Step
from jaxglue.engine.array_checks import check_parameters, non_finite
from jaxglue.files.atomic import atomic_file
from jaxglue.files.regular_file import open_regular
from jaxglue.models.parameters import ParamKey, Params
from jaxglue.ops.segments import PackedSegments, copy_beginnings
from jaxglue.training.checkpoint import Checkpoints
from jaxglue.training.record import Diverged
from jaxglue.training.result import abstract_state
from jaxglue.training.run import Run
from jaxglue.training.step import StepParts, TrainState, restart, train_step, visit_gradients

_WINDOW = 128
"""Latest accepted steps that mean and deviation are taken over."""
_FEWEST = 16
"""Steps before which only values that are not finite are spikes."""
_MOST_IN_A_ROW = 10
"""Spikes in a row after which the run ends: the weights, not the rows, are to blame."""
_MOST_STEPS = 100
"""Steps that are replayed to reach the failed one."""
_RUINED = (
    "Updates before it ruined the weights: start a new run with a lower --learning-rate or --clip-norm, or more warm-up"
)
_FROM_START = (
    "No update came before it, and other rows are not finite either: look at the model's weights, and at --dtype and "
    "--quantize"
)
_ROWS = "Other rows are finite with the same weights: look at these, or leave them out with --on-spike skip"
_log = logging.getLogger(__name__)
_ANSWER_FIELDS = ("owners", "used", "desirable", "token_weight", "reference")
_ROLLOUT_FIELDS = ("owners", "advantages", "old", "sampler", "reference", "credits", "mean_weight")
_COLUMN, _ROLLOUT = "column ", "rollout "
"""Begin the names of columns' and rollouts' arrays."""
_OPTIONAL_FIELDS = ("gap_starts", "gap_ends", "units")
_ROW_FIELDS = ("tokens", "targets", "loss_weights")
_SEGMENT_FIELDS = ("segment_ids", "positions", "starts", "ends", "long")


class SpikeState(TypedDict):
    """The latest good steps' values by name, and the spikes among all steps, as JSON."""

    values: dict[str, list[float]]
    steps: list[int]
    in_a_row: int


class Spikes:
    """Decides step by step whether loss or gradient norm is beyond `sigma` deviations above its mean."""

    def __init__(self, sigma: float):
        self._sigma = sigma
        self._values: dict[str, deque[float]] = {name: deque(maxlen=_WINDOW) for name in ("loss", "grad_norm")}
        self.in_a_row = 0
        """Spikes up to the last step. Its weights may be ruined, so no checkpoint is saved until the next good step."""
        self.steps: list[int] = []
        """Steps left out so far."""

    def accepts(self, step: int, values: Mapping[str, float]) -> bool:
        """Tell whether the update of a step may be applied.

        Raises:
            Diverged: too many steps in a row are spikes.
        """
        if not any(self._is_spike(name, values[name]) for name in self._values):
            self.in_a_row = 0
            for name, window in self._values.items():
                window.append(values[name])
            return True
        self.steps.append(step)
        self.in_a_row += 1
        if self.in_a_row == _MOST_IN_A_ROW:
            raise Diverged(step, f"the last {_MOST_IN_A_ROW} steps were spikes, {_shown(values)}")
        return False

    def first_in_a_row(self, step: int) -> int:
        """Return the first of the spikes in a row that end with a step; the step itself where it is none."""
        return step - max(self.in_a_row - 1, 0)

    def get_state(self) -> SpikeState:
        """Return a JSON-able state."""
        return {
            "values": {name: list(window) for name, window in self._values.items()},
            "steps": self.steps,
            "in_a_row": self.in_a_row,
        }

    def set_state(self, state: SpikeState) -> None:
        """Continue from a state of `get_state`."""
        self._values = {name: deque(window, maxlen=_WINDOW) for name, window in state["values"].items()}
        self.steps, self.in_a_row = list(state["steps"]), state["in_a_row"]

    def _is_spike(self, name: str, value: float) -> bool:
        window = self._values[name]
        if not math.isfinite(value):
            return True
        return len(window) >= _FEWEST and value > float(np.mean(window) + self._sigma * np.std(window))


def _shown(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def explain_divergence(
    run: Run,
    parts: StepParts,
    state: TrainState,
    checkpoints: Checkpoints,
    error: Diverged,
    *,
    start: Any,
    first: int,
    replay: bool,
) -> str:
    """Return cause and remedy of a divergence; set aside checkpoints after which nothing was finite.

    Args:
        run, parts, state, checkpoints: of the run; the state is of no use afterwards.
        error: names the failed step.
        start: state of the batches before step 1.
        first: of the failed steps, before that one where spikes preceded it.
        replay: False where steps cannot be replayed by this process alone.
    """
    frozen = parts.features.with_tower(state.frozen) if parts.features else state.frozen
    if bad := next((name for name, check in check_parameters(frozen) if not check.is_finite), None):
        return bad_weights(run.base.name, bad)
    cause = _replayed(run, parts, state, checkpoints, error.step, start) if replay else None
    followed = cause is not None and cause.endswith(_ROWS)
    cause = cause or _unknown(first)
    for saved in [] if followed else checkpoints.reject(first - 1):
        cause = f"{cause}; checkpoint {saved} is set aside as {saved}.diverged"
    latest = checkpoints.latest_step
    resume = f"--resume continues from checkpoint {latest}" if latest is not None else "No checkpoint is left"
    return f"{cause}. {resume}"


def _replayed(
    run: Run, parts: StepParts, state: TrainState, checkpoints: Checkpoints, failed: int, start: Any
) -> str | None:
    """Return the first value of a step that is not finite, and the remedy; None where it cannot be replayed."""
    abstract, step, begin = abstract_state(state.saved), failed - 1, checkpoints.latest_step or 0
    if not begin <= step <= begin + _MOST_STEPS:
        return None
    try:
        state.free()
        if begin and (restored := checkpoints.restore_latest(abstract)):
            state = state.restored(restored.state, restored.step)
            run.batches.set_state(restored.host["batches"])
        else:
            state = restart(parts, state)
            run.batches.set_state(start)
        while state.step < step:
            state, _ = train_step(parts, state, next(run.batches))
        first = first_non_finite(parts, state, next(run.batches))
        others = next(run.batches, None)
    except Exception as error:  # the divergence is the error to report
        _log.debug("the failed step could not be replayed", exc_info=error)
        return None
    if first is None:
        return "Its gradients are finite, its update is not: start a new run with a lower --learning-rate"
    ruined = others is not None and first_non_finite(parts, state, others) is not None
    return f"First not finite: {first}. {_ROWS if not ruined else _RUINED if failed > 1 else _FROM_START}"


def _unknown(first: int) -> str:
    """Return the remedy for a step whose cause was not found; `first` is the first failed one."""
    if first == 1:
        return "No update came before it: look at its rows, at the model's weights, and at --dtype"
    return (
        "Its rows or the updates before it are the cause: look at the rows, or start a new run with a lower "
        "--learning-rate or --clip-norm"
    )


def bad_weights(model: str, name: str) -> str:
    """Return the line about a loaded array that is not finite."""
    return f"The weights in {model} are not finite ({name}): mend or copy them again; no flag helps"


def first_non_finite(parts: StepParts, state: TrainState, step: Step) -> str | None:
    """Return the first value of a step, forward and then backward, that is not finite; None if all are."""
    for batch in parts.place(step):
        for index, x in enumerate(parts.executor.hidden_states(state.trainable, state.frozen, batch)):
            if not jnp.isfinite(x).all():
                return f"the output of layer {index - 1}" if index else "the embedded tokens"
    bad: list[ParamKey] = []

    def visit(key: ParamKey, gradient: Params) -> None:
        if non_finite(gradient):
            bad.append(key)

    loss = visit_gradients(parts, state, step, visit)
    if bad:
        return f"the gradient of {f'layer {bad[0]}' if isinstance(bad[0], int) else bad[0]}"
    return None if jnp.isfinite(loss) else "the loss"


def save_step(path: Path, step: Step) -> None:
    """Write a step's micro-batches as an `.npz`: stacked, but for the boundaries, whose slots may differ.

    What a teacher computed for rollouts is left out.
    """
    batches = step.micro_batches
    arrays: dict[str, Any] = {name: np.stack([getattr(batch, name) for batch in batches]) for name in _ROW_FIELDS}
    arrays |= {name: np.stack([getattr(batch.segments, name) for batch in batches]) for name in _SEGMENT_FIELDS}
    arrays |= _stacked(_OPTIONAL_FIELDS, [batch.segments for batch in batches])
    arrays |= {"copies": np.array([batch.segments.copies is not None for batch in batches])}
    arrays |= _stacked(_ANSWER_FIELDS, [batch.answers for batch in batches])
    rollouts = _stacked(_ROLLOUT_FIELDS, [batch.rollouts for batch in batches])
    arrays |= {_ROLLOUT + name: values for name, values in rollouts.items()}
    arrays |= {_COLUMN + name: np.stack([batch.columns[name] for batch in batches]) for name in batches[0].columns}
    arrays |= {_bounds(index): batch.segments.cu_seqlens for index, batch in enumerate(batches)}
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, counts=np.array([step.tokens, step.targets]), **arrays)


def load_step(path: Path) -> Step:
    """Read a step written by `save_step`, for `train_step`; raise ValueError for a damaged file."""
    try:
        with open_regular(path) as source, np.load(source, allow_pickle=False) as file:
            arrays: dict[str, Any] = dict(file)
        tokens, targets = map(int, arrays.pop("counts"))
        batches = tuple(_micro_batch(arrays, index) for index in range(len(arrays["tokens"])))
    except Exception as error:  # zipfile raises errors of many types
        raise ValueError(f"{path} is damaged: {error}") from error
    return Step(micro_batches=batches, tokens=tokens, targets=targets)


def _micro_batch(arrays: dict[str, Any], index: int) -> Batch:
    fields = {name: arrays[name][index] for name in _SEGMENT_FIELDS}
    others, answers = (
        {name: arrays[name][index] for name in names if name in arrays} for names in (_OPTIONAL_FIELDS, _ANSWER_FIELDS)
    )
    segments = PackedSegments(**fields | {"long": bool(fields["long"])} | others, cu_seqlens=arrays[_bounds(index)])
    if "copies" in arrays and arrays["copies"][index]:
        segments = copy_beginnings(segments)
    rows = {name: arrays[name][index] for name in _ROW_FIELDS}
    columns, rollouts = (
        {name.removeprefix(kind): arrays[name][index] for name in arrays if name.startswith(kind)}
        for kind in (_COLUMN, _ROLLOUT)
    )
    return Batch(
        **rows,
        segments=segments,
        columns=columns,
        answers=Answers(**answers) if answers else None,
        rollouts=Rollouts(**rollouts) if rollouts else None,
    )


def _stacked(names: Sequence[str], parts: Sequence[Any]) -> dict[str, np.ndarray]:
    """Stack the fields that all parts have."""
    known = [name for name in names if all(getattr(part, name, None) is not None for part in parts)]
    return {name: np.stack([getattr(part, name) for part in parts]) for name in known}


def _bounds(index: int) -> str:
    return f"cu_seqlens_{index}"
