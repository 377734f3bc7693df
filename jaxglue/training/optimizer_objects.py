"""Optimizers given as objects, which see the whole tree of parameters: transformations of optax, and stepped AdamW."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.stages import Traced
from jaxtyping import Array, Float

from jaxglue.engine.compiler import on_device
from jaxglue.engine.transfer import commit
from jaxglue.models.parameters import ParamKey, Params
from jaxglue.training.optimizer import OPTIMIZERS, Optimizer, OptimizerKind

NAME = "given"
"""Name of the optimizer in a run's record."""


class TreeOptimizer:
    """Base of optimizers that see the whole tree of parameters at once."""

    fits_programs = False

    def update_part(
        self, trainable: Params, state: Params, key: ParamKey, gradient: Params, step: int
    ) -> tuple[Params, Params]:
        """Refuse: an update may need all gradients."""
        raise ValueError("update_in_backward: an optimizer given as an object sees all gradients at once: leave it out")

    def trace_update(self, trainable: Params) -> tuple[Traced, ...]:
        """Trace no program."""
        return ()


class TransformOptimizer(TreeOptimizer):
    """Adds the transformation's updates to the parameters as they are.

    Learning rate, schedule, decay and clipping are the transformation's. The state has its arrays in their order.
    """

    def __init__(self, transformation: optax.GradientTransformation):
        self._transformation = optax.with_extra_args_support(transformation)
        self._init = jax.jit(lambda trainable: {"arrays": jax.tree.leaves(self._transformation.init(trainable))})
        self._update = jax.jit(self._step, donate_argnums=(0, 1))

    def init(self, trainable: Params) -> Params:
        """Return the state before the first step."""
        return commit(self._init(trainable))

    def state_shapes(self, trainable: Params) -> Params:
        """Return the shapes of the state on one device for shapes of parameters."""
        return on_device(jax.eval_shape(self._init, trainable))

    def update(
        self, trainable: Params, state: Params, gradients: Params, step: int | Array
    ) -> tuple[Params, Params, dict[str, Float[Array, ""]]]:
        """Update all parts (see `Optimizer.update`)."""
        trainable, state, norm = self._update(trainable, state, gradients)
        return trainable, state, {"grad_norm": norm, **self.learning_rate(0)}

    def learning_rate(self, step: int) -> dict[str, Float[Array, ""]]:
        """Return the factor of the transformation's updates."""
        return {"learning_rate": jnp.float32(1)}

    def _step(self, trainable: Params, state: Params, gradients: Params) -> tuple[Params, Params, Array]:
        treedef = jax.tree.structure(jax.eval_shape(self._transformation.init, trainable))
        before = jax.tree.unflatten(treedef, state["arrays"])
        updates, after = self._transformation.update(gradients, before, trainable)
        new = jax.tree.map(lambda parameter, update: parameter + update.astype(parameter.dtype), trainable, updates)
        return new, {"arrays": jax.tree.leaves(after)}, optax.tree.norm(gradients)


class SteppedAdam(TreeOptimizer):
    """AdamW whose learning rate, decays and clipping are those of `settings` at each step; float32 moments."""

    def __init__(self) -> None:
        self.settings = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        self.settings |= {"weight_decay": 0.0, "grad_clip_norm": 0.0}
        self._update = jax.jit(self._step, donate_argnums=(0, 1))

    def init(self, trainable: Params) -> Params:
        """Return the state before the first step."""
        return commit({name: jax.tree.map(jnp.zeros_like, trainable) for name in ("mu", "nu")})

    def state_shapes(self, trainable: Params) -> Params:
        """Return the shapes of the state on one device for shapes of parameters."""
        return on_device(jax.eval_shape(lambda tree: {"mu": tree, "nu": tree}, trainable))

    def update(
        self, trainable: Params, state: Params, gradients: Params, step: int | Array
    ) -> tuple[Params, Params, dict[str, Float[Array, ""]]]:
        """Update all parts (see `Optimizer.update`)."""
        values = {name: jnp.float32(value) for name, value in self.settings.items()}
        trainable, state, norm = self._update(trainable, state, gradients, jnp.float32(step + 1), values)
        return trainable, state, {"grad_norm": norm, **self.learning_rate(0)}

    def learning_rate(self, step: int) -> dict[str, Float[Array, ""]]:
        """Return the present learning rate."""
        return {"learning_rate": jnp.float32(self.settings["learning_rate"])}

    @staticmethod
    def _step(trainable: Params, state: Params, gradients: Params, count: Array, s: dict[str, Array]):
        norm = optax.tree.norm(gradients)
        limit = s["grad_clip_norm"]
        scale = jnp.where(limit > 0, jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12)), 1.0)
        gradients = jax.tree.map(lambda g: g * scale, gradients)
        mu = jax.tree.map(lambda m, g: s["beta1"] * m + (1 - s["beta1"]) * g, state["mu"], gradients)
        nu = jax.tree.map(lambda v, g: s["beta2"] * v + (1 - s["beta2"]) * g * g, state["nu"], gradients)
        first, second = (1 - s[name] ** count for name in ("beta1", "beta2"))

        def moved(p, m, v):
            step = m / first / (jnp.sqrt(v / second) + s["eps"]) + s["weight_decay"] * p
            return p - s["learning_rate"] * step

        return jax.tree.map(moved, trainable, mu, nu), {"mu": mu, "nu": nu}, norm


_IGNORED = (
    *("learning_rate", "lr", "schedule", "lr_scheduler_type", "warmup_steps", "warmup_ratio", "weight_decay"),
    *("clip_norm", "max_grad_norm", "beta1", "beta2", "epsilon", "moments", "lora_plus_ratio"),
    *("embedding_learning_rate", "update_in_backward", "decay_ratio", "min_lr_ratio"),
)


@contextmanager
def named_optimizer(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield settings in which an optimizer that is an object, such as optax's, has a name that is known meanwhile.

    Raises:
        ValueError: settings that the transformation has itself.
    """
    given = settings.get("optimizer")
    if given is None or isinstance(given, str):
        yield settings
        return
    if not isinstance(given, optax.GradientTransformation | SteppedAdam):
        raise ValueError(f"optimizer: expected a name or a transformation of optax, got {given!r:.100}")
    if ignored := [name for name in _IGNORED if name in settings]:
        raise ValueError(f"{ignored[0]}: an optimizer given as an object has its own: leave it out")

    def make(*_: Any) -> Optimizer:
        return given if isinstance(given, SteppedAdam) else TransformOptimizer(given)

    kind = OptimizerKind(make=make, title="transformation of optax, its own rate and schedule")
    with OPTIMIZERS.scope({NAME: kind}):
        yield settings | {"optimizer": NAME}
