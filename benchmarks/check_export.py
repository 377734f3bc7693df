"""Print the Kullback-Leibler divergence of an adapted model from itself read again, and from its merged export.

python benchmarks/check_export.py BASE ADAPTER MERGED
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gpu_check import CHATS

from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.hf.loading import add_adapter, load_model
from jaxglue.ops.segments import pack_segments

TOKENS = 128


@nnx.jit
def _forward(model, tokens, segments):
    return model(tokens, segments)


def log_probabilities(folder: str, adapter: str | None = None) -> np.ndarray:
    """Return log-probabilities of the next token at every position of some chats, float64 [T, V]."""
    model = load_model(folder, dtype=jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    if adapter:
        add_adapter(model, adapter)
    tokens = np.asarray(load_tokenizer(folder).encode(CHATS.read_text()[:2000]), np.int32)[None, :TOKENS]
    logits = np.asarray(_forward(model, tokens, pack_segments([[TOKENS]], seq_len=TOKENS)), np.float64)[0]
    return (
        logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1)[:, None]
    )


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Return the mean KL divergence of q from p, nats per token."""
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def main() -> None:
    base, adapter, merged = sys.argv[1:]
    first = log_probabilities(base, adapter)
    print(
        json.dumps(
            {
                "again": divergence(first, log_probabilities(base, adapter)),
                "merged": divergence(first, log_probabilities(merged)),
                "base": divergence(first, log_probabilities(base)),
            }
        )
    )


if __name__ == "__main__":
    main()
