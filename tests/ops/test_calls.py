"""Every backend of every operation refuses a call with a field that it does not read."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxglue.engine.host_table import TABLE_ROWS, TableCall
from jaxglue.ops.adam import ADAM, AdamCall, AdamW
from jaxglue.ops.attention import ATTENTION, AttentionCall
from jaxglue.ops.backend import Operation, Reads, tracing_for, unread_fields
from jaxglue.ops.cross_entropy import CROSS_ENTROPY, CrossEntropyCall
from jaxglue.ops.delta_rule import CONVOLUTION_STEP, DELTA_ROWS, DELTA_RULE, DELTA_STEP, DeltaCall, DeltaRowsCall
from jaxglue.ops.gated_mlp import GATED_MLP, GatedCall, GatedParts
from jaxglue.ops.gated_mlp.fp8 import GATE_FP8, GateCall
from jaxglue.ops.gated_mlp.swiglu import LORA_SWIGLU, SwigluCall
from jaxglue.ops.kda import KDA, KDACall
from jaxglue.ops.moe import (
    CHOOSE,
    FEW_ROWS_EXPERTS,
    GROUPED_MATMUL,
    ROUTE,
    ChooseCall,
    ExpertAdapter,
    FewRowsExpertsCall,
    GroupedCall,
    RouteCall,
)
from jaxglue.ops.norm_rope import LAYER_NORM, LLAMA_NORM, NORM_ROPE, NormCall, NormStyle
from jaxglue.ops.paged_attention import (
    APPEND,
    APPEND_AND_ATTEND,
    LATENT_ATTENTION,
    PAGED_ATTENTION,
    AppendAndAttendCall,
    AppendCall,
    LatentCall,
    LatentPages,
    PagedCall,
    make_pages,
)
from jaxglue.ops.projection import (
    PROJECTION,
    RESIDUAL_SUM,
    LowRankAdapter,
    Projection,
    ProjectionCall,
    ResidualSumCall,
    StaticConditions,
)
from jaxglue.ops.projection.few_rows import FEW_ROWS, FewRowsCall
from jaxglue.ops.projection.fp8 import ENCODE, EncodeCall
from jaxglue.ops.projection.lora import LORA, LoraCall
from jaxglue.ops.projection.ordered import ORDERED, OrderedCall
from jaxglue.ops.projection.served import MERGE, MergeCall
from jaxglue.ops.quant import DEQUANTIZE, DequantizeCall
from jaxglue.ops.quant.formats import quantize_matrix
from jaxglue.ops.residual_norm import RESIDUAL_NORM, GatedInput, ResidualNormCall
from jaxglue.ops.rope import RopeConfig, Rotary
from jaxglue.ops.sampling import SAMPLING, SamplingCall
from jaxglue.ops.short_convolution import SHORT_CONVOLUTION, ShortConvolutionCall
from jaxglue.ops.small_layer import SMALL_LAYER, LayerSpec, SmallLayerCall
from jaxglue.ops.state_space import GATED_NORM, STATE_SPACE, STATE_STEP, GatedNormCall, StateHeads, StateSpaceCall

HOPPER = 9, 0
HALF = jnp.dtype(jnp.bfloat16)
WEIGHT = jnp.ones((64, 64), HALF)
ADAPTER = LowRankAdapter(A=jnp.ones((8, 64)), B=jnp.ones((64, 8)))
PLAIN, ADAPTED = Projection(weight=WEIGHT), Projection(weight=WEIGHT, adapter=ADAPTER)


def quantized(name: str) -> Any:
    """Return a matrix's shapes in a format."""
    return jax.eval_shape(partial(quantize_matrix, how=name), WEIGHT)


FP8 = Projection(weight=quantized("fp8"), adapter=ADAPTER)
ROTARY, TRAINING = Rotary(RopeConfig(), 64), StaticConditions(fp8=True)
INFERENCE = StaticConditions(fp8=True, inference=True)
PAGES = make_pages(4, 2, 16, 64, HALF)
PAGED, APPENDED = PagedCall(dtype=HALF, cache=PAGES), AppendCall(dtype=HALF, cache=PAGES, rotary=ROTARY)
X = jnp.ones((4, 64), HALF)
STATES = StateHeads(4, 64, 2, 128)
ATTENDED = {"query_heads": 4, "kv_heads": 2, "seq_len": 512, "segment_slots": 4}


def of_all_parts(projection: Projection) -> GatedParts:
    return GatedParts(projection, projection, projection)


