"""AdamW over the parts of a model: small compiled updates of a few parts each, whatever the depth."""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxglue.memory.transfer import commit
from jaxglue.parameters import Place, Tree, get_part, set_part
from jaxglue.sharding.layout import WHOLE, Layout

_PARTS_PER_PROGRAM = 8
"""Parts updated by one program: more are fewer launches, but longer to compile."""


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
    update_in_backward: bool = False
    """Update each layer as soon as its gradients are there, so that those of one layer exist at a time."""

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be positive")
        for name in ("warmup_ratio", "min_lr_ratio", "beta1", "beta2"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")
        if self.weight_decay < 0 or self.clip_norm < 0:
            raise ValueError("weight_decay and clip_norm must not be negative")
        if self.update_in_backward and self.clip_norm:
            raise ValueError("--update-in-backward needs --clip-norm 0: the global norm is known only after it")


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
    """AdamW with global-norm clipping; its state has an entry for every place of `places`."""

    def __init__(self, config: OptimizerConfig, total_steps: int, layout: Layout = WHOLE):
        self._layout = layout
        self.schedule = learning_rate_schedule(config, total_steps)
        self._clip_norm = config.clip_norm
        self._adamw = optax.chain(
            optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
            optax.add_decayed_weights(config.weight_decay, mask=_is_matrix),
            optax.scale_by_learning_rate(self.schedule),
        )
        self._init = jax.jit(self._init_part, static_argnames="prefix")
        self._square_norm = jax.jit(optax.tree.norm, static_argnames="squared")
        self._clip_scale = jax.jit(self._norm_and_scale)
        self._learning_rate = jax.jit(lambda step: jnp.asarray(self.schedule(step), jnp.float32))
        self._update = jax.jit(self._update_parts, donate_argnums=(0, 1))

    def init(self, trainable: Tree) -> list[Any]:
        """Optimiser state of every part, in the order of `places`."""
        parts = [(get_part(trainable, place), place if isinstance(place, str) else "") for place in places(trainable)]
        return commit([self._init(part, prefix=prefix) for part, prefix in parts])

    def update(
        self, trainable: Tree, state: list[Any], gradients: Tree, step: int
    ) -> tuple[Tree, list[Any], dict[str, Float[Array, ""]]]:
        """(new trainable, new state, grad_norm and learning_rate); the old trees are donated.

        Args:
            trainable, state, gradients: of this step.
            step: optimiser steps done before, for the learning rate that is reported.
        """
        batches = list(itertools.batched(places(trainable), _PARTS_PER_PROGRAM))
        squares = [
            self._square_norm([get_part(gradients, place) for place in batch], squared=True) for batch in batches
        ]
        scale, values = self._clip_scale(squares, np.int32(step))
        updated: Tree = {**trainable, "layers": list(trainable["layers"])}
        states, new_state = iter(state), []
        for batch in batches:
            old, gradient = ([get_part(tree, place) for place in batch] for tree in (trainable, gradients))
            new, new_states = self._update(old, list(itertools.islice(states, len(batch))), gradient, scale)
            new_state += new_states
            for place, part in zip(batch, new, strict=True):
                set_part(updated, place, part)
        return updated, new_state, values

    def learning_rate(self, step: int) -> dict[str, Float[Array, ""]]:
        """The learning rate after `step` optimiser steps, as `update` reports it."""
        return {"learning_rate": self._learning_rate(np.int32(step))}

    def update_part(self, trainable: Tree, state: list[Any], place: Place, gradient: Tree) -> tuple[Tree, list[Any]]:
        """(trainable, state) with one part updated, without clipping; the part's old arrays are donated."""
        index = places(trainable).index(place)
        (part,), (part_state,) = self._update([get_part(trainable, place)], [state[index]], [gradient], np.float32(1))
        trainable = {**trainable, "layers": list(trainable["layers"])}
        set_part(trainable, place, part)
        return trainable, [*state[:index], part_state, *state[index + 1 :]]

    def _init_part(self, part: Tree, prefix: str) -> Any:
        return self._layout.constrain(self._adamw.init(part), prefix)

    def _norm_and_scale(self, squares: list[Array], step: Array) -> tuple[Array, dict[str, Array]]:
        norm = jnp.sqrt(sum(squares, start=jnp.float32(0)))
        scale = jnp.minimum(1.0, self._clip_norm / jnp.maximum(norm, 1e-12)) if self._clip_norm else jnp.float32(1)
        return scale, {"grad_norm": norm, "learning_rate": self._learning_rate(step)}

    def _update_parts(self, parts: list[Tree], states: list[Any], gradients: list[Tree], scale: Array):
        """(new parts, new states)."""
        triples = zip(parts, states, gradients, strict=True)
        pairs = [self._update_part(part, state, gradient, scale) for part, state, gradient in triples]
        return [part for part, _ in pairs], [state for _, state in pairs]

    def _update_part(self, part: Tree, state: Any, gradient: Tree, scale: Array) -> tuple[Tree, Any]:
        gradient = jax.tree.map(lambda g: g * scale, gradient)
        changes, state = self._adamw.update(gradient, state, part)
        return optax.apply_updates(part, changes), state


def places(tree: Tree) -> list[Place]:
    """The places of all parts that hold a parameter, the layers last."""
    names: list[Place] = [name for name in sorted(tree.keys() - {"layers"}) if jax.tree.leaves(tree[name])]
    return names + [index for index, layer in enumerate(tree["layers"]) if jax.tree.leaves(layer)]


def _is_matrix(tree: Tree) -> Tree:
    """Biases of experts have two axes too."""
    return jax.tree.map_with_path(lambda path, leaf: leaf.ndim > 1 and path[-1] != jax.tree_util.DictKey("bias"), tree)
