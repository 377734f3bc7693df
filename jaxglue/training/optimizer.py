"""AdamW over the parts of a model: one small compiled update per kind of part, whatever the depth."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxglue.parameters import Tree


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its learning-rate schedule and clipping."""

    learning_rate: float = 2e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """What follows the warm-up: down to min_lr_ratio along a cosine or a line, or constant."""
    warmup_ratio: float = 0.03
    """Share of all steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end, as a share of the peak."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: float = 0.9
    """Decay of the gradient's mean."""
    beta2: float = 0.999
    """Decay of the gradient's square."""
    epsilon: float = 1e-8
    """Added to the root of the mean square."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 clips nothing."""

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be positive")
        for name in ("warmup_ratio", "min_lr_ratio", "beta1", "beta2"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")
        if self.weight_decay < 0 or self.clip_norm < 0:
            raise ValueError("weight_decay and clip_norm must not be negative")


def learning_rate_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate of each optimiser step, counted from 0."""
    peak, end = config.learning_rate, config.learning_rate * config.min_lr_ratio
    warmup = round(config.warmup_ratio * total_steps)
    rest = max(total_steps - warmup, 1)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=config.min_lr_ratio),
        "linear": optax.linear_schedule(peak, end, rest),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    # The first step already moves: it is step 1 of the warm-up's count.
    return optax.join_schedules(
        [optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1)), after], [warmup]
    )


class Optimizer:
    """AdamW with global-norm clipping; its state is a list with an entry for every part of the model."""

    def __init__(self, config: OptimizerConfig, total_steps: int):
        self.schedule = learning_rate_schedule(config, total_steps)
        self._clip_norm = config.clip_norm
        self._adamw = optax.chain(
            optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
            optax.add_decayed_weights(config.weight_decay, mask=_is_matrix),
            optax.scale_by_learning_rate(self.schedule),
        )
        self._init = jax.jit(self._adamw.init)
        self._square_norm = jax.jit(optax.tree.norm, static_argnames="squared")
        self._clip_scale = jax.jit(self._norm_and_scale)
        self._update = jax.jit(self._update_part, donate_argnums=(0, 1))

    def init(self, trainable: Tree) -> list[Any]:
        """Optimiser state of every part, in the order of `parts`."""
        return [self._init(part) for _, part in parts(trainable)]

    def update(
        self, trainable: Tree, state: list[Any], gradients: Tree, step: int
    ) -> tuple[Tree, list[Any], dict[str, Float[Array, ""]]]:
        """(new trainable, new state, grad_norm and learning_rate); the old trees are donated.

        Args:
            trainable, state, gradients: of this step.
            step: optimiser steps done before, for the learning rate that is reported.
        """
        squares = [self._square_norm(part, squared=True) for _, part in parts(gradients)]
        scale, values = self._clip_scale(squares, np.int32(step))
        updated: Tree = {**trainable, "layers": list(trainable["layers"])}
        new_state = []
        for (place, part), part_state, (_, gradient) in zip(parts(trainable), state, parts(gradients), strict=True):
            part, part_state = self._update(part, part_state, gradient, scale)
            new_state.append(part_state)
            if isinstance(place, int):
                updated["layers"][place] = part
            else:
                updated[place] = part
        return updated, new_state, values

    def _norm_and_scale(self, squares: list[Array], step: Array) -> tuple[Array, dict[str, Array]]:
        norm = jnp.sqrt(sum(squares, start=jnp.float32(0)))
        scale = jnp.minimum(1.0, self._clip_norm / jnp.maximum(norm, 1e-12)) if self._clip_norm else jnp.float32(1)
        return scale, {"grad_norm": norm, "learning_rate": jnp.asarray(self.schedule(step), jnp.float32)}

    def _update_part(self, part: Tree, state: Any, gradient: Tree, scale: Array) -> tuple[Tree, Any]:
        gradient = jax.tree.map(lambda g: g * scale, gradient)
        changes, state = self._adamw.update(gradient, state, part)
        return optax.apply_updates(part, changes), state


def parts(tree: Tree) -> Iterator[tuple[str | int, Tree]]:
    """The non-empty parts of a parameter tree with their places: a name, or a layer's index."""
    for name in sorted(tree.keys() - {"layers"}):
        if jax.tree.leaves(tree[name]):
            yield name, tree[name]
    yield from ((index, layer) for index, layer in enumerate(tree["layers"]) if jax.tree.leaves(layer))


def _is_matrix(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
