"""Kernels that write references, as a primitive that JAX transforms like jax-triton's."""

from collections.abc import Callable
from functools import partial

import jax
from jax._src.state import discharge, types
from jax.extend.core import Primitive
from jax.interpreters import partial_eval

from jaxglue.ops.launch import _recompute

_kernel = Primitive("interpreted_kernel")
_kernel.multiple_results = True
partial_eval.partial_eval_jaxpr_custom_rules[_kernel] = _recompute


def write_references(run: Callable, *arrays: jax.Array | jax.Ref) -> None:
    """Call `run` with the arrays, references by their values, for the values to write into the references."""
    _kernel.bind(*arrays, run=run)


@_kernel.def_impl
def _run(*arrays, run):
    return jax.jit(partial(_kernel.bind, run=run))(*arrays)


@_kernel.def_effectful_abstract_eval
def _effects(*arrays, run):
    del run
    references = [i for i, array in enumerate(arrays) if isinstance(array, types.AbstractRef)]
    return [], {effect(i) for i in references for effect in (types.ReadEffect, types.WriteEffect)}


@discharge.register_discharge_rule(_kernel)
def _discharge(context, *arrays, run):
    written = iter(run(*arrays))
    return [next(written) if is_reference else None for is_reference in context.should_discharge], []
