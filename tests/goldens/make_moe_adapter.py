"""Make adapters of attention and experts, and merged folders, written by jaxglue, for transformers and PEFT to load.

Run with jaxglue installed, after make_moe.py and before make_moe_adapter_logits.py:

    python tests/goldens/make_moe_adapter.py

The merged folders are not committed.
"""

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.loading import load_model
from jaxglue.hf.merge import export_adapter
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model

HERE = Path(__file__).parent
CONFIGS = {
    "qwen3_moe": LoraConfig(rank=2, alpha=3.0),
    "gpt_oss": LoraConfig(rank=3, alpha=5.0, rslora=True, targets=("q_proj", "o_proj", "gate_up_proj", "down_proj")),
    "gpt_oss_mxfp4": LoraConfig(rank=2, alpha=3.0, targets=("v_proj", "down_proj")),
}


def random_adapter(base: Path, config: LoraConfig) -> dict[str, np.ndarray]:
    """Draw both matrices non-zero, to expose a missing factor or transpose."""
    model = load_model(base, dtype=jnp.float32)
    add_lora(model, config, rngs=nnx.Rngs(0))
    tensors = flatten_names(split_model(model, nnx.LoRAParam)[1])
    rng = np.random.default_rng(7)
    return {
        name: jnp.asarray(rng.normal(scale=0.3, size=tensor.shape), jnp.float32) for name, tensor in tensors.items()
    }


def main() -> None:
    for name, config in CONFIGS.items():
        adapter, merged = HERE / f"{name}_adapter", HERE / f"{name}_merged"
        for folder in (adapter, merged):
            shutil.rmtree(folder, ignore_errors=True)
        save_adapter(adapter, random_adapter(HERE / name, config), config, name)
        export_adapter(adapter, HERE / name, merged)


if __name__ == "__main__":
    main()
