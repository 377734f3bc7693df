"""Hugging Face folders and PEFT adapters: read and write."""
