"""The bytes that the sharding plan predicts equal those exchanged by the traced programs of a layer."""

import jax
import jax.numpy as jnp
import pytest

from jaxglue.engine.layer import LayerFunctions
from jaxglue.engine.policy import parse_policy
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.ops.backend import tracing_for
from jaxglue.planner.equation_sizes import received_bytes
from jaxglue.planner.programs import abstract_input
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.sharding.mesh import MeshShape
from jaxglue.sharding.plan import plan_sharding
from jaxglue.sharding.rules import Layout

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
B, T = 8, 64


@pytest.fixture
def work_of(tiny_config):
    """work_of(layers, method, **changes to config.json) → the workload."""

    def make(layers: int, method: str, **changes):
        raw = {**tiny_config, "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": layers, **changes}
        lora = LoraConfig(rank=4) if method == "lora" else None
        return Workload(config=config_from_hf(raw), batch_size=B, seq_len=T, lora=lora)

    return make


def planned(work, mesh: str):
    shape = MeshShape.parse(mesh)
    layout, parts = Layout(shape.abstract, jnp.bfloat16), abstract_parts(work)[1:]
    return plan_sharding(layout, work.config, *parts, tokens=B // shape.batch_shards * T, gradient_accumulation_steps=1)


def programs(work, mesh: str):
    """Return a layer's forward and backward programs, which gather for another layer of its type."""
    layout = Layout(MeshShape.parse(mesh).abstract, jnp.bfloat16)
    graphdefs, *trees = abstract_parts(work)
    weights = [tree["layers"][1] for tree in trees]
    to_gather = jax.tree.map(
        lambda leaf, spec: leaf if "fsdp" in layout.axes(spec) else None, weights, layout.param_specs(weights)
    )
    layer = LayerFunctions(graphdefs.layers[1], parse_policy("full"), layout)
    x, context = abstract_input(work)
    with tracing_for((9, 0)):
        forward = layer.forward.trace(*weights, x, context, to_gather)
        y, residuals, _ = forward.out_info
        backward = layer.backward.trace(residuals, *weights, x, context, y, None, to_gather)
    return forward.jaxpr.jaxpr, backward.jaxpr.jaxpr


@pytest.mark.parametrize(
    ("mesh", "changes"), [("fsdp=4", {}), ("data=2,expert=4", EXPERTS), ("fsdp=2,expert=2", EXPERTS)]
)
def test_layer_receives_the_planned_bytes(work_of, mesh, changes):
    if changes:
        pytest.importorskip("jax_triton", reason="the kernels of experts are traced")
    more, less = (planned(work_of(layers, "lora", **changes), mesh) for layers in (4, 3))
    expected = more.gathered + more.exchanged - less.gathered - less.exchanged
    received = sum(map(received_bytes, programs(work_of(3, "lora", **changes), mesh)))
    # Routing indices and weights travel with the tokens.
    assert received == pytest.approx(expected, rel=0.05 if changes else 0)


def test_replicated_gradients_are_not_summed_in_layers(work_of):
    for method in ("lora", "full"):
        for program in programs(work_of(3, method), "data=4"):
            assert received_bytes(program) == 0
            assert "psum" not in str(program)
