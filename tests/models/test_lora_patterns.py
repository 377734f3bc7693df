"""Patterns of adapters that take for ever to match."""

import pytest

from jaxglue.models.lora_config import LoraConfig


def test_catastrophic_patterns_are_refused(monkeypatch):
    monkeypatch.setattr("jaxglue.data.limits.SECONDS", 0.5)
    config = LoraConfig(rank_pattern=(r"(\w+\.?)+-=4",))
    with pytest.raises(ValueError, match="a regular expression takes more than"):
        config.rank_of("model.layers.0.self_attn.q_proj_with_a_long_name_for_it")
