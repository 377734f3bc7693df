"""Continuation of a run: its changed settings, and the learning rate of a longer schedule."""

from collections.abc import Iterator

from jaxglue.training.checkpoint import Restored
from jaxglue.training.differences import changed_settings
from jaxglue.training.optimizer import learning_rate_schedule
from jaxglue.training.setup import Setup


def resume_notes(setup: Setup, restored: Restored) -> Iterator[str]:
    """Yield lines about a resumed run: its step, changed settings, and a changed length.

    Raises:
        ValueError: the checkpoint lies beyond the run's last step.
    """
    step, total, before = restored.step, setup.total_steps, restored.fingerprint["steps"]
    if step > total:
        raise ValueError(
            f"--resume: the run has done {step:,} steps, more than the {total:,} asked for: raise --steps or --epochs"
        )
    yield f"resumed from step {step}"
    for key, text in changed_settings(setup.config.run.output / "config.toml", setup.config).items():
        yield f"changed setting {key}: {text}"
    if before != total:
        old, new = (learning_rate_schedule(setup.config.optimizer, steps) for steps in (before, total))
        yield (
            f"the run ends at step {total:,} in place of {before:,}, by the {setup.config.optimizer.schedule} schedule "
            f"of {total:,} steps from here on: learning rate {float(old(max(step - 1, 0))):.3g} at step {step:,}, "
            f"{float(new(step)):.3g} at step {step + 1:,}"
        )
