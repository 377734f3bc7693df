"""AdamW: a few kernel launches on one GPU, elsewhere compiled updates of a few parts each."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.stages import Traced
from jaxtyping import Array

from jaxglue.engine.compiler import jit_step
from jaxglue.models.parameters import Params, get_part
from jaxglue.ops.adam import ADAM, AdamW, StepScalars, is_moment
from jaxglue.sharding.gather import constrain_params
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.training.config import OptimizerConfig
from jaxglue.training.partwise import Factors, PartwiseOptimizer, decays, param_keys

if TYPE_CHECKING:
    from jaxglue.ops.adam.triton import TritonAdam


class AdamWOptimizer(PartwiseOptimizer):
    """AdamW; the state of a part is its moments, `mu` and `nu`."""

    fits_programs = True

    def __init__(self, config: OptimizerConfig, total_steps: int, layout: Layout = SINGLE_DEVICE):
        super().__init__(config, total_steps, layout)
        self._adam = AdamW(
            beta1=config.beta1,
            beta2=config.second_decay,
            epsilon=config.epsilon,
            weight_decay=config.weight_decay,
            moments=config.moments,
        )
        static = ("kernels", "clips", "factors")
        self._update_fused = jit_step(self._fused_step, donate_argnums=(0, 1), static_argnames=static)

    def init_part(self, part: Params, prefix: str = "") -> Params:
        """Return the moments of a part, which are 0."""
        leaves, treedef = jax.tree.flatten(part)
        moments = [jax.tree.unflatten(treedef, some) for some in zip(*map(self._adam.init, leaves), strict=True)]
        mu, nu = (constrain_params(self._layout, tree, prefix) for tree in moments)
        return {"mu": mu, "nu": nu}

    def scalars(self, scale: Array, learning_rate: Array, step: Array) -> StepScalars:
        """Return the values that a step's updates share."""
        return self._adam.scalars(scale, learning_rate, step)

    def update_parts(
        self,
        parts: list[Params],
        states: list[Params],
        gradients: list[Params],
        scalars: StepScalars,
        factors: Factors,
    ) -> tuple[list[Params], list[Params]]:
        """Return new parts and new states."""
        flat, rebuild = _flatten(parts, states, gradients)
        rows = zip(*flat, decays(parts), factors, strict=True)
        new = [
            self._adam.update(p, m, v, g, _times(scalars, factor), decays=decay) for p, m, v, g, decay, factor in rows
        ]
        return rebuild(*zip(*new, strict=True))

    def trace_update(self, trainable: Params) -> Iterator[Traced]:
        """Trace the program of `update` on shapes of parameters on one GPU, where it is one."""
        keys = param_keys(trainable)
        old = [get_part(trainable, key) for key in keys]
        if kernels := self._kernels(old):
            shapes = self.state_shapes(trainable)
            states = [get_part(shapes, key) for key in keys]
            factors = sum((self.factors(*each) for each in zip(keys, old, strict=True)), ())
            yield self._update_fused.trace(old, states, old, np.int32(0), kernels=kernels, factors=factors)

    def _update_all(
        self, parts: list[Params], states: list[Params], gradients: list[Params], step: Any, factors: list[Factors]
    ):
        if kernels := self._kernels(parts):
            return self._update_fused(parts, states, gradients, step, kernels=kernels, factors=sum(factors, ()))
        return super()._update_all(parts, states, gradients, step, factors)

    def _update_one(
        self, parts: list[Params], states: list[Params], gradients: list[Params], step: int, factors: Factors
    ):
        if kernels := self._kernels(parts):
            options: dict[str, Any] = {"kernels": kernels, "clips": False, "factors": factors}
            return self._update_fused(parts, states, gradients, np.int32(step), **options)[:2]
        return super()._update_one(parts, states, gradients, step, factors)

    def _fused_step(
        self,
        parts: list[Params],
        states: list[Params],
        gradients: list[Params],
        step: Array,
        *,
        kernels: "TritonAdam",
        factors: Factors,
        clips: bool = True,
    ):
        """Return new parts, new states and the reported values; leaves with one learning rate share launches."""
        flat, rebuild = _flatten(parts, states, gradients)
        scalars, values = self._step_scalars([kernels.square_norm(flat[-1])] if clips else None, step)
        rows = [*flat, decays(parts)]
        new: list[list[Any]] = [[None] * len(factors) for _ in range(3)]
        for factor in dict.fromkeys(factors):
            numbers = [number for number, each in enumerate(factors) if each == factor]
            p, m, v, g, decay = ([row[number] for number in numbers] for row in rows)
            for results, updated in zip(new, kernels.update(p, m, v, g, decay, _times(scalars, factor)), strict=True):
                for number, value in zip(numbers, updated, strict=True):
                    results[number] = value
        return *rebuild(*new), values

    def _kernels(self, parts: list[Params]) -> "TritonAdam | None":
        arrays = [leaf for leaf in jax.tree.leaves(parts) if not isinstance(leaf, jax.core.Tracer)]
        devices = {device for leaf in arrays for device in leaf.sharding.device_set}
        return ADAM.load(self._adam, max(len(devices), 1))  # programs that have an update in them run on one device


def _times(scalars: StepScalars, factor: float) -> StepScalars:
    """Return the scalars with another learning rate."""
    return scalars if factor == 1 else scalars._replace(learning_rate=scalars.learning_rate * factor)


def _flatten(parts: list[Params], states: list[Params], gradients: list[Params]) -> tuple[list[list[Any]], Any]:
    """Return leaves of (parameters, mus, nus, gradients), and a function from the first three to (parts, states)."""
    leaves, treedef = jax.tree.flatten(parts)
    mus, nus = (jax.tree.leaves([state[name] for state in states], is_leaf=is_moment) for name in ("mu", "nu"))

    def rebuild(new, new_mus, new_nus) -> tuple[list[Params], list[Params]]:
        trees = [jax.tree.unflatten(treedef, some) for some in (new, new_mus, new_nus)]
        return trees[0], [{"mu": mu, "nu": nu} for mu, nu in zip(*trees[1:], strict=True)]

    return [leaves, mus, nus, jax.tree.leaves(gradients)], rebuild
