"""The fingerprint by which a resumed run is known to continue the same one."""

import hashlib
from typing import Any

from jaxglue.hf.checkpoint import open_checkpoint
from jaxglue.recipe import as_dict
from jaxglue.training.config import TrainConfig
from jaxglue.training.setup import Setup


def fingerprint(setup: Setup) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the one that it continues, JSON-able."""
    config = setup.config
    groups = as_dict(config)
    return {
        "model": _digest(repr(setup.model).encode()),
        "weights": _weights_digest(config),
        "data": setup.data.fingerprint,
        "seed": config.data.seed,
        "method": config.model.method,
        "router_losses": list(config.model.router_losses or ()),
        "dtype": str(config.model.compute_dtype),
        "lora": groups["lora"] if config.model.method == "lora" else None,
        "optimizer": groups["optimizer"],
        "steps": setup.total_steps,
        "batch": [config.run.gradient_accumulation_steps, config.run.batch_size, config.data.seq_len],
    }


def _weights_digest(config: TrainConfig) -> str:
    """Return a digest of the final norm and the first rows of the embedding: checkpoints are too large to read."""
    if config.model.random_weights:
        return "random"
    files = open_checkpoint(config.model.model)
    norm, embedding = files.read("model.norm.weight"), files.read_rows("model.embed_tokens.weight", 0, 64)
    return _digest(norm.tobytes() + embedding.tobytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
