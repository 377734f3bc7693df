"""Whether a run's rows hold the prompt of two answers once."""

from dataclasses import replace

import jax

from jaxglue.models.config import DecoderConfig
from jaxglue.ops.attention import ATTENTION, AttentionShape
from jaxglue.ops.backend import compute_capability
from jaxglue.training.config import TrainConfig


def refuse_shared_prompt(config: TrainConfig, model: DecoderConfig) -> str:
    """Return why no attention kernel serves forked segments, empty if one does."""
    if jax.default_backend() == "cpu":
        return ""
    plain = AttentionShape(
        dtype=config.model.compute_dtype,
        head_dim=model.head_dim,
        query_heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        softcap=model.attention_softcap,
        seq_len=config.data.row_tokens,
        segment_slots=2,
        window=next((window for window in model.layer_windows if window), None),
    )
    try:
        choices = [
            ATTENTION.choose(compute_capability(), shape, backend=config.model.attention)
            for shape in (plain, replace(plain, forked=True))
        ]
    except ValueError as error:
        return str(error)
    return choices[1].reason if choices[1].name == "reference" != choices[0].name else ""