CALLS: list[tuple[Operation, str, Any]] = [
    (ADAM, "triton", AdamCall(adam=AdamW(beta1=0.9, beta2=0.99, epsilon=0.0, weight_decay=0.0, moments="float32"))),
    *((ATTENTION, name, AttentionCall(dtype=HALF, head_dim=64, **ATTENDED)) for name in ATTENTION.backends),
    (CROSS_ENTROPY, "triton", CrossEntropyCall(dtype=HALF, vocab_size=128)),
    *((KDA, name, KDACall(dtype=HALF, key_dim=64, value_dim=64)) for name in KDA.backends),
    *((DELTA_RULE, name, DeltaCall(dtype=HALF, key_dim=64, value_dim=64)) for name in DELTA_RULE.backends),
    (DELTA_ROWS, "triton", DeltaRowsCall(dtype=HALF)),
    (SHORT_CONVOLUTION, "triton", ShortConvolutionCall(dtype=HALF, taps=3)),
    (CONVOLUTION_STEP, "triton", DeltaRowsCall(dtype=HALF)),
    (DELTA_STEP, "triton", DeltaCall(dtype=HALF, key_dim=64, value_dim=64)),
    *((STATE_SPACE, name, StateSpaceCall(dtype=HALF, heads=STATES)) for name in STATE_SPACE.backends),
    (STATE_STEP, "triton", StateSpaceCall(dtype=HALF, heads=STATES)),
    (GATED_NORM, "triton", GatedNormCall(dtype=HALF, width=64)),
    (GATED_MLP, "fp8", GatedCall(parts=of_all_parts(FP8), conditions=TRAINING)),
    (GATED_MLP, "fp8_inference", GatedCall(parts=of_all_parts(replace(FP8, adapter=None)), conditions=INFERENCE)),
    (GATED_MLP, "lora_swiglu", GatedCall(parts=of_all_parts(ADAPTED), conditions=TRAINING)),
    (GATE_FP8, "triton", GateCall(dtype=HALF)),
    (LORA_SWIGLU, "triton", SwigluCall(dtype=HALF, rank=8)),
    (CHOOSE, "triton", ChooseCall(experts=8)),
    (
        FEW_ROWS_EXPERTS,
        "triton",
        FewRowsExpertsCall(
            dtype=HALF,
            rows=4,
            experts=2,
            matrices=(WEIGHT, WEIGHT),
            adapters=(ExpertAdapter(jnp.ones((2, 8, 64)), jnp.ones((2, 64, 8))), None),
            transpose_rhs=True,
        ),
    ),
    (GROUPED_MATMUL, "triton", GroupedCall(dtype=HALF)),
    (ROUTE, "triton", RouteCall(assignments=8, experts=4)),
    (NORM_ROPE, "triton", NormCall(dtype=HALF, style=NormStyle(offset=1.0))),
    (PAGED_ATTENTION, "triton", PAGED),
    (PAGED_ATTENTION, "tiles", replace(PAGED, forked=True)),
    (APPEND, "triton", APPENDED),
    (
        APPEND_AND_ATTEND,
        "triton",
        AppendAndAttendCall(append=APPENDED, attend=PAGED, query_shape=(256, 4, 64), pages=2),
    ),
    (LATENT_ATTENTION, "triton", LatentCall(dtype=HALF, cache=LatentPages(tokens=jnp.ones((2, 16, 96), HALF)))),
    (PROJECTION, "fp8", ProjectionCall(projections=[FP8], conditions=TRAINING)),
    (RESIDUAL_SUM, "lora", ResidualSumCall(projection=ADAPTED)),
    *(
        (FEW_ROWS, "triton", FewRowsCall(dtype=HALF, rows=4, projections=[projection], conditions=INFERENCE))
        for projection in (
            PLAIN,
            ADAPTED,
            FP8,
            *(Projection(weight=quantized(n)) for n in ("nf4", "int8")),
        )
    ),
    (ENCODE, "triton", EncodeCall(dtype=HALF)),
    (ORDERED, "triton", OrderedCall(dtype=HALF)),
    (LORA, "triton", LoraCall(dtype=HALF, rank=8)),
    (MERGE, "triton", MergeCall(weight=quantized("served_nvfp4"), rank=8)),
    (DEQUANTIZE, "triton", DequantizeCall(weight=quantized("nf4"))),
    (
        RESIDUAL_NORM,
        "few_rows",
        ResidualNormCall(x=X, style=LLAMA_NORM, reader=[replace(FP8, adapter=None)], conditions=INFERENCE),
    ),
    (
        RESIDUAL_NORM,
        "fp8",
        ResidualNormCall(x=X, style=LLAMA_NORM, reader=GatedInput(of_all_parts(FP8), "silu"), conditions=TRAINING),
    ),
    (SAMPLING, "triton", SamplingCall()),
    (
        SMALL_LAYER,
        "triton",
        SmallLayerCall(
            x=X[None],
            spec=LayerSpec(rotary=ROTARY, eps=1e-6, window=None),
            projections=[ADAPTED] * 7,
            conditions=TRAINING,
        ),
    ),
    (TABLE_ROWS, "triton", TableCall(dtype=HALF)),
]


