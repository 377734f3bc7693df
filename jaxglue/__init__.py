"""Fine-tune open language models in JAX on NVIDIA GPUs.

Public names are imported on first use, so `import jaxglue` loads neither JAX nor Triton.
"""

import importlib
import os
import sys
from typing import Any

# transformers only provides tokenizers here: its advice to install PyTorch does not apply.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

HIDES_TORCH = "JAXGLUE_HIDES_TORCH"
"""Environment variable by which a command's worker processes know that torch is hidden from libraries."""
if HIDES_TORCH in os.environ:
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]

_MODULES = {
    "api.calls": ("evaluate", "export", "generate", "load_model", "plan", "score", "train"),
    "data.tokenizer": ("load_tokenizer",),
    "training.callbacks": ("Callback", "Predictions"),
    "api.losses": ("DistillationLoss",),
    "api.session": ("Session",),
    "training.config": ("TrainConfig",),
    "serve.config": ("GenerateConfig",),
    "engine.layer_stack": ("LayerStack",),
    "planner.workload": ("Workload",),
    "ops.attention": ("packed_attention",),
    "ops.cross_entropy": ("linear_cross_entropy",),
    "ops.projection.lora": ("lora_expand", "lora_shrink"),
    "ops.gated_mlp.swiglu": ("lora_swiglu",),
    "ops.moe": ("auxiliary_loss", "grouped_matmul", "moe_mlp", "route", "z_loss"),
    "ops.norm_rope": ("rms_norm", "rotate_heads"),
    "ops.quant": ("dequantize", "project_quantized"),
    "ops.quant.nf4": ("quantize_nf4",),
    "ops.rope": ("rope_tables",),
    "ops.segments": ("pack_segments",),
}
_HOMES = {name: f"jaxglue.{module}" for module, names in _MODULES.items() for name in names}

__all__ = sorted(["__version__", *_HOMES])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _HOMES:
        from jaxglue.engine.garbage_collection import without_collection

        with without_collection():
            value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'jaxglue' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jaxglue")
    except PackageNotFoundError:
        return "0+unknown"
