"""What stays, whatever its size: doors, models, the glue between operations, kernels, and their measurements."""

import ast
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policy
from jaxglue.engine.transfer import default_prefetch_depth, prefetch
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.parameters import split_model
from jaxglue.ops.moe import routing

ROOT = Path(__file__).parents[1]
FAMILIES = {
    "llama": "llama_tied_llama3",
    "qwen3": "qwen3_tied",
    "qwen3_moe": "qwen3_moe",
    "gpt_oss": "gpt_oss",
}
"""Files of `models/`, and folders of goldens with a configuration of each."""


def calls(path: Path, *names: str) -> bool:
    """Tell whether a file calls one of these names, as written up to its arguments."""
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in names):
        return False
    found = (ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return not {*names}.isdisjoint(found)


@pytest.mark.parametrize("command", ["train", "generate", "export", "estimate"])
def test_scripts_run_the_commands_of_their_names(command):
    assert f'run("{command}")' in (ROOT / "scripts" / f"{command}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_flax_modules_in_the_top_level_models(family):
    assert (ROOT / "models" / f"{family}.py").is_file() and not (ROOT / "models").is_symlink()
    raw = json.loads((ROOT / "tests" / "goldens" / FAMILIES[family] / "config.json").read_text())
    model = build_model(config_from_hf(raw), dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert isinstance(model, nnx.Module) and all(isinstance(layer, nnx.Module) for layer in model.layers)


def test_layers_share_the_segments_packed_once_for_a_batch(tiny_model, random_batch):
    graphdefs, *weights = split_model(model := tiny_model(), nnx.Param)
    executor = Executor(graphdefs, model.config, policy=parse_policy("full"), dtype=jnp.float32)
    batch = random_batch([[5, 3], [8]], 8)

    _, contexts = executor.entry_head.embed(*weights, batch, None)
    assert len(contexts) == 3 and all(context.segments is batch.segments for context in contexts)
    packing = {
        path.relative_to(ROOT / "jaxglue").parts[0]
        for path in [*(ROOT / "jaxglue").rglob("*.py"), *(ROOT / "jaxglue" / "models").rglob("*.py")]
        if calls(path, "pack_segments")
    }
    assert not packing & {"engine", "training", "objectives"}, "steps and layers read a batch's segments"


def test_policies_checkpoint_layers_and_offload_to_two_buffers():
    policy = parse_policy("offload:layer_input,attention_out")
    program = jax.make_jaxpr(policy.wrap(jnp.sin))(1.0)
    assert program.eqns[0].params["policy"] is not None and not program.eqns[0].params["prevent_cse"]
    assert default_prefetch_depth(stream_weights=False) == 1
    requested: list[int] = []
    values = prefetch((lambda i=i: requested.append(i) or i for i in range(3)), 1)
    assert [(value, len(requested)) for value in values] == [(0, 2), (1, 3), (2, 3)]


def test_routing_sorts_assignments_and_counts_experts(monkeypatch):
    sorts, argsort = [], jnp.argsort
    monkeypatch.setattr(jnp, "argsort", lambda *args, **options: sorts.append(args) or argsort(*args, **options))
    experts = np.array([[2, 0], [2, 1], [0, 2]], np.int32)
    found = routing.make_routing(jnp.asarray(experts), jnp.ones((3, 2)), 4)
    assert len(sorts) == 1
    assert experts.reshape(-1)[np.asarray(found.permutation)].tolist() == [0, 0, 1, 2, 2, 2]
    assert np.asarray(found.groups.sizes).tolist() == [2, 1, 3, 0]


KERNELS = {
    "adam",
    "attention",
    "cross_entropy",
    "delta_rule",
    "gated_mlp",
    "moe",
    "norm_rope",
    "paged_attention",
    "projection",
    "quant",
}
"""Folders of operations with Triton kernels of ours."""


def test_operations_have_triton_kernels_called_from_jax():
    assert calls(ROOT / "jaxglue" / "ops" / "launch.py", "triton_call")
    written = {
        path.relative_to(ROOT / "jaxglue" / "ops").parts[0]
        for path in (ROOT / "jaxglue" / "ops").rglob("*kernels.py")
        if "@triton.jit" in path.read_text(encoding="utf-8")
    }
    assert written >= KERNELS


def test_values_of_optimizers_layers_and_meshes_are_compared_by_chex():
    using = {
        path.relative_to(ROOT / "tests").parts[0]
        for path in (ROOT / "tests").rglob("test_*.py")
        if calls(path, "chex.assert_trees_all_close", "chex.assert_trees_all_equal")
    }
    assert using >= {"engine", "models", "sharding", "training"}


def test_benchmarks_measure_the_glue_and_the_programs_of_others():
    glue = {"packed_metadata.py", "offload.py", "moe_routing.py"}
    bench = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all((ROOT / "benchmarks" / name).is_file() and f"benchmarks/{name}" in bench for name in glue)
    peers = ROOT / "benchmarks" / "peers"
    assert {path.name for path in peers.glob("*.py")} >= {"train.py", "dpo.py", "engines.py"}
    assert "torch" in (peers / "train.py").read_text(encoding="utf-8")
