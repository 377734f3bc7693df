"""Programs of a workload's layers and head, traced once, without a device, for all plans that share them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import combinations
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxglue.data.batch import Answers, Batch, Reads, Rollouts, target_room
from jaxglue.engine.embed_head import EmbedHead
from jaxglue.engine.layer import LayerFunctions, layer_function
from jaxglue.engine.policy import PRESETS, RematPolicy
from jaxglue.engine.residuals import Layer, result_names
from jaxglue.models.config import DecoderConfig
from jaxglue.models.context import PackedContext
from jaxglue.models.lora import without_adapters
from jaxglue.models.parameters import Params
from jaxglue.ops.attention.rotation import rotated_flash_attention
from jaxglue.ops.attention.vjp import FlashSpec, flash_attention
from jaxglue.ops.backend import Capability, tracing_for
from jaxglue.ops.equations import equations
from jaxglue.ops.kernel_cost import KernelCost, KernelKind, stand_in
from jaxglue.ops.names import ATTENTION_LSE, ATTENTION_OUT
from jaxglue.ops.rope import RopeTables
from jaxglue.ops.segments import ForkCopies, PackedSegments
from jaxglue.planner.cost import program_sizes
from jaxglue.planner.equation_sizes import aval_bytes
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.sharding.mesh import MeshShape
from jaxglue.sharding.rules import Layout

_BACKWARD = KernelCost(kind=KernelKind.ATTENTION_BACKWARD)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PlannedContext(PackedContext):
    """Context of packed rows whose attention is traced, never run."""

    def attend(self, q, k, v, *, window=None, sinks=None, softcap=None):
        """Return the shape of attention's output, with a fused backend's differentiation rule."""
        if self.attention_out is not None:
            return self.attention_out
        spec = FlashSpec(backend=_ShapesOnly(), window=window)
        return flash_attention(spec, q, k, v, sinks, self.segments)

    def attend_rotated(self, rotation, z, *, window=None):
        """Do as `attend` with the heads of z."""
        return rotated_flash_attention(FlashSpec(backend=_ShapesOnly(), window=window), rotation, z, self.segments)


@dataclass(frozen=True)
class _ShapesOnly:
    """An `AttentionBackend` of stand-ins for the kernels, whose time documents' lengths decide."""

    def forward(self, q, k, v, sinks, segments, *, window, softcap=None):
        out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
        lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
        return tuple(stand_in(KernelCost(kind=KernelKind.ATTENTION_FORWARD), (q, k, v), (out, lse)))

    def backward(self, q, k, v, sinks, segments, out, lse, dout, *, window, softcap=None):
        dsinks = None if sinks is None else jnp.zeros_like(sinks)
        return *stand_in(_BACKWARD, (q, k, v, out, lse, dout), (q, k, v)), dsinks

    def rotated_backward(self, q, k, z, segments, out, lse, dout, rotation, *, window):
        return stand_in(_BACKWARD, (q, k, z, out, lse, dout), (z,))[0]


def abstract_batch(workload: Workload) -> Batch:
    """Return the shapes of a micro-batch with one segment slot in a row."""
    shape = (workload.batch_size, workload.row_tokens)
    ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    bounds: Any = jax.ShapeDtypeStruct((shape[0], 2), jnp.int32)
    copies = _abstract_copies(shape) if workload.objective.forks and workload.config.recurrent else None
    segments = PackedSegments(segment_ids=ids, positions=ids, starts=ids, ends=ids, cu_seqlens=bounds, copies=copies)
    objective, units = workload.objective, jax.ShapeDtypeStruct((shape[0], 1), jnp.float32)
    answers = None if objective.answers is None else _abstract_answers(ids, units)
    columns: Any = dict.fromkeys(objective.columns, weights if answers is None else units)
    fields: dict[str, Any] = {"segments": segments, "answers": answers, "columns": columns}
    if objective.reads:
        fields["reads"] = _abstract_reads(ids, objective, workload.config.hidden_size)
    if objective.needs_rollouts:
        of_tokens: dict[str, Any] = dict.fromkeys(("sampler", "old", "reference"), weights)
        if objective.needs_teacher:
            width = workload.config.hidden_size  # as wide as the model, for lack of better knowledge
            of_tokens["teacher"] = jax.ShapeDtypeStruct((*shape, width), workload.dtype)
            of_tokens["teacher_matrix"] = jax.ShapeDtypeStruct((workload.config.vocab_size, width), workload.dtype)
        fields["rollouts"] = Rollouts(owners=ids, **{"advantages": units, "mean_weight": units, **of_tokens})
    if answers is None and not objective.reads and not objective.needs_rollouts:
        fields["room"] = target_room(math.ceil(workload.targets * shape[1]), shape[1])
    return Batch(tokens=ids, targets=ids, loss_weights=weights, **fields)


