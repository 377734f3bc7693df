"""Settings of rewards and rollouts that no run could keep to are refused before it starts."""

import math

import pytest

from jaxglue.objectives.config import PolicyGradientSettings
from jaxglue.rl.config import RolloutConfig


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (RolloutConfig, {"num_generations": 10**9}),
        (RolloutConfig, {"generation_batch_size": 10**12}),
        (RolloutConfig, {"max_completion_length": 2**40}),
        (RolloutConfig, {"num_iterations": 10**9}),
        (RolloutConfig, {"reward_timeout": 1e300}),
        (RolloutConfig, {"reward_memory": 1e300}),
        (RolloutConfig, {"reward_workers": 10**6}),
        (RolloutConfig, {"max_turns": 10**9}),
        (PolicyGradientSettings, {"temperature": 1e-300}),
        (PolicyGradientSettings, {"temperature": 1e300}),
        (PolicyGradientSettings, {"beta": 1e300}),
        (PolicyGradientSettings, {"epsilon_low": 1e300}),
        (PolicyGradientSettings, {"epsilon_high": math.inf}),
        (PolicyGradientSettings, {"delta": 1e38}),
        (PolicyGradientSettings, {"entropy_coef": 1e300}),
        (PolicyGradientSettings, {"importance_sampling_min": 4.0}),
    ],
)
def test_settings_that_no_run_could_keep_to_are_refused(settings, changes):
    (name,) = changes
    with pytest.raises(ValueError, match=name.replace("_", "[-_]")):
        settings(**changes)
