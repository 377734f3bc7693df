"""The fingerprint by which a resumed run is known to continue the same one."""

import hashlib
from typing import Any

from jaxglue.hf.fingerprint import weights_digest
from jaxglue.recipe import as_dict
from jaxglue.training.setup import Setup


def fingerprint(setup: Setup) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the one that it continues, JSON-able."""
    config = setup.config
    groups = as_dict(config)
    return {
        "model": _digest(repr(setup.model).encode()),
        "weights": "random" if config.model.random_weights else weights_digest(config.model.folder),
        "data": setup.data.fingerprint,
        "seed": config.data.seed,
        "method": config.model.method,
        "router_losses": list(config.model.router_losses or ()),
        "neftune_alpha": config.model.neftune_alpha,
        "dtype": str(config.model.compute_dtype),
        "adapter": config.model.adapter and str(config.model.adapter),
        "lora": groups["lora"] if config.model.method == "lora" else None,
        "objective": None if config.objective.objective == "sft" else groups["objective"],
        "optimizer": groups["optimizer"],
        "steps": setup.total_steps,
        "batch": {
            "gradient_accumulation_steps": config.run.gradient_accumulation_steps,
            "batch_size": config.run.batch_size,
            "seq_len": config.data.seq_len,
        },
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