_COPIED = 1.5
"""Tokens of rows of copies in those of forked rows: of two answers as long as their prompt, 4/3 in the next width."""


def _abstract_copies(shape: tuple[int, int]) -> ForkCopies:
    """Return the shapes of rows in which each of two answers has its own prompt."""
    (B, T), integers = shape, partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    copied: Any = integers((B, int(T * _COPIED)))
    return ForkCopies(rows=copied, starts=copied, ends=copied, places=integers((B, 2, T)))  # type: ignore[arg-type]


def _abstract_reads(owners: Any, objective: Any, hidden: int) -> Reads:
    """Return the shapes of a part in each row."""
    rows = owners.shape[0]
    numbers: Any = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    counts: Any = jax.ShapeDtypeStruct((rows, 1), jnp.float32)
    values = objective.abstract_values(rows, 1, hidden)
    return Reads(owners=owners, counts=counts, units=numbers, parts=numbers, values=values)


def _abstract_answers(owners: Any, units: Any) -> Answers:
    """Return the shapes of a unit in each row."""
    reference: Any = jax.ShapeDtypeStruct((*units.shape, 2), jnp.float32)
    return Answers(owners=owners, used=units, desirable=units, token_weight=units, reference=reference)


def abstract_input(workload: Workload) -> tuple[jax.ShapeDtypeStruct, PlannedContext]:
    """Return the shapes of a layer's input [B, T, D] and its context."""
    config, segments = workload.config, abstract_batch(workload).segments
    x = jax.ShapeDtypeStruct((workload.batch_size, workload.row_tokens, config.stream_width), workload.dtype)
    rope = _rope_shapes(segments.positions.shape, config)
    own: Any = None
    if config.per_layer is not None:
        own = jax.ShapeDtypeStruct((*x.shape[:2], config.per_layer.size), workload.dtype)
    return x, PlannedContext(segments=segments, rope=rope, tile=workload.tile, exact=workload.exact, layer_input=own)


@lru_cache(maxsize=64)
def _rope_shapes(shape: tuple[int, ...], config: DecoderConfig) -> RopeTables:
    return jax.eval_shape(config.rope_tables, jax.ShapeDtypeStruct(shape, jnp.int32))


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
    graphdef: nnx.GraphDef, workload: Workload, trees: Sequence[Params], *, attended: tuple[int, int] | None
) -> ClosedJaxpr:
    """Trace a layer's second run (`LayerFunctions.replay`) on one device, given attention's output of this shape."""
    shape = workload.batch_size, workload.row_tokens
    attention_out = None if attended is None else jax.ShapeDtypeStruct((*shape, *attended), workload.dtype)
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


_shared: WeakValueDictionary[tuple[Workload, Capability | None], "Programs"] = WeakValueDictionary()
"""Programs by workload, and by the compute capability for whose kernels programs are traced."""


