"""Settings that an objective does not read are refused."""

import dataclasses
import pickle

import pytest

from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.objectives.objective import OBJECTIVES
from jaxglue.settings.recipe import load_config
from jaxglue.training.config import TrainConfig


@pytest.mark.parametrize("setting", [{"beta": 0.2}, {"reference_cache": "on"}, {"rpo_alpha": 1.0}])
def test_settings_of_other_objectives_are_refused(setting):
    with pytest.raises(ValueError, match=r"not reward: (name the objective, or )?leave it out"):
        ObjectiveConfig(objective="reward", **setting)


def test_a_record_with_the_settings_of_all_objectives_at_their_defaults_is_read(tmp_path):
    path = tmp_path / "config.toml"
    optimizer = '[optimizer]\noptimizer = "adafactor"\nbeta1 = 0.9\nbeta2 = "none"\n'
    head = f'[model]\nmodel = "m"\n[data]\ndata = ["d"]\n{optimizer}'
    others = 'simpo_gamma = 0.5\nbeta = 0.1\nepsilon_high = "none"\nreference_cache = "auto"\n'
    path.write_text(f'{head}[objective]\nobjective = "reward"\ncenter_rewards_coefficient = 0.01\n{others}')
    assert load_config(TrainConfig, path).objective == ObjectiveConfig(
        objective="reward", center_rewards_coefficient=0.01
    )
    path.write_text(f'{head}[objective]\nobjective = "reward"\nsimpo_gamma = 0.6\n')
    with pytest.raises(ValueError, match=r"\[objective\] --simpo-gamma is for --objective simpo, not reward"):
        load_config(TrainConfig, path)


def test_settings_of_built_in_objectives_are_those_of_their_classes():
    for name in OBJECTIVES:
        assert type(ObjectiveConfig(objective=name)) is OBJECTIVES[name].Settings
    copied = pickle.loads(pickle.dumps(settings := ObjectiveConfig(objective="rloo", beta=0.2)))
    assert copied == settings == dataclasses.replace(settings) and type(copied) is type(settings)
