"""Optimizers of optax beside AdamW: Muon, Adafactor and Lion, each parameter by itself."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import scale_by_muon

from jaxglue.engine.compiler import jit_step
from jaxglue.models.parameters import Params
from jaxglue.ops.adam import StepScalars
from jaxglue.sharding.gather import constrain_params
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.training.config import OptimizerConfig
from jaxglue.training.optimizer import Optimizer, decays, param_keys

_MUON_MOMENTUM = 0.95
_MUON_RMS = 0.2
"""Root mean square of an update of Muon, AdamW's usual one, so that both share a learning rate (arXiv 2502.16982)."""


class OptaxOptimizer(Optimizer):
    """An optimizer of optax; its state has, in place of each parameter, the arrays of optax's state for it."""

    parts_per_program = 1
    fits_programs = False

    def __init__(self, config: OptimizerConfig, total_steps: int, layout: Layout = SINGLE_DEVICE):
        super().__init__(config, total_steps, layout)
        self._config = config
        self._programs: dict[Any, Any] = {}
        self._update: Any = self._update_in_place

    def _init_part(self, part: Params, prefix: str = "") -> Params:
        def init(path, parameter):
            return jax.tree.leaves(self._transform(path, parameter).init(parameter))

        return constrain_params(self._layout, jax.tree.map_with_path(init, part), prefix)

    def _update_in_place(self, parts: list[Params], states: list[Params], gradients: list[Params], scalars):
        """Update parts, whose new arrays are stored as the old ones are."""
        shardings = jax.tree.map(lambda array: array.sharding, (parts, states))
        leaves, treedef = jax.tree.flatten(shardings)
        key = (*leaves, treedef)
        if key not in self._programs:
            self._programs[key] = jit_step(self._update_parts, donate_argnums=(0, 1), out_shardings=shardings)
        return self._programs[key](parts, states, gradients, scalars)

    def _update_parts(self, parts: list[Params], states: list[Params], gradients: list[Params], scalars: StepScalars):
        leaves, treedef = jax.tree.flatten(parts)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(parts)]
        old: list[Any] = treedef.flatten_up_to(states)  # type: ignore[attr-defined]
        rows = zip(paths, leaves, old, jax.tree.leaves(gradients), decays(parts), strict=True)
        new, new_states = zip(*(self._step(*row, scalars) for row in rows), strict=True)
        return jax.tree.unflatten(treedef, new), jax.tree.unflatten(treedef, new_states)

    def _step(self, path, parameter, state, gradient, decay, scalars: StepScalars) -> tuple[Any, list[Any]]:
        """Return (parameter, state) after a step."""
        transform = self._transform(path, parameter)
        old = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(transform.init, parameter)), state)
        update, new = transform.update(gradient * scalars.scale, old, parameter)
        if decay:
            update += self._config.weight_decay * parameter
        return parameter - scalars.learning_rate * update, jax.tree.leaves(new)

    def _transform(self, path, parameter) -> optax.GradientTransformation:
        """Return the transformation of a parameter's gradients into its updates."""
        config = self._config
        mu_dtype = jnp.bfloat16 if config.moments == "bfloat16" else jnp.float32
        if config.optimizer == "lion":
            return optax.scale_by_lion(config.beta1, config.second_decay, mu_dtype)
        if config.optimizer == "adafactor":
            return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
        if is_hidden_matrix(path, parameter):
            scale = _MUON_RMS * math.sqrt(max(parameter.shape))
            return optax.chain(scale_by_muon(beta=_MUON_MOMENTUM, mu_dtype=mu_dtype), optax.scale(scale))
        return optax.scale_by_adam(config.beta1, config.second_decay, config.epsilon, mu_dtype=mu_dtype)

    def _kernels(self, parts: list[Params]) -> None:
        return None


def is_hidden_matrix(path: tuple[Any, ...], parameter: Any) -> bool:
    """Tell whether Muon updates a parameter: a matrix of a decoder layer, whose path names module and projection."""
    return parameter.ndim == 2 and sum(isinstance(key, jax.tree_util.DictKey) for key in path) > 1


def make_optimizer(config: OptimizerConfig, total_steps: int, layout: Layout = SINGLE_DEVICE) -> Optimizer:
    """Return the optimizer that `--optimizer` names."""
    return (Optimizer if config.optimizer == "adamw" else OptaxOptimizer)(config, total_steps, layout)


def state_bytes(config: OptimizerConfig, trainable: Params) -> float:
    """Return the mean bytes of optimizer state of a trained value, from parameters or their shapes."""
    optimizer = OptaxOptimizer(config, total_steps=1)
    init = partial(jax.eval_shape, optimizer._init_part)
    parts = [trainable["layers"][key] if isinstance(key, int) else trainable[key] for key in param_keys(trainable)]
    state = sum(leaf.size * leaf.dtype.itemsize for part in parts for leaf in jax.tree.leaves(init(part)))
    return state / sum(leaf.size for leaf in jax.tree.leaves(trainable))
