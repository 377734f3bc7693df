"""AdamW over the parts of a model: a few kernel launches on one GPU, elsewhere compiled updates of a few parts each."""

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.stages import Traced
from jaxtyping import Array, Float

from jaxglue.engine.compiler import jit_step, on_device
from jaxglue.engine.transfer import commit
from jaxglue.models.parameters import ParamKey, Params, get_part, set_part
from jaxglue.objectives.objective import Objective
from jaxglue.ops.adam import ADAM, AdamW, StepScalars, is_moment
from jaxglue.sharding.gather import constrain_params
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.training.config import OptimizerConfig, warmup_steps

if TYPE_CHECKING:
    from jaxglue.ops.adam.triton import TritonAdam


def learning_rate_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the optimizer steps done."""
    peak = config.learning_rate or Objective.learning_rates["lora"]
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


class Optimizer:
    """AdamW with global-norm clipping; its state is a tree with the keys of the trainable one."""

    parts_per_program = 8
    """Parts updated by one XLA program: more save dispatches but compile longer."""
    fits_programs = True
    """Allows `update` inside a larger program on one device."""

    def __init__(self, config: OptimizerConfig, total_steps: int, layout: Layout = SINGLE_DEVICE):
        self._layout = layout
        self.schedule = learning_rate_schedule(config, total_steps)
        self._clip_norm = config.clip_norm
        self._adam = AdamW(
            beta1=config.beta1,
            beta2=config.second_decay,
            epsilon=config.epsilon,
            weight_decay=config.weight_decay,
            moments=config.moments,
        )
        self._init = jax.jit(self._init_part, static_argnames="prefix")
        self._square_norm = jit_step(optax.tree.norm, static_argnames="squared")
        self._scalars = jax.jit(self._step_scalars)
        self._learning_rate = jax.jit(lambda step: jnp.asarray(self.schedule(step), jnp.float32))
        self._update = jit_step(self._update_parts, donate_argnums=(0, 1))
        self._update_fused = jit_step(self._fused_step, donate_argnums=(0, 1), static_argnames=("kernels", "clips"))

    def init(self, trainable: Params) -> Params:
        """Return the state before the first step: `mu` and `nu` of every part."""

        def init(key: ParamKey) -> Params:
            return commit(self._init(get_part(trainable, key), prefix=key if isinstance(key, str) else ""))

        return _state_of(trainable, init)

    def state_shapes(self, trainable: Params) -> Params:
        """Return the shapes of the state on one device for shapes of parameters."""
        return _state_of(trainable, lambda key: on_device(jax.eval_shape(self._init_part, get_part(trainable, key))))

    def update(
        self, trainable: Params, state: Params, gradients: Params, step: int | Array
    ) -> tuple[Params, Params, dict[str, Float[Array, ""]]]:
        """Update all parts; return new trainable, new state, and grad_norm and learning_rate.

        The old trees are donated.

        Args:
            trainable, state, gradients: trees of this step.
            step: optimizer steps done before.
        """
        keys, done = param_keys(trainable), step if isinstance(step, jax.Array) else np.int32(step)
        old, states, gradient = ([get_part(tree, key) for key in keys] for tree in (trainable, state, gradients))
        if kernels := self._kernels(old):
            new, new_states, values = self._update_fused(old, states, gradient, done, kernels=kernels)
        else:
            batches = [list(batch) for batch in itertools.batched(range(len(old)), self.parts_per_program)]
            squares = [self._square_norm([gradient[i] for i in batch], squared=True) for batch in batches]
            scalars, values = self._scalars(squares, done)
            new, new_states = [], []
            for batch in batches:
                some = self._update(*([parts[i] for i in batch] for parts in (old, states, gradient)), scalars)
                new, new_states = new + some[0], new_states + some[1]
        return _with_parts(trainable, keys, new), _with_parts(state, keys, new_states), values

    def trace_update(self, trainable: Params) -> Iterator[Traced]:
        """Trace the program of `update` on shapes of parameters on one GPU, where it is one."""
        keys = param_keys(trainable)
        old = [get_part(trainable, key) for key in keys]
        if kernels := self._kernels(old):
            shapes = self.state_shapes(trainable)
            states = [get_part(shapes, key) for key in keys]
            yield self._update_fused.trace(old, states, old, np.int32(0), kernels=kernels)

    def learning_rate(self, step: int) -> dict[str, Float[Array, ""]]:
        """Return the learning rate after `step` optimizer steps, as `update` reports it."""
        return {"learning_rate": self._learning_rate(np.int32(step))}

    def update_part(
        self, trainable: Params, state: Params, key: ParamKey, gradient: Params, step: int
    ) -> tuple[Params, Params]:
        """Update one part without clipping; return trainable and state. The part's old arrays are donated."""
        parts = [get_part(trainable, key)], [get_part(state, key)], [gradient]
        if kernels := self._kernels(parts[0]):
            new, new_states, _ = self._update_fused(*parts, np.int32(step), kernels=kernels, clips=False)
        else:
            new, new_states = self._update(*parts, self._scalars(None, np.int32(step))[0])
        return _with_parts(trainable, [key], new), _with_parts(state, [key], new_states)

    def _init_part(self, part: Params, prefix: str = "") -> Params:
        leaves, treedef = jax.tree.flatten(part)
        moments = [jax.tree.unflatten(treedef, some) for some in zip(*map(self._adam.init, leaves), strict=True)]
        mu, nu = (constrain_params(self._layout, tree, prefix) for tree in moments)
        return {"mu": mu, "nu": nu}

    def _step_scalars(self, squares: list[Array] | None, step: Array) -> tuple[StepScalars, dict[str, Array]]:
        """Return the scalars of all updates and the reported values; without squares nothing is clipped."""
        norm = jnp.sqrt(sum(squares or [], start=jnp.float32(0)))
        clips = self._clip_norm and squares is not None
        scale = jnp.minimum(1.0, self._clip_norm / jnp.maximum(norm, 1e-12)) if clips else jnp.float32(1)
        rate = self._learning_rate(step)
        return self._adam.scalars(scale, rate, step), {"grad_norm": norm, "learning_rate": rate}

    def _update_parts(self, parts: list[Params], states: list[Params], gradients: list[Params], scalars: StepScalars):
        """Return new parts and new states."""
        flat, rebuild = _flatten(parts, states, gradients)
        rows = zip(*flat, decays(parts), strict=True)
        new = [self._adam.update(p, m, v, g, scalars, decays=decay) for p, m, v, g, decay in rows]
        return rebuild(*zip(*new, strict=True))

    def _fused_step(
        self,
        parts: list[Params],
        states: list[Params],
        gradients: list[Params],
        step: Array,
        *,
        kernels: "TritonAdam",
        clips: bool = True,
    ):
        """Return new parts, new states and the reported values."""
        flat, rebuild = _flatten(parts, states, gradients)
        scalars, values = self._step_scalars([kernels.square_norm(flat[3])] if clips else None, step)
        parameters, mus, nus, slopes = flat
        return *rebuild(*kernels.update(parameters, mus, nus, slopes, decays(parts), scalars)), values

    def _kernels(self, parts: list[Params]) -> "TritonAdam | None":
        arrays = [leaf for leaf in jax.tree.leaves(parts) if not isinstance(leaf, jax.core.Tracer)]
        devices = {device for leaf in arrays for device in leaf.sharding.device_set}
        return ADAM.load(self._adam, max(len(devices), 1))  # programs that have an update in them run on one device


