"""An optimizer from outside of the library: an entry among `OPTIMIZERS` is all that it adds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxglue.models.parameters import get_part, set_part
from jaxglue.settings.flags import parse_config
from jaxglue.training.config import OptimizerConfig, TrainConfig
from jaxglue.training.optax_optimizer import OptaxOptimizer
from jaxglue.training.optimizer import OPTIMIZERS, MomentumSettings, OptimizerKind, make_optimizer, state_bytes
from jaxglue.training.report import plan_rows
from jaxglue.training.setup import resolve
from jaxglue.training.step import prepare_steps
from jaxglue.training.train import train
from tests.selection import repeat, repeats_parts_of


class SignMomentum:
    """Steps by the learning rate along the sign of a momentum in bfloat16."""

    fits_programs = True

    def __init__(self, config, total_steps, layout):
        self._rate, self._decay = config.learning_rate, config.beta1

    def init(self, trainable):
        return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.bfloat16), trainable)

    def state_shapes(self, trainable):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), trainable)

    def update(self, trainable, state, gradients, step):
        state = jax.tree.map(lambda m, g: (self._decay * m + g).astype(m.dtype), state, gradients)
        trainable = jax.tree.map(lambda x, m: x - self._rate * jnp.sign(m).astype(x.dtype), trainable, state)
        squares = [jnp.sum(g**2) for g in jax.tree.leaves(gradients)]
        return trainable, state, {"grad_norm": jnp.sqrt(sum(squares)), **self.learning_rate(step)}

    def update_part(self, trainable, state, key, gradient, step):
        part, moments, _ = self.update(get_part(trainable, key), get_part(state, key), gradient, step)
        set_part(trainable, key, part)
        set_part(state, key, moments)
        return trainable, state

    def learning_rate(self, step):
        return {"learning_rate": jnp.float32(self._rate)}

    def trace_update(self, trainable):
        return ()


@pytest.fixture(autouse=True)
def registered():
    """Make the optimizer one that `--optimizer` names."""
    kind = OptimizerKind(make=SignMomentum, title="sign of momentum", rate_factor=0.5, Settings=MomentumSettings)
    with OPTIMIZERS.scope({"toy": kind}):
        yield


def test_registered_optimizer_is_a_flag_with_its_learning_rate():
    flags = ["--model", "m", "--data", "d.jsonl", "--optimizer", "toy"]
    config = parse_config(TrainConfig, flags, command="train")
    assert config.optimizer.optimizer == "toy" and config.optimizer.learning_rate == 0.5 * 2e-4
    with pytest.raises(ValueError, match=r"--moments is for --optimizer adamw .*, not toy"):
        OptimizerConfig(optimizer="toy", moments="8bit")


def test_planner_takes_the_bytes_of_its_state(make_config):
    setup = resolve(make_config(optimizer="toy"))
    assert setup.workload.moment_bytes == 2.0
    assert plan_rows(setup)["optimizer"].startswith("sign of momentum, learning rate")


@repeats_parts_of("test_resumed_run_is_bit_identical")
@pytest.mark.parametrize(
    "options", [{}, repeat({"update_in_backward": True, "clip_norm": 0}), repeat({"layers_per_program": 2})]
)
def test_registered_optimizer_trains_and_resumes_to_the_bit(make_config, tmp_path, options):
    options |= {"optimizer": "toy", "learning_rate": 1e-3, "steps": 4, "save_every": 2}
    whole = train(make_config(**options, output=tmp_path / "whole"))
    assert whole.last_loss < whole.first_loss
    train(make_config(**options | {"steps": 2}))
    assert train(make_config(**options, resume=True)).last_loss == whole.last_loss


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "lion", "adafactor"])
def test_planned_bytes_are_those_of_the_state(make_config, name):
    _, state = prepare_steps(resolve(make_config(optimizer=name)), None)
    arrays = jax.tree.leaves(state.optimizer)
    values = sum(leaf.size for leaf in jax.tree.leaves(state.trainable))
    expected = state_bytes(OptimizerConfig(optimizer=name), state.trainable)
    assert sum(leaf.nbytes for leaf in arrays) == pytest.approx(expected * values)


class Momentum(OptaxOptimizer):
    """A transformation of optax is all that it is."""

    def transform(self, path, parameter):
        return optax.trace(decay=0.9)


def test_an_optax_transformation_is_an_optimizer():
    OPTIMIZERS.add("momentum", OptimizerKind(make=Momentum, title="momentum"))
    plain = {"learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0, "clip_norm": 0, "weight_decay": 0}
    config, trainable = OptimizerConfig(optimizer="momentum", **plain), {"layers": [{"weight": jnp.ones((2, 3))}]}
    optimizer, ones = make_optimizer(config, total_steps=9), jax.tree.map(jnp.copy, trainable)
    assert state_bytes(config, trainable) == 4.0
    state = optimizer.init(trainable)
    for step in range(2):
        trainable, state, _ = optimizer.update(trainable, state, ones, step)
    np.testing.assert_allclose(trainable["layers"][0]["weight"], 1 - 0.1 - 0.19, rtol=1e-6)
