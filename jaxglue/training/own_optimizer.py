"""A transformation of optax, given as an object, as a run's optimizer: it sees the whole tree of parameters."""

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
from jaxglue.training.optimizer import OPTIMIZERS, OptimizerKind

NAME = "given"
"""Name of the optimizer in a run's record."""


class TransformOptimizer:
    """Adds the transformation's updates to the parameters as they are.

    Learning rate, schedule, decay and clipping are the transformation's. The state has its arrays in their order.
    """

    fits_programs = False

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

    def update_part(
        self, trainable: Params, state: Params, key: ParamKey, gradient: Params, step: int
    ) -> tuple[Params, Params]:
        """Refuse: a transformation may need all gradients."""
        raise ValueError("update_in_backward: an optimizer given as an object sees all gradients at once: leave it out")

    def learning_rate(self, step: int) -> dict[str, Float[Array, ""]]:
        """Return the factor of the transformation's updates."""
        return {"learning_rate": jnp.float32(1)}

    def trace_update(self, trainable: Params) -> tuple[Traced, ...]:
        """Trace no program."""
        return ()

    def _step(self, trainable: Params, state: Params, gradients: Params) -> tuple[Params, Params, Array]:
        treedef = jax.tree.structure(jax.eval_shape(self._transformation.init, trainable))
        before = jax.tree.unflatten(treedef, state["arrays"])
        updates, after = self._transformation.update(gradients, before, trainable)
        new = jax.tree.map(lambda parameter, update: parameter + update.astype(parameter.dtype), trainable, updates)
        return new, {"arrays": jax.tree.leaves(after)}, optax.tree.norm(gradients)


_IGNORED = (
    *("learning_rate", "lr", "schedule", "lr_scheduler_type", "warmup_steps", "warmup_ratio", "weight_decay"),
    *("clip_norm", "max_grad_norm", "beta1", "beta2", "epsilon", "moments", "lora_plus_ratio"),
    *("embedding_learning_rate", "update_in_backward", "decay_ratio", "min_lr_ratio"),
)


@contextmanager
def named_optimizer(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield settings in which a transformation of optax, if there is one, has a name that is known meanwhile.

    Raises:
        ValueError: settings that the transformation has itself.
    """
    given = settings.get("optimizer")
    if not isinstance(given, optax.GradientTransformation):
        yield settings
        return
    if ignored := [name for name in _IGNORED if name in settings]:
        raise ValueError(f"{ignored[0]}: an optimizer given as an object has its own: leave it out")
    make = lambda config, total_steps, layout: TransformOptimizer(given)  # noqa: E731
    before = OPTIMIZERS.get(NAME)
    OPTIMIZERS[NAME] = OptimizerKind(make=make, title="transformation of optax, its own rate and schedule")
    try:
        yield settings | {"optimizer": NAME}
    finally:
        if before is None:
            del OPTIMIZERS[NAME]
        else:
            OPTIMIZERS[NAME] = before