def _flatten(parts: list[Params], states: list[Params], gradients: list[Params]) -> tuple[list[list[Any]], Any]:
    """Return leaves of (parameters, mus, nus, gradients), and a function from the first three to (parts, states)."""
    leaves, treedef = jax.tree.flatten(parts)
    mus, nus = (jax.tree.leaves([state[name] for state in states], is_leaf=is_moment) for name in ("mu", "nu"))

    def rebuild(new, new_mus, new_nus) -> tuple[list[Params], list[Params]]:
        trees = [jax.tree.unflatten(treedef, some) for some in (new, new_mus, new_nus)]
        return trees[0], [{"mu": mu, "nu": nu} for mu, nu in zip(*trees[1:], strict=True)]

    return [leaves, mus, nus, jax.tree.leaves(gradients)], rebuild


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


def param_keys(tree: Params) -> list[ParamKey]:
    """Return the keys of all parts with parameters, layers last."""
    names: list[ParamKey] = [name for name in sorted(tree.keys() - {"layers"}) if jax.tree.leaves(tree[name])]
    return names + [index for index, layer in enumerate(tree["layers"]) if jax.tree.leaves(layer)]


def decays(parts: list[Params]) -> list[bool]:
    """Tell for each leaf whether it decays: matrices do, but for experts' biases, which have two axes too."""
    bias = jax.tree_util.DictKey("bias")
    return [leaf.ndim > 1 and path[-1] != bias for path, leaf in jax.tree_util.tree_leaves_with_path(parts)]
