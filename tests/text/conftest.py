"""Fixture of the quickstart's tokenizer."""

from chat_model import quickstart, tokenizer

__all__ = ["quickstart", "tokenizer"]
