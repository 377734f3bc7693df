"""Tokens out of a model: sampling, generation, chat."""
