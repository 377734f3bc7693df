"""Plans of models with linear attention."""

from dataclasses import replace

import pytest

from jaxglue.engine.policy import parse_policy
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.ops.backend import HOPPER
from jaxglue.planner.flops import matmul_parameters, training_flops_per_token
from jaxglue.planner.gpus import find_gpu
from jaxglue.planner.layer_costs import TracedModel
from jaxglue.planner.programs import Programs
from jaxglue.planner.workload import Workload
from jaxglue.sharding.mesh import MeshShape

SIZES = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12}


@pytest.fixture
def config(tiny_config):
    return config_from_hf({**tiny_config, **SIZES, "model_type": "qwen3_5_text", "num_hidden_layers": 4})


def test_layers_are_computed_again_from_the_outputs_of_both_kinds(config):
    assert [config.attended(index) for index in (0, 3)] == [(2, 12), (4, 16)]
    programs = Programs(
        Workload(config=config, batch_size=1, seq_len=128, lora=LoraConfig(targets=("o_proj",))), HOPPER
    )
    for index in (0, 3):
        outputs = programs.replay(index, True).jaxpr.outvars
        assert outputs[0].aval.shape == (1, 128, config.hidden_size)


def test_only_attention_reads_all_visible_keys(config):
    attention, mlp, head = 32 * 16 * 2 * (4 + 2), 3 * 32 * 48, 32 * 97
    qkv, z, b_a, out = 32 * (8 + 8 + 24), 32 * 24, 32 * 4, 24 * 32
    assert matmul_parameters(config) == 3 * (qkv + z + b_a + out) + attention + 4 * mlp + head
    few, many = (training_flops_per_token(config, visible_keys=keys, weight_gradients=False) for keys in (0, 1))
    assert many - few == 12 * 4 * 16
    unread = training_flops_per_token(config, visible_keys=0, weight_gradients=False, has_logits=False)
    assert few - unread == 4 * head


def test_split_rows_exchange_tokens_for_heads_in_linear_layers(config):
    work = Workload(config=config, batch_size=1, seq_len=2048, lora=LoraConfig(), mesh=MeshShape(context=2))
    gpu = find_gpu("H100")
    near, far = (TracedModel(work, replace(gpu, peers=peers), kernels=False) for peers in (gpu.peers, gpu.peers / 9))
    moved = work.tokens * (2 * 8 + 2 * 2 * 12) * 2 / 2  # of queries, keys, values and outputs, half
    full = parse_policy("full")
    for passes, times in (("forward", 1), ("backward", 2)):
        slower = [getattr(model.layer(0, full), passes).seconds for model in (far, near)]
        assert slower[0] - slower[1] == pytest.approx(times * 8 * moved / gpu.peers, rel=1e-3)


def test_copies_of_prompts_count_in_linear_layers_alone(config):
    work = Workload(config=config, batch_size=1, seq_len=2048, lora=LoraConfig())
    pairs = replace(work, objective=ObjectiveConfig(objective="dpo").make())
    plain, copied = (TracedModel(each, find_gpu("H100"), kernels=False) for each in (work, pairs))
    full = parse_policy("full")
    linear, attention = ([model.layer(index, full) for model in (plain, copied)] for index in (0, 3))
    assert linear[1].backward.seconds > 1.1 * linear[0].backward.seconds
    assert linear[1].backward.temporary > linear[0].backward.temporary
    assert attention[1].backward.kernels == attention[0].backward.kernels
