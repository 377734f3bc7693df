"""Base of optimizers that update a model part by part: the learning rate, clipping, and compiled programs."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.stages import Traced
from jaxtyping import Array, Float

from jaxglue.engine.compiler import jit_step, on_devices
from jaxglue.engine.transfer import commit
from jaxglue.models.parameters import ParamKey, Params, get_part, set_part
from jaxglue.objectives.objective import Objective
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.training.optimizer import OptimizerConfig, warmup_steps

Prefixes = tuple[str, ...]
"""Names of parts, empty for layers: parameters' names, which decide how a mesh splits them, begin with these."""
Factors = tuple[float, ...]
"""Learning rate of each leaf as a multiple of the step's."""


def learning_rate_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the optimizer steps done."""
    peak = peak_rate(config)
    end, warmup = peak * config.min_lr_ratio, warmup_steps(config, total_steps)
    rest = max(total_steps - warmup, 1)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=config.min_lr_ratio),
        "linear": optax.linear_schedule(peak, end, rest),
        "constant": optax.constant_schedule(peak),
        "wsd": _stable_decay(peak, end, rest, min(round(config.decay_ratio * total_steps), rest)),
    }[config.schedule]
    # The first step counts as step 1 of the warm-up, so that its rate is not 0.
    return optax.join_schedules(
        [optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1)), after], [warmup]
    )


def _stable_decay(peak: float, end: float, steps: int, decay: int) -> optax.Schedule:
    """Return the peak for all but the last `decay` steps, in which the rate falls along a line (arXiv 2405.18392)."""
    return optax.join_schedules(
        [optax.constant_schedule(peak), optax.linear_schedule(peak, end, max(decay, 1))], [steps - decay]
    )


class PartwiseOptimizer:
    """Base of optimizers that update part by part, with gradients scaled down to a global norm.

    A subclass returns a part's state from `init_part`, and new parts and states from `update_parts`.
    """

    parts_per_program = 8
    """Parts updated by one XLA program: more save dispatches but compile longer."""
    fits_programs = False

    def __init__(self, config: OptimizerConfig, total_steps: int, layout: Layout = SINGLE_DEVICE):
        self._config, self._layout = config, layout
        self.schedule = learning_rate_schedule(config, total_steps)
        self._init = jax.jit(self.init_part, static_argnames="prefix")
        self._square_norm = jit_step(optax.tree.norm, static_argnames="squared")
        self._scalars = jax.jit(self._step_scalars)
        self._learning_rate = jax.jit(lambda step: jnp.asarray(self.schedule(step), jnp.float32))
        self._update: Any = jit_step(self.update_parts, donate_argnums=(0, 1), static_argnames="factors")

    def init_part(self, part: Params, prefix: str = "") -> Params:
        """Return the state of a part before the first step; `prefix` is the name of one outside of the layers."""
        raise NotImplementedError

    def scalars(self, scale: Array, learning_rate: Array, step: Array) -> Any:
        """Return the values that a step's updates share, from the gradients' scale and the learning rate."""
        raise NotImplementedError

    def update_parts(
        self, parts: list[Params], states: list[Params], gradients: list[Params], scalars: Any, factors: Factors
    ) -> tuple[list[Params], list[Params]]:
        """Return new parts and new states."""
        raise NotImplementedError

    def init(self, trainable: Params) -> Params:
        """Return the state before the first step, of every part."""

        def init(key: ParamKey) -> Params:
            return commit(self._init(get_part(trainable, key), prefix=key if isinstance(key, str) else ""))

        return _state_of(trainable, init)

    def state_shapes(self, trainable: Params) -> Params:
        """Return the shapes of the state for shapes of parameters."""

        def shapes(key: ParamKey) -> Params:
            state = jax.eval_shape(self.init_part, get_part(trainable, key))
            return on_devices(self._layout, state, self.state_specs(state, key if isinstance(key, str) else ""))

        return _state_of(trainable, shapes)

    def state_specs(self, state: Params, prefix: str) -> Any:
        """Return the specs of a part's state on a mesh."""
        return self._layout.param_specs(state, prefix)

    def update(
        self, trainable: Params, state: Params, gradients: Params, step: int | Array
    ) -> tuple[Params, Params, dict[str, Float[Array, ""]]]:
        """Update all parts (see `Optimizer.update`)."""
        keys, done = param_keys(trainable), step if isinstance(step, jax.Array) else np.int32(step)
        old, states, gradient = ([get_part(tree, key) for key in keys] for tree in (trainable, state, gradients))
        factors = [self.factors(key, part) for key, part in zip(keys, old, strict=True)]
        new, new_states, values = self._update_all(part_prefixes(keys), old, states, gradient, done, factors)
        return _with_parts(trainable, keys, new), _with_parts(state, keys, new_states), values

    def update_part(
        self, trainable: Params, state: Params, key: ParamKey, gradient: Params, step: int
    ) -> tuple[Params, Params]:
        """Update one part without clipping; return trainable and state. The part's old arrays are donated."""
        part, prefixes = get_part(trainable, key), part_prefixes([key])
        arguments = prefixes, [part], [get_part(state, key)], [gradient], step, self.factors(key, part)
        new, new_states = self._update_one(*arguments)
        return _with_parts(trainable, [key], new), _with_parts(state, [key], new_states)

    def factors(self, key: ParamKey, part: Params) -> Factors:
        """Return the factors on the learning rates of a part's leaves."""
        return tuple(
            _factor(self._config, key, str(getattr(path[-1], "key", "")))
            for path, _ in jax.tree_util.tree_leaves_with_path(part)
        )

    def learning_rate(self, step: int) -> dict[str, Float[Array, ""]]:
        """Return the learning rate after `step` optimizer steps, as `update` reports it."""
        return {"learning_rate": self._learning_rate(np.int32(step))}

    def trace_update(self, trainable: Params) -> Iterable[Traced]:
        """Trace no program: they are of a few parts each, and compile soon."""
        return ()

    def _update_all(
        self,
        prefixes: Prefixes,
        parts: list[Params],
        states: list[Params],
        gradients: list[Params],
        step: Any,
        factors: list[Factors],
    ) -> tuple[list[Params], list[Params], dict[str, Array]]:
        """Return new parts, new states and the reported values."""
        batches = [list(batch) for batch in itertools.batched(range(len(parts)), self.parts_per_program)]
        squares = [self._square_norm([gradients[i] for i in batch], squared=True) for batch in batches]
        scalars, values = self._scalars(squares, step)
        new: list[Params] = []
        new_states: list[Params] = []
        for batch in batches:
            own = tuple(factor for i in batch for factor in factors[i])
            trees = [[each[i] for i in batch] for each in (parts, states, gradients)]
            some = self._update(*trees, scalars, factors=own)
            new, new_states = new + some[0], new_states + some[1]
        return new, new_states, values

    def _update_one(
        self,
        prefixes: Prefixes,
        parts: list[Params],
        states: list[Params],
        gradients: list[Params],
        step: int,
        factors: Factors,
    ) -> tuple[list[Params], list[Params]]:
        return self._update(parts, states, gradients, self._scalars(None, np.int32(step))[0], factors=factors)

    def _step_scalars(self, squares: list[Array] | None, step: Array) -> tuple[Any, dict[str, Array]]:
        """Return the scalars of all updates and the reported values; without squares nothing is clipped."""
        norm = jnp.sqrt(sum(squares or [], start=jnp.float32(0)))
        limit = self._config.clip_norm
        clips = limit and squares is not None
        scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12)) if clips else jnp.float32(1)
        rate = self._learning_rate(step)
        return self.scalars(scale, rate, step), {"grad_norm": norm, "learning_rate": rate}


