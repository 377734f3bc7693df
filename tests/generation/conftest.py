"""Fixtures of a small model that answers."""

from chat_model import adapted, base, folders, quickstart, tokenizer

__all__ = ["adapted", "base", "folders", "quickstart", "tokenizer"]
