"""Runs on mixtures of experts."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeats_parts_of

from jaxglue.hf.adapter import load_adapter
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model
from jaxglue.planner.workload import parameter_counts
from jaxglue.training.checks import warn_of_peft
from jaxglue.training.evaluation import ExpertLoadProbe
from jaxglue.training.record import read_metrics
from jaxglue.training.report import plan_rows
from jaxglue.training.setup import resolve
from jaxglue.training.train import train


def test_mxfp4_run_learns(make_config, moe_folder, tmp_path):
    options = {"router_balance_loss": 0.01, "eval_fraction": 0.2, "eval_every": 8}
    summary = train(make_config(steps=8, **options))
    assert summary.last_loss < summary.first_loss - 0.2
    (figures,) = (line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "eval_loss" in line)
    assert 1 <= figures["expert_load_max"] <= 4
    adapter = load_adapter(tmp_path / "run/adapter")
    config, tensors = adapter.config, adapter.tensors
    assert config.targets == ("down_proj", "gate_up_proj", "k_proj", "o_proj", "q_proj", "v_proj")
    assert tensors["model.layers.1.mlp.experts.gate_up_proj.lora_B"].shape == (4, 64, 4)
    assert all(np.abs(tensor).max() > 0 for tensor in tensors.values())


def test_expert_load_is_read_from_training_batches(make_config, moe_folder, tmp_path):
    train(make_config(steps=2, eval_every=2))
    (figures,) = (line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "expert_load_max" in line)
    assert figures["step"] == 2 and "eval_loss" not in figures


@repeats_parts_of("test_mxfp4_run_learns")
def test_adapters_of_some_layers_experts_are_trained_on(make_config, moe_folder, tmp_path):
    options = {"layers": (1,), "targets": ("gate_up_proj", "down_proj")}
    first = train(make_config(steps=1, **options, output=tmp_path / "first")).adapter
    options = {"model": str(tmp_path / "first/base"), "random_weights": False, "adapter": first}
    config = make_config(steps=1, **options, output=tmp_path / "second")
    second = train(replace(config, lora=LoraConfig())).adapter
    modules = {f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    assert set(load_adapter(first).modules) == set(load_adapter(second).modules) == modules


def test_mxfp4_byte_counts_as_two_parameters(make_config, moe_folder):
    blocks, expanded = (resolve(make_config(expand_experts=expand)) for expand in (False, True))
    assert parameter_counts(blocks.workload) == parameter_counts(expanded.workload)
    assert plan_rows(blocks)["experts"] == "2 of 4 for each token, in MXFP4"
    assert plan_rows(expanded)["experts"] == "2 of 4 for each token"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "full"}, "--method full cannot train experts in MXFP4: add --expand-experts"),
        ({"dropout": 0.1}, "dropout=0.1 is not supported for the adapters of experts"),
    ],
)
def test_unsupported_mxfp4_options_are_refused(make_config, moe_folder, options, message):
    with pytest.raises(ValueError, match=message):
        plan_rows(resolve(make_config(**options)))


@pytest.mark.parametrize(("targets", "warned"), [(("all-linear",), True), (("q_proj", "gate_up_proj"), False)])
def test_adapters_that_peft_takes_for_those_of_experts_are_warned_of(make_config, tiny_model, caplog, targets, warned):
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    for dense, expected in (([], False), ([0], warned)):
        caplog.clear()
        model = tiny_model("qwen3_moe", **experts, mlp_only_layers=dense).config
        warn_of_peft(make_config(targets=targets), model)
        assert ("PEFT leaves out or refuses" in caplog.text) == expected


@pytest.mark.parametrize(
    ("targets", "warned"), [(("all-linear",), True), (("q_proj", "gate_up_proj", "mlp.experts.down_proj"), False)]
)
def test_adapters_of_shared_experts_are_warned_of_where_peft_takes_them_for_others(
    make_config, tiny_model, caplog, targets, warned
):
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    warn_of_peft(make_config(targets=targets), tiny_model("glm4_moe", **experts).config)
    assert ("and shared experts of a GLM with experts" in caplog.text) == warned


def test_router_losses_need_routers(make_config):
    with pytest.raises(ValueError, match="has no routers: leave out --router-balance-loss"):
        resolve(make_config(router_balance_loss=0.01))
    with pytest.raises(ValueError, match="router_z_loss: expected float >= 0, got -1"):
        make_config(router_z_loss=-1)


@pytest.mark.parametrize("skew", [False, True], ids=["even", "skewed"])
def test_probe_reads_expert_load(tiny_model, random_batch, skew):
    model = tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=1, moe_intermediate_size=16, mlp_only_layers=[0])
    if skew:
        for layer in model.layers[1:]:
            layer.mlp.gate.weight[...] = jnp.zeros_like(layer.mlp.gate.weight[...])  # of equals the first is chosen
    graphdefs, *trees = split_model(model, nnx.LoRAParam)
    probe = ExpertLoadProbe(graphdefs, model.config, dtype=jnp.float32)
    figures = probe.read(*trees, random_batch([[20, 12], [30]], seq_len=32))
    if skew:
        assert (figures["expert_load_max"], figures["expert_load_entropy"]) == (4, 0)
    else:
        assert 1 < figures["expert_load_max"] < 4 and 0 < figures["expert_load_entropy"] < 1
