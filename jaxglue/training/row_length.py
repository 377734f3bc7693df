"""The length of packed rows where none is given: the default, or the model's positions if those are fewer."""

from dataclasses import replace

from jaxglue.data.config import DEFAULT_SEQ_LEN
from jaxglue.models.config import DecoderConfig
from jaxglue.training.config import TrainConfig


def with_seq_len[C: TrainConfig](config: C, model: DecoderConfig) -> C:
    """Return the configuration with a length of rows; a given one stays."""
    return replace(config, data=config.data.within(model.max_position_embeddings))


def row_text(seq_len: int, model: DecoderConfig | None) -> str:
    """Describe the length of rows, and why one at a model's limit, if that is known, is below the default."""
    tokens = f"{seq_len:,} tokens"
    if model and seq_len == model.max_position_embeddings < DEFAULT_SEQ_LEN:
        return f"{tokens} (all positions of the model, fewer than the default of {DEFAULT_SEQ_LEN:,} tokens)"
    return tokens
