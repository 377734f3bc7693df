"""AdamW: a few kernel launches on each GPU, elsewhere compiled updates of a few parts each."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.stages import Traced
from jaxtyping import Array

from jaxglue.engine.compiler import jit_step
from jaxglue.models.parameters import Params, get_part
from jaxglue.ops.adam import ADAM, AdamCall, AdamW, StepScalars, is_moment
from jaxglue.ops.adam.reference import BLOCK
from jaxglue.ops.collectives import per_device, psum
from jaxglue.sharding.gather import constrain_params
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.training.optimizer import AdamWSettings
from jaxglue.training.partwise import Factors, PartwiseOptimizer, Prefixes, decays, param_keys, part_prefixes

if TYPE_CHECKING:
    from jaxglue.ops.adam.triton import TritonAdam


class AdamWOptimizer(PartwiseOptimizer):
    """AdamW; the state of a part is its moments, `mu` and `nu`."""

    fits_programs = True

    def __init__(self, config: AdamWSettings, total_steps: int, layout: Layout = SINGLE_DEVICE):
        super().__init__(config, total_steps, layout)
        self._adam = AdamW(
            beta1=config.beta1,
            beta2=config.beta2,
            epsilon=config.epsilon,
            weight_decay=config.weight_decay,
            moments=config.moments,
        )
        static = "kernels", "prefixes", "clips", "factors"
        self._update_fused = jit_step(self._fused_step, donate_argnums=(0, 1), static_argnames=static)

    def init_part(self, part: Params, prefix: str = "") -> Params:
        """Return the moments of a part, which are 0."""
        leaves, treedef = jax.tree.flatten(part)
        moments = [jax.tree.unflatten(treedef, some) for some in zip(*map(self._adam.init, leaves), strict=True)]
        mu, nu = (constrain_params(self._layout, tree, prefix) for tree in moments)
        return {"mu": mu, "nu": nu}

    def state_specs(self, state: Params, prefix: str) -> Params:
        """Return the specs of a part's moments on a mesh."""
        return {name: self._layout.param_specs(moments, prefix) for name, moments in state.items()}

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
        """Trace the program of `update` on shapes of parameters, where it is one."""
        keys = param_keys(trainable)
        old = [get_part(trainable, key) for key in keys]
        if kernels := self._kernels(old, prefixes := part_prefixes(keys)):
            shapes = self.state_shapes(trainable)
            states = [get_part(shapes, key) for key in keys]
            factors = sum((self.factors(*each) for each in zip(keys, old, strict=True)), ())
            yield self._update_fused.trace(
                old, states, old, np.int32(0), kernels=kernels, prefixes=prefixes, factors=factors
            )

    def _update_all(
        self,
        prefixes: Prefixes,
        parts: list[Params],
        states: list[Params],
        gradients: list[Params],
        step: Any,
        factors: list[Factors],
    ):
        if kernels := self._kernels(parts, prefixes):
            return self._update_fused(
                parts, states, gradients, step, kernels=kernels, prefixes=prefixes, factors=sum(factors, ())
            )
        return super()._update_all(prefixes, parts, states, gradients, step, factors)

    def _update_one(
        self,
        prefixes: Prefixes,
        parts: list[Params],
        states: list[Params],
        gradients: list[Params],
        step: int,
        factors: Factors,
    ):
        if kernels := self._kernels(parts, prefixes):
            return self._update_fused(
                parts,
                states,
                gradients,
                np.int32(step),
                kernels=kernels,
                prefixes=prefixes,
                clips=False,
                factors=factors,
            )[:2]
        return super()._update_one(prefixes, parts, states, gradients, step, factors)

    def _fused_step(
        self,
        parts: list[Params],
        states: list[Params],
        gradients: list[Params],
        step: Array,
        *,
        kernels: "TritonAdam",
        prefixes: Prefixes,
        factors: Factors,
        clips: bool = True,
    ):
        """Return new parts, new states and the reported values."""
        layout = self._layout
        specs = [layout.param_specs(part, prefix) for part, prefix in zip(parts, prefixes, strict=True)]
        of_states = [self.state_specs(state, prefix) for state, prefix in zip(states, prefixes, strict=True)]
        split = [tuple(layout.axes(spec)) for spec in jax.tree.leaves(specs)]
        program = partial(self._fused_update, kernels=kernels, factors=factors, split=split, clips=clips)
        arguments, results = (specs, of_states, specs, PartitionSpec()), (specs, of_states, PartitionSpec())
        return per_device(program, layout.mesh, arguments, results)(parts, states, gradients, step)

    def _fused_update(
        self,
        parts: list[Params],
        states: list[Params],
        gradients: list[Params],
        step: Array,
        *,
        kernels: "TritonAdam",
        factors: Factors,
        split: list[tuple[str, ...]],
        clips: bool,
    ):
        """Update a device's own parts; leaves with one learning rate share launches, `split` are their axes."""
        flat, rebuild = _flatten(parts, states, gradients)
        squares = [psum(kernels.square_norm(some), *axes) for axes, some in _by_axes(split, flat[-1])]
        scalars, values = self._step_scalars(squares if clips else None, step)
        rows = [*flat, decays(parts)]
        new: list[list[Any]] = [[None] * len(factors) for _ in range(3)]
        for factor in dict.fromkeys(factors):
            numbers = [number for number, each in enumerate(factors) if each == factor]
            p, m, v, g, decay = ([row[number] for number in numbers] for row in rows)
            for results, updated in zip(new, kernels.update(p, m, v, g, decay, _times(scalars, factor)), strict=True):
                for number, value in zip(numbers, updated, strict=True):
                    results[number] = value
        return *rebuild(*new), values

    def _kernels(self, parts: list[Params], prefixes: Prefixes) -> "TritonAdam | None":
        """Return the kernels, where each device can update its own parameters with them."""
        if self._layout.mesh is not None:
            apart = all(self._has_whole_blocks(part, prefix) for part, prefix in zip(parts, prefixes, strict=True))
            return ADAM.load(AdamCall(adam=self._adam, devices=1 if apart else self._layout.mesh.size))
        arrays = [leaf for leaf in jax.tree.leaves(parts) if not isinstance(leaf, jax.core.Tracer)]
        devices = {device for leaf in arrays for device in leaf.sharding.device_set}
        return ADAM.load(AdamCall(adam=self._adam, devices=max(len(devices), 1)))

    def _has_whole_blocks(self, part: Params, prefix: str) -> bool:
        """Return whether blocks of 8-bit moments lie where their parameters do."""
        if self._adam.moments != "8bit":
            return True
        layout, specs = self._layout, self._layout.param_specs(part, prefix)
        scales = jax.tree.map(lambda leaf: jax.eval_shape(self._adam.init, leaf)[0], part)
        locals_ = jax.tree.leaves(layout.local_shapes(part, specs))
        rows = zip(
            locals_,
            jax.tree.leaves(specs),
            jax.tree.leaves(layout.param_specs(scales, prefix), is_leaf=is_moment),
            strict=True,
        )
        return all(
            not layout.axes(spec) or not is_moment(moment) or (spec == moment.absmax and local.size % BLOCK == 0)
            for local, spec, moment in rows
        )


def _by_axes(axes: list[tuple[str, ...]], arrays: list[Array]) -> list[tuple[tuple[str, ...], list[Array]]]:
    """Return arrays by the axes that split them."""
    rows = list(zip(axes, arrays, strict=True))
    return [(each, [array for own, array in rows if own == each]) for each in dict.fromkeys(axes)]


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