def shared_programs(workload: Workload, capability: Capability | None) -> "Programs":
    """Return the programs of a workload, those of another one in use where all that decides them is the same."""
    traced = replace(
        workload,
        document_lengths=(),
        gradient_accumulation_steps=1,
        update_in_backward=False,
        moment_bytes=8.0,
        host_embeddings=False,
        attention="auto",
        reference=False,
    )
    key = traced, capability
    if (programs := _shared.get(key)) is None:
        programs = _shared[key] = Programs(*key)
    return programs


@lru_cache(maxsize=8)
def used_shapes(workload: Workload) -> list[Params]:
    """Return the trainable and frozen parameters that one GPU uses."""
    # Every GPU computes as much as if it had all experts and 1 / n of their tokens.
    layout = Layout(replace(workload.mesh, expert=1).abstract, workload.dtype)
    return [layout.local_shapes(tree, layout.gathered_specs(tree)) for tree in abstract_parts(workload)[1:]]


class Programs:
    """Traces each kind of layer under each policy once; compiles nothing and needs no GPU.

    Args:
        workload: the training to trace.
        capability: of the GPU for whose kernels programs are traced; None traces the references in their place.
    """

    def __init__(self, workload: Workload, capability: Capability | None):
        self.workload, self.capability = workload, capability
        self._graphdefs, self._used = abstract_parts(workload)[0], used_shapes(workload.any_rows)
        self._function = cache(lambda index: layer_function(self._graphdefs.layers[index]))
        self._layer, self._names = cache(self._trace_layer), cache(self._find_names)
        self.replay, self.reference = cache(self._trace_replay), cache(self._trace_reference)

    def layer(self, index: int, policy: RematPolicy) -> tuple[LayerPrograms, LayerPrograms]:
        """Return a layer's programs, and those whose memory counts, under a policy that keeps all on the device."""
        if policy.saved is not None:
            policy = RematPolicy(saved=policy.saved & self._names(index))
        return self._layer(index, policy)

    @cached_property
    def head(self) -> ClosedJaxpr:
        """Return the program of the head, the loss and their gradients."""
        if self.workload.tile is not None:
            return shared_programs(replace(self.workload, tile=None), self.capability).head
        trainable, frozen = self._used
        sums: Params = dict.fromkeys(trainable)
        inputs = abstract_input(self.workload)[0], abstract_batch(self.workload)
        with tracing_for(self.capability):
            return self._embed_head.trace_head_backward(trainable, frozen, *inputs, jnp.float32(1), sums).jaxpr

    @cached_property
    def reference_head(self) -> ClosedJaxpr:
        """Return the program of the reference's head."""
        (trainable, frozen), x = self._used, abstract_input(self.workload)[0]
        with tracing_for(self.capability):
            return self._embed_head.trace_answer_log_probs(trainable, frozen, x, abstract_batch(self.workload)).jaxpr

    @property
    def _embed_head(self) -> EmbedHead:
        work = self.workload
        return EmbedHead(self._graphdefs, work.config, dtype=work.dtype, attention="auto", objective=work.objective)

    def parameters(self, index: int) -> list[Params]:
        """Return a layer's trainable and frozen parameters, abstract."""
        return [tree["layers"][index] for tree in self._used]

    def _trace_layer(self, index: int, policy: RematPolicy) -> tuple[LayerPrograms, LayerPrograms]:
        layer = self._function(index), policy, self.workload, self.parameters(index)
        recomputing = self._recomputing(index, policy)
        with tracing_for(self.capability):
            programs = layer_programs(*layer, recomputing=recomputing)
            if (devices := self.workload.mesh.expert) == 1:
                return programs, programs
            # All devices' tokens may reach one; on average it computes as many rows as its own tokens have.
            return programs, layer_programs(*layer, experts=devices)

    def _recomputing(self, index: int, policy: RematPolicy) -> ClosedJaxpr | None:
        """Return the backward pass that keeps nothing, if that of the policy follows from it.

        Not where JAX shortens a loop over tiles to results that are not kept, or exchanges experts' tokens.
        """
        full, saved = PRESETS["full"], policy.saved
        shortened = self.workload.tile and saved and saved - {ATTENTION_OUT, ATTENTION_LSE}
        if policy == full or saved is None or shortened or self.workload.mesh.expert > 1:
            return None
        backward = self._layer(index, full)[0].backward
        return None if backward.scaled else backward.program

    def _find_names(self, index: int) -> frozenset[str]:
        """Return the names of values that the backward pass computes again if they are not kept."""
        return frozenset().union(*(value_names(each.backward.program) for each in self._layer(index, PRESETS["full"])))

    def _trace_replay(self, index: int, keeps_attention: bool) -> ClosedJaxpr:
        layer = self._graphdefs.layers[index], self.workload, self.parameters(index)
        attended = self.workload.config.attended(index) if keeps_attention else None
        with tracing_for(self.capability):
            return replay_program(*layer, attended=attended)

    def _trace_reference(self, index: int) -> ClosedJaxpr:
        trainable, frozen = self.parameters(index)
        graphdef = without_adapters(self._graphdefs.layers[index], trainable, frozen)
        with tracing_for(self.capability):
            return reference_program(graphdef, self.workload, frozen)


