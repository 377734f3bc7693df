"""Patterns of adapters that take for ever to match."""

import pytest

from jaxglue.models.lora_config import LoraConfig


def test_patterns_must_be_ones_at_the_end_of_a_path():
    with pytest.raises(ValueError, match=r"expected PATTERN=NUMBER.*global flags not at the start"):
        LoraConfig(rank_pattern=("(?i)q_proj=4",))
    assert LoraConfig(rank_pattern=("(?i:Q_PROJ)=4",)).rank_of("layers.0.q_proj") == 4


def test_catastrophic_patterns_are_refused(monkeypatch):
    monkeypatch.setattr("jaxglue.data.limits.SECONDS", 0.5)
    config = LoraConfig(rank_pattern=(r"(\w+\.?)+-=4",))
    with pytest.raises(ValueError, match="a regular expression takes more than"):
        config.rank_of("model.layers.0.self_attn.q_proj_with_a_long_name_for_it")
