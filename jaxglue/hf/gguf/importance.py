"""Importance of each matrix's inputs, their mean squares on rows of text: K-quants weigh errors by them."""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

from jaxglue.hf.export_check import ExportRows, Parts, embed_rows
from jaxglue.hf.gguf.architectures import architecture_of
from jaxglue.hf.gguf.linear_attention import inputs_in_file
from jaxglue.hf.gguf.package import load_gguf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.decoder import packed_context
from jaxglue.models.parameters import merge_module
from jaxglue.ops.equations import called

_INLINED = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"}
"""Primitives that only call a program."""
_ROUTERS = ("mlp.router", "mlp.gate")
_FLOOR = 1e-6
"""Least importance in units of the mean: inputs that these rows leave at zero may occur in others."""
_log = logging.getLogger(__name__)

Labels = frozenset[str]
"""Names of the weights that a value is computed from, and from nothing else; empty for others."""


def measure_importance(config: DecoderConfig, parts: Parts, rows: Sequence[ExportRows], dtype) -> dict[str, np.ndarray]:
    """Return the mean squares [in] of the inputs of each matrix, by its name in a GGUF file.

    Experts' gate and up projections are given the inputs of all tokens, their down projections none.

    Args:
        config: of the model.
        parts: returns a module with its parameters; one layer's at a time are in memory.
        rows: packed rows of text.
        dtype: of activations.
    """
    gguf = load_gguf()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture_of(config).name], config.num_hidden_layers)
    contexts = [packed_context(config, one.segments) for one in rows]
    hidden = [embed_rows(parts, one, dtype) for one in rows]
    found: dict[str, np.ndarray] = {}
    for index in range(config.num_hidden_layers):
        graphdef, trees = parts(index)
        sums: dict[str, Any] = {}
        for number, context in enumerate(contexts):
            hidden[number], squares = _layer(graphdef, trees, hidden[number], context)
            sums = {name: sums.get(name, 0) + value for name, value in squares.items()}
        for name, value in sums.items():
            for target in _targets(name):
                if tensor := names.get_name(f"model.layers.{index}.{target}"):
                    mean = np.asarray(value, np.float64) / sum(
                        int((one.segments.segment_ids > 0).sum()) for one in rows
                    )
                    mean = inputs_in_file(config, target, mean)
                    found[f"{tensor}.weight"] = (mean + _FLOOR * mean.mean()).astype(np.float32)
    if not found:
        _log.warning("no inputs of matrices were found in the layers' programs: errors are weighed by size alone")
    return found


def _targets(name: str) -> Iterable[str]:
    """Return the modules whose inputs those of a parameter are."""
    module = name.removesuffix(".weight")
    if module == name or ".experts." in name:
        return ()
    if module in _ROUTERS:
        return ("mlp.experts.gate_proj", "mlp.experts.up_proj")
    return (module,)


@partial(jax.jit, static_argnums=0)
def _layer(graphdef, trees, x, context) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return a layer's output, and the sums of squares of the inputs of its weights."""

    def run(trees, x, context):
        return merge_module(graphdef, *trees)(x, context)

    program = jax.make_jaxpr(run)(trees, x, context)
    paths = [
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:])
        for path, _ in jax.tree_util.tree_leaves_with_path(trees)
    ]
    arguments = jax.tree.leaves((trees, x, context))
    labels = [frozenset([path]) for path in paths] + [frozenset[str]()] * (len(arguments) - len(paths))
    mask = (context.segments.segment_ids > 0).reshape(-1)
    recorder = _Recorder(mask)
    (output,), _ = recorder.evaluate(program.jaxpr, program.consts, arguments, labels)
    return output, recorder.squares


class _Recorder:
    """Evaluates a program, and sums the squares of the inputs multiplied with its weights."""

    def __init__(self, mask: jax.Array):
        self.squares: dict[str, jax.Array] = {}
        self._mask = mask

    def evaluate(
        self, program: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], labels: Sequence[Labels]
    ) -> tuple[list[Any], list[Labels]]:
        """Return a program's results and their labels."""
        values = dict(zip(program.constvars, constants, strict=True)) | dict(
            zip(program.invars, arguments, strict=True)
        )
        known = dict(zip(program.invars, labels, strict=True))

        def value(var: Any) -> Any:
            return var.val if isinstance(var, Literal) else values[var]

        def label(var: Any) -> Labels:
            return frozenset() if isinstance(var, Literal) else known.get(var, frozenset())

        for eqn in program.eqns:
            inputs, marks = [value(var) for var in eqn.invars], [label(var) for var in eqn.invars]
            inner = called(eqn) if eqn.primitive.name in _INLINED else None
            if inner is not None and len(inner.jaxpr.invars) == len(inputs):
                results, marked = self.evaluate(inner.jaxpr, inner.consts, inputs, marks)
            else:
                if eqn.primitive.name == "dot_general":
                    self._record(eqn, inputs, marks)
                made = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
                results = list(made) if eqn.primitive.multiple_results else [made]
                marked = [_joined(inputs, marks)] * len(results)
            values.update(zip(eqn.outvars, results, strict=True))
            known.update(zip(eqn.outvars, marked, strict=True))
        return [value(var) for var in program.outvars], [label(var) for var in program.outvars]

    def _record(self, eqn: Any, inputs: Sequence[Any], marks: Sequence[Labels]) -> None:
        """Add the squares of the other factor of a weight, [tokens, in]."""
        (contracted, batch) = eqn.params["dimension_numbers"]
        for own, other in ((0, 1), (1, 0)):
            if not marks[own] or marks[other] or batch[0] or len(contracted[other]) != 1:
                continue
            factor = jnp.moveaxis(inputs[other], contracted[other][0], -1).astype(jnp.float32)
            factor = factor.reshape(-1, factor.shape[-1])
            if len(factor) != len(self._mask):
                continue
            total = jnp.sum(jnp.where(self._mask[:, None], factor**2, 0), axis=0)
            self.squares |= dict.fromkeys(marks[own], total)


def _joined(inputs: Sequence[Any], marks: Sequence[Labels]) -> Labels:
    """Return the labels of an equation's results: those of its arrays, where all have some."""
    arrays = [mark for value, mark in zip(inputs, marks, strict=True) if np.ndim(value) > 0]
    return frozenset().union(*arrays) if arrays and all(arrays) else frozenset()