class _Shape(NamedTuple):
    """Tokens of a micro-batch, those of a tile, and the number of tiles."""

    tokens: int
    tile: int
    tiles: int


def _shape(workload: Workload) -> _Shape:
    tile = workload.tile or workload.tokens
    return _Shape(workload.tokens, tile, workload.tokens // tile)


def can_scale(first: Workload, second: Workload, to: Workload) -> bool:
    """Return whether the sizes of two workloads' programs tell those of a third.

    Not where two numbers of `_Shape`, or one and a constant, grow alike between the first two but not to the third.
    """
    a, b, c = ((1, *_shape(workload)) for workload in (first, second, to))
    pairs = combinations(range(len(a)), 2)
    return all(a[i] * b[j] != b[i] * a[j] or a[i] * c[j] == c[i] * a[j] for i, j in pairs)


class ScaledPrograms(Programs):
    """Programs whose sizes follow from those of two others, within 1e-4 of the memory of traced ones.

    A size is constant or proportional to tokens, a tile's tokens or tiles; few, such as numbers of partial sums, are
    between.

    Args:
        workload: of `Programs`.
        others: traced programs of rows of other lengths and tiles.
    """

    def __init__(self, workload: Workload, others: tuple[Programs, Programs]):
        super().__init__(workload, others[0].capability)
        self._others, self._shapes = others, [_shape(programs.workload) for programs in others]

    def _trace_layer(self, index: int, policy: RematPolicy) -> tuple[LayerPrograms, LayerPrograms]:
        first, second = (programs.layer(index, policy)[0] for programs in self._others)
        scaled = self._scale_layer(first, second)
        return (scaled, scaled) if scaled else super()._trace_layer(index, policy)

    def _scale_layer(self, first: LayerPrograms, second: LayerPrograms) -> LayerPrograms | None:
        """Return scaled programs; None where the two do not have the same operations."""
        pairs = (first.forward, second.forward), (first.backward, second.backward)
        if first.kept.keys() != second.kept.keys() or any(len(a.sizes) != len(b.sizes) for a, b in pairs):
            return None
        forward, backward = (SizedProgram(one.program, self._scale(one.sizes, other.sizes)) for one, other in pairs)
        kept = self._scale(tuple(first.kept.values()), tuple(second.kept.values()))
        return LayerPrograms(forward, backward, dict(zip(first.kept, kept, strict=True)))

    def _scale(self, first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self._scale_size, first, second))

    def _scale_size(self, first: int, second: int) -> int:
        if first == second:
            return first
        here = _shape(self.workload)
        for one, other, size in zip(*self._shapes, here, strict=True):
            if first * other == second * one:
                return first * size // one
        one, other = (shape.tokens for shape in self._shapes)
        return max(first + (second - first) * (here.tokens - one) // (other - one), 0)
