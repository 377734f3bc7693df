"""A layer's programs on one device, traced without a device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxglue.engine.equations import equations
from jaxglue.engine.layer import LayerFunctions
from jaxglue.engine.policy import PRESETS, RematPolicy
from jaxglue.engine.residuals import Layer, result_names
from jaxglue.models.parameters import Params
from jaxglue.planner.cost import program_sizes
from jaxglue.planner.sizes import aval_bytes
from jaxglue.planner.workload import Workload, abstract_input
from jaxglue.sharding.mesh import MeshShape
from jaxglue.sharding.rules import Layout

_CHECKPOINT = "remat2"
"""Primitive of `jax.checkpoint`."""


@dataclass(frozen=True, eq=False)
class SizedProgram:
    """A program, and the numbers that its cost reads (`Sizes`)."""

    program: ClosedJaxpr
    scaled: tuple[int, ...] | None = None
    """Numbers in place of the program's own."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers."""
        return self.scaled or program_sizes(self.program)


class LayerPrograms(NamedTuple):
    """A layer's programs on one device."""

    forward: SizedProgram
    backward: SizedProgram
    kept: dict[str | None, int]
    """Bytes kept in between beside the layer's input, by their names."""


def layer_programs(
    layer: nnx.GraphDef | Layer,
    policy: RematPolicy,
    workload: Workload,
    trees: Sequence[Params],
    *,
    experts: int = 1,
    recomputing: ClosedJaxpr | None = None,
) -> LayerPrograms:
    """Trace a layer's forward and backward passes, with its experts spread over some devices.

    Args:
        layer: the module without its parameters, or its function (`layer_function`), traced once for all policies.
        policy: of its values for the backward pass.
        workload: gives shapes and dtypes.
        trees: trainable and frozen parameters, abstract.
        experts: devices that share the experts.
        recomputing: backward pass that keeps no value, from which the policy's follows; the policy's is traced without.
    """
    functions = LayerFunctions(layer, policy, Layout(MeshShape(expert=experts).abstract, workload.dtype))
    inputs = *trees, *abstract_input(replace(workload, batch_size=workload.batch_size * experts))
    forward = functions.forward.trace(*inputs)
    y, residuals, _ = forward.out_info
    backward = _given(recomputing, policy.saved or frozenset()) if recomputing else None
    backward = backward or _local_program(functions.backward.trace(residuals, *inputs, y, None).jaxpr)
    program = _local_program(forward.jaxpr)
    kept = _bytes_by_name(program.jaxpr, len(jax.tree.leaves(residuals)))
    return LayerPrograms(SizedProgram(program), SizedProgram(backward), kept)


def _given(backward: ClosedJaxpr, names: frozenset[str]) -> ClosedJaxpr | None:
    """Return a backward pass with the values of these names as arguments in place of their computation.

    None for a program of another form than that of `jax.checkpoint`.
    """
    program = backward.jaxpr
    calls = [eqn for eqn in program.eqns if eqn.primitive.name == _CHECKPOINT]
    if len(calls) != 1:
        return None
    inner: Jaxpr = calls[0].params["jaxpr"]
    named = [eqn for eqn in inner.eqns if eqn.primitive.name == "name" and eqn.params["name"] in names]
    values = [eqn.outvars[0] for eqn in named]
    arguments = [type(value)(value.aval) for value in values]
    inner = _with_arguments(inner, values, [eqn for eqn in inner.eqns if eqn not in named])
    call = calls[0].replace(invars=[*calls[0].invars, *arguments], params=calls[0].params | {"jaxpr": inner})
    eqns = [call if eqn is calls[0] else eqn for eqn in program.eqns]
    return ClosedJaxpr(_with_arguments(program, arguments, eqns), backward.consts)


def _with_arguments(program: Jaxpr, arguments: Sequence[Var], eqns: list[JaxprEqn]) -> Jaxpr:
    return program.replace(
        invars=[*program.invars, *arguments], eqns=eqns, debug_info=program.debug_info.with_unknown_names()
    )


def value_names(program: ClosedJaxpr) -> set[str]:
    """Return the names that a layer gives values which a program computes."""
    return {eqn.params["name"] for eqn, _ in equations(program.jaxpr) if eqn.primitive.name == "name"}


def _bytes_by_name(forward: Jaxpr, residuals: int) -> dict[str | None, int]:
    """Sum the bytes of a forward pass's residuals, its results after y, by their names; constants have none."""
    kept: dict[str | None, int] = {}
    for name, var in list(zip(result_names(forward), forward.outvars, strict=True))[1 : residuals + 1]:
        kept[name] = kept.get(name, 0) + aval_bytes(var.aval)
    return kept


def replay_program(
    graphdef: nnx.GraphDef, workload: Workload, trees: Sequence[Params], *, from_attention: bool
) -> ClosedJaxpr:
    """Trace a layer's second run (`LayerFunctions.replay`) on one device, with attention's output given or not."""
    config = workload.config
    shape = workload.batch_size, workload.seq_len, config.num_attention_heads, config.head_dim
    attention_out = jax.ShapeDtypeStruct(shape, workload.dtype) if from_attention else None
    layer = LayerFunctions(graphdef, PRESETS["full"])
    return layer.replay.trace(attention_out, *trees, *abstract_input(workload)).jaxpr


def reference_program(graphdef: nnx.GraphDef, workload: Workload, frozen: Params) -> ClosedJaxpr:
    """Trace the forward pass of a layer of the reference (`without_adapters`) on one device."""
    layer = LayerFunctions(graphdef, PRESETS["full"])
    return layer.apply.trace({}, frozen, *abstract_input(workload)).jaxpr


def _local_program(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the body of the program's `shard_map`; without one, the program itself."""
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            inner: Jaxpr = eqn.params["jaxpr"]
            return ClosedJaxpr(inner, ())
    return program
