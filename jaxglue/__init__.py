"""jaxglue: fine-tune Llama, Qwen3 and GPT-OSS in JAX on NVIDIA GPUs."""

import os

# transformers is only asked for tokenizers: its advice to install PyTorch does not apply.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
