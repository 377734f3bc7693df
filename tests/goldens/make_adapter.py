"""Make an adapter on `qwen3_tied` and the merged folder, both written by jaxglue, for transformers and PEFT to load.

Run with jaxglue installed, after make_models.py and before make_adapter_logits.py:

    python tests/goldens/make_adapter.py
"""

import shutil
from pathlib import Path

import numpy as np

from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.checkpoint import open_checkpoint
from jaxglue.hf.merge import export_adapter
from jaxglue.models.lora_config import LoraConfig

HERE = Path(__file__).parent
CONFIG = LoraConfig(rank=3, alpha=5.0, rslora=True, targets=("down_proj", "k_proj", "o_proj", "q_proj"))


def random_adapter() -> dict[str, np.ndarray]:
    """Draw both matrices non-zero, to expose a missing factor or transpose."""
    rng = np.random.default_rng(7)
    adapter = {}
    for name, info in sorted(open_checkpoint(HERE / "qwen3_tied").tensors.items()):
        linear = name.removesuffix(".weight")
        if linear.rpartition(".")[2] in CONFIG.targets:
            out_features, in_features = info.shape
            adapter[f"{linear}.lora_A"] = rng.normal(scale=0.3, size=(CONFIG.rank, in_features)).astype(np.float32)
            adapter[f"{linear}.lora_B"] = rng.normal(scale=0.3, size=(out_features, CONFIG.rank)).astype(np.float32)
    return adapter


def main() -> None:
    for folder in ("adapter", "merged"):
        shutil.rmtree(HERE / folder, ignore_errors=True)
    save_adapter(HERE / "adapter", random_adapter(), CONFIG, "qwen3_tied")
    export_adapter(HERE / "adapter", HERE / "qwen3_tied", HERE / "merged")


if __name__ == "__main__":
    main()
