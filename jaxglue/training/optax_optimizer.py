"""Optimizers of optax: Muon, Adafactor and Lion, each parameter by itself."""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array
from optax.contrib import scale_by_muon

from jaxglue.engine.compiler import jit_step
from jaxglue.models.parameters import Params
from jaxglue.sharding.gather import constrain_params
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.training.partwise import Factors, PartwiseOptimizer, decays

_MUON_MOMENTUM = 0.95
_MUON_RMS = 0.2
"""Root mean square of an update of Muon, AdamW's usual one, so that both share a learning rate (arXiv 2502.16982)."""


class Scalars(NamedTuple):
    """Values that a step's updates share."""

    scale: Array
    """Factor on gradients that clips them."""
    learning_rate: Array


class OptaxOptimizer(PartwiseOptimizer):
    """An optimizer of optax; its state has, in place of each parameter, the arrays of optax's state for it."""

    _config: Any
    parts_per_program = 1

    def __init__(self, config: Any, total_steps: int, layout: Layout = SINGLE_DEVICE):
        super().__init__(config, total_steps, layout)
        self._programs: dict[Any, Any] = {}
        self._update = self._update_in_place

    def transform(self, path: tuple[Any, ...], parameter: Any) -> optax.GradientTransformation:
        """Return the transformation of a parameter's gradients into its updates, before decay and learning rate."""
        raise NotImplementedError

    @property
    def _mu_dtype(self) -> Any:
        return jnp.bfloat16 if self._config.moments == "bfloat16" else jnp.float32

    def init_part(self, part: Params, prefix: str = "") -> Params:
        """Return the arrays of optax's state for each parameter."""

        def init(path, parameter):
            return jax.tree.leaves(self.transform(path, parameter).init(parameter))

        return constrain_params(self._layout, jax.tree.map_with_path(init, part), prefix)

    def scalars(self, scale: Array, learning_rate: Array, step: Array) -> Scalars:
        """Return the values that a step's updates share."""
        return Scalars(scale, learning_rate)

    def update_parts(
        self, parts: list[Params], states: list[Params], gradients: list[Params], scalars: Scalars, factors: Factors
    ) -> tuple[list[Params], list[Params]]:
        """Return new parts and new states."""
        leaves, treedef = jax.tree.flatten(parts)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(parts)]
        old: list[Any] = treedef.flatten_up_to(states)  # type: ignore[attr-defined]
        rates = [scalars.learning_rate if factor == 1 else scalars.learning_rate * factor for factor in factors]
        gradient = [leaf * scalars.scale for leaf in jax.tree.leaves(gradients)]
        rows: Any = zip(paths, leaves, old, gradient, decays(parts), rates, strict=True)
        new, new_states = zip(*itertools.starmap(self._step, rows), strict=True)
        return jax.tree.unflatten(treedef, new), jax.tree.unflatten(treedef, new_states)

    def _update_in_place(
        self, parts: list[Params], states: list[Params], gradients: list[Params], scalars: Scalars, factors: Factors
    ):
        """Update parts, whose new arrays are stored as the old ones are."""
        shardings = jax.tree.map(lambda array: array.sharding, (parts, states))
        leaves, treedef = jax.tree.flatten(shardings)
        key = (*leaves, treedef)
        if key not in self._programs:
            self._programs[key] = jit_step(
                self.update_parts, donate_argnums=(0, 1), static_argnames="factors", out_shardings=shardings
            )
        return self._programs[key](parts, states, gradients, scalars, factors=factors)

    def _step(self, path, parameter, state, gradient, decay: bool, learning_rate: Array) -> tuple[Any, list[Any]]:
        """Return (parameter, state) after a step."""
        transform = self.transform(path, parameter)
        old = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(transform.init, parameter)), state)
        update, new = transform.update(gradient, old, parameter)
        if decay:
            update += self._config.weight_decay * parameter
        return parameter - learning_rate * update, jax.tree.leaves(new)


class Lion(OptaxOptimizer):
    """The sign of a momentum (arXiv 2302.06675)."""

    def transform(self, path: tuple[Any, ...], parameter: Any) -> optax.GradientTransformation:
        """Return the transformation of a parameter's gradients."""
        return optax.scale_by_lion(self._config.beta1, self._config.beta2, self._mu_dtype)


class Adafactor(OptaxOptimizer):
    """Gradients over the root of a factored second moment (arXiv 1804.04235)."""

    def transform(self, path: tuple[Any, ...], parameter: Any) -> optax.GradientTransformation:
        """Return the transformation of a parameter's gradients."""
        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


class Muon(OptaxOptimizer):
    """Orthogonalized momentum for the matrices of the decoder layers, Adam for the rest."""

    def transform(self, path: tuple[Any, ...], parameter: Any) -> optax.GradientTransformation:
        """Return the transformation of a parameter's gradients."""
        config = self._config
        if is_hidden_matrix(path, parameter):
            scale = _MUON_RMS * math.sqrt(max(parameter.shape))
            return optax.chain(scale_by_muon(beta=_MUON_MOMENTUM, mu_dtype=self._mu_dtype), optax.scale(scale))
        return optax.scale_by_adam(config.beta1, config.beta2, config.epsilon, mu_dtype=self._mu_dtype)


def is_hidden_matrix(path: tuple[Any, ...], parameter: Any) -> bool:
    """Tell whether Muon updates a parameter: a matrix of a decoder layer, whose path names module and projection."""
    return parameter.ndim == 2 and sum(isinstance(key, jax.tree_util.DictKey) for key in path) > 1
