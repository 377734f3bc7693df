"""Cost model of a traced program on a GPU: seconds and bytes from its jaxpr, without compiling it.

Matmuls, reductions and attention kernels read their operands from memory and write their results there; XLA fuses
everything else into them, so a value is in memory only if one of them makes or needs it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from jaxglue.ops.equations import branch, called, live_program
from jaxglue.ops.kernel_cost import KERNEL, KernelCost, KernelKind, stated_cost
from jaxglue.planner.equation_sizes import aval_bytes, dot_flops, fp8_to_transpose, is_fp8, padded_bytes
from jaxglue.planner.gpus import Gpu, find_gpu
from jaxglue.planner.kernel_times import (
    conversion_seconds,
    fused_seconds,
    kernel_seconds,
    matmul_seconds,
    transposed_seconds,
    with_gap,
)
from jaxglue.planner.live_bytes import Kernel, Value, peak_bytes


class Sizes:
    """Bytes, FLOPs and loops' lengths in the order in which a program's cost asks for them.

    Args:
        given: numbers in place of those of the program's own shapes.
    """

    def __init__(self, given: Sequence[int] | None = None):
        self.read: list[int] = []
        self._given = None if given is None else iter(given)

    def __call__(self, own: int) -> int:
        """Return a number of the program, or the one given in its place."""
        self.read.append(own if self._given is None else next(self._given))
        return self.read[-1]

    def of(self, var: Any) -> int:
        """Return a variable's bytes."""
        return self(aval_bytes(var.aval) if self._given is None else 0)


_ALIASES = {
    "reshape",
    "squeeze",
    "expand_dims",
    "name",
    "reduce_precision",
    "optimization_barrier",
    "copy",
    "new_ref",
    "freeze",
}
_CONVERSIONS = {KERNEL, "convert_element_type", "mul", "broadcast_in_dim", "transpose"}
"""Operations by which kernels' weights are made of quantized ones."""
_SCALAR, _TABLE = 8, 1024
"""Bytes of constants that XLA finds equal in conversions, outside and inside of loops (NF4's tables of values)."""
_SMALL = 2**16
"""Bytes of an array from which XLA gathers within another kernel of a loop."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time and memory of one run of a program."""

    seconds: float
    temporary: int
    """Peak bytes beside arguments and results."""
    results: int
    """Bytes of results."""
    matmul: int = 0
    """Most bytes of a matmul's operands and, twice, its result: copies with which its algorithms are compared.

    A loop's matmul that reads its slice of an array is fused with the slicing, and not compared.
    """
    kernels: int = 0
    """Kernels, those of loops in every turn."""


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """Time and memory of attention's kernels of a pass, together."""

    seconds: float
    workspace: int = 0
    """Temporary bytes."""
    in_place: bool = False
    """Results take the places of the first arrays that the kernel reads."""


def program_cost(
    jaxpr: ClosedJaxpr,
    gpu: Gpu,
    *,
    attention: Mapping[KernelKind, AttentionCost],
    sizes: Sizes | None = None,
    slices: int = 0,
    in_loop: bool = False,
) -> Cost:
    """Return the cost of a program.

    Args:
        jaxpr: the program.
        gpu: that runs it.
        attention: costs of kernels whose time the program does not tell, by their kind.
        sizes: of the program; by default its own.
        slices: of a loop's body, the number of last arguments that are slices.
        in_loop: the program is a loop's body.
    """
    jaxpr, sizes = live_program(jaxpr), sizes or Sizes()
    trace = _Trace(gpu, attention, sizes, in_loop=in_loop)
    variables = jaxpr.jaxpr.invars
    arguments = [Value(sizes.of(var), is_argument=True, of_arguments=True, in_memory=True) for var in variables]
    for value, var in zip(arguments, variables, strict=True):
        value.is_codes = getattr(var.aval, "dtype", None) == jnp.int8
    for value in arguments[len(arguments) - slices :]:
        value.is_slice = True
    results = trace.run(jaxpr.jaxpr, arguments)
    made = dict.fromkeys(value for value in results if not value.is_argument)
    in_place = {root for value in made for root in _places(value, in_loop=in_loop)}
    for value in made:
        trace.materialize(value)
    total = sum(value.bytes for value in made)
    without = {*made, *in_place}
    temporary = peak_bytes(trace.kernels, without=without, results=list(made), in_order=in_loop)
    return Cost(seconds=trace.seconds, temporary=temporary, results=total, matmul=trace.matmul, kernels=trace.launched)


def _places(value: Value, *, in_loop: bool) -> list[Value]:
    """Return the arrays that a result may be written over; in a loop, none beside the carry that it replaces."""
    alike = [root for root in value.roots if root.bytes == value.bytes]
    carried = in_loop and any(root.is_argument for root in alike)
    return [] if carried else [root for root in alike if root.may_become_result]


def program_sizes(jaxpr: ClosedJaxpr) -> tuple[int, ...]:
    """Return the numbers that `Sizes` reads from a program."""
    passes = KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD
    sizes = Sizes()
    program_cost(jaxpr, find_gpu("H100"), attention=dict.fromkeys(passes, AttentionCost(seconds=0.0)), sizes=sizes)
    return tuple(sizes.read)


