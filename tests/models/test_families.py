from pathlib import Path

import pytest
from flax import nnx

from jaxglue.hf.checkpoint import read_config
from jaxglue.models import abstract_model, build_model, config_from_hf
from jaxglue.models.parameters import split_model

GOLDENS = Path(__file__).parent.parent / "goldens"


@pytest.mark.parametrize("folder", ["qwen3_window_bias", "gpt_oss_mxfp4", "qwen3_moe_mixed"])
def test_abstract_model_has_the_parts_of_a_built_one(folder):
    config = config_from_hf(read_config(GOLDENS / folder))
    built = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    model = abstract_model(config)
    assert model.config == config
    assert split_model(model, nnx.Param) == split_model(built, nnx.Param)
