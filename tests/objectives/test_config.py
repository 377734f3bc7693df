"""Settings that an objective does not read are refused."""

import pytest

from jaxglue.objectives.config import ObjectiveConfig


@pytest.mark.parametrize("setting", [{"beta": 0.2}, {"reference_cache": "on"}, {"rpo_alpha": 1.0}])
def test_settings_of_other_objectives_are_refused(setting):
    with pytest.raises(ValueError, match=r"not reward: (name the objective, or )?leave it out"):
        ObjectiveConfig(objective="reward", **setting)
