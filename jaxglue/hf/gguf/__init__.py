"""GGUF, the file that llama.cpp and Ollama read: a model's weights, tokenizer, template and stop tokens in one."""
