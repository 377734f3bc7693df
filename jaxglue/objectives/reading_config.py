"""Settings of objectives whose rows have parts that are read by themselves; importing them loads no JAX."""

from dataclasses import dataclass
from typing import Annotated

from jaxglue.objectives.objective import ObjectiveConfig
from jaxglue.settings.config import NonNegativeFloat, Range


@dataclass(frozen=True, kw_only=True)
class DecideSettings(ObjectiveConfig):
    """Decisions."""

    label_smoothing: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Share of the gold probabilities that is spread over all options of a question."""
    brier_weight: NonNegativeFloat = 0.0
    """Weight of the squared differences between probabilities and gold, beside the cross-entropy."""
    rps_weight: NonNegativeFloat = 0.0
    """Weight of the squared differences between their sums up to each level of a score (ranked probability score)."""
    ordinal_weight: NonNegativeFloat = 0.0
    """Weight of the expected distance between a score's level and the gold one, in shares of its range."""
    permute_options: bool = False
    """Show the options of choices in another order each time in training; evaluation says what their order changes."""
