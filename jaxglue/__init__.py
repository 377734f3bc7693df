"""jaxglue: fine-tune Llama, Qwen3 and GPT-OSS in JAX on NVIDIA GPUs."""