@dataclass(frozen=True, kw_only=True)
class Node:
    """A part of a call: its class, and how to put another in its place."""

    part: Any
    put: Any


def parts_of(value: Any, put) -> Iterator[Node]:
    """Yield a call and the dataclasses and named tuples in it, each with a function that puts another in its place."""
    names = [f.name for f in fields(value)] if is_dataclass(value) else getattr(value, "_fields", None)
    if names is not None:
        yield Node(part=value, put=put)
        change = replace if is_dataclass(value) else type(value)._replace
        for name in names:
            yield from parts_of(getattr(value, name), lambda new, name=name: put(change(value, **{name: new})))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from parts_of(item, lambda new, i=i: put(type(value)([*value[:i], new, *value[i + 1 :]])))


def with_an_added_field(part: Any) -> Any:
    """Return a part of a class that has one more field, off its default."""
    if is_dataclass(part):
        added = [("added", bool, False)]
        cls = make_dataclass(type(part).__name__, added, bases=(type(part),), frozen=True, kw_only=True)
        return cls(**{f.name: getattr(part, f.name) for f in fields(part)}, added=True)
    base, defaults = type(part), {**part._field_defaults, "added": False}
    members = {"_fields": (*part._fields, "added"), "_field_defaults": defaults, "added": True}
    return tuple.__new__(type(base.__name__, (base,), members), part)


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("jax_triton")


@pytest.mark.parametrize(("operation", "name", "call"), CALLS, ids=lambda value: getattr(value, "name", None))
def test_an_added_field_is_refused(operation, name, call):
    with tracing_for(HOPPER):
        assert operation.choose(HOPPER, call, backend=name).name == name
    nodes = list(parts_of(call, lambda new: new))
    assert nodes[0].part is call
    for node in nodes:
        changed = node.put(with_an_added_field(node.part))
        with pytest.raises(ValueError, match="cannot serve"), tracing_for(HOPPER):
            operation.choose(HOPPER, changed, backend=name)
            pytest.fail(f"it ignores a field added to {type(node.part).__name__}")


def test_every_backend_has_a_call_here():
    values = [
        value for name, module in sys.modules.items() if name.startswith("jaxglue.") for value in vars(module).values()
    ]
    operations = {value for value in values if isinstance(value, Operation) and value.name != "layer"}
    assert {(each.name, name) for each in operations for name in each.backends} == {
        (operation.name, name) for operation, name, _ in CALLS
    }


@pytest.mark.parametrize(("operation", "name", "call"), CALLS, ids=lambda value: getattr(value, "name", None))
def test_backends_read_fields_that_exist(operation, name, call):
    reads: Reads = operation.backends[name].reads
    for cls, names in reads.items():
        known = [f.name for f in fields(cls)] if is_dataclass(cls) else getattr(cls, "_fields", ())
        assert set(names or ()) <= set(known), cls
    assert type(call) in reads


@pytest.mark.parametrize("style", [LAYER_NORM, NormStyle(centered=True), NormStyle(bias=True)])
def test_kernels_of_norms_refuse_layer_norms(style):
    assert NORM_ROPE.choose(HOPPER, NormCall(dtype=HALF, style=style)).name == "reference"
    assert APPEND.choose(HOPPER, replace(APPENDED, style=style)).name == "reference"
    for name, conditions, projection in (("few_rows", INFERENCE, replace(FP8, adapter=None)), ("fp8", TRAINING, FP8)):
        call = ResidualNormCall(x=X, style=style, reader=[projection], conditions=conditions)
        with pytest.raises(ValueError, match="root-mean-square norm alone"):
            RESIDUAL_NORM.choose(HOPPER, call, backend=name)


@pytest.mark.parametrize("operation", [GATE_FP8, LORA_SWIGLU, GROUPED_MATMUL])
def test_kernels_refuse_activations_that_they_lack(operation):
    call = next(call for other, _, call in CALLS if other is operation)
    choice = operation.choose(HOPPER, replace(call, activation="softplus"))
    assert choice.name == "reference" and "activation = 'softplus'" in choice.reason


def test_arrays_are_compared_by_being_there():
    call = SamplingCall(truncation=jnp.ones(3))
    assert list(unread_fields(call, {SamplingCall: ()})) == ["SamplingCall.truncation"]
    assert not list(unread_fields(SamplingCall(), {SamplingCall: ()}))
    assert jax.tree.leaves(call.truncation)