class _Trace:
    """Collects the kernels of a program in order."""

    def __init__(self, gpu: Gpu, attention: Mapping[KernelKind, AttentionCost], sizes: Sizes, *, in_loop: bool):
        self.seconds, self.matmul, self.launched = 0.0, 0, 0
        self._in_loop, self._constant = in_loop, _TABLE if in_loop else _SCALAR
        self._gpu, self._attention, self._sizes = gpu, attention, sizes
        self.kernels: list[Kernel] = []
        self._formed: dict[tuple, list[Value]] = {}

    def run(self, jaxpr: Jaxpr, arguments: Sequence[Value]) -> list[Value]:
        env: dict[Var, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var in jaxpr.constvars:
            env[var] = Value(self._sizes.of(var), is_argument=True, of_arguments=self._is_constant(var), in_memory=True)

        literal = Value(0, of_arguments=True)

        def read(atom) -> Value:
            return env.get(atom, literal) if isinstance(atom, Var) else literal

        for eqn in jaxpr.eqns:
            outputs = self._once(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def materialize(self, value: Value) -> None:
        """Write a fused value to memory, once."""
        if not value.in_memory:
            value.in_memory = True
            copied = self._fused_copy(value.bytes + sum(root.bytes for root in value.roots))
            codes = sum(root.bytes for root in value.roots if root.is_codes)
            seconds = max(copied, conversion_seconds(codes))
            self._kernel(value.roots, [value], seconds, fused=True)

    def _once(self, eqn, inputs: list[Value]) -> list[Value]:
        """Return an equation's values; equal conversions of weights are formed once, as XLA merges them."""
        name = eqn.primitive.name
        if name not in _CONVERSIONS or not all(value.of_arguments for value in inputs):
            return self._equation(eqn, inputs)
        arrays = (value for value, var in zip(inputs, eqn.invars, strict=True) if not self._is_constant(var))
        key = name, eqn.params.get("fn"), *arrays, *(var.aval for var in eqn.outvars)
        if key not in self._formed:
            self._formed[key] = self._equation(eqn, inputs)
            for value in self._formed[key]:
                value.of_arguments = True
        return self._formed[key]

    def _is_constant(self, var) -> bool:
        return aval_bytes(var.aval) <= self._constant

    def _equation(self, eqn, inputs: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        outputs = [Value(self._sizes.of(var)) for var in eqn.outvars]
        if name == "scan":
            return self._scan(eqn, inputs, outputs)
        if (stated := stated_cost(eqn)) is not None:
            if (attention := self._attention.get(stated.kind)) is not None:
                return self._attend(attention, inputs, outputs)
            return self._opaque(inputs, outputs, self._kernel_seconds(eqn, stated, inputs, outputs))
        if (inner := called(eqn)) is not None:
            return self.run(inner.jaxpr, inputs) if len(inner.jaxpr.invars) == len(inputs) else outputs
        if name == "cond":
            return self.run(branch(eqn).jaxpr, inputs[1:])
        if name in _ALIASES:
            return inputs[: len(outputs)]
        if name == "dot_general":
            flops = self._sizes(dot_flops(eqn))
            compared = sum(self._sizes.of(var) for var in (*eqn.invars, *2 * eqn.outvars))
            self.matmul = max(self.matmul, 0 if any(value.is_slice for value in inputs) else compared)
            moved = sum(value.bytes for value in (*inputs, *outputs))
            outputs[0].from_matmul = True
            seconds = matmul_seconds(flops / self._dot_rate(eqn), moved, self._gpu)
            seconds += transposed_seconds(fp8_to_transpose(eqn), self._gpu)
            padded = self._sizes(padded_bytes(eqn))
            return self._opaque(inputs, outputs, seconds + self._fused_copy(2 * padded), padded)
        if name in ("add", "add_any") and any(value.from_matmul for value in inputs):
            return [self._accumulate(*inputs)]
        if name == "gather" and not (self._in_loop and inputs[0].bytes <= _SMALL):
            return self._reduce(inputs, outputs, moved=2 * outputs[0].bytes)
        if name.startswith("scatter") and inputs[0].in_memory and inputs[0].may_become_result:
            return self._scatter(*inputs)
        if name.startswith(("reduce_", "arg", "cumsum", "scatter", "sort")):
            return self._reduce(inputs, outputs)
        if name == "convert_element_type" and is_fp8(eqn.outvars[0].aval):
            return [self._round_to_fp8(inputs[0], outputs[0])]
        fused = self._fuse(inputs, outputs)
        if name == "tanh" and any(root.from_matmul and root.bytes == fused[0].bytes for root in fused[0].roots):
            self.materialize(fused[0])  # XLA writes capped logits, which several reductions read
        return fused

    def _attend(self, cost: AttentionCost, inputs: list[Value], outputs: list[Value]) -> list[Value]:
        """Run a kernel of attention as a whole."""
        if cost.in_place:
            outputs = [new if old.is_argument else old for old, new in zip(inputs, outputs, strict=False)]
        self._opaque(inputs, [value for value in outputs if value not in inputs], cost.seconds, cost.workspace)
        return outputs

    def _round_to_fp8(self, value: Value, output: Value) -> Value:
        """Return a matmul's float32 result as its own FP8 one, as cuBLAS writes it; fuse any other value."""
        (root, *others) = value.roots or (value,)
        if others or not root.from_matmul or root.bytes != 4 * output.bytes:
            return self._fuse([value], [output])[0]
        root.bytes = output.bytes
        return root

    def _dot_rate(self, eqn) -> float:
        """Return the FLOP/s of a matmul by its operands' dtypes."""
        return self._gpu.matmul * (self._gpu.fp8_gain if all(is_fp8(var.aval) for var in eqn.invars) else 1)

    def _fuse(self, inputs: list[Value], outputs: list[Value]) -> list[Value]:
        roots = frozenset(root for value in inputs for root in ([value] if value.in_memory else value.roots))
        for output in outputs:
            output.roots = roots
        return outputs

    def _kernel_seconds(self, eqn, stated: KernelCost, inputs: list[Value], outputs: list[Value]) -> float:
        """Return a Triton kernel's time by the cost that its launch states.

        An array that it gets twice, for descriptors of two kinds, counts once.
        """
        flops, fp8 = self._sizes(stated.flops), any(is_fp8(var.aval) for var in (*eqn.invars, *eqn.outvars))
        whole = sum(value.bytes for value in {*inputs, *outputs})
        moved = whole if stated.bytes is None else self._sizes(stated.bytes)
        return kernel_seconds(stated, flops=flops, moved=moved, reads_fp8=fp8, gpu=self._gpu)

    def _accumulate(self, left: Value, right: Value) -> Value:
        """Add a matmul's result to an array already in memory."""
        total, other = (left, right) if left.from_matmul else (right, left)
        if not other.in_memory and not other.roots:  # zeros
            return total
        if other.in_memory and other.bytes == total.bytes:
            total, other = other, total
            other.bytes = 0
        else:
            self._kernel(other.roots, [], self._fused_copy(sum(root.bytes for root in other.roots)))
        self._kernel([total, other], [], self._fused_copy(total.bytes))
        return total

    def _reduce(self, inputs: list[Value], outputs: list[Value], moved: int | None = None) -> list[Value]:
        """Fuse a reduction's inputs into it; it moves all of them unless given other bytes."""
        roots = self._fuse(inputs, [Value(0)])[0].roots
        self._kernel(roots, outputs, self._fused_copy(moved or sum(v.bytes for v in (*roots, *outputs))))
        return outputs

    def _scatter(self, whole: Value, indices: Value, updates: Value) -> list[Value]:
        """Write values over some of an array's."""
        for value in (indices, updates):
            self.materialize(value)
        self._kernel([whole, indices, updates], [], self._fused_copy(2 * updates.bytes))
        return [whole]

    def _opaque(self, inputs: list[Value], outputs: list[Value], seconds: float, inner: int = 0) -> list[Value]:
        for value in inputs:
            self.materialize(value)
        self._kernel(inputs, outputs, seconds, inner)
        return outputs

    def _scan(self, eqn, inputs: list[Value], outputs: list[Value]) -> list[Value]:
        body, length = eqn.params["jaxpr"], self._sizes(eqn.params["length"])
        if eqn.params["length"] == 1:  # XLA makes no loop of one turn
            return self.run(body.jaxpr, inputs)
        for value in inputs:
            self.materialize(value)
        pairs = zip(body.jaxpr.invars, eqn.invars, strict=True)
        slices = sum(var.aval.shape != whole.aval.shape for var, whole in pairs) if length > 1 else 0
        cost = program_cost(body, self._gpu, attention=self._attention, sizes=self._sizes, slices=slices, in_loop=True)
        self.matmul = max(self.matmul, cost.matmul)
        pairs = zip(body.jaxpr.outvars, eqn.outvars, strict=True)
        per_step = sum(self._sizes.of(var) for var, stacked in pairs if var.aval.shape != stacked.aval.shape)
        carried = {
            output.bytes
            for output, var in zip(outputs, body.jaxpr.outvars, strict=True)
            if output.bytes == self._sizes.of(var)
        }
        for value in inputs:  # carries are updated in place
            if value.bytes in carried and not value.is_argument:
                value.bytes = 0
        for value, var in zip(outputs, body.jaxpr.outvars, strict=True):
            value.from_loop = value.bytes != self._sizes.of(var)
        self.launched += length * cost.kernels
        self._kernel(inputs, outputs, length * cost.seconds, inner=cost.temporary + per_step)
        return outputs

    def _kernel(self, inputs, outputs, seconds: float, inner: int = 0, *, fused: bool = False) -> None:
        for output in outputs:
            output.in_memory = True
        self.seconds += with_gap(seconds)
        self.launched += 1
        self.kernels.append(Kernel(tuple(inputs), tuple(outputs), seconds, inner, fused))

    def _fused_copy(self, moved: int) -> float:
        return fused_seconds(moved, self._gpu)
