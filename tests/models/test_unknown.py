"""Parts of models of unknown types, as `jaxglue doctor` tells them."""

import json

import pytest

from jaxglue.commands.doctor import check_folder
from jaxglue.models import abstract_model, config_from_hf
from jaxglue.models.parameters import abstract_parameters
from jaxglue.models.unknown import known_parts
from tests.models.test_family_goldens import read_golden


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "lfm2_moe", "deepseek_v3", "muse_glimmer_text"])
def test_modules_of_families_are_of_parts_that_exist(name):
    raw, _ = read_golden(name)
    names = abstract_parameters(abstract_model(config_from_hf(raw)))
    parts = known_parts({}, names)
    assert parts.others == () and {"norms", "gated feed-forwards"} & set(parts.exist)


def test_other_modules_and_settings_are_named():
    names = [
        f"backbone.layers.{layer}.{path}" for layer in (0, 1) for path in ("mixer.A_log", "self_attn.q_proj.weight")
    ]
    parts = known_parts({"mamba_d_state": 16}, names)
    assert parts == (("grouped attention",), ("mixer.A_log", "state-space layers (mamba_d_state)"))


def test_doctor_tells_which_parts_of_a_model_exist(tmp_path):
    raw = {"model_type": "seed_oss2", "ssm_state_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    index = {"weight_map": {"model.layers.0.self_attn.q_proj.weight": "a", "model.layers.0.ssm.dt.weight": "a"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check = next(check_folder(tmp_path))
    assert check.verdict == "fail" and "adding_a_model" in check.remedy
    assert "model_type 'seed_oss2' is not supported" in check.found
    assert "exist: grouped attention. Others: ssm.dt, state-space layers (ssm_state_size)" in check.found


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "mistral3", "qwen3_5", "lfm2", "seed_oss"])
def test_a_refusal_lists_all_types_that_work(name):
    with pytest.raises(ValueError, match=rf"known are .*\b{name}[,;]"):
        config_from_hf({"model_type": "unheard_of"})
