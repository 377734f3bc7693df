import pytest

from jaxglue.training.checks import check_dropout


@pytest.mark.parametrize("name", ["attention_dropout", "residual_dropout", "resid_pdrop"])
def test_dropout_that_transformers_would_apply_is_refused(name):
    check_dropout("folder", {name: 0.0})
    with pytest.raises(ValueError, match=rf"{name}=0.1 in folder/config.json is not supported: set it to 0"):
        check_dropout("folder", {name: 0.1})
