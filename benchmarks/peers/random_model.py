"""A random model of a published shape for PyTorch peers."""

from typing import Any


def random_model(config: dict[str, Any], layers: int | None, **fields: Any):
    """Return a model of config.json, made on the GPU in bfloat16.

    Args:
        config: config.json's fields.
        layers: fewer than its own; None for all.
        fields: set on the configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = config | ({"num_hidden_layers": layers} if layers else {})
    shape = AutoConfig.for_model(**{key: value for key, value in raw.items() if key != "architectures"})
    for name, value in fields.items():
        setattr(shape, name, value)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    return model