def _factor(config: OptimizerConfig, key: ParamKey, name: str) -> float:
    """Return the learning rate of a leaf of this name as a multiple of the step's."""
    rate, adapts = config.embedding_learning_rate, name.startswith("lora_")
    if rate is not None and (key == "embed_tokens" or (key == "lm_head" and not adapts)):
        return rate / peak_rate(config)
    return config.lora_plus_ratio if name in ("lora_B", "lora_magnitude_vector") else 1.0


def peak_rate(config: OptimizerConfig) -> float:
    """Return the learning rate after the warm-up."""
    return Objective.learning_rates["lora"] if config.learning_rate is None else config.learning_rate


def _state_of(trainable: Params, init: Callable[[ParamKey], Params]) -> Params:
    """Return the state of all parts by that of each."""
    state: Params = {name: {} for name in trainable} | {"layers": [{} for _ in trainable["layers"]]}
    for key in param_keys(trainable):
        set_part(state, key, init(key))
    return state


def _with_parts(tree: Params, keys: list[ParamKey], parts: list[Params]) -> Params:
    """Return the tree with the parts at these keys replaced."""
    tree = {**tree, "layers": list(tree["layers"])}
    for key, part in zip(keys, parts, strict=True):
        set_part(tree, key, part)
    return tree


def part_prefixes(keys: Iterable[ParamKey]) -> Prefixes:
    """Return the names of the parts with these keys."""
    return tuple(key if isinstance(key, str) else "" for key in keys)


def param_keys(tree: Params) -> list[ParamKey]:
    """Return the keys of all parts with parameters, layers last."""
    names: list[ParamKey] = [name for name in sorted(tree.keys() - {"layers"}) if jax.tree.leaves(tree[name])]
    return names + [index for index, layer in enumerate(tree["layers"]) if jax.tree.leaves(layer)]


def decays(parts: list[Params]) -> list[bool]:
    """Tell for each leaf whether it decays: matrices do, but for experts' biases, which have two axes too."""
    bias = jax.tree_util.DictKey("bias")
    return [leaf.ndim > 1 and path[-1] != bias for path, leaf in jax.tree_util.tree_leaves_with_path(parts)]
