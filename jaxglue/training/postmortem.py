"""The cause of a divergence, found by replaying the failed step."""

import logging
from typing import Any

import jax.numpy as jnp

from jaxglue.data.iterator import Step
from jaxglue.engine.transfer import to_device
from jaxglue.models.parameters import ParamKey, Params
from jaxglue.training.array_checks import non_finite
from jaxglue.training.checkpoint import Checkpoints
from jaxglue.training.metrics import Diverged
from jaxglue.training.result import abstract_state
from jaxglue.training.setup import Setup
from jaxglue.training.train_step import TrainStep

_MOST_STEPS = 100
"""Steps that are replayed to reach the failed one."""
_RUINED = (
    "Updates before it ruined the weights: start a new run with a lower --learning-rate or --clip-norm, or more warm-up"
)
_ROWS = "Other rows are finite with the same weights: look at these, or leave them out with --on-spike skip"
_log = logging.getLogger(__name__)


class Postmortem:
    """Finds the cause of a divergence; the model is not fit for training afterwards.

    Args:
        setup, model, checkpoints: of the run.
        start: state of the batches before step 1.
    """

    def __init__(self, setup: Setup, model: TrainStep, checkpoints: Checkpoints, start: dict[str, Any]):
        self._setup, self._model, self._checkpoints, self._start = setup, model, checkpoints, start

    def explain(self, error: Diverged, *, replay: bool) -> str:
        """Return the cause and the remedy; set a checkpoint that nothing finite followed aside.

        Args:
            error: names the failed step.
            replay: False where steps cannot be replayed by this process alone.
        """
        if bad := self._bad_weights():
            folder = self._setup.config.model.model
            return f"The weights in {folder} are not finite ({bad}): mend or copy them again; no flag helps"
        cause = self._replay(error.step) if replay else None
        saved = self._checkpoints.latest_step
        followed = cause is not None and cause.endswith(_ROWS)
        if saved == error.step - 1 and not followed and self._checkpoints.reject(saved):
            cause = f"{cause or _RUINED}; checkpoint {saved} is set aside as {saved}.diverged"
        latest = self._checkpoints.latest_step
        resume = f"--resume continues from checkpoint {latest}" if latest is not None else "No checkpoint is left"
        return f"{cause or _RUINED}. {resume}"

    def _bad_weights(self) -> str | None:
        """Return the name of the first frozen array with elements that are not finite."""
        frozen = self._model.frozen
        parts = [("", {name: part for name, part in frozen.items() if name != "layers"})]
        parts += [(f"layers.{index}.", layer) for index, layer in enumerate(frozen["layers"])]
        return next((prefix + names[0] for prefix, part in parts if (names := non_finite(to_device(part)))), None)

    def _replay(self, failed: int) -> str | None:
        """Return what was first not finite in the step, and the remedy; None where it cannot be replayed."""
        try:
            if not self._return_to(failed - 1):
                return None
            first = first_non_finite(self._model, next(self._setup.batches))
            others = next(self._setup.batches, None)
        except Exception as error:  # the divergence is the error to report
            _log.debug("the failed step could not be replayed", exc_info=error)
            return None
        if first is None:
            return f"Its gradients are finite, its update is not. {_RUINED}"
        ruined = others is not None and first_non_finite(self._model, others) is not None
        return f"First not finite: {first}. {_RUINED if ruined else _ROWS}"

    def _return_to(self, step: int) -> bool:
        """Bring model and batches to the state after `step` steps; return whether it is near enough."""
        model, batches = self._model, self._setup.batches
        abstract = abstract_state(model.state())
        begin = self._checkpoints.latest_step or 0
        if not begin <= step <= begin + _MOST_STEPS:
            return False
        model.release()
        if begin and (restored := self._checkpoints.restore_latest(abstract)):
            model.restore(restored.state, restored.step)
            batches.set_state(restored.host["batches"])
        else:
            model.restart()
            batches.set_state(self._start)
        while model.step < step:
            model.dispatch(next(batches))
        return True


def first_non_finite(model: TrainStep, step: Step) -> str | None:
    """Return the first value of a step, forward and then backward, that is not finite; None if all are."""
    for batch in model.place(step):
        for index, x in enumerate(model.executor.hidden_states(model.trainable, model.frozen, batch)):
            if not jnp.isfinite(x).all():
                return f"the output of layer {index - 1}" if index else "the embedded tokens"
    bad: list[ParamKey] = []

    def visit(key: ParamKey, gradient: Params) -> None:
        if non_finite(gradient):
            bad.append(key)

    loss = model.visit_gradients(step, visit)
    if bad:
        return f"the gradient of {f'layer {bad[0]}' if isinstance(bad[0], int) else bad[0]}"
    return None if jnp.isfinite(loss) else "the loss"
