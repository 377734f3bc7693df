"""Shared tiny models and batches."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxglue.models import build_model, config_from_hf

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "initializer_range": 0.2,
}


@pytest.fixture
def tiny_model():
    """Builds a small random model: tiny_model(model_type, **changes to its config.json)."""

    def make(model_type: str = "qwen3", dtype=jnp.float32, **changes):
        config = config_from_hf({"model_type": model_type, **TINY, **changes})
        return build_model(config, dtype=dtype, rngs=nnx.Rngs(0))

    return make


@pytest.fixture
def random_batch():
    """Builds a packed batch of random tokens: random_batch([[5, 3], [9]], seq_len=12)."""
    from jaxglue.data.batch import Batch
    from jaxglue.segments import pack_segments

    def make(lengths, seq_len: int, vocab_size: int = TINY["vocab_size"], seed: int = 0):
        rng = np.random.default_rng(seed)
        shape = (len(lengths), seq_len)
        segments = pack_segments(lengths, seq_len=seq_len)
        trained = (segments.segment_ids > 0) & (rng.random(shape) < 0.7)
        tokens, targets = (rng.integers(0, vocab_size, shape, dtype=np.int32) for _ in range(2))
        return Batch(tokens=tokens, targets=targets, loss_weights=trained.astype(np.float32), segments=segments)

    return make
