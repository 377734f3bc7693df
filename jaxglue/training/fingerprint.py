"""The fingerprint by which a resumed run is known to continue the same one."""

import hashlib
from typing import Any

from jaxglue.config import stable_repr
from jaxglue.hf.identity import weights_digest
from jaxglue.models.config import DecoderConfig
from jaxglue.recipe import as_dict, defaults_of
from jaxglue.training.setup import Setup

_DIGESTED = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope"),
    *("attention_bias", "mlp_bias", "initializer_range", "layer_windows", "moe", "quantize", "scores", "fp8_head"),
    *("fp8_experts", "num_experts", "num_experts_per_tok", "sparse_layers", "norm_topk_prob", "mxfp4", "rope_type"),
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
)
"""Fields of a model in the digests of earlier checkpoints, which have no mapping by field; none is ever added here."""


def fingerprint(setup: Setup) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the one that it continues, JSON-able.

    `defaults` holds those of optional settings, by which versions that lack a setting compare (`differences`).
    """
    config = setup.config
    groups: dict[str, Any] = {"model": setup.model, "optimizer": config.optimizer}
    if config.model.method == "lora":
        groups["lora"] = config.lora
    if config.objective.objective != "sft":
        groups["objective"] = config.objective
    return {
        "weights": "random" if config.model.random_weights else weights_digest(config.model.folder),
        "data": setup.data.fingerprint,
        "seed": config.data.seed,
        "method": config.model.method,
        "router_losses": list(config.model.router_losses or ()),
        "neftune_alpha": config.model.neftune_alpha,
        "dtype": str(config.model.compute_dtype),
        "adapter": config.model.adapter and str(config.model.adapter),
        "lora": None,
        "objective": None,
        "steps": setup.total_steps,
        "batch": {
            "gradient_accumulation_steps": config.run.gradient_accumulation_steps,
            "batch_size": config.run.batch_size,
            "seq_len": config.data.row_tokens,
        },
        **{name: as_dict(group) for name, group in groups.items()},
        "defaults": {name: defaults_of(group) for name, group in groups.items()},
        "model_digest": model_digest(setup.model),
    }


def model_digest(model: DecoderConfig) -> str:
    """Return the digest that stands for a model in earlier checkpoints, whichever fields it has been given since."""
    return hashlib.sha256(stable_repr(model, _DIGESTED).encode()).hexdigest()[:16]
