"""Hugging Face folders and PEFT adapters, in and out."""
