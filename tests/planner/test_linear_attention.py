"""Plans of models with linear attention."""

import pytest

from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.ops.backend import HOPPER
from jaxglue.planner.flops import matmul_parameters, training_flops_per_token
from jaxglue.planner.programs import Programs
from jaxglue.planner.workload import Workload

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
