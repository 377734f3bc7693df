from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from jaxglue.hf.checkpoint import read_config
from jaxglue.models import abstract_model, build_model, config_from_hf
from jaxglue.models.parameters import split_model
from jaxglue.ops.segments import pack_segments

GOLDENS = Path(__file__).parent.parent / "goldens"


@pytest.mark.parametrize("folder", ["qwen3_window_bias", "gpt_oss_mxfp4", "qwen3_moe_mixed"])
def test_abstract_model_has_the_parts_of_a_built_one(folder):
    config = config_from_hf(read_config(GOLDENS / folder))
    built = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    model = abstract_model(config)
    assert model.config == config
    assert split_model(model, nnx.Param) == split_model(built, nnx.Param)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.arange(3), r"tokens must be integers \[B, T\], got \(3,\)"),
        (np.ones((1, 3)), r"tokens must be integers"),
        (np.ones((1, 9), int), r"segments are of rows \(1, 3\), and tokens of \(1, 9\)"),
    ],
)
def test_other_than_rows_of_tokens_are_refused(tiny_model, tokens, message):
    model = tiny_model()
    assert model([[1, 2, 3]]).shape == (1, 3, 97)
    with pytest.raises(ValueError, match=message):
        model(tokens, pack_segments([[3]], seq_len=3))
