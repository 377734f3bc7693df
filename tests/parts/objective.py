"""An objective with two settings of its own: DPO whose rewards are calibrated (Cal-DPO, arXiv 2412.14516)."""

from dataclasses import dataclass

from jaxglue.objectives.config import DPOSettings
from jaxglue.objectives.dpo import DPO
from jaxglue.objectives.objective import OBJECTIVES
from jaxglue.settings.config import NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class CalDPOSettings(DPOSettings):
    """Calibrated DPO."""

    calibration: NonNegativeFloat = 1.0
    """Weight of the squared distances of log-ratios from ±1 / (2 β)."""
    calibrates_rejected: bool = True
    """Calibrate the other answers, too."""


@OBJECTIVES.register("cal_dpo")
class CalDPO(DPO):
    """DPO's losses, with the distances of log-ratios from their targets."""

    Settings = CalDPOSettings

    def losses(self, pairs):
        target = 1 / (2 * self.beta)
        distances = (pairs.chosen_ratio - target) ** 2
        if self.config.calibrates_rejected:
            distances += (pairs.rejected_ratio + target) ** 2
        return super().losses(pairs) + self.config.calibration * distances
